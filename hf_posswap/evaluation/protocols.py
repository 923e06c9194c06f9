"""Which tokens are scored, and from which windows: pure arithmetic, no torch.

A window is a run of tokens of one document, after the BOS token where one is used; its last tokens are its
targets. Letters: n tokens of a document, L length of a window in tokens (the BOS counts), b = 1 with a BOS
and 0 without, S stride.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest
from typing import Any, ClassVar, TypeVar

from ..errors import PosSwapError, nearest

Document = TypeVar("Document", bound=Sequence[int])

DEFAULT_STRIDE = 256  # tokens; the YaRN authors' --sliding-window


@dataclass(frozen=True)
class Window:
    """Feed tokens `begin` to `end` of a document; score the last `targets` of them."""

    document: int
    begin: int
    end: int
    targets: int


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """What every protocol has.

    lengths: the values of L, kept sorted. bos_token_id: put before every window; None for no BOS.
    """

    name: ClassVar[str]
    summary: ClassVar[str]

    lengths: tuple[int, ...]
    bos_token_id: int | None = None
    stride: int | None = None

    def __post_init__(self) -> None:
        for length in self.lengths:
            if isinstance(length, bool) or not isinstance(length, int) or length < 2:
                raise PosSwapError(
                    f"lengths={list(self.lengths)} holds {length!r}, not an integer of at least 2 tokens"
                )
        if not self.lengths:
            raise PosSwapError("lengths=[] asks for nothing; give at least one length in tokens")
        object.__setattr__(self, "lengths", tuple(sorted(set(self.lengths))))
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _COUNTS and value is not None and (type(value) is not int or value < 1):
                raise PosSwapError(f"{field.name}={value!r} is not a positive integer")

    def room(self, length: int) -> int:
        """Tokens of a document that fit in a window of `length`: L - b."""
        return length - (self.bos_token_id is not None)

    def choose(self, documents: Iterable[Document]) -> tuple[list[Document], int]:
        """The documents that are scored, in their order, and how many were read to find them."""
        raise NotImplementedError

    def windows(self, sizes: Sequence[int], length: int) -> list[Window]:
        """The windows of length L over the chosen documents, `sizes` tokens long."""
        raise NotImplementedError

    def loss(self, sums: Sequence[float], counts: Sequence[int]) -> float:
        """Nats per token, from every window's summed negative log-likelihood and its number of targets."""
        raise NotImplementedError

    def _first(
        self, documents: Iterable[Document], least: int, most: int | None, cause: tuple[str, int]
    ) -> tuple[list[Document], int]:
        """The first `most` documents of at least `least` tokens, and how many were read; never no document.

        `cause`: the argument that asks for so many tokens, and its value, for the error.
        """
        chosen: list[Document] = []
        read, longest = 0, 0
        for document in documents:
            read, longest = read + 1, max(longest, len(document))
            if len(document) >= least:
                chosen.append(document)
            if len(chosen) == most:
                break
        if not read:
            raise PosSwapError("token_documents is empty; give at least one document")
        if not chosen:
            argument, value = cause
            raise PosSwapError(
                f"no document is long enough: {argument}={value} needs {least} tokens and the longest of "
                f"{read} has {longest}; the greatest {argument} that fits is {longest + value - least}"
            )
        return chosen, read


_COUNTS = {"stride", "max_documents", "max_targets", "samples", "dataset_min_tokens"}


