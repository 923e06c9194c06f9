"""t5 - Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer, section 2.1, https://arxiv.org/abs/1910.10683"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..scheme import Scheme
from ..sites import BIAS, BiasChange, BiasGeometry, Tensors

INITS = ("alibi", "zeros")


@dataclass(frozen=True, kw_only=True)
class T5(Scheme):
    """A learned number per head and bucket of distances; buckets widen like a logarithm, the last has no end.

    num_buckets: of all distances; half of them for keys that follow, in encoders. max_distance: tokens at which the
    last bucket begins. per_layer: a table for each layer (T5 has one for all). init: `alibi` starts each bucket at
    ALiBi's slope times the logarithm of its distance, `zeros` without any position.
    """

    name = "t5"
    paper = "https://arxiv.org/abs/1910.10683"
    sites: ClassVar = frozenset({BIAS})
    learns: ClassVar = "its buckets"
    fits: ClassVar = True

    num_buckets: int = 32
    max_distance: int = 128
    per_layer: bool = False
    init: str = "alibi"

    def __post_init__(self) -> None:
        self.check_count("num_buckets")
        self.check_count("max_distance")
        self.check_choice("per_layer", (False, True))
        self.check_choice("init", INITS)
        if self.num_buckets < 4 or self.num_buckets % 4:
            raise self.refuse("num_buckets", "is not a multiple of 4, so its halves cannot be halved")
        if self.max_distance <= self.num_buckets // 2:
            raise self.refuse("max_distance", f"must be greater than {self.num_buckets // 2}, the exact buckets")

    def bias(self, site: BiasGeometry) -> BiasChange:
        import torch

        from ..relative import alibi_slopes

        read = _Read(not site.causal, self.num_buckets, self.max_distance)
        table = torch.zeros(self.num_buckets, site.heads)
        if self.init == "alibi":
            reach = torch.arange(-self.max_distance, self.max_distance + 1)
            nearest = torch.full((self.num_buckets,), float(self.max_distance))
            nearest.scatter_reduce_(0, read.bucket(reach), reach.abs().float(), "amin")
            table = -torch.log1p(nearest)[:, None] * torch.tensor(alibi_slopes(site.heads))
        return BiasChange(bias=read, parameters={"buckets": table}, shared=not self.per_layer, fit=read.fit)


@dataclass(frozen=True)
class _Read:
    bidirectional: bool
    num_buckets: int
    max_distance: int

    def bucket(self, distance):
        from ..relative import t5_bucket

        return t5_bucket(
            distance, bidirectional=self.bidirectional, num_buckets=self.num_buckets, max_distance=self.max_distance
        )

    def __call__(self, tensors: Tensors, distance):
        return tensors["buckets"][self.bucket(distance)].movedim(-1, 0)

    def fit(self, profile):
        """The mean of each bucket; one that no pair fell into has that of the last before it."""
        means, masses = profile.grouped(self.bucket(profile.distance), self.num_buckets)
        half = self.num_buckets // 2 if self.bidirectional else self.num_buckets
        for begin in range(0, self.num_buckets, half):  # keys before, keys that follow
            met = [b for b in range(begin, begin + half) if masses[:, b].any()]
            for bucket in range(begin, begin + half):
                means[:, bucket] = means[:, max((b for b in met if b <= bucket), default=met[0] if met else 0)]
        return {"buckets": means.T}
