"""What positions add to attention logits, by distance. Pure: no model, no transformers.

A distance is key - query; between the tokens of an image it is one of a list, see `Pairs`. See `sites.py` for the
letters; here P are distances, G guesses of a parameter.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from .grid import Grid
from .relative import spread, spread_grid

TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class Pairs:
    """Which pairs of the S tokens of an image count together; tokens in a row have no need of it.

    kind: (S, S) integers, which of the P distances a pair has, -1 where it has none. distance: (P,) integers, what a
    scheme calls them. longest: of them, in patches.
    """

    grid: Grid
    kind: Tensor
    distance: Tensor
    longest: int

    @classmethod
    def between(cls, grid: Grid) -> Pairs:
        """By rows and columns from query to key: as in `BiasChange.between` row by row, then its three `beside`."""
        height, width = 2 * grid.rows - 1, 2 * grid.columns - 1
        table, beside = torch.arange(height * width), height * width + torch.arange(3)
        kind = grid.squared(spread_grid(table.reshape(1, height, width), grid.rows, grid.columns))
        whole = torch.cat([table, beside])
        return cls(grid, (kind + grid.beside(beside[None]))[0], whole, max(grid.rows, grid.columns) - 1)

    @classmethod
    def in_row(cls, grid: Grid) -> Pairs:
        """By the difference of their numbers, patches numbered row by row; the tokens around them have none."""
        distance = torch.arange(1 - grid.patches, grid.patches)
        kind = spread(torch.arange(1, len(distance) + 1)[None], grid.patches, grid.patches)
        return cls(grid, grid.squared(kind)[0] - 1, distance, grid.patches - 1)

    @property
    def placed(self) -> Tensor:
        """(S,), which tokens are patches."""
        return F.pad(torch.ones(self.grid.patches), (self.grid.before, self.grid.after)).bool()

    def level(self, added: Tensor) -> Tensor:
        """(..., Q, S) -> the same, less what each query's keys without a place have: a bias of distances is 0 there."""
        if not (self.kind < 0).any():
            return added
        return added - added[..., ~self.placed].mean(-1, keepdim=True)

    def plain(self, vectors: Tensor) -> Tensor:
        """(..., S, D) -> the same without place: all patches have the mean of theirs."""
        mean = vectors[..., self.placed, :].mean(-2, keepdim=True)
        return torch.where(self.placed[:, None], mean, vectors)


