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
    """A trained table of position vectors: the model's own, resized. Give one of max_positions, target_length, factor,
    image_size; patch_size may stand alone.

    max_positions, target_length: tokens (patches, on an image model: a square grid). factor: times the present
    length. image_size: pixels, one number or (height, width), on image models; patch_size, beside it or alone: the
    patches' own, their kernels resized by FlexiViT's pseudo-inverse. init: how the new rows come from the old:
    `interpolate` (linear in text; on a grid as the model itself would, bicubic), `tile`; in text also `hierarchical`
    (Su 2020), `fit` (the continuation of a sinusoid fitted to the old rows) and `random` (drawn as the old rows
    scatter, by `init_seed`). All but `interpolate` keep the old rows. combine: `add` to the token embedding, or
    `concat`: token and position, both of width E, are concatenated and projected back to E by a trained matrix, at the
    size the table has. It begins as [1 | 1], which is the model as it was; on a model without a table, which gets one
    of max_positions rows, as [1 | 0], which is `nope`.
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
    image_size: int | tuple[int, int] | None = None
    patch_size: int | tuple[int, int] | None = None
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
        sizes = {k: v for k, v in self.given().items() if k not in ("init", "init_seed", "combine", "patch_size")}
        if self.combine == "concat":
            if self.patch_size is not None:
                raise self.refuse("patch_size", "is for image models, and combine='concat' for text")
            if sizes.keys() - {"max_positions"}:
                raise self.refuse("combine", f"does not resize a table; leave out {next(iter(sizes))}")
            if self.init not in ("interpolate", "random"):
                raise self.refuse("init", "makes new rows from old ones, and combine='concat' makes none; leave it out")
        elif len(sizes) > 1 or (not sizes and self.patch_size is None):
            raise PosSwapError(
                f"learned: give exactly one of max_positions, target_length, factor, image_size; got {sizes or 'none'}"
            )

    def embed(self, site: EmbedGeometry) -> EmbedChange:
        from . import _tables

        if self.combine == "concat":
            return self._concatenated(site)
        if site.table is None:
            raise PosSwapError(
                "learned: this model has no table of position vectors to resize; 'sinusoidal' can be added to it"
            )
        if site.grid is not None:
            patch = site.patch if self.patch_size is None else self._pair("patch_size", (1, 1), "positive numbers")
            grid = self._grid(site, patch)
            table = _tables.resized_grid(self.init, site, grid)
            return EmbedChange(partial(_tables.lookup, table), length=len(table), grid=grid, patch=patch)
        for name in ("image_size", "patch_size"):
            if getattr(self, name) is not None:
                raise self.refuse(name, "is for image models; give max_positions")
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

    def _grid(self, site: EmbedGeometry, patch: tuple[int, int]) -> tuple[int, int]:
        """(rows, columns) of patches asked for; without a size, those that the present image has."""
        if self.image_size is not None:
            size = self._pair("image_size", patch, f"multiples of the patch size {_said(patch)}")
            return size[0] // patch[0], size[1] // patch[1]
        if self.max_positions is self.target_length is self.factor is None:
            size = tuple(count * side for count, side in zip(site.grid, site.patch, strict=True))
            if size[0] % patch[0] or size[1] % patch[1]:
                raise self.refuse("patch_size", f"does not divide the image size {_said(size)}; give image_size too")
            return size[0] // patch[0], size[1] // patch[1]
        patches = self.max_positions or self.target_length or int(site.length * self.factor)
        side = round(patches**0.5)
        if side * side != patches:
            raise PosSwapError(f"learned: {patches} patches are not a square grid; give image_size=(height, width)")
        return side, side

    def _pair(self, name: str, unit: tuple[int, int], what: str) -> tuple[int, int]:
        """(height, width) of a parameter that is one number or two, each a multiple of its unit."""
        value = getattr(self, name)
        size = tuple(value) if isinstance(value, (tuple, list)) else (value, value)
        if len(size) != 2 or any(type(s) is not int or s < 1 or s % u for s, u in zip(size, unit, strict=True)):
            raise self.refuse(name, f"is not one or two {what}")
        return size


def _said(size: tuple[int, int]) -> str:
    return str(size[0]) if size[0] == size[1] else f"{size[0]} x {size[1]}"
