"""Independent references for attention on a grid of patches, in float64, entry by entry. Nothing here imports
hf_posswap. Tokens are (row, column) or None where one has no place."""

from __future__ import annotations

import cmath
import math

import numpy as np

Token = tuple[int, int] | None


def tokens_of(rows: int, columns: int, before: int = 0, after: int = 0) -> list[Token]:
    return [None] * before + [(r, c) for r in range(rows) for c in range(columns)] + [None] * after


def on_flat_grid(bias: np.ndarray, tokens: list[Token]) -> np.ndarray:
    """A bias (H, n, n) of n patches numbered row by row, among all tokens."""
    places = [i for i, token in enumerate(tokens) if token is not None]
    out = np.zeros((len(bias), len(tokens), len(tokens)))
    for a, i in enumerate(places):
        for b, j in enumerate(places):
            out[:, i, j] = bias[:, a, b]
    return out


def bias2d(tokens: list[Token], table: np.ndarray, beside: np.ndarray) -> np.ndarray:
    """BEiT's, read off its table by the difference of two places; table (H, 2 rows - 1, 2 columns - 1)."""
    middle = [side // 2 for side in table.shape[1:]]
    out = np.empty((len(table), len(tokens), len(tokens)))
    for i, query in enumerate(tokens):
        for j, key in enumerate(tokens):
            if query is None or key is None:
                out[:, i, j] = beside[:, 2 if query is key else 0 if query is None else 1]
            else:
                out[:, i, j] = table[:, middle[0] + key[0] - query[0], middle[1] + key[1] - query[1]]
    return out


def turns(
    dim: int, tokens: list[Token], frequencies: tuple[np.ndarray, np.ndarray], grid: tuple[int, int], of_image: bool
) -> np.ndarray:
    """(S, D/2) complex numbers of modulus 1 that each pair of a token is multiplied by."""
    out = np.ones((len(tokens), dim // 2), complex)
    for i, token in enumerate(tokens):
        if token is not None:
            place = [
                2 * math.pi * ((2 * n + 1) / side - 1) if of_image else n for n, side in zip(token, grid, strict=True)
            ]
            for pair in range(dim // 2):
                out[i, pair] = cmath.exp(1j * sum(p * f[pair] for p, f in zip(place, frequencies, strict=True)))
    return out


def axial(dim: int, theta: float, convention: str) -> tuple[np.ndarray, np.ndarray]:
    """(by row, by column) of every pair: eq. 5, the first half of the pairs by the axis that the convention names."""
    half = [theta ** (-4 * i / dim) for i in range(dim // 4)]
    first, second = np.array(half + [0.0] * len(half)), np.array([0.0] * len(half) + half)
    return (first, second) if convention == "ij" else (second, first)


def scores(q: np.ndarray, k: np.ndarray, turn: np.ndarray, pairing: str) -> np.ndarray:
    """Logits (S, S) of one head: the real part of the product of the turned numbers."""

    def numbers(x: np.ndarray) -> np.ndarray:
        half = x.shape[1] // 2
        return x[:, :half] + 1j * x[:, half:] if pairing == "halves" else x[:, ::2] + 1j * x[:, 1::2]

    return ((numbers(q) * turn) @ (numbers(k) * turn).conj().T).real / math.sqrt(q.shape[1])
