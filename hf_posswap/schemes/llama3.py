"""llama3 - The Llama 3 Herd of Models (the frequency scaling of Llama 3.1), https://arxiv.org/abs/2407.21783"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..sites import RotaryGeometry
from ._scaled import ScaledRope


@dataclass(frozen=True, kw_only=True)
class Llama3(ScaledRope):
    """Wavelengths longer than L / low_freq_factor are stretched by s, shorter than L / high_freq_factor kept.

    low_freq_factor, high_freq_factor: rotations within the trained length L, no unit; between the two a linear blend.
    """

    name = "llama3"
    paper = "https://arxiv.org/abs/2407.21783"

    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_number("low_freq_factor", above=0)
        self.check_number("high_freq_factor", above=0)
        if self.high_freq_factor <= self.low_freq_factor:
            raise self.refuse("high_freq_factor", f"must be greater than low_freq_factor ({self.low_freq_factor})")

    def scaling(self, site: RotaryGeometry, factor: float) -> dict[str, Any]:
        return {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": self.low_freq_factor,
            "high_freq_factor": self.high_freq_factor,
            "original_max_position_embeddings": site.length,
        }
