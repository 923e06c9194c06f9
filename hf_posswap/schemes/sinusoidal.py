"""sinusoidal - Attention Is All You Need, section 3.5, https://arxiv.org/abs/1706.03762"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from ..errors import PosSwapError
from ..scheme import Scheme
from ..sites import EMBED, EmbedChange, EmbedGeometry

LAYOUTS = ("interleaved", "halves")
SCALES = ("match", "none")
INITS = ("exact", "fit")
COMBINES = ("add", "concat")
UNIT_RMS = 0.5**0.5  # of a vector of sines and cosines


@dataclass(frozen=True, kw_only=True)
class Sinusoidal(Scheme):
    """A fixed vector of sines and cosines at every token.

    max_positions: rows of the table, in tokens, on models that have one (its present size where None). layout:
    `interleaved` (the paper's) or `halves`. scale: `match` gives the vectors the root mean square of the table
    they replace (of the token embeddings where there is none), `none` leaves them at 0.707. init: `exact` is the
    paper's; `fit` multiplies every vector by the matrix (E, E) that best reproduces the table they replace.
    combine: `add` to the token embedding, or `concat`: token and position, both of width E, are concatenated and
    projected back to E by a trained matrix [1 | P]. It begins with P = 0, where nothing but the model's own
    positions is missing (as under `nope`), or with the fitted matrix, where the model is as `add` makes it.
    """

    name = "sinusoidal"
    paper = "https://arxiv.org/abs/1706.03762"
    sites: ClassVar = frozenset({EMBED})
    learns: ClassVar = "its projection, with combine='concat'"
    fits_with: ClassVar = "init='fit' fits it to the table it replaces, without text"

    max_positions: int | None = None
    layout: str = "interleaved"
    scale: str = "match"
    init: str = "exact"
    combine: str = "add"

    def __post_init__(self) -> None:
        self.check_count("max_positions")
        self.check_choice("layout", LAYOUTS)
        self.check_choice("scale", SCALES)
        self.check_choice("init", INITS)
        self.check_choice("combine", COMBINES)
        if self.init == "fit" and self.scale != "match":
            raise self.refuse("scale", "has no meaning beside init='fit', which finds the scale itself")

    @property
    def recomputable(self) -> bool:
        return self.init == "exact"

    def embed(self, site: EmbedGeometry) -> EmbedChange:
        from ..positions import fit_sinusoid, mapped_sinusoid, sinusoid

        if site.dim % 2:
            raise self.refuse("layout", f"needs an even width to pair sines with cosines; this model's is {site.dim}")
        if site.grid is not None:
            raise PosSwapError(
                "sinusoidal: it has one dimension, and this model's positions are a grid of patches; see 'sincos2d'"
            )
        length, concat = self.max_positions or site.length, self.combine == "concat"
        if self.init == "fit":
            if site.table is None:
                raise self.refuse("init", "needs a table to reproduce, and this model has none; leave it out")
            matrix = fit_sinusoid(site.table, self.layout)
            if concat:
                plain = partial(sinusoid, dim=site.dim, layout=self.layout)
                return EmbedChange(plain, length=length, projection=matrix.T)
            return EmbedChange(partial(mapped_sinusoid, matrix=matrix, layout=self.layout), length=length)
        import torch

        scale = site.rms() / UNIT_RMS if self.scale == "match" else 1.0
        return EmbedChange(
            vectors=partial(sinusoid, dim=site.dim, layout=self.layout, scale=scale),
            length=length,
            projection=torch.zeros(site.dim, site.dim) if concat else None,
        )
