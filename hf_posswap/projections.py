"""Projections: which rows of which linear layers make the queries and keys of an attention module.

Nothing is known by name: the model runs on one row of text, and each element of a head's first query (key) is asked,
by differentiation, which element of which layer's output it is. So layers that make q, k and v together, heads that
share keys, and factors on the way (OPT scales its queries) are read as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from .anatomy import kind
from .attention import ATTRIBUTE
from .edits import Hook, Replace
from .errors import PosSwapError


@dataclass(frozen=True)
class Rows:
    """The rows (D,) of a layer that make one head's vectors, and the factor on the way."""

    layer: nn.Module
    rows: Tensor
    factor: float

    @property
    def key(self) -> tuple:
        """Equal for heads whose vectors are the same."""
        return id(self.layer), *self.rows.tolist()


@dataclass
class TracingEar:
    """Traces the queries and keys of one attention module, in a forward that is differentiated."""

    module: nn.Module
    tokens: int | None = None
    outputs: dict[nn.Module, Tensor] = field(default_factory=dict)
    queries: list[Rows] = field(default_factory=list)
    keys: list[Rows] = field(default_factory=list)

    def edits(self) -> list[Replace | Hook]:
        """What has it see the layers' outputs and hear the attention."""
        layers = [inner for inner in self.module.modules() if isinstance(inner, (nn.Linear, Conv1D))]
        return [Replace(self.module, ATTRIBUTE, (self,)), *(Hook(one, self.keep, after=True) for one in layers)]

    def keep(self, layer: nn.Module, args: tuple, output: Tensor) -> Tensor:
        """After a layer: its output, as something to differentiate by."""
        self.outputs[layer] = output.detach().requires_grad_()
        return self.outputs[layer].clone()

    def hear(self, query: Tensor, key: Tensor, mask: Any, added: Any) -> None:
        self.queries, self.keys = ([self._rows(head) for head in vectors[0, :, 0]] for vectors in (query, key))
        self.outputs.clear()

    def _rows(self, vector: Tensor) -> Rows:
        """Of a head's first vector (D,): by the gradient of its sum, and of the sums that spell each index in bits."""
        found = [(layer, g) for layer in self.outputs if (g := self._gradient(vector.sum(), layer)).any()]
        layer, gradient = found[0] if len(found) == 1 else (None, vector.new_zeros(0))
        rows = gradient.nonzero()[:, 0]
        if len(rows) != len(vector) or (gradient[rows] != gradient[rows[0]]).any():
            raise PosSwapError(
                f"fit= writes positions into the layers that make queries and keys, and those of {kind(self.module)} "
                "are not rows of a linear layer of their own; leave it out"
            )
        index, place = torch.arange(len(vector), device=vector.device), torch.zeros_like(rows)
        for bit in range(len(vector).bit_length()):
            chosen = (index >> bit & 1).to(vector.dtype)
            place += (self._gradient((vector * chosen).sum(), layer)[rows] != 0).long() << bit
        return Rows(layer, rows[place.argsort()], gradient[rows[0]].item())

    def _gradient(self, value: Tensor, layer: nn.Module) -> Tensor:
        """Of a number by the layer's output for the first token, (O,); 0 where it does not depend on it."""
        (gradient,) = torch.autograd.grad(value, self.outputs[layer], retain_graph=True, allow_unused=True)
        output = self.outputs[layer]
        return torch.zeros_like(output).flatten(0, -2)[0] if gradient is None else gradient.flatten(0, -2)[0]