@dataclass(frozen=True)
class Profile:
    """What positions add to the logits, H heads at P distances.

    distance: (P,) integers in order. mean: (H, P) float64, over the pairs at a distance, each with the attention that
    it gets without positions; mass: (H, P), the sums of that. Where a pair gets none, its logit does not matter until
    a bias raises it; measured on the demo's model, plain means leave its loss 0.3 nats higher. heed: (H, P), the
    attention that the pairs at a distance get, without positions and with them: where a shape that cannot follow the
    mean everywhere should.
    """

    distance: Tensor
    mean: Tensor
    mass: Tensor
    heed: Tensor

    def beyond(self, times: int, share: float) -> Profile:
        """The same with what no text tells, up to so many times the longest distance: the mean of its last quarter.

        share: of the heed that all other distances have together, what these get, evenly, on each side that there is.
        """
        longest = int(self.distance.abs().max())
        parts = [self]
        for sign in (-1, 1):
            if not (self.distance * sign > 0).any():
                continue
            last = 4 * self.distance * sign > 3 * longest
            level = (self.mean[:, last] * self.mass[:, last]).sum(1) / self.mass[:, last].sum(1).clamp(min=TINY)
            far = sign * torch.arange(longest + 1, times * longest + 1)
            heed = (share * self.heed.sum(1) / len(far))[:, None].expand(-1, len(far))
            none = torch.zeros(len(level), len(far), dtype=torch.float64)
            parts.append(Profile(far, level[:, None].expand(-1, len(far)), none, heed))
        return Profile(*(torch.cat([getattr(one, f.name) for one in parts], dim=-1) for f in fields(self)))

    def grouped(self, group: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """(means (H, count), masses (H, count)) of groups of distances; group: (P,) integers below count."""
        masses, sums = torch.zeros(2, len(self.mean), count, dtype=torch.float64)
        masses.index_add_(1, group, self.mass)
        sums.index_add_(1, group, self.mean * self.mass)
        return sums / masses.clamp(min=TINY), masses

    def factors(self, shape: Tensor) -> tuple[Tensor, Tensor]:
        """(factors, squared errors), each (H, G): the least squares of the mean on factor * shape + any constant.

        shape: (G, P), one function of distance for each guess.
        """
        weight = self.heed / self.heed.sum(-1, keepdim=True)
        x, y = shape.double(), self.mean
        x_mean, y_mean = weight @ x.T, (weight * y).sum(-1, keepdim=True)
        across = (weight * y) @ x.T - x_mean * y_mean
        own = weight @ (x * x).T - x_mean**2
        factor = across / own.clamp(min=TINY)
        return factor, (weight * y * y).sum(-1, keepdim=True) - y_mean**2 - factor * across

    def weights(self, basis: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
        """(weights (H, B), squared errors (H,)) of the least squares of the mean on a basis (P, B) and a ridge.

        ridge: the penalty on a weight's square, as a share of the basis' own mean square.
        """
        basis, weight = basis.double(), self.heed / self.heed.sum(-1, keepdim=True)
        normal = torch.einsum("pb,hp,pc->hbc", basis, weight, basis)
        penalty = ridge * normal.diagonal(dim1=-2, dim2=-1).mean(-1)
        normal = normal + penalty[:, None, None] * torch.eye(basis.shape[1], dtype=torch.float64)
        found = torch.linalg.solve(normal, (weight * self.mean) @ basis)
        return found, (weight * (found @ basis.T - self.mean) ** 2).sum(-1)


@dataclass
class Tally:
    """Sums over the pairs of one attention module, float64 on the CPU: as large as the longest sequence so far, or as
    the distances of `pairs`.

    mass, sums, heed: (H, P) by distance (from 1 - length on where no `pairs` are given), as in `Profile`,
    sums = mass * mean. squares: (H,), like the sums, of what positions add squared.
    """

    heads: int
    pairs: Pairs | None = None
    length: int = 1
    mass: Tensor = field(init=False)
    sums: Tensor = field(init=False)
    heed: Tensor = field(init=False)
    squares: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.mass, self.sums, self.heed = torch.zeros(3, self.heads, len(self.distance), dtype=torch.float64)
        self.squares = torch.zeros(self.heads, dtype=torch.float64)

    def add(self, added: Tensor, without: Tensor, attention: Tensor, first: int) -> None:
        """Count the queries first, first + 1, ... of one forward, every tensor (B, H, Q, K).

        added: what positions add to the logits. without, attention: what a pair gets without positions, and what with
        them; 0 where the query does not see the key.
        """
        if self.pairs is None:
            self._grow(max(added.shape[-1], first + added.shape[-2]))
        else:
            counted = self.pairs.kind[first : first + added.shape[-2]].to(added.device) >= 0
            added, without, attention = self.pairs.level(added), without * counted, attention * counted
        for total, values in (
            (self.mass, without),
            (self.sums, without * added),
            (self.heed, without + attention),
        ):
            self._count(total, values.sum(0), first)
        self.squares += (without * added.square()).sum((0, 2, 3)).cpu().double()

    def _count(self, total: Tensor, values: Tensor, first: int) -> None:
        """Sum (H, Q, K) by distance into (H, P)."""
        queries = values.shape[-2]
        if self.pairs is not None:  # on the CPU, where the order of a sum is always the same
            kind = self.pairs.kind[first : first + queries].clamp(min=0)
            total.index_add_(1, kind.flatten(), values.flatten(1).cpu().double())
            return
        begin, by_distance = self.length - first - queries, diagonal_sums(values).cpu().double()
        total[:, begin : begin + by_distance.shape[-1]] += by_distance

    def _grow(self, length: int) -> None:
        more = length - self.length
        if more > 0:
            self.length = length
            self.mass, self.sums, self.heed = (F.pad(t, (more, more)) for t in (self.mass, self.sums, self.heed))

    @property
    def distance(self) -> Tensor:
        return torch.arange(1 - self.length, self.length) if self.pairs is None else self.pairs.distance

    @property
    def longest(self) -> int:
        """The longest distance met, in tokens, or patches along an axis."""
        return self.length - 1 if self.pairs is None else self.pairs.longest

    def __add__(self, other: Tally) -> Tally:
        both = Tally(self.heads, self.pairs)
        for one in (self, other):
            both._grow(one.length)
        for one in (self, other):
            inside = slice(both.length - one.length, both.length - one.length + one.mass.shape[1])
            for name in ("mass", "sums", "heed"):
                getattr(both, name)[:, inside] += getattr(one, name)
            both.squares += one.squares
        return both

    def profile(self) -> Profile:
        """Of the distances that were met; on an image, of all."""
        met = (self.mass > 0).any(0) if self.pairs is None else slice(None)
        mass = self.mass[:, met]
        return Profile(self.distance[met], self.sums[:, met] / mass.clamp(min=TINY), mass, self.heed[:, met])

    def explained(self, bias: Tensor) -> Tensor:
        """Share (H,) of the variance of what positions add that a bias (H, P) explains: 1 is all."""
        bias, total = bias.double(), self.mass.sum(-1)
        mean = self.sums.sum(-1) / total
        variance = self.squares / total - mean**2
        left = (self.squares - 2 * (bias * self.sums).sum(-1) + (bias**2 * self.mass).sum(-1)) / total
        left = left - (mean - (bias * self.mass).sum(-1) / total) ** 2
        return 1 - left / variance.clamp(min=TINY)


def diagonal_sums(values: Tensor) -> Tensor:
    """(H, Q, K) -> (H, Q + K - 1): entry c is the sum over all i, j with j - i = c - (Q - 1).

    Rows are shifted against each other by a reshape, so that no index is scattered:
        a b c        . a b c
        d e f   ->   d e f .   ->   d   a + e   b + f   c
    """
    heads, queries, keys = values.shape
    wide = F.pad(values.flip(-2), (0, queries)).flatten(1)[:, : queries * (queries + keys - 1)]
    return wide.reshape(heads, queries, queries + keys - 1).sum(1)


@dataclass(frozen=True)
class Fit:
    """How well a scheme's parameters reproduce what the positions before it did.

    explained: attention module -> per head, the share of the variance of what positions added to the logits, pairs
    weighted as in `Profile`. 1 is all of it; below 0, worse than nothing. tokens: of the text. distance: the longest
    met.
    """

    explained: dict[str, list[float]]
    tokens: int
    distance: int

    def __str__(self) -> str:
        layers = [f"{100 * sum(heads) / len(heads):.0f}" for heads in self.explained.values()]
        return (
            f"explains {' / '.join(layers)} % by layer of what positions added to the logits, "
            f"on {self.tokens:,} tokens, to distance {self.distance:,}"
        )
