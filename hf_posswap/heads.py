"""What attention modules outside of transformers' interface have in common: for the declarations in `anatomies/`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


def always(module: nn.Module) -> bool:
    """A lambda could not be pickled with the model that it is bound to."""
    return True


def never(module: nn.Module) -> bool:
    return False


def project_apart(
    module: nn.Module, call: Mapping[str, Any], *, layers: tuple[str, str, str], size: str, states: str
) -> list[Tensor]:
    """Query, key and value (B, H, S, D) of three layers; `size`: the module's name for D, `states`: its input's."""
    heads = (-1, getattr(module, size))
    return [getattr(module, layer)(call[states]).unflatten(-1, heads).transpose(1, 2) for layer in layers]


def project_as_bert(module: nn.Module, call: Mapping[str, Any]) -> list[Tensor]:
    """The same, of layers named as BERT names them."""
    layers = ("query", "key", "value")
    return project_apart(module, call, layers=layers, size="attention_head_size", states="hidden_states")


def finished(module: nn.Module, output: Tensor, call: Mapping[str, Any]) -> Tensor:
    """The attention output (B, S, H D) as it is: what follows is another module's."""
    return output


def given_mask(module: nn.Module, call: Mapping[str, Any]) -> Tensor | None:
    """The mask that the caller made: numbers to add, or true where hidden; (B, 1, Q, K)."""
    return call["attention_mask"]


def with_weights(module: nn.Module, output: Any, weights: Tensor | None) -> tuple[Any, Tensor | None]:
    """What most modules return."""
    return output, weights
