"""Vocabulary: the sites where a transformer learns position, seen from a scheme's side.

Letters used for shapes in this package:
    B batch, S sequence, P positions (rows of a table), H heads, D dimension of one head,
    R rotated dimensions of one head (R <= D), E dimension of the embedding a table is added to.

A model has up to three sites. An anatomy measures each one it finds (`RotaryGeometry`, `EmbedGeometry`); a
scheme answers with what belongs there (`RotaryChange`, `EmbedChange`), or with None. Neither side knows the
other: patching carries the question and installs the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

EMBED = "embed"  # a vector added to the token embedding
ROTARY = "rotary"  # a rotation of q and k before their dot product
BIAS = "bias"  # a term on the attention logits
SITES = (EMBED, ROTARY, BIAS)


@dataclass(frozen=True)
class RotaryGeometry:
    """A rotary site as its model was trained.

    `rope_parameters` are transformers' own, with any context scaling removed; `length` is the trained length in
    tokens; `rotary_dim` is R and `head_dim` D; `pairing` says which two dimensions share an angle: `halves`
    (i, i + R/2) or `interleaved` (2i, 2i + 1). `second_factor`: the attention derives a factor of its own, on the
    whole softmax, from the parameters (multi-head latent attention, where cos and sin reach part of a head only).
    """

    rope_parameters: dict[str, Any]
    length: int
    head_dim: int
    rotary_dim: int
    pairing: str | None
    second_factor: bool = False


@dataclass(frozen=True)
class RotaryChange:
    """What a scheme puts at a rotary site.

    `rope_parameters` go to the config as they are; `config_length` is the `max_position_embeddings` written
    beside them, and `config_original` the `original_max_position_embeddings`, where readers look for it there too;
    `length` is the longest sequence, in tokens, that the result is meant for (the two differ where
    transformers keeps the trained length in the config: linear, dynamic).
    """

    rope_parameters: dict[str, Any]
    config_length: int
    length: int
    pairing: str | None = None
    config_original: int | None = None


@dataclass(frozen=True)
class EmbedGeometry:
    """An embed site: the table that is there, or what a vector added there has to live beside.

    `table` has shape (P, E) in float32, without the rows that the family reserves (padding, offsets) and without
    prefix tokens; it is None on a model that adds no position vector. `grid` is (rows, columns) of the patches of
    an image model and None for text. `rms` is the root mean square of what stands there (of the table, or of the
    token embeddings where there is no table).
    """

    dim: int
    length: int
    table: Tensor | None
    rms: Callable[[], float]
    grid: tuple[int, int] | None = None
    patch: int | None = None


@dataclass(frozen=True)
class EmbedChange:
    """What a scheme puts at an embed site.

    `vectors` maps positions, an integer tensor of any shape (...), to float32 vectors (..., E). `length` is the
    number of positions it is good for.
    `grid` is the (rows, columns) that an image model gets.
    """

    vectors: Callable[[Tensor], Tensor]
    length: int
    grid: tuple[int, int] | None = None
