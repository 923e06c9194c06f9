"""Fitting a rotation of queries and keys that takes the place of a table of positions.

A rotation turns what a head's queries and keys say, and a model trained without it has put nothing there that may be
turned. So each head gives up a few dimensions: from then on they hold a constant query and a constant key, and what is
left of them after the rotation is a sum of waves in the distance d,

    logit += sum_i a_i cos(w_i d - phi_i),        q_i = (a_i cos phi_i, a_i sin phi_i),  k_i = (1, 0)

least squares of what the table did. Which dimensions say least is seen in a basis in which queries and keys vary alike
(balanced, Moore 1981: q' = A q, k' = A^-T k, which leaves every logit as it is); how many turn, and how fast, is what
costs least: waves that miss the profile, and content given up, are variances of the same logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import pi
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from .anatomy import kind
from .errors import PosSwapError
from .planning.attention import find_attention, rotation_of
from .planning.images import is_image
from .planning.plan import Plan, refuse_quantised, trained_length
from .profile import Profile
from .projections import Rows, TracingEar

if TYPE_CHECKING:
    from .rotation import Rotation
    from .scheme import Scheme

SHARES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75)  # of a head's dimensions, to turn
REACHES = (0.5, 1.0, 2.0, 4.0)  # wave length of the slowest, in longest distances of the text
FAR, BEYOND = 4, 0.15  # times the longest distance, and the heed, on each side: else waves come again where no text was
RIDGE = 1e-6  # of the waves' weights: those that cancel each other are not wanted
JITTER, TINY = 1e-6, 1e-12  # of a dimension that does not vary: in mean variances, and where none does


@dataclass(frozen=True)
class Basis:
    """q' = query @ q, k' = key @ k, both (H, D, D): dimensions in order of what they say.

    said: (H, D), the variance of the logits that each carries; the sum is that of them all.
    """

    query: Tensor
    key: Tensor
    said: Tensor

    @classmethod
    def balanced(cls, query: Tensor, key: Tensor, group: Tensor) -> Basis:
        """Of second moments (H, D, D), of queries about 0, of keys about their mean: what all keys of a query have in
        common, no softmax sees. group: (H,), the first head that has the same keys; heads of a group share a basis.
        """
        query = _grouped_mean(query, group)
        left, right = (torch.linalg.cholesky(_jittered(moments)) for moments in (query, key))
        u, size, _ = torch.linalg.svd(right.mT @ left)
        to_query = size.rsqrt()[..., None] * (u.mT @ right.mT)
        return cls(to_query, torch.linalg.inv(to_query).mT, size.square())

    def given_up(self, rotation: Rotation) -> Tensor:
        """(H,), of `said`: what the dimensions carried that are to turn."""
        return self.said[:, -2 * len(turning(rotation)) :].sum(-1)

    def lost(self, rotation: Rotation) -> float:
        """The same as a share, the mean over heads."""
        return float((self.given_up(rotation) / self.said.sum(-1)).mean())


def _grouped_mean(values: Tensor, group: Tensor) -> Tensor:
    """(H, ...) -> the same, each the mean of its group (H,)."""
    sums = torch.zeros_like(values).index_add_(0, group, values)
    return (sums / group.bincount(minlength=len(group)).clamp(min=1).reshape(-1, *[1] * (values.dim() - 1)))[group]


def _jittered(moments: Tensor) -> Tensor:
    mean = moments.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=TINY)
    return moments + (JITTER * mean)[:, None, None] * torch.eye(moments.shape[-1], dtype=moments.dtype)


@dataclass(frozen=True)
class Waves:
    """Sums of waves, H heads of F frequencies (F,): amplitude and phase (H, F), squared error (H,) of each head."""

    frequencies: Tensor
    amplitude: Tensor
    phase: Tensor
    error: Tensor

    @classmethod
    def fitted(cls, profile: Profile, frequencies: Tensor) -> Waves:
        """The least squares of a profile, which goes on level behind its longest distance."""
        profile = profile.beyond(FAR, BEYOND)
        angle = profile.distance[:, None].double() * frequencies.double()
        basis = torch.cat([angle.cos(), angle.sin(), torch.ones(len(angle), 1)], dim=1)
        weights, error = profile.weights(basis, RIDGE)
        cos, sin = weights[:, :-1].chunk(2, dim=1)
        return cls(frequencies, torch.hypot(cos, sin), torch.atan2(sin, cos), error)

    def at(self, distance: Tensor) -> Tensor:
        """(H, P) at distances (P,)."""
        angle = distance[:, None].double() * self.frequencies.double()
        return (self.amplitude[:, None] * (angle - self.phase[:, None]).cos()).sum(-1)


@dataclass(frozen=True)
class Heard:
    """What is known of one attention module: the rows that make its H queries and keys, the profile of its positions,
    and a basis of its contents.
    """

    queries: Sequence[Rows]
    keys: Sequence[Rows]
    profile: Profile
    basis: Basis

    @classmethod
    def of(cls, trace: TracingEar, profile: Profile, moments: Sequence[Tensor]) -> Heard:
        """moments: of queries and keys, as in `Basis.balanced`."""
        return cls(trace.queries, trace.keys, profile, Basis.balanced(*moments, group_of(trace.keys)))


def group_of(keys: Sequence[Rows]) -> Tensor:
    """(H,), the number of the first head that has the same keys."""
    first: dict[tuple, int] = {}
    return torch.tensor([first.setdefault(rows.key, head) for head, rows in enumerate(keys)])


def refuse_unturnable(new: Plan) -> None:
    """Raise PosSwapError where no table of positions is there whose place the rotation could take."""
    what = f"fit= fits {new.scheme.name} to a table of positions of text, and {kind(new.anatomy.model)} has"
    if is_image(new.anatomy):
        raise PosSwapError(f"{what} images; leave it out")
    if new.anatomy.table is None:
        raise PosSwapError(f"{what} none; leave it out")
    if new.scheme.partial_rotary_factor == 1:
        raise PosSwapError(
            f"{new.scheme}: fit= writes positions into the dimensions that turn, and these are all; give a smaller "
            "share, or none, and one is chosen"
        )
    refuse_quantised(new.anatomy.model, f"{new.scheme.name} with fit=")


def choose(new: Plan, modules: Sequence[Heard]) -> tuple[Scheme, Rotation, list[Waves]]:
    """The scheme with the `partial_rotary_factor` and `rope_theta` that cost least, where they were not given; its
    rotation; and the waves of each module.
    """
    site, length = find_attention(new, new.scheme), trained_length(new)
    longest = max(int(one.profile.distance.abs().max()) for one in modules)
    found = []
    for scheme in guesses(new.scheme, site.head_dim, longest):
        rotation = rotation_of(new, scheme, site, length)
        waves = [Waves.fitted(one.profile, turning(rotation)) for one in modules]
        given_up = sum(one.basis.given_up(rotation).sum() for one in modules)
        found.append((float(given_up + sum(one.error.sum() for one in waves)), scheme, rotation, waves))
    if not found:
        raise PosSwapError(
            f"{new.scheme}: fit= finds no pairs of dimensions to turn among {site.head_dim} of a head, on text of "
            f"distance {longest}; give longer rows"
        )
    return min(found, key=lambda one: one[0])[1:]


def guesses(scheme: Scheme, dim: int, longest: int) -> Iterator[Scheme]:
    """What is tried: shares of D = `dim` dimensions, and bases that give the slowest pair a wave of some length."""
    given, base = scheme.partial_rotary_factor, scheme.rope_theta
    for share in SHARES if given is None else (given,):
        pairs = share * dim / 2
        if base is not None:
            bases = [base]
        else:  # theta^(-2 i / D) of pair i
            lengths = [reach * longest / (2 * pi) for reach in REACHES] if pairs >= 2 else []
            bases = [float(f"{length ** (dim / (2 * pairs - 2)):.3g}") for length in lengths if length > 1]
        if pairs == int(pairs) and pairs >= 1:
            yield from (replace(scheme, partial_rotary_factor=share, rope_theta=theta) for theta in bases)


def turning(rotation: Rotation) -> Tensor:
    """The frequencies (F,) that are not 0: the first ones."""
    frequencies = rotation.frequencies[0]
    return frequencies[frequencies != 0]


def write(new: Plan, modules: Sequence[Heard], rotation: Rotation, waves: Sequence[Waves]) -> None:
    """Plan the weights that make queries and keys in the new basis, and the constants in the dimensions that turn."""
    count, half = len(turning(rotation)), rotation.frequencies.shape[-1]
    index = torch.arange(count)
    places = torch.cat((2 * index, 2 * index + 1) if rotation.interleaved else (index, index + half))
    weights = _Weights(places)
    for one, wave in zip(modules, waves, strict=True):
        factor = torch.tensor([q.factor * k.factor for q, k in zip(one.queries, one.keys, strict=True)]).double()
        amplitude = wave.amplitude / factor[:, None]
        key = _grouped_mean(amplitude, group_of(one.keys)).sqrt()  # both sides of the product of one size
        query = amplitude / key.clamp(min=torch.finfo(torch.float64).tiny)
        for head in range(len(factor)):
            turned = query[head] * wave.phase[head].cos(), query[head] * wave.phase[head].sin()
            weights.set(one.queries[head], one.basis.query[head], torch.cat(turned))
            weights.set(one.keys[head], one.basis.key[head], torch.cat([key[head], torch.zeros(count)]))
    weights.plan(new)


class _Weights:
    """New weights and biases of linear layers, float64, of heads that hold constants at `places` (r,)."""

    def __init__(self, places: Tensor) -> None:
        self.places, self.layers = places, {}

    def set(self, one: Rows, basis: Tensor, constants: Tensor) -> None:
        """One head's: its first D - r dimensions in a basis (D, D), and the constants (r,)."""
        if one.layer.bias is None:
            raise PosSwapError(
                f"fit= writes positions into the bias of the layers that make queries and keys, and {kind(one.layer)} "
                "has none; leave it out"
            )
        old = [parameter.detach().cpu().double() for parameter in (_outputs_first(one.layer), one.layer.bias)]
        stay = torch.ones(len(basis), dtype=torch.bool).index_fill(0, self.places, False)
        rows, turned = one.rows.cpu()[stay], one.rows.cpu()[self.places]
        for new, was in zip(self.layers.setdefault(one.layer, [tensor.clone() for tensor in old]), old, strict=True):
            new[rows] = basis[: len(rows)] @ was[one.rows.cpu()]
            new[turned] = 0
        self.layers[one.layer][1][turned] = constants

    def plan(self, new: Plan) -> None:
        paths = {module: path for path, module in new.anatomy.model.named_modules()}
        for layer, (weight, bias) in self.layers.items():
            weight = weight.T if isinstance(layer, Conv1D) else weight
            for name, value in (("weight", weight), ("bias", bias)):
                old = getattr(layer, name)
                value = value.to(old.device, old.dtype).contiguous()
                new.replace(layer, name, nn.Parameter(value, old.requires_grad), paths[layer])


def _outputs_first(layer: nn.Module) -> Tensor:
    """The weight, a row for each output; Conv1D has a column."""
    return layer.weight.T if isinstance(layer, Conv1D) else layer.weight