@dataclass(frozen=True, kw_only=True)
class Strict(Protocol):
    """The same target tokens at every length, each from a full window; every token weighs the same.

    Documents: the first `max_documents` of at least max(lengths) - b tokens, in the order given. Targets: all
    their tokens from max(lengths) - b - S to the end, in blocks of S (the last block may be shorter). At
    length L a block is predicted from the L - b tokens that end with the block, after the BOS: every window
    is full, and a target has between L - S and L - 1 tokens before it (the BOS among them). So only the
    length of the context differs between two lengths. Nothing is drawn at random.

    stride: S, less than min(lengths); half of min(lengths), at most 256, where not given. max_targets: where
    the documents hold more targets, the first block of every document is taken, then the second of each, and
    so on; the last block taken keeps its last tokens only.
    """

    name = "strict"
    summary = "token-weighted; the same targets at every length; each from a full sliding window"

    max_documents: int | None = None
    max_targets: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        shortest = self.lengths[0]
        if self.stride is None:
            object.__setattr__(self, "stride", min(DEFAULT_STRIDE, shortest // 2))
        if self.stride >= shortest:
            raise PosSwapError(
                f"stride={self.stride} leaves a target without context at length {shortest}; "
                f"the greatest stride is {shortest - 1}"
            )

    def choose(self, documents: Iterable[Document]) -> tuple[list[Document], int]:
        longest = self.lengths[-1]
        return self._first(documents, self.room(longest), self.max_documents, ("length", longest))

    def windows(self, sizes: Sequence[int], length: int) -> list[Window]:
        windows: list[Window] = []
        left = math.inf if self.max_targets is None else self.max_targets
        for turn in zip_longest(*map(self._blocks, sizes)):
            for document, block in enumerate(turn):
                if block is not None and left > 0:
                    end, targets = block
                    targets = int(min(targets, left))
                    windows.append(Window(document, end - self.room(length), end, targets))
                    left -= targets
        return windows

    def _blocks(self, size: int) -> Iterator[tuple[int, int]]:
        """(end, targets) of every block of a document; no length L in it, hence the same targets at each."""
        end = self.room(self.lengths[-1])
        yield end, self.stride
        while end < size:
            start, end = end, min(end + self.stride, size)
            yield end, end - start

    def loss(self, sums: Sequence[float], counts: Sequence[int]) -> float:
        return math.fsum(sums) / sum(counts)


@dataclass(frozen=True, kw_only=True)
class Yarn(Protocol):
    """What jquesnelle/yarn's `eval/perplexity.py` computes, faults included, to compare with its figures.

    Documents: the first `samples` of at least `dataset_min_tokens` tokens. From each, windows begin at 0, S,
    2S, ... and hold up to L - b tokens after the BOS; the targets are those that no earlier window held; the
    window that reaches the end is the last. The loss is the mean over windows of the window's mean. Hence the
    faults: the first window of a document, all L - b tokens of it without a full context, weighs as much as
    one step of S; a document shorter than L - b counts as one short window; another length has other targets.

    stride: S, 256 where not given. truncate_documents: each document is cut to L - b tokens, which are scored
    in one window. A window that holds nothing to predict (NaN in theirs) is left out.
    """

    name = "yarn"
    summary = "as jquesnelle/yarn; exp of the mean of window means, not token-weighted"

    samples: int | None = None
    dataset_min_tokens: int | None = None
    truncate_documents: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.truncate_documents and self.stride is not None:
            raise PosSwapError(f"stride={self.stride} has no effect with truncate_documents; give one of the two")
        if self.stride is None and not self.truncate_documents:
            object.__setattr__(self, "stride", DEFAULT_STRIDE)
        if self.stride is not None and self.stride > self.lengths[0]:
            raise PosSwapError(
                f"stride={self.stride} skips tokens at length {self.lengths[0]}; "
                f"the greatest stride is {self.lengths[0]}"
            )

    def choose(self, documents: Iterable[Document]) -> tuple[list[Document], int]:
        least, longest = self.dataset_min_tokens or 0, self.lengths[-1]
        chosen, read = self._first(documents, least, self.samples, ("dataset_min_tokens", least))
        # theirs would report a length in whose windows no document ever fits; ours raises
        self._first(chosen, self.room(longest), 1, ("length", longest))
        return chosen, read

    def windows(self, sizes: Sequence[int], length: int) -> list[Window]:
        room = self.room(length)
        windows: list[Window] = []
        for document, size in enumerate(sizes):
            if self.truncate_documents:
                size = min(size, room)
            previous = 0
            for begin in range(0, size, self.stride or room):
                end = min(begin + room, size)
                # The first token fed is never predicted; theirs is dropped by the shift of the labels.
                targets = min(end - previous, end - begin - 1 + length - room)
                if targets:
                    windows.append(Window(document, begin, end, targets))
                previous = end
                if end == size:
                    break
        return windows

    def loss(self, sums: Sequence[float], counts: Sequence[int]) -> float:
        return math.fsum(s / n for s, n in zip(sums, counts, strict=True)) / len(counts)


PROTOCOLS: dict[str, type[Protocol]] = {"strict": Strict, "yarn": Yarn}


def make_protocol(name: str, lengths: Iterable[int], *, bos_token_id: int | None = None, **parameters: Any) -> Protocol:
    """A validated protocol. PosSwapError for an unknown name or a parameter that it does not have."""
    if name not in PROTOCOLS:
        raise PosSwapError(f"protocol={name!r} is unknown; {nearest(name, PROTOCOLS)}")
    known = {f.name for f in fields(PROTOCOLS[name])} - {"lengths", "bos_token_id"}
    for argument, value in parameters.items():
        if argument not in known:
            raise PosSwapError(
                f"{argument}={value!r} is not a parameter of protocol {name!r}; {nearest(argument, known)}"
            )
    return PROTOCOLS[name](lengths=tuple(lengths), bos_token_id=bos_token_id, **parameters)
