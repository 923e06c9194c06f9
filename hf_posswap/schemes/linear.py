"""linear - Extending Context Window of Large Language Models via Position Interpolation, https://arxiv.org/abs/2306.15595"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..sites import RotaryGeometry
from ._scaled import ScaledRope


@dataclass(frozen=True, kw_only=True)
class Linear(ScaledRope):
    """Every angle divided by the factor: position m is read as m / s (eq. 4)."""

    name = "linear"
    paper = "https://arxiv.org/abs/2306.15595"
    keeps_config_length = True  # vLLM and SGLang multiply the config's length by the factor

    def scaling(self, site: RotaryGeometry, factor: float) -> dict[str, Any]:
        return {"rope_type": "linear", "factor": factor}
