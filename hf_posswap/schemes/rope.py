"""rope - RoFormer: Enhanced Transformer with Rotary Position Embedding, https://arxiv.org/abs/2104.09864"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..scheme import Scheme
from ..sites import ROTARY, RotaryChange, RotaryGeometry

PAIRINGS = ("halves", "interleaved")


@dataclass(frozen=True, kw_only=True)
class Rope(Scheme):
    """Pairs of dimensions rotated by m * theta_i, theta_i = rope_theta^(-2i / R) (eq. 15), without scaling.

    rope_theta: base of the frequencies, no unit (10000 in eq. 15; the angle of pair i is radians per token). pairing:
    which two dimensions share an angle, `halves` (i, i + R/2) or `interleaved` (2i, 2i + 1). partial_rotary_factor:
    share of the pairs that are rotated; the fastest are kept. layer_types: the layer types to change on models that
    keep one rotary per type (full attention only where None). None leaves each as the model has it; on a scaled
    model the scaling is removed.
    """

    name = "rope"
    paper = "https://arxiv.org/abs/2104.09864"
    sites: ClassVar = frozenset({ROTARY})
    keeps_function: ClassVar = True
    fits: ClassVar = True
    fits_with: ClassVar = "text chooses it where it takes the place of a table of positions"

    rope_theta: float | None = None
    pairing: str | None = None
    partial_rotary_factor: float | None = None
    layer_types: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        self.check_number("rope_theta", above=0)
        self.check_number("partial_rotary_factor", above=0)
        self.check_names("layer_types")
        if self.pairing is not None:
            self.check_choice("pairing", PAIRINGS)
        if self.partial_rotary_factor is not None and self.partial_rotary_factor > 1:
            raise self.refuse("partial_rotary_factor", "is greater than 1")

    def rotary(self, site: RotaryGeometry) -> RotaryChange:
        parameters = dict(site.rope_parameters)
        if self.rope_theta is not None:
            parameters["rope_theta"] = float(self.rope_theta)
        share = self.partial_rotary_factor
        if share is not None and share != parameters.get("partial_rotary_factor", 1.0):
            if site.rotary_dim != site.head_dim:
                raise self.refuse(
                    "partial_rotary_factor",
                    f"cannot replace {site.rotary_dim / site.head_dim:g}: this attention was built for that width",
                )
            rotated = share * site.head_dim
            if rotated != int(rotated) or int(rotated) % 2:
                raise self.refuse(
                    "partial_rotary_factor",
                    f"rotates {rotated:g} of {site.head_dim} dimensions, not an even number",
                )
            # transformers' type for a model whose attention rotates every dimension: the rest get frequency zero
            parameters |= {"rope_type": "proportional", "partial_rotary_factor": float(share)}
        return RotaryChange(parameters, config_length=site.length, length=site.length, pairing=self.pairing)
