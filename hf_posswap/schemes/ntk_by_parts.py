"""ntk-by-parts - NTK-by-parts interpolation (bloc97 2023); YaRN, section 3.2, https://arxiv.org/abs/2309.00071"""

from __future__ import annotations

from dataclasses import dataclass

from ..sites import RotaryGeometry
from ._scaled import RampedRope


@dataclass(frozen=True, kw_only=True)
class NtkByParts(RampedRope):
    """YaRN's frequencies (definition 1) without its temperature: stored as `yarn` with an attention_factor of 1."""

    name = "ntk-by-parts"
    paper = "https://arxiv.org/abs/2309.00071"

    def factors(self, site: RotaryGeometry) -> dict[str, float | None]:
        return {"attention_factor": 1.0}
