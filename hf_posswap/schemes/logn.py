"""logn - Overcoming a Theoretical Limitation of Self-Attention, section 5.3 (log-length scaling), https://arxiv.org/abs/2202.12172"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from ..errors import PosSwapError
from ..scheme import Scheme
from ..sites import BIAS, BiasChange, BiasGeometry


@dataclass(frozen=True, kw_only=True)
class Logn(Scheme):
    """Logits of a query that sees n tokens are multiplied by log n / log L, so that attention stays as sharp as at L.

    original_max_position_embeddings: L, the trained length in tokens (the model's own where None). clip: only beyond
    L, as Qwen does; False: also below 1, as in Su 2021. Joins the positions that the model has. On an image model
    every query sees all tokens, however they stand.
    """

    name = "logn"
    paper = "https://arxiv.org/abs/2202.12172"
    sites: ClassVar = frozenset({BIAS})
    stacks: ClassVar = True
    keeps_function: ClassVar = True
    ndim: ClassVar = 0

    original_max_position_embeddings: int | None = None
    clip: bool = True

    def __post_init__(self) -> None:
        self.check_number("original_max_position_embeddings", at_least=2)
        self.check_count("original_max_position_embeddings")
        self.check_choice("clip", (False, True))

    def bias(self, site: BiasGeometry) -> BiasChange:
        if not site.causal and site.grid is None:
            raise PosSwapError("logn: the tokens that a query sees are counted from its position, in causal models")
        length = self.original_max_position_embeddings or site.length
        if length < 2:
            raise PosSwapError("logn: this model's trained length is not known; give original_max_position_embeddings")
        return BiasChange(temperature=partial(_temperature, length=length, clip=self.clip))


def _temperature(position, *, length: int, clip: bool):
    import math

    # a query that sees one token has one weight, whatever its logit: 2 keeps its multiplier off zero
    growth = (position.float() + 1).clamp(min=2).log() / math.log(length)
    return growth.clamp(min=1) if clip else growth
