"""Independent references for the attention site, in float64 and by another route than the package's. Nothing here
imports hf_posswap; every bias is the matrix (H, S, S) of a whole sequence, queries in rows."""

from __future__ import annotations

import math

import numpy as np


def alibi_slopes(heads: int) -> list[float]:
    """The authors' get_slopes: https://github.com/ofirpress/attention_with_linear_biases (their recursion)."""
    if math.log2(heads).is_integer():
        start = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return [start * start**i for i in range(heads)]
    closest = 2 ** math.floor(math.log2(heads))
    return alibi_slopes(closest) + alibi_slopes(2 * closest)[0::2][: heads - closest]


def alibi(heads: int, length: int, slopes=None, **_) -> np.ndarray:
    out = np.zeros((heads, length, length))
    for h, slope in enumerate(slopes or alibi_slopes(heads)):
        for i in range(length):
            for j in range(length):
                out[h, i, j] = -slope * abs(i - j)
    return out


def t5(heads: int, length: int, *, state, causal: bool, num_buckets=32, max_distance=128, **_) -> np.ndarray:
    """The table read through transformers' own bucket function, the one that T5 checkpoints were trained with."""
    import torch
    from transformers.models.t5.modeling_t5 import T5Attention

    places = torch.arange(length)
    buckets = T5Attention._relative_position_bucket(
        places[None, :] - places[:, None], bidirectional=not causal, num_buckets=num_buckets, max_distance=max_distance
    )
    return state["buckets"][buckets.numpy()].transpose(2, 0, 1)


def kerple(heads: int, length: int, *, state, kernel="log", **_) -> np.ndarray:
    out = np.zeros((heads, length, length))
    for h in range(heads):
        a = math.exp(state["a"][h])
        p = math.exp(state["p"][h]) if kernel == "log" else 2 / (1 + math.exp(-state["p"][h]))
        for i in range(length):
            for j in range(length):
                gap = abs(i - j)
                out[h, i, j] = -p * math.log(1 + a * gap) if kernel == "log" else -a * gap**p
    return out


def fire(heads: int, length: int, *, state, **_) -> np.ndarray:
    """Eq. 4, entry by entry, for the keys a causal query sees."""
    out = np.zeros((heads, length, length))
    c, threshold = state["c"], state["L"]
    for i in range(length):
        for j in range(i + 1):
            x = math.log(c * (i - j) + 1) / math.log(c * max(i, threshold) + 1)
            hidden = np.maximum(x * state["hidden_weight"] + state["hidden_bias"], 0)
            out[:, i, j] = state["out_weight"] @ hidden + state["out_bias"]
    return out


def sandwich(heads: int, length: int, *, dim=128, **_) -> np.ndarray:
    """The listing in the paper's appendix: two tables of sinusoids, multiplied."""
    positions, i = np.arange(length)[:, None], np.arange(dim // 2)
    table = np.concatenate(
        [np.sin(positions / 1e4 ** (2 * i / dim)), np.cos(positions / 1e4 ** (2 * i / dim))], axis=-1
    )
    compression = np.arange(1, heads + 1) * 8 / heads
    return (table @ table.T)[None] / compression[:, None, None]


def xpos_scores(q: np.ndarray, k: np.ndarray, frequencies: np.ndarray, scale_base: float) -> np.ndarray:
    """Logits (S, S) of one head, eq. 14 on distances: Re(q_i conj(k_i) e^(i theta (m - n))) zeta_i^((m - n) / base)."""
    half = len(frequencies)
    q, k = (x[:, :half] + 1j * x[:, half : 2 * half] for x in (q, k))
    gap = np.subtract.outer(np.arange(len(q)), np.arange(len(k)))
    total = np.zeros(gap.shape)
    for i, frequency in enumerate(frequencies):
        zeta = (2 * i / (2 * half) + 0.4) / 1.4
        turned = np.outer(q[:, i], k[:, i].conj()) * np.exp(1j * frequency * gap)
        total += turned.real * zeta ** (gap / scale_base)
    return total / math.sqrt(2 * half)


def softmax(scores: np.ndarray, causal: bool) -> np.ndarray:
    if causal:
        scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)
