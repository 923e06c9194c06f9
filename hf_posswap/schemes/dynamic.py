"""dynamic - Dynamic NTK scaling (emozilla 2023); written up in YaRN, section 3.3, https://arxiv.org/abs/2309.00071"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..sites import RotaryChange, RotaryGeometry
from . import ntk
from ._scaled import ScaledRope


@dataclass(frozen=True, kw_only=True)
class Dynamic(ScaledRope):
    """NTK scaling that grows with the longest position seen; up to the trained length nothing changes.

    Keys already in a cache keep the angles they were rotated with: decoding past the trained length is not equal
    to a full forward; and after a long input the frequencies stay grown until one shorter than the trained length
    comes (properties of the scheme in transformers, not of this package).

    freeze_at: tokens. The base that the scheme reaches at this length, used at every length: an ordinary `default`
    rope with a larger `rope_theta`, which has neither fault.
    """

    name = "dynamic"
    paper = "https://arxiv.org/abs/2309.00071"
    keeps_config_length = True  # transformers takes it as the length at which scaling begins

    freeze_at: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_count("freeze_at")

    def scaling(self, site: RotaryGeometry, factor: float) -> dict[str, Any]:
        if self.freeze_at is None:
            return {"rope_type": "dynamic", "factor": factor}
        if self.freeze_at <= site.length:
            raise self.refuse("freeze_at", f"is not beyond the {site.length} tokens up to which nothing changes")
        return ntk.larger_base(site, factor * self.freeze_at / site.length - (factor - 1))

    def rotary(self, site: RotaryGeometry) -> RotaryChange:
        change = super().rotary(site)
        if self.freeze_at is None:
            return change
        return replace(change, config_length=self.freeze_at, length=self.freeze_at)
