"""sandwich - Dissecting Transformer Length Extrapolation via the Lens of Receptive Field Analysis, https://arxiv.org/abs/2212.10356"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..scheme import Scheme
from ..sites import BIAS, BiasChange, BiasGeometry, Tensors


@dataclass(frozen=True, kw_only=True)
class Sandwich(Scheme):
    """The product of two sinusoidal positions, less for later heads: sum_i cos(distance / 10000^(2i/d)) / (8 h / H).

    dim: width d of the sinusoids, even (128 in the paper). Nothing is learned; heads h count from 1.
    """

    name = "sandwich"
    paper = "https://arxiv.org/abs/2212.10356"
    sites: ClassVar = frozenset({BIAS})

    dim: int = 128

    def __post_init__(self) -> None:
        self.check_count("dim")
        if self.dim % 2:
            raise self.refuse("dim", "is odd; a sine and a cosine are a pair")

    def bias(self, site: BiasGeometry) -> BiasChange:
        import torch

        frequencies = 10000.0 ** (-torch.arange(0, self.dim, 2, dtype=torch.float64) / self.dim)
        compression = torch.arange(1, site.heads + 1) * 8 / site.heads
        return BiasChange(
            bias=self.product, constants={"frequencies": frequencies.float(), "compression": compression.float()}
        )

    @staticmethod
    def product(tensors: Tensors, distance):
        # less d / 2, the value at distance 0: softmax does not see it, and the numbers stay near zero where it matters
        total = ((distance[..., None] * tensors["frequencies"]).cos() - 1).sum(-1)
        return total / tensors["compression"].reshape(-1, *[1] * distance.dim())
