"""longrope - LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens, https://arxiv.org/abs/2402.13753"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from ..sites import RotaryChange, RotaryGeometry
from ._scaled import ScaledRope


@dataclass(frozen=True, kw_only=True)
class LongRope(ScaledRope):
    """A factor lambda_i for every frequency: theta_i becomes theta_i / lambda_i (eq. 2), and cos and sin are
    multiplied by sqrt(1 + ln s / ln L).

    long_factor, short_factor: lambda_i, R / 2 positive numbers that do not fall, for sequences strictly longer
    than the trained length L and for the others. short_factor is long_factor where None: a cache then never
    holds keys that were rotated otherwise. With two different lists, generation that crosses L is right only on
    families that recompute the cache there (Phi-3 does). attention_factor: the multiplier of cos and sin.
    """

    name = "longrope"
    paper = "https://arxiv.org/abs/2402.13753"

    long_factor: tuple[float, ...]
    short_factor: tuple[float, ...] | None = None
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_number("attention_factor", above=0)
        for argument in ("long_factor", "short_factor"):
            self._check_factors(argument)

    def _check_factors(self, argument: str) -> None:
        factors = getattr(self, argument)
        if factors is None:
            return
        if isinstance(factors, list):
            object.__setattr__(self, argument, tuple(factors))
        elif not isinstance(factors, tuple):
            raise self.refuse(argument, "is not a list of numbers")
        for i, factor in enumerate(factors):
            if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not math.isfinite(factor):
                raise self.refuse(argument, f"holds {factor!r} at {i}, which is not a finite number")
            if factor <= 0:
                raise self.refuse(argument, f"holds {factor} at {i}, which is not positive")
            if i and factor < factors[i - 1]:
                raise self.refuse(argument, f"falls from {factors[i - 1]} to {factor} at {i}; a factor never falls")

    def scaling(self, site: RotaryGeometry, factor: float) -> dict[str, Any]:
        short = self.long_factor if self.short_factor is None else self.short_factor
        for argument, factors in (("long_factor", self.long_factor), ("short_factor", short)):
            if len(factors) != site.rotary_dim // 2:
                raise self.refuse(
                    argument,
                    f"has {len(factors)} factors, and this model turns {site.rotary_dim // 2} pairs of dimensions",
                )
        if site.second_factor and self.attention_factor != 1:
            raise self.refuse(
                "attention_factor",
                "would reach only the dimensions of a head that turn in this model's latent attention; give 1",
            )
        optional = {} if self.attention_factor is None else {"attention_factor": float(self.attention_factor)}
        return {
            "rope_type": "longrope",
            "factor": factor,
            "original_max_position_embeddings": site.length,
            "short_factor": list(short),
            "long_factor": list(self.long_factor),
        } | optional

    def rotary(self, site: RotaryGeometry) -> RotaryChange:
        change = super().rotary(site)
        # transformers 4 and vLLM look for the trained length at the top of the config
        return replace(change, config_original=change.rope_parameters["original_max_position_embeddings"])
