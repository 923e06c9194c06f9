"""dynamic - Dynamic NTK scaling (emozilla 2023); written up in YaRN, section 3.3, https://arxiv.org/abs/2309.00071"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..sites import RotaryGeometry
from ._scaled import ScaledRope


@dataclass(frozen=True, kw_only=True)
class Dynamic(ScaledRope):
    """NTK scaling that grows with the longest position seen; up to the trained length nothing changes.

    Keys already in a cache keep the angles they were rotated with: decoding past the trained length is not equal
    to a full forward (a property of the scheme in transformers, not of this package).
    """

    name = "dynamic"
    paper = "https://arxiv.org/abs/2309.00071"
    keeps_config_length = True  # transformers takes it as the length at which scaling begins

    def scaling(self, site: RotaryGeometry, factor: float) -> dict[str, Any]:
        return {"rope_type": "dynamic", "factor": factor}
