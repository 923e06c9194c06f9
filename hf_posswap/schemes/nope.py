"""nope - The Impact of Positional Encoding on Length Generalization in Transformers, https://arxiv.org/abs/2305.19466"""

from __future__ import annotations

from dataclasses import dataclass

from ..scheme import Scheme


@dataclass(frozen=True, kw_only=True)
class Nope(Scheme):
    """No positions at all: every site of the model is silenced, nothing is installed."""

    name = "nope"
    paper = "https://arxiv.org/abs/2305.19466"
