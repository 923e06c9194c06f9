"""proportional - Round and Round We Go! What makes Rotary Positional Encodings useful? (p-RoPE), https://arxiv.org/abs/2410.06205"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..sites import RotaryGeometry
from ._scaled import ScaledRope


@dataclass(frozen=True, kw_only=True)
class Proportional(ScaledRope):
    """The fastest share p of the frequencies kept, the slowest 1 - p set to zero: those pairs carry no position.

    partial_rotary_factor: p, from 0 to 1. factor: every angle that is left is divided by it (1 where None).
    """

    name = "proportional"
    paper = "https://arxiv.org/abs/2410.06205"
    keeps_config_length = True  # as for linear: readers multiply it by the factor

    keeps_function = False  # pairs that a trained model turned stand still
    default_factor = 1.0

    partial_rotary_factor: float

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_number("partial_rotary_factor", at_least=0)
        if self.partial_rotary_factor > 1:
            raise self.refuse("partial_rotary_factor", "is greater than 1")

    def scaling(self, site: RotaryGeometry, factor: float) -> dict[str, Any]:
        if site.rotary_dim != site.head_dim:
            raise self.refuse(
                "partial_rotary_factor",
                f"cannot replace {site.rotary_dim / site.head_dim:g}: this model's attention was built for that width",
            )
        pairs = self.partial_rotary_factor * site.head_dim / 2
        if pairs != int(pairs):
            raise self.refuse(
                "partial_rotary_factor", f"keeps {pairs:g} of {site.head_dim // 2} pairs of dimensions, not whole ones"
            )
        share = {"rope_type": "proportional", "partial_rotary_factor": float(self.partial_rotary_factor)}
        # in latent attention transformers 5.17 reads the factor of any type
        return share if factor == 1 and not site.second_factor else share | {"factor": factor}
