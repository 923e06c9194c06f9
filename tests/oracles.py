"""Independent references, in float64 and by another route than the package's: numpy and complex numbers, one
entry at a time where that is clearest. Nothing here imports hf_posswap or transformers' rope functions."""

from __future__ import annotations

import math

import numpy as np


def rope(dim: int, theta: float = 10000.0, **_) -> tuple[np.ndarray, float]:
    """RoFormer eq. 15, by repeated multiplication: theta_{i+1} = theta_i * theta^(-2/d)."""
    ratio, frequencies = math.exp(-2.0 * math.log(theta) / dim), [1.0]
    while len(frequencies) < dim // 2:
        frequencies.append(frequencies[-1] * ratio)
    return np.array(frequencies), 1.0


def partial(dim: int, theta: float = 10000.0, *, partial_rotary_factor: float, **_) -> tuple[np.ndarray, float]:
    frequencies, _one = rope(dim, theta)
    kept = round(partial_rotary_factor * dim / 2)
    return np.array([f if i < kept else 0.0 for i, f in enumerate(frequencies)]), 1.0


def linear(dim: int, theta: float, *, factor: float, **_) -> tuple[np.ndarray, float]:
    """Position Interpolation eq. 4: f(x, m) -> f(x, m L / L'): the angle of position m is that of m / s."""
    position = 7.0
    angle_of = rope(dim, theta)[0] * (position / factor)
    return angle_of / position, 1.0


