"""yarn - YaRN: Efficient Context Window Extension of Large Language Models, https://arxiv.org/abs/2309.00071"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..sites import RotaryGeometry
from ._scaled import ScaledRope


@dataclass(frozen=True, kw_only=True)
class Yarn(ScaledRope):
    """NTK-by-parts frequencies and a temperature on the attention logits (definitions 2 and 3).

    beta_fast, beta_slow: rotations within the trained length beyond which a dimension is kept, and below which it
    is interpolated (32 and 1 where None). attention_factor: the multiplier of cos and sin (0.1 ln s + 1 where
    None). mscale, mscale_all_dim: DeepSeek's two factors of it. truncate: round the ramp's ends to whole
    dimensions (True where None).
    """

    name = "yarn"
    paper = "https://arxiv.org/abs/2309.00071"

    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for argument in ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
            self.check_number(argument, above=0)
        if (self.beta_fast or 32) <= (self.beta_slow or 1):
            raise self.refuse("beta_fast", f"must be greater than beta_slow ({self.beta_slow or 1})")
        if self.truncate not in (None, True, False):
            raise self.refuse("truncate", "is neither True nor False")

    def scaling(self, site: RotaryGeometry, factor: float) -> dict[str, Any]:
        optional = {
            # transformers' validator accepts a float only
            "attention_factor": None if self.attention_factor is None else float(self.attention_factor),
            "beta_fast": self.beta_fast,
            "beta_slow": self.beta_slow,
            "mscale": self.mscale,
            "mscale_all_dim": self.mscale_all_dim,
            "truncate": self.truncate,
        }
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": site.length,
        } | {k: v for k, v in optional.items() if v is not None}
