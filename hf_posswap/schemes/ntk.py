"""ntk - NTK-aware scaled RoPE (bloc97 2023); written up in YaRN, section 3.1, https://arxiv.org/abs/2309.00071"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import PosSwapError
from ..sites import RotaryGeometry
from ._scaled import ScaledRope


@dataclass(frozen=True, kw_only=True)
class Ntk(ScaledRope):
    """A larger base: b' = b * s^(R / (R - 2)) (YaRN eq. 16), so the slowest angle is divided by s, the fastest kept.

    Stored as an ordinary `default` rope with the new `rope_theta`: every reader of the config agrees on it.
    """

    name = "ntk"
    paper = "https://arxiv.org/abs/2309.00071"

    def scaling(self, site: RotaryGeometry, factor: float) -> dict[str, Any]:
        return larger_base(site, factor)


def larger_base(site: RotaryGeometry, factor: float) -> dict[str, Any]:
    """The parameters of a plain rope whose slowest angle is `factor` times slower."""
    dim = site.rotary_dim
    if dim <= 2:
        raise PosSwapError(f"ntk: a rotary dimension of {dim} leaves no exponent R / (R - 2); use linear")
    theta = site.rope_parameters["rope_theta"] * factor ** (dim / (dim - 2))
    return {"rope_type": "default", "rope_theta": theta}