def ntk(dim: int, theta: float, *, factor: float, **_) -> tuple[np.ndarray, float]:
    """What defines the NTK-aware base: the slowest angle is exactly interpolated, the fastest kept, and the
    frequencies stay a geometric series between the two."""
    original = rope(dim, theta)[0]
    return np.geomspace(original[0], original[-1] / factor, dim // 2), 1.0


def yarn(
    dim: int,
    theta: float,
    *,
    factor: float,
    length: int,
    beta_fast=32,
    beta_slow=1,
    truncate=True,
    attention_factor=None,
    **_,
) -> tuple[np.ndarray, float]:
    """YaRN definitions 2 and 3. The ramp runs over dimension indices, as in the authors' code; its ends are where a
    dimension makes beta rotations within L, found here by bisection on the wavelength instead of by the formula."""

    def index_with(rotations: float) -> float:
        low, high = -1e4, 1e4
        for _ in range(200):
            middle = (low + high) / 2
            log_turns = math.log(length / (2 * math.pi)) - 2.0 * middle / dim * math.log(theta)
            low, high = (middle, high) if log_turns > math.log(rotations) else (low, middle)
        return low

    start, end = index_with(beta_fast), index_with(beta_slow)
    if truncate:
        start, end = math.floor(start), math.ceil(end)
    start, end = max(start, 0), min(end, dim - 1)
    if start == end:
        end += 0.001  # as the authors do
    kept = []
    for i, frequency in enumerate(rope(dim, theta)[0]):
        share = min(max((i - start) / (end - start), 0.0), 1.0)
        kept.append(frequency * (1 - share) + frequency / factor * share)
    return np.array(kept), 0.1 * math.log(factor) + 1 if attention_factor is None else attention_factor


def ntk_by_parts(dim: int, theta: float, *, factor: float, length: int, **options) -> tuple[np.ndarray, float]:
    """YaRN definition 1: definition 2 without its temperature."""
    return yarn(dim, theta, factor=factor, length=length, **options)[0], 1.0


def longrope(dim: int, theta: float, *, factor: float, length: int, factors, **_) -> tuple[np.ndarray, float]:
    """LongRoPE eq. 2, by periods: the period of dimension i, 2 pi / theta_i tokens, becomes lambda_i as long; the
    multiplier of cos and sin is its appendix's sqrt(1 + ln s / ln L), here with logarithms of base 2."""
    periods = [2 * math.pi / f * stretch for f, stretch in zip(rope(dim, theta)[0], factors, strict=True)]
    return np.array([2 * math.pi / p for p in periods]), (1 + math.log2(factor) / math.log2(length)) ** 0.5


def proportional(dim: int, theta: float, *, factor: float, share: float, **_) -> tuple[np.ndarray, float]:
    """p-RoPE: the fastest share p of the pairs turn, the others stand still."""
    frequencies, kept = rope(dim, theta)[0], share * dim / 2
    return np.where(np.arange(dim // 2) < kept, frequencies, 0.0) / factor, 1.0


def llama3(
    dim: int, theta: float, *, factor: float, length: int, low_freq_factor=1.0, high_freq_factor=4.0, **_
) -> tuple[np.ndarray, float]:
    """Llama 3.1's piecewise rule, one frequency at a time."""
    out = []
    for frequency in rope(dim, theta)[0]:
        turns = length * frequency / (2 * math.pi)  # rotations within the trained length
        if turns > high_freq_factor:
            out.append(frequency)
        elif turns < low_freq_factor:
            out.append(frequency / factor)
        else:
            mix = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
            out.append(mix * frequency + (1 - mix) * frequency / factor)
    return np.array(out), 1.0


def dynamic(dim: int, theta: float, *, factor: float, length: int, seen: int, **_) -> tuple[np.ndarray, float]:
    """YaRN section 3.3 with the NTK-aware scale s = factor * seen / L - (factor - 1), beyond L; before it, nothing."""
    if seen <= length:
        return rope(dim, theta)
    return ntk(dim, theta, factor=factor * seen / length - (factor - 1))


def nope(dim: int, theta: float = 0.0, **_) -> tuple[np.ndarray, float]:
    return np.zeros(dim // 2), 1.0


def turn(vectors: np.ndarray, frequencies: np.ndarray, scale: float, pairing: str) -> np.ndarray:
    """Rotate (S, D) by complex multiplication; returns (S, R/2) complex, and the unrotated rest is not included."""
    half = len(frequencies)
    rotated = vectors[:, : 2 * half]
    pairs = (
        rotated[:, :half] + 1j * rotated[:, half:] if pairing == "halves" else rotated[:, 0::2] + 1j * rotated[:, 1::2]
    )
    return pairs * np.exp(1j * np.outer(np.arange(len(vectors)), frequencies)) * scale


def scores(q: np.ndarray, k: np.ndarray, frequencies: np.ndarray, scale: float, pairing: str) -> np.ndarray:
    """Logits (S, S) of one head before softmax: Re(q conj(k)) over the pairs, plus the dimensions that do not turn."""
    rest = slice(2 * len(frequencies), None)
    turned = (turn(q, frequencies, scale, pairing) @ turn(k, frequencies, scale, pairing).conj().T).real
    return (turned + q[:, rest] @ k[:, rest].T) / math.sqrt(q.shape[1])


def sinusoid(positions: int, dim: int, layout: str, scale: float) -> np.ndarray:
    """Attention Is All You Need, section 3.5, entry by entry."""
    table = np.empty((positions, dim))
    for position in range(positions):
        for i in range(dim // 2):
            angle = position / math.pow(10000.0, 2 * i / dim)
            where = (2 * i, 2 * i + 1) if layout == "interleaved" else (i, dim // 2 + i)
            table[position, where[0]], table[position, where[1]] = scale * math.sin(angle), scale * math.cos(angle)
    return table


def fitted_sinusoid(table: np.ndarray, length: int, layout: str, ridge: float = 0.1) -> np.ndarray:
    """The ridge regression of a table on the sinusoid of its positions, by singular values: each direction of the
    regressors counts for s^2 / (s^2 + P ridge) of its least-squares share."""
    rows, dim = table.shape
    u, s, v = np.linalg.svd(sinusoid(rows, dim, layout, 1.0), full_matrices=False)
    matrix = v.T @ np.diag(s / (s**2 + rows * ridge)) @ u.T @ table
    return sinusoid(length, dim, layout, 1.0) @ matrix


def fit(table: np.ndarray, length: int) -> np.ndarray:
    return np.concatenate([table, fitted_sinusoid(table, length, "interleaved")[len(table) :]])[:length]


def interpolate(table: np.ndarray, length: int) -> np.ndarray:
    where = np.linspace(0, len(table) - 1, length)
    return np.stack([np.interp(where, np.arange(len(table)), column) for column in table.T], axis=1)


def tile(table: np.ndarray, length: int) -> np.ndarray:
    return np.concatenate([table] * (length // len(table) + 1))[:length]


def hierarchical(table: np.ndarray, length: int) -> np.ndarray:
    """Su 2020: q_{(i-1)n+j} = a u_i + (1-a) u_j, with u solved from q_j = p_j for the first n."""
    a, rows = 0.4, len(table)
    u = [table[0]]
    u += [(p - a * u[0]) / (1 - a) for p in table[1:]]
    return np.array([a * u[j // rows] + (1 - a) * u[j % rows] for j in range(length)])


def sincos2d(height: int, width: int, dim: int, convention: str) -> np.ndarray:
    """(height * width, dim): in complex numbers and one patch at a time. A unit vector turns from patch to patch;
    big_vision's slowest turns by exactly 1 / 10000, in the others that would be the next one after the last.
    """
    count = dim // 4
    last = count - 1 if convention == "big_vision" else count
    turns = np.exp(1j * np.geomspace(1.0, 1e-4, last + 1)[:count])  # by one patch
    table = np.empty((height * width, dim))
    for row in range(height):
        for column in range(width):
            first, second = (row, column) if convention == "moco" else (column, row)
            waves = [turns**place for place in (first, second)]
            table[row * width + column] = np.concatenate([part for z in waves for part in (z.imag, z.real)])
    return table


def resampled(image: np.ndarray, size: int, mode: str, antialias: bool) -> np.ndarray:
    """(n, ...) -> (size, ...): a weighted mean of the old rows for each new one, the kernels written out (Keys 1981:
    a = -0.75, with antialias -0.5, as Pillow has it); rows beyond the edge as torch takes them: the edge repeated, or
    with antialias left out.
    """
    old = len(image)
    step = max(1.0, old / size) if antialias else 1.0
    a = -0.5 if antialias else -0.75

    def kernel(x: float) -> float:
        x = abs(x)
        if mode == "bilinear":
            return max(0.0, 1.0 - x)
        if x < 1:
            return (a + 2) * x**3 - (a + 3) * x**2 + 1
        return a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a if x < 2 else 0.0

    out = np.zeros((size, *image.shape[1:]))
    for i in range(size):
        centre = (i + 0.5) * old / size - 0.5
        reach = range(int(np.floor(centre - 3 * step)), int(np.ceil(centre + 3 * step)) + 1)
        weights = {j: kernel((j - centre) / step) for j in reach}
        if antialias:
            weights = {j: w for j, w in weights.items() if 0 <= j < old}
        total = sum(weights.values())
        for j, weight in weights.items():
            out[i] += weight / total * image[min(max(j, 0), old - 1)]
    return out
