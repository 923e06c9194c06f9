"""How the learned scheme fills a resized table; the arithmetic is `positions.py`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .. import positions
from ..errors import PosSwapError
from ..sites import EmbedGeometry


def lookup(table: Tensor, index: Tensor) -> Tensor:
    """Rows (..., E) of a table (P, E) at integer positions (...)."""
    return F.embedding(index, table)


def resized(init: str, table: Tensor, length: int, **options: int) -> Tensor:
    """(P, E) -> (length, E)."""
    if length == len(table):
        return table
    fill = {
        "interpolate": positions.interpolate,
        "tile": positions.tile,
        "hierarchical": positions.hierarchical,
        "random": positions.random,
        "fit": positions.fit,
    }
    return fill[init](table, length, **options)


def resized_grid(init: str, site: EmbedGeometry, grid: tuple[int, int]) -> Tensor:
    """(h * w, E) -> (h' * w', E)."""
    if grid == site.grid:
        return site.table
    if init == "interpolate" and site.resample is not None:
        return site.resample(grid)
    resize = {"interpolate": positions.resize_grid, "tile": positions.tile_grid}
    if init not in resize:
        raise PosSwapError(f"learned: init={init!r} is for text; on a grid of patches use 'interpolate' or 'tile'")
    return resize[init](site.table, site.grid, grid)
