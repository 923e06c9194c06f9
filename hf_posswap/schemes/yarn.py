"""yarn - YaRN: Efficient Context Window Extension of Large Language Models, https://arxiv.org/abs/2309.00071"""

from __future__ import annotations

from dataclasses import dataclass

from ..sites import RotaryGeometry
from ._scaled import RampedRope


@dataclass(frozen=True, kw_only=True)
class Yarn(RampedRope):
    """NTK-by-parts frequencies and a temperature on the attention logits (definitions 2 and 3).

    attention_factor: the multiplier of cos and sin (sqrt(1 / t) of eq. 15, 0.1 ln s + 1 where None). mscale,
    mscale_all_dim: DeepSeek's two factors of it, 0.1 mscale ln s + 1 each: cos and sin get their ratio, and the
    softmax of a multi-head latent attention the square of the second; there both are 1 where none of the three is
    given.
    """

    name = "yarn"
    paper = "https://arxiv.org/abs/2309.00071"

    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for argument in ("attention_factor", "mscale", "mscale_all_dim"):
            self.check_number(argument, above=0)

    def factors(self, site: RotaryGeometry) -> dict[str, float | None]:
        # transformers' validator accepts a float only
        attention = None if self.attention_factor is None else float(self.attention_factor)
        mscale, of_softmax = self.mscale, self.mscale_all_dim
        if site.second_factor:
            if attention is not None and (attention != 1 or of_softmax is not None):
                raise self.refuse(
                    "attention_factor",
                    "would reach only the dimensions of a head that turn in this model's latent attention; "
                    "give mscale and mscale_all_dim instead",
                )
            if (mscale is None) != (of_softmax is None):
                lone = "mscale" if of_softmax is None else "mscale_all_dim"
                raise self.refuse(lone, "is one of two factors of this model's latent attention; give the other too")
            if attention is None and mscale is None:
                mscale = of_softmax = 1.0
        return {"attention_factor": attention, "mscale": mscale, "mscale_all_dim": of_softmax}
