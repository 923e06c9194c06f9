"""Vocabulary: the sites where a transformer learns position, seen from a scheme's side.

Letters used for shapes in this package:
    B batch, S sequence, P positions (rows of a table), H heads, D dimension of one head,
    R rotated dimensions of one head (R <= D), E dimension of the embedding a table is added to,
    Q queries and K keys of one call of attention (K > Q where a cache holds the keys before).

A model has up to three sites. An anatomy measures each one it finds (`RotaryGeometry`, `EmbedGeometry`,
`BiasGeometry`); a scheme answers with what belongs there (`RotaryChange`, `EmbedChange`, `BiasChange`), or with None.
Neither side knows the other: patching carries the question and installs the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

EMBED = "embed"  # a vector added to the token embedding
ROTARY = "rotary"  # a rotation of q and k before their dot product
BIAS = "bias"  # a term on the attention logits
SITES = (EMBED, ROTARY, BIAS)
ROTARY_2D = "rotary2d"  # the same by row and column of a patch, in models that have it by themselves
RELATIVE, SPATIAL = "relative", "spatial"  # biases that a model has: by distance in tokens, and on a page
KEEP, SILENCE = "keep", "silence"  # what can be decided of them


@dataclass(frozen=True)
class RotaryGeometry:
    """A rotary site as its model was trained.

    `rope_parameters` are transformers' own, with any context scaling removed; `length` is the trained length in
    tokens; `rotary_dim` is R and `head_dim` D; `pairing` says which two dimensions share an angle: `halves`
    (i, i + R/2) or `interleaved` (2i, 2i + 1). `second_factor`: the attention derives a factor of its own, on the
    whole softmax, from the parameters (multi-head latent attention, where cos and sin reach part of a head only).
    `heads` is H, where it is told.
    """

    rope_parameters: dict[str, Any]
    length: int
    head_dim: int
    rotary_dim: int
    pairing: str | None
    second_factor: bool = False
    heads: int = 0


@dataclass(frozen=True)
class RotaryChange:
    """What a scheme puts at a rotary site.

    `rope_parameters` go to the config as they are; `config_length` is the `max_position_embeddings` written
    beside them, and `config_original` the `original_max_position_embeddings`, where readers look for it there too;
    `length` is the longest sequence, in tokens, that the result is meant for (the two differ where
    transformers keeps the trained length in the config: linear, dynamic). `decay` is xPos's scale base, in tokens:
    only a rotation done by this package inside attention has one.
    Where the places have two axes there are no `rope_parameters`, but `frequencies` (2, R/2) by row and column,
    float32, radians per patch, or (H, 2, R/2) where heads have their own. `learned`: they are trained, in each layer
    apart. `of_image`: places are of an image from -2 pi to 2 pi, whatever its size.
    """

    rope_parameters: dict[str, Any]
    config_length: int
    length: int
    pairing: str | None = None
    config_original: int | None = None
    decay: float | None = None
    frequencies: Tensor | None = None
    learned: bool = False
    of_image: bool = False


@dataclass(frozen=True)
class EmbedGeometry:
    """An embed site: the table that is there, or what a vector added there has to live beside.

    `table` has shape (P, E) in float32, without the rows that the family reserves (padding, offsets) and without
    prefix tokens; it is None on a model that adds no position vector. `grid` is (rows, columns) of the patches of
    an image model, (frames, rows, columns) of a video's, and `new_grid` that which it is to have; both None for text.
    `rms` is the root mean square of what stands there (of the table, or of the token embeddings where there is no
    table). `resample`: the model's own way from the table to one (h * w, E) of another grid, None where it has none.
    """

    dim: int
    length: int
    table: Tensor | None
    rms: Callable[[], float]
    grid: tuple[int, ...] | None = None
    new_grid: tuple[int, ...] | None = None
    resample: Callable[[tuple[int, int]], Tensor] | None = None


@dataclass(frozen=True)
class EmbedChange:
    """What a scheme puts at an embed site.

    `vectors` maps positions, an integer tensor of any shape (...), to float32 vectors (..., E). `length` is the
    number of positions it is good for. `projection` (E, E): a vector is not added to the token's but concatenated with
    it and projected back to E; this is the half of the projection that reads it, at the start, and the other half is
    the identity.
    """

    vectors: Callable[[Tensor], Tensor]
    length: int
    projection: Tensor | None = None


@dataclass(frozen=True)
class BiasGeometry:
    """The attention logits of a model: H `heads`, `length` trained tokens, `causal` where keys never follow queries.

    `grid` is the (rows, columns) of patches that an image model was trained on, None for text.
    """

    heads: int
    length: int
    causal: bool
    grid: tuple[int, int] | None = None


Tensors = Mapping[str, "Tensor"]


@dataclass(frozen=True)
class BiasChange:
    """What a scheme puts on the attention logits.

    `parameters` are learned, `constants` are not; float32 both, and handed by name to the functions below. Places are
    indices in the cache (of the sequence, without one), integers; positions count from the start of a document.

    `bias(tensors, distance)`: additive terms (H, ...) at distances key - query, integers of any shape (...).
    `placed(tensors, distance, position)`: the same for terms that also depend on the query's position;
    distance (..., Q, K), position (..., Q, 1), result (..., H, Q, K).
    `factors(tensors, keys)`: for causal models, the bias up to a constant per row as a short sum of products:
    left (H, r), right (K, r) at the key places `keys` (K,).
    `between(tensors, rows, columns)`: on images of so many patches, the terms (H, 2 rows - 1, 2 columns - 1) by (rows,
    columns) from query to key, the least first; then `tensors["beside"]` (H, 3) are those of a token without a place
    to a patch, of a patch to it, and between two.
    `temperature(position)`: a multiplier of the logits, any shape (...).
    `shared`: one set of parameters for all layers, else one for each.
    `fit(profile)`: the values of all `parameters` by name that come closest to what other positions add to the logits
    (`profile.Profile`); None where there is nothing to choose.
    """

    bias: Callable[[Tensors, Tensor], Tensor] | None = None
    placed: Callable[[Tensors, Tensor, Tensor], Tensor] | None = None
    factors: Callable[[Tensors, Tensor], tuple[Tensor, Tensor]] | None = None
    between: Callable[[Tensors, int, int], Tensor] | None = None
    temperature: Callable[[Tensor], Tensor] | None = None
    parameters: dict[str, Tensor] = field(default_factory=dict)
    constants: dict[str, Tensor] = field(default_factory=dict)
    shared: bool = True
    fit: Callable[[Any], dict[str, Tensor]] | None = None

    @property
    def absolute(self) -> bool:
        """Whether it depends on the query's position, not on distances alone."""
        return self.placed is not None or self.temperature is not None
