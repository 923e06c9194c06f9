"""kerple - KERPLE: Kernelized Relative Positional Embedding for Length Extrapolation, https://arxiv.org/abs/2205.09921"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..scheme import Scheme
from ..sites import BIAS, BiasChange, BiasGeometry, Tensors

KERNELS = ("log", "power")
GUESSES = 400  # of the number that bends a kernel, when it is fitted: the next one is 5 % away
LEAST = 1e-4  # of a fitted number that would be 0 or below: from there it can still be trained


@dataclass(frozen=True, kw_only=True)
class Kerple(Scheme):
    """A learned, conditionally positive definite kernel of the distance; two numbers per head.

    kernel: `log` -p log(1 + a |m - n|) (eq. 2), `power` -a |m - n|^p with 0 < p < 2. per_layer: two numbers for
    each layer, as the authors train them; else one pair for all.
    """

    name = "kerple"
    paper = "https://arxiv.org/abs/2205.09921"
    sites: ClassVar = frozenset({BIAS})
    learns: ClassVar = "its two parameters a head"
    fits: ClassVar = True

    kernel: str = "log"
    per_layer: bool = True

    def __post_init__(self) -> None:
        self.check_choice("kernel", KERNELS)
        self.check_choice("per_layer", (False, True))

    def bias(self, site: BiasGeometry) -> BiasChange:
        import torch

        # the authors draw p from (0, 2) and a from (0, 1); here both ranges are covered evenly, steep heads first
        share = (torch.arange(site.heads, 0, -1) - 0.5) / site.heads
        p = torch.logit(share) if self.kernel == "power" else (2 * share).log()
        return BiasChange(
            bias=getattr(self, self.kernel),
            parameters={"p": p, "a": share.log()},
            shared=not self.per_layer,
            fit=self.fit,
        )

    # Both numbers stay in their ranges whatever an optimiser does: a = exp(.), p = exp(.) or 2 sigmoid(.).

    @staticmethod
    def log(tensors: Tensors, distance):
        p, a = (tensors[name].exp().reshape(-1, *[1] * distance.dim()) for name in "pa")
        return -p * (a * distance.abs()).log1p()

    @staticmethod
    def power(tensors: Tensors, distance):
        a = tensors["a"].exp().reshape(-1, *[1] * distance.dim())
        p = 2 * tensors["p"].sigmoid().reshape(a.shape)
        return -a * distance.abs().float() ** p

    def fit(self, profile):
        """Least squares: the number that bends the kernel by trying many, the other in closed form for each."""
        import torch

        away = profile.distance.abs().double()
        if self.kernel == "power":
            guesses = torch.linspace(0.005, 1.995, GUESSES, dtype=torch.float64)
            shapes = -(away ** guesses[:, None])
        else:
            guesses = torch.logspace(-5, 4, GUESSES, dtype=torch.float64)
            shapes = -(guesses[:, None] * away).log1p()
        factors, errors = profile.factors(shapes)
        best = errors.where(factors > 0, torch.inf).argmin(1)
        factor = factors.gather(1, best[:, None])[:, 0].clamp(min=LEAST).log()
        bent = guesses[best]
        if self.kernel == "power":
            return {"p": torch.logit(bent / 2), "a": factor}
        return {"p": factor, "a": bent.log()}
