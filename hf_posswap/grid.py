"""Where the tokens of an image stand: patches on a grid, in rows from the top; tokens around them have no place."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .errors import PosSwapError


@dataclass(frozen=True)
class Grid:
    """`rows` x `columns` patches in a row; `before` and `after` them class, register and other tokens."""

    rows: int
    columns: int
    before: int = 0
    after: int = 0

    @property
    def patches(self) -> int:
        return self.rows * self.columns

    def coordinates(self, ndim: int, of_image: bool, device: torch.device) -> Tensor:
        """(patches, ndim): the number in the sequence of patches, or row and column, integers; `of_image`: these as
        places of centres, from -2 pi to 2 pi over each side.
        """
        if ndim == 1:
            return torch.arange(self.patches, device=device)[:, None]
        axes = [torch.arange(side, device=device) for side in (self.rows, self.columns)]
        if of_image:
            axes = [2 * math.pi * (2 * (axis + 0.5) / len(axis) - 1) for axis in axes]
        return torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).flatten(0, 1)

    def beside(self, values: Tensor) -> Tensor:
        """(H, 3) values of a token around to a patch, of a patch to it, and between two -> (H, S, S), 0 elsewhere."""
        patch = F.pad(values.new_ones(self.patches), (self.before, self.after))
        other = 1 - patch
        kinds = torch.stack([other[:, None] * patch, patch[:, None] * other, other[:, None] * other])
        return torch.einsum("hk,kqs->hqs", values, kinds)

    def framed(self, values: Tensor, value: float = 0.0) -> Tensor:
        """(..., patches, R), a row for each patch, as one for each token."""
        return F.pad(values, (0, 0, self.before, self.after), value=value)

    def squared(self, values: Tensor) -> Tensor:
        """(..., patches, patches), an entry for each two patches, as one for each two tokens: 0 beside the grid."""
        return F.pad(values, (self.before, self.after) * 2)


@dataclass
class Sight:
    """What the patch embedding of one model saw: images of (rows, columns) patches of `patch` (height, width) pixels.

    `seen`: by the number of their patches. Gradient checkpointing runs a layer once more when other images may have
    been seen meanwhile; the number of its tokens says which were its own.
    """

    patch: tuple[int, int]
    before: int
    after: int
    seen: dict[int, tuple[int, int]] = field(default_factory=dict)

    def grid(self, tokens: int) -> Grid:
        """Of a layer that gets so many tokens. Raises PosSwapError where no image seen has as many."""
        patches = tokens - self.before - self.after
        if patches not in self.seen:
            raise PosSwapError(
                f"{tokens} tokens reached a layer, and images of {' or '.join(map(str, self.seen))} patches, with "
                f"{self.before + self.after} tokens around them, came in; where the others stand is not known"
            )
        return Grid(*self.seen[patches], self.before, self.after)


def look(module: nn.Module, args: tuple, kwargs: dict, *, sight: Sight, stack: nn.Module) -> None:
    """Before a patch embedding: the size of the images, (B, C, height, width)."""
    rows, columns = (pixels // size for pixels, size in zip(args[0].shape[-2:], sight.patch, strict=True))
    if not (stack.training and any(getattr(inner, "gradient_checkpointing", False) for inner in stack.modules())):
        sight.seen = {}
    elif sight.seen.get(rows * columns, (rows, columns)) != (rows, columns):
        raise PosSwapError(
            f"pixel_values: images of {rows} x {columns} patches and others of as many cannot be told apart where "
            "gradient checkpointing runs layers again; turn it off"
        )
    sight.seen[rows * columns] = rows, columns
