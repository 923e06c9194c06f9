"""Pure functions of distances on the attention logits. No state, no cache, no transformers.

A distance is key - query: negative for keys that precede. See `sites.py` for the letters.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def alibi_slopes(heads: int) -> list[float]:
    """ALiBi's slope of every head, H numbers (ALiBi, section 3; the authors' code for any number of heads).

    H a power of two: a geometric series that starts at, and multiplies by, 2^(-8 / H). Any other H: the slopes of
    the power of two below, then every other slope of the power of two above.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8 * (i + 1) / power) for i in range(power)]
    return slopes + [2.0 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]


def t5_bucket(distance: Tensor, *, bidirectional: bool, num_buckets: int, max_distance: int) -> Tensor:
    """Bucket of every distance, integers of its shape (T5, section 2.1; the rounding of the authors' code).

    Half of the buckets hold one distance each, the other half are as wide as a logarithm up to `max_distance`;
    bidirectional: one half of all is for keys that follow.
    """
    offset = torch.zeros_like(distance)
    if bidirectional:
        num_buckets //= 2
        offset = (distance > 0).long() * num_buckets
        away = distance.abs()
    else:
        away = (-distance).clamp(min=0)
    exact = num_buckets // 2
    steps = (away.clamp(min=1).float() / exact).log() / math.log(max_distance / exact) * (num_buckets - exact)
    far = (exact + steps.long()).clamp(max=num_buckets - 1)
    return offset + torch.where(away < exact, away, far)


def spread(values: Tensor, queries: int, keys: int) -> Tensor:
    """(H, Q + K - 1) values at the distances c - (Q - 1) to c + K - 1 -> (H, Q, K), entry (i, j) that of c + j - i.

    Every row is the one above it, shifted by one to the right:
        Q = 3, K = 4, values a b c d e f   ->   c d e f
                                                b c d e
                                                a b c d
    """
    heads, count = values.shape
    # unfold, were it not that torch.compile makes a new graph for every `keys` of it
    windows = values.contiguous().as_strided((heads, queries, keys), (count, 1, 1))
    return windows.flip(-2)


def spread_grid(values: Tensor, rows: int, columns: int) -> Tensor:
    """(H, 2 rows - 1, 2 columns - 1) values by (rows, columns) from query to key -> (H, Q, K), patches row by row."""
    heads, height, width = values.shape
    strides = (height * width, width, 1, width, 1)
    windows = values.contiguous().as_strided((heads, rows, columns, rows, columns), strides)
    return windows.flip(1, 2).flatten(3).flatten(1, 2)


def exact_parts(values: Tensor, dtype: torch.dtype, count: int) -> list[Tensor]:
    """Up to `count` tensors of `dtype` whose sum is `values` (float32). bf16 keeps 8 bits, so three make a float32.

    Gradients reach `values` through the first part, which is the identity to rounding.
    """
    if dtype == torch.float32:
        return [values]
    parts = [values.to(dtype)]
    rest = values.detach() - parts[0].detach().float()
    for _ in range(count - 1):
        parts.append(rest.to(dtype))
        rest = rest - parts[-1].float()
    return parts
