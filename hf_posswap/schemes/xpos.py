"""xpos - A Length-Extrapolatable Transformer, https://arxiv.org/abs/2212.10554"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ..sites import RotaryChange, RotaryGeometry
from .rope import Rope


@dataclass(frozen=True, kw_only=True)
class Xpos(Rope):
    """RoPE whose dimensions also fade with distance: zeta_i^((q - k) / scale_base), zeta_i = (2i/d + 0.4) / 1.4.

    scale_base: tokens over which dimension i fades by zeta_i. The centre is fixed at half the trained length: keys
    are in the cache for good, and only differences of places matter. Other parameters as in `rope`.
    """

    name = "xpos"
    paper = "https://arxiv.org/abs/2212.10554"
    keeps_function: ClassVar = False
    in_attention: ClassVar = True
    fits: ClassVar = False
    fits_with: ClassVar = ""

    scale_base: float = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_number("scale_base", above=0)

    def rotary(self, site: RotaryGeometry) -> RotaryChange:
        return replace(super().rotary(site), decay=float(self.scale_base))
