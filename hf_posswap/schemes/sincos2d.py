"""sincos2d - Masked Autoencoders Are Scalable Vision Learners, appendix A, https://arxiv.org/abs/2111.06377"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from ..errors import PosSwapError
from ..scheme import Scheme
from ..sites import EMBED, EmbedChange, EmbedGeometry
from .sinusoidal import SCALES, UNIT_RMS

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Sincos2d(Scheme):
    """A fixed vector of sines and cosines of its row and column at every patch of an image model with a table. Rows of
    tokens that are no patches stay.

    convention: `mae` (MAE's, I-JEPA's; columns first), `moco` (MoCo v3's; the same, rows first) or `big_vision` (MAE's
    order, and frequencies that divide by E / 4 - 1). scale: `match` gives the vectors the root mean square of the
    table they replace, `none` leaves them at 0.707. init: `exact`, or `fit`: every vector is multiplied by the matrix
    (E, E) that best reproduces the table they replace, resized as `learned2d` does.
    """

    name = "sincos2d"
    paper = "https://arxiv.org/abs/2111.06377"
    sites: ClassVar = frozenset({EMBED})
    fits_with: ClassVar = "init='fit' fits it to the table it replaces, without pictures"

    convention: str = "mae"
    scale: str = "match"
    init: str = "exact"

    def __post_init__(self) -> None:
        from ..positions import SINCOS
        from .sinusoidal import INITS

        self.check_choice("convention", SINCOS)
        self.check_choice("scale", SCALES)
        self.check_choice("init", INITS)
        if self.init == "fit" and self.scale != "match":
            raise self.refuse("scale", "has no meaning beside init='fit', which finds the scale itself")

    @property
    def recomputable(self) -> bool:
        return self.init == "exact"

    def embed(self, site: EmbedGeometry) -> EmbedChange:
        from ..positions import fit_waves, sincos_grid

        if site.grid is None or len(site.grid) != 2:
            raise PosSwapError("sincos2d: it fills a table of an image's patches, and this model has none")
        if site.dim % 4 or site.dim < 8:
            raise self.refuse(
                "convention", f"needs a width that is a multiple of 4, from 8; this model's is {site.dim}"
            )
        waves = partial(sincos_grid, dim=site.dim, convention=self.convention)
        length = math.prod(site.new_grid)
        if self.init == "fit":
            import torch

            from . import _tables

            waves = partial(waves, grid=site.new_grid)
            matrix = fit_waves(waves(torch.arange(length)), _tables.resized_grid(site, "bicubic"))
            return EmbedChange(partial(_mapped, waves=waves, matrix=matrix), length=length)
        # to six digits: a table that is made of such waves keeps its scale of 1
        scale = round(site.rms() / UNIT_RMS, 6) if self.scale == "match" else 1.0
        return EmbedChange(partial(waves, grid=site.new_grid, scale=scale), length=length)


def _mapped(positions: Tensor, *, waves: Callable[[Tensor], Tensor], matrix: Tensor) -> Tensor:
    """Waves of positions (...), every vector multiplied by a matrix (E, E): (..., E)."""
    return waves(positions) @ matrix
