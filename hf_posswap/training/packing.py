"""Text as rows of one length. The tokens stay where `datasets` keeps them, in files mapped to memory.

Letters: T tokens of the whole text, N rows, S tokens in a row.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort

import numpy as np
from datasets import Dataset

PADDING = -1  # the position of a token that fills up a row


class Stream:
    """All documents, one after the other: T `tokens`; `starts` is the place of each document's first one."""

    def __init__(self, tokenized: Dataset) -> None:
        chunks = tokenized.with_format("arrow")[:].column("input_ids").chunks if len(tokenized) else []
        self._chunks = [chunk.flatten().to_numpy() for chunk in chunks]
        self._ends = np.cumsum([len(chunk) for chunk in self._chunks], dtype=np.int64)
        lengths = [chunk.value_lengths().to_numpy() for chunk in chunks]
        self.lengths = np.concatenate([np.zeros(0, np.int64), *lengths])
        self.starts = np.cumsum(self.lengths, dtype=np.int64) - self.lengths
        self.tokens = int(self._ends[-1]) if chunks else 0

    def __getitem__(self, places: slice) -> np.ndarray:
        """Token ids of the places [start, stop), int64."""
        begin, end = places.start, places.stop
        first, last = np.searchsorted(self._ends, [begin, end - 1], side="right")
        pieces = []
        for index in range(first, last + 1):
            origin = self._ends[index] - len(self._chunks[index])
            pieces.append(self._chunks[index][max(begin - origin, 0) : end - origin])
        return np.concatenate(pieces).astype(np.int64)

    def digest(self) -> str:
        """The sha256 of the documents' lengths and of all tokens, as little-endian int64."""
        digest = hashlib.sha256(self.lengths.astype("<i8").tobytes())
        for chunk in self._chunks:
            digest.update(chunk.astype("<i8").tobytes())
        return digest.hexdigest()


class Blocks:
    """The stream cut into N = T // S rows, documents where an edge falls; the tail that fills no row is left out."""

    def __init__(self, tokenized: Dataset, block_size: int) -> None:
        self.stream, self.block_size = Stream(tokenized), block_size
        self.tokens = self.stream.tokens

    def __len__(self) -> int:
        return self.tokens // self.block_size

    def __getitem__(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """(token ids, positions inside the document), both (S,). A document cut by a row's edge begins anew at 0."""
        begin = row * self.block_size
        places = np.arange(begin, begin + self.block_size)
        starts = self.stream.starts
        documents = starts[np.searchsorted(starts, places, side="right") - 1]
        return self.stream[begin : begin + self.block_size], places - np.maximum(documents, begin)

    def longest_document(self) -> int:
        """Tokens of the longest document, or part of one, inside one row."""
        edges = np.arange(len(self) + 1) * self.block_size
        inside = self.stream.starts[self.stream.starts < edges[-1]]
        return int(np.diff(np.union1d(edges, inside)).max())


class WholeDocuments:
    """Rows of documents that no edge cuts, unless one is longer than a row: S tokens at a time then.

    Best fit decreasing: the longest first, each into the row that it leaves the least room in. What stays free in a
    row is filled with `pad` at position PADDING.
    """

    def __init__(self, tokenized: Dataset, block_size: int, pad: int) -> None:
        self.stream, self.block_size, self.pad = Stream(tokenized), block_size, pad
        self.tokens = self.stream.tokens
        self._rows = _best_fit(pieces(self.stream, block_size), block_size)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """(token ids, positions inside the document), both (S,)."""
        pieces = self._rows[row]
        free = self.block_size - sum(length for _, length in pieces)
        ids = [self.stream[begin : begin + length] for begin, length in pieces]
        positions = [np.arange(length) for _, length in pieces]
        return (
            np.concatenate([*ids, np.full(free, self.pad, np.int64)]),
            np.concatenate([*positions, np.full(free, PADDING)]),
        )

    def longest_document(self) -> int:
        """Tokens of the longest document, or part of one, inside one row."""
        return max(length for row in self._rows for _, length in row)


def pieces(stream: Stream, size: int) -> list[tuple[int, int]]:
    """(first place, tokens) of every document, those of more than `size` tokens cut; a token alone is left out."""
    return [
        (int(begin) + cut, min(size, int(length) - cut))
        for begin, length in zip(stream.starts, stream.lengths, strict=True)
        for cut in range(0, int(length), size)
        if int(length) - cut > 1
    ]


def _best_fit(pieces: list[tuple[int, int]], size: int) -> list[list[tuple[int, int]]]:
    """Pieces (first place, tokens) in rows of at most `size` tokens."""
    rows: list[list[tuple[int, int]]] = []
    spaces: list[int] = []  # sorted; the room of the rows that have some
    with_space: dict[int, list[int]] = {}  # room -> rows
    for piece in sorted(pieces, key=lambda piece: -piece[1]):
        at = bisect_left(spaces, piece[1])
        if at == len(spaces):
            row, space = len(rows), size
            rows.append([])
        else:
            space = spaces[at]
            row = with_space[space].pop()
            if not with_space[space]:
                del with_space[space], spaces[at]
        rows[row].append(piece)
        left = space - piece[1]
        if left not in with_space:
            insort(spaces, left)
        with_space.setdefault(left, []).append(row)
    return rows


def spread_positions(rng: np.random.Generator, tokens: int, length: int, chunks: int) -> np.ndarray:
    """Positions (tokens,) that rise from 0 and stay below `length`: in `chunks` runs without a gap, apart at random.

    PoSE (Zhu et al. 2023, https://arxiv.org/abs/2309.10400, section 3.2): the edges of the runs are drawn, then how
    far each is moved, never less than the one before it and the first not at all.
    """
    edges = np.sort(rng.choice(np.arange(1, tokens), chunks - 1, replace=False))
    moves = [0]
    for _ in range(chunks - 1):
        moves.append(int(rng.integers(moves[-1], length - tokens, endpoint=True)))
    return np.arange(tokens) + np.array(moves)[np.searchsorted(edges, np.arange(tokens), side="right")]
