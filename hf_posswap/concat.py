"""Concatenation: token and position, both of width E, side by side and projected back to E.

    W [x | p] = T x + P p    with W = [T | P] of shape (E, 2 E)

So each half works where its vector is made: T behind the token embedding, P behind the table of positions or before
what is added to the first layer; the model itself adds the two as it always did. `inputs_embeds` are, as ever, what
`get_input_embeddings()` returns: T has read them already.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from .parts import keeping_dtype


class Concatenation(nn.Module):
    """The projection, trained, float32 whatever the model is cast to.

    of_positions: its half P at the start, (E, E); the other is the identity. What it reads where the model has no table
    of its own: `vectors` of integer positions, or a trained `table` (P, E).
    """

    def __init__(
        self,
        of_positions: Tensor,
        vectors: Callable[[Tensor], Tensor] | None = None,
        table: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.projection = nn.Parameter(torch.cat([torch.eye(len(of_positions)), of_positions.float().cpu()], dim=1))
        self.vectors = vectors
        self.table = None if table is None else nn.Parameter(table)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        return super()._apply(keeping_dtype(fn), recurse)

    def forward(self, positions: Tensor) -> Tensor:
        """P p of integer positions (...): (..., E)."""
        return self.of_position(self.vectors(positions) if self.table is None else embedding(positions, self.table))

    def of_token(self, tokens: Tensor) -> Tensor:
        """T x of vectors (..., E), in their dtype."""
        return self._half(tokens, slice(None, len(self.projection)))

    def of_position(self, vectors: Tensor) -> Tensor:
        """P p of vectors (..., E), in their dtype."""
        return self._half(vectors, slice(len(self.projection), None))

    def _half(self, vectors: Tensor, columns: slice) -> Tensor:
        with torch.autocast(vectors.device.type, enabled=False):  # the identity must stay one
            return linear(vectors.float(), self.projection[:, columns]).to(vectors.dtype)


def project(module: nn.Module, args: tuple, output: Tensor, *, side: Callable[[Tensor], Tensor]) -> Tensor:
    """After a module that makes vectors: one half of the projection."""
    return side(output)
