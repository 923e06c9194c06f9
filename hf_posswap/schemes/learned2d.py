"""learned2d - An Image is Worth 16x16 Words, section 3.2, https://arxiv.org/abs/2010.11929"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from ..errors import PosSwapError
from ..scheme import Scheme
from ..sites import EMBED, EmbedChange, EmbedGeometry


@dataclass(frozen=True, kw_only=True)
class Learned2d(Scheme):
    """A trained table of the positions of patches: the model's own, resized to its image_size. Rows of tokens that are
    no patches stay.

    resize: `bicubic`, `bilinear`, or `tile` (the old rows again and again). antialias: low-pass what shrinks and widen
    the kernel, as timm does; transformers' own functions do not, and `bicubic` without it is the model's own function
    to the bit.
    """

    name = "learned2d"
    paper = "https://arxiv.org/abs/2010.11929"
    sites: ClassVar = frozenset({EMBED})
    keeps_function: ClassVar = True
    trainable: ClassVar = True
    learns: ClassVar = "the table"

    resize: str = "bicubic"
    antialias: bool = False

    def __post_init__(self) -> None:
        from ._tables import RESIZES

        self.check_choice("resize", RESIZES)
        if self.antialias not in (True, False) or (self.antialias and self.resize == "tile"):
            raise self.refuse("antialias", "is not a choice here; it is true or false, and false beside resize='tile'")

    def embed(self, site: EmbedGeometry) -> EmbedChange:
        from . import _tables

        if site.grid is None:
            has = "no table" if site.table is None else "a table of text"
            raise PosSwapError(f"learned2d: it resizes a table of patches, and this model has {has}; see 'learned'")
        table = _tables.resized_grid(site, self.resize, self.antialias)
        return EmbedChange(partial(_tables.lookup, table), length=len(table))
