"""learned - Convolutional Sequence to Sequence Learning (a table of position vectors), https://arxiv.org/abs/1705.03122"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from ..errors import PosSwapError
from ..scheme import Scheme
from ..sites import EMBED, EmbedChange, EmbedGeometry
from .sinusoidal import COMBINES

INITS = ("interpolate", "tile", "hierarchical", "fit", "random")


@dataclass(frozen=True, kw_only=True)
class Learned(Scheme):
    """A trained table of position vectors: the model's own, resized. In text, give one of max_positions,
    target_length, factor; an image model's is resized to its image_size (`learned2d` has more ways).

    max_positions, target_length: tokens. factor: times the present length. init: how the new rows come from the old:
    `interpolate` (linear in text; of patches as `learned2d` does), `tile`; in text also `hierarchical` (Su 2020),
    `fit` (the continuation of a sinusoid fitted to the old rows) and `random` (drawn as the old rows scatter, by
    `init_seed`). All but `interpolate` keep the old rows. combine: `add` to the token embedding, or `concat`: token and
    position, both of width E, are concatenated and projected back to E by a trained matrix, at the size the table has.
    It begins as [1 | 1], which is the model as it was; on a model without a table, which gets one of max_positions
    rows, as [1 | 0], which is `nope`.
    """

    name = "learned"
    paper = "https://arxiv.org/abs/1705.03122"
    sites: ClassVar = frozenset({EMBED})
    keeps_function: ClassVar = True
    trainable: ClassVar = True
    learns: ClassVar = "the table; its projection, with combine='concat'"

    max_positions: int | None = None
    target_length: int | None = None
    factor: float | None = None
    init: str = "interpolate"
    init_seed: int | None = None
    combine: str = "add"

    def __post_init__(self) -> None:
        self.check_count("max_positions")
        self.check_count("target_length")
        self.check_number("factor", at_least=1)
        self.check_choice("init", INITS)
        self.check_choice("combine", COMBINES)
        seed = self.init_seed
        if seed is not None and (self.init != "random" or type(seed) is not int or seed < 0):
            raise self.refuse("init_seed", "is not a natural number beside init='random'")
        sizes = self._sizes()
        if self.combine == "concat":
            if sizes.keys() - {"max_positions"}:
                raise self.refuse("combine", f"does not resize a table; leave out {next(iter(sizes))}")
            if self.init not in ("interpolate", "random"):
                raise self.refuse("init", "makes new rows from old ones, and combine='concat' makes none; leave it out")
        elif len(sizes) > 1:
            raise PosSwapError(f"learned: give exactly one of max_positions, target_length, factor; got {sizes}")

    def _sizes(self) -> dict[str, float]:
        return {k: v for k, v in self.given().items() if k in ("max_positions", "target_length", "factor")}

    def embed(self, site: EmbedGeometry) -> EmbedChange:
        from . import _tables

        if self.combine == "concat":
            return self._concatenated(site)
        if site.table is None:
            raise PosSwapError(
                "learned: this model has no table of position vectors to resize; 'sinusoidal' can be added to it"
            )
        if site.grid is not None:
            return self._of_patches(site)
        if not self._sizes():
            raise PosSwapError("learned: give exactly one of max_positions, target_length, factor")
        length = self.max_positions or self.target_length or int(site.length * self.factor)
        if self.init == "hierarchical" and length > site.length**2:
            raise PosSwapError(
                f"learned: init='hierarchical' reaches {site.length**2} positions from {site.length}, not {length}"
            )
        if self.init == "fit" and site.dim % 2:
            raise self.refuse("init", f"pairs sines with cosines, and this model's width is {site.dim}, an odd number")
        options = {} if self.init_seed is None else {"seed": self.init_seed}
        table = _tables.resized(self.init, site.table, length, **options)
        return EmbedChange(partial(_tables.lookup, table), length=length)

    def _concatenated(self, site: EmbedGeometry) -> EmbedChange:
        import torch

        from . import _tables

        if site.grid is not None:
            raise self.refuse("combine", "is for text")
        if site.table is not None:
            if self.init == "random":
                raise self.refuse("init", "draws rows, and combine='concat' keeps this model's own; leave it out")
            return EmbedChange(
                partial(_tables.lookup, site.table),
                length=self.max_positions or site.length,
                projection=torch.eye(site.dim),
            )
        if self.max_positions is None:
            raise PosSwapError("learned: combine='concat': give max_positions, the rows of the table this model gets")
        generator = torch.Generator().manual_seed(self.init_seed or 0)
        rows = torch.randn(self.max_positions, site.dim, generator=generator) * site.rms()
        return EmbedChange(
            partial(_tables.lookup, rows),
            length=self.max_positions,
            projection=torch.zeros(site.dim, site.dim),
        )

    def _of_patches(self, site: EmbedGeometry) -> EmbedChange:
        from . import _tables

        for name in self._sizes():
            raise self.refuse(name, "is for text; give image_size=(height, width)")
        resize = {"interpolate": "bicubic", "tile": "tile"}.get(self.init)
        if resize is None:
            raise self.refuse("init", "is for text; on a grid of patches use 'interpolate' or 'tile', or learned2d")
        table = _tables.resized_grid(site, resize)
        return EmbedChange(partial(_tables.lookup, table), length=len(table))
