"""What the context-scaling rotary schemes share: the factor, the lengths, and the keys transformers reads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ..errors import PosSwapError
from ..scheme import Scheme
from ..sites import ROTARY, RotaryChange, RotaryGeometry


@dataclass(frozen=True, kw_only=True)
class ScaledRope(Scheme):
    """A rotary scheme that stretches the trained length L to s * L. Give `factor` (s) or `target_length` (s * L).

    factor: s >= 1, no unit. target_length: tokens. original_max_position_embeddings: L in tokens, where the
    config does not tell it. rope_theta: base of the frequencies (the model's own where None). layer_types: the
    layer types to scale on models that keep one rotary per type (full attention only where None).
    """

    sites: ClassVar = frozenset({ROTARY})
    keeps_function: ClassVar = True
    keeps_config_length: ClassVar[bool] = False  # true where readers multiply max_position_embeddings themselves
    default_factor: ClassVar[float | None] = None

    factor: float | None = None
    target_length: int | None = None
    original_max_position_embeddings: int | None = None
    rope_theta: float | None = None
    layer_types: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        self.check_number("factor", at_least=1)
        self.check_count("target_length")
        self.check_count("original_max_position_embeddings")
        self.check_number("rope_theta", above=0)
        self.check_names("layer_types")
        if self.factor is not None and self.target_length is not None:
            raise self.refuse("factor", f"was given together with target_length={self.target_length}; give one of them")
        if self.factor is None and self.target_length is None and self.default_factor is None:
            raise PosSwapError(f"{self.name}: give factor (a number >= 1) or target_length (tokens)")

    def scaling(self, site: RotaryGeometry, factor: float) -> dict[str, Any]:
        """The keys of `rope_parameters` that make this scheme, for a resolved factor."""
        raise NotImplementedError

    def rotary(self, site: RotaryGeometry) -> RotaryChange:
        original = self.original_max_position_embeddings or site.length
        if original < 1:
            raise PosSwapError(
                f"{self.name}: this model's trained length is not known; give original_max_position_embeddings"
            )
        if self.target_length is not None and self.target_length <= original:
            raise self.refuse("target_length", f"is not beyond the model's {original} tokens")
        factor = self.default_factor if self.factor is None else self.factor
        if self.target_length is not None:
            factor = self.target_length / original
        length = self.target_length or int(original * factor)
        base = dict(site.rope_parameters)
        if self.rope_theta is not None:
            base["rope_theta"] = float(self.rope_theta)
        scaling = self.scaling(replace(site, rope_parameters=base, length=original), factor)
        return RotaryChange(
            rope_parameters=base | scaling,
            config_length=original if self.keeps_config_length else length,
            length=length,
        )


@dataclass(frozen=True, kw_only=True)
class RampedRope(ScaledRope):
    """Fast dimensions kept, slow ones interpolated, a linear ramp between the two (YaRN, definition 1).

    beta_fast (the paper's beta), beta_slow (its alpha): rotations within the trained length beyond which a dimension
    is kept, and below which it is interpolated (32 and 1 where None). truncate: round the ramp's ends to whole
    dimensions (True where None).
    """

    beta_fast: float | None = None
    beta_slow: float | None = None
    truncate: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_number("beta_fast", above=0)
        self.check_number("beta_slow", above=0)
        if (self.beta_fast or 32) <= (self.beta_slow or 1):
            raise self.refuse("beta_fast", f"must be greater than beta_slow ({self.beta_slow or 1})")
        if self.truncate not in (None, True, False):
            raise self.refuse("truncate", "is neither True nor False")

    def factors(self, site: RotaryGeometry) -> dict[str, float | None]:
        """The keys that decide the multiplier of cos and sin."""
        raise NotImplementedError

    def scaling(self, site: RotaryGeometry, factor: float) -> dict[str, Any]:
        ramp = {"beta_fast": self.beta_fast, "beta_slow": self.beta_slow, "truncate": self.truncate}
        optional = self.factors(site) | ramp
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": site.length,
        } | {k: v for k, v in optional.items() if v is not None}
