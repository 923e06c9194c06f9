"""alibi - Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation, https://arxiv.org/abs/2108.12409"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..errors import PosSwapError
from ..scheme import Scheme
from ..sites import BIAS, BiasChange, BiasGeometry, Tensors


@dataclass(frozen=True, kw_only=True)
class Alibi(Scheme):
    """Every logit is lowered by slope * distance: slope * (k - q) in causal models, -slope * |q - k| in encoders.

    slopes: one number per head (the paper's where None). learnable: the slopes are trained. per_layer: each layer has
    its own, where they are trained.
    """

    name = "alibi"
    paper = "https://arxiv.org/abs/2108.12409"
    sites: ClassVar = frozenset({BIAS})
    learns: ClassVar = "its slopes, with learnable=True"
    fits: ClassVar = True
    fits_with: ClassVar = "its slopes are chosen with learnable=True"

    slopes: tuple[float, ...] | None = None
    learnable: bool = False
    per_layer: bool = False

    def __post_init__(self) -> None:
        self.check_choice("learnable", (False, True))
        self.check_choice("per_layer", (False, True))
        if self.per_layer and not self.learnable:
            raise self.refuse("per_layer", "makes a difference only beside learnable=True")
        if self.slopes is not None and not all(type(s) in (int, float) and 0 <= s < float("inf") for s in self.slopes):
            raise self.refuse("slopes", "are not finite numbers >= 0")

    def bias(self, site: BiasGeometry) -> BiasChange:
        import torch

        from ..relative import alibi_slopes

        slopes = self.slopes or alibi_slopes(site.heads)
        if len(slopes) != site.heads:
            raise PosSwapError(f"alibi: slopes holds {len(slopes)} numbers and this model has {site.heads} heads")
        tensors = {"slopes": torch.tensor(slopes, dtype=torch.float32)}
        return BiasChange(
            bias=self.lowered,
            factors=self.factors if site.causal else None,
            shared=not self.per_layer,
            fit=self.fit if self.learnable else None,
            **{"parameters" if self.learnable else "constants": tensors},
        )

    @staticmethod
    def lowered(tensors: Tensors, distance):
        """(H, ...): in a causal model every key is at a distance <= 0, so one form serves both."""
        return -tensors["slopes"].reshape(-1, *[1] * distance.dim()) * distance.abs()

    @staticmethod
    def factors(tensors: Tensors, keys):
        return tensors["slopes"][:, None], keys[:, None].float()

    @staticmethod
    def fit(profile):
        """The least squares of a line through any height; 0 where it would rise with distance."""
        factors, _ = profile.factors(-profile.distance.abs()[None])
        return {"slopes": factors[:, 0].clamp(min=0)}
