"""How the learned schemes fill a resized table; the arithmetic is `positions.py`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .. import positions
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


RESIZES = ("bicubic", "bilinear", "tile")


def resized_grid(site: EmbedGeometry, resize: str, antialias: bool = False) -> Tensor:
    """(P, E) -> (P', E) of the new grid. Bicubic without antialias is the model's own function, where it has one."""
    if site.new_grid == site.grid:
        return site.table
    if resize == "tile":
        return positions.tile_grid(site.table, site.grid, site.new_grid)
    if resize == "bicubic" and not antialias and site.resample is not None:
        return site.resample(site.new_grid)
    return positions.resize_grid(site.table, site.grid, site.new_grid, resize, antialias)
