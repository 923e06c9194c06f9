"""The hand inside attention: the only file that names transformers' AttentionInterface and AttentionMaskInterface.

One function stands in the interface under names of its own, `posswap_sdpa` beside `sdpa` and so on; no stock entry is
touched. It does what is attached to the attention module that calls it, then calls the stock function; where nothing
is attached it only calls the stock function. Where the tokens of a call stand is told by a hook before the module
(`hand_places`), in the coordinates that transformers' own masks use: the index in the cache. Padding and packing move
all tokens of a document by the same amount, so differences of such indices are distances.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from .anatomy import AttentionDeclaration
from .errors import PosSwapError
from .grid import Grid, Sight
from .parts import given, with_argument
from .relative import exact_parts, spread, spread_grid
from .rotation import Rotation
from .sites import BiasChange

PREFIX = "posswap_"
BACKENDS = ("eager", "sdpa", "flex_attention")
ATTRIBUTE = "_posswap_attention"  # on an attention module: what its calls are to do
PLACES = "posswap_places"  # the keyword that carries Places from the hook through the module to the function
PLACE_UNIT = 16  # tokens; places counted in these are in float16's range, which ends at 65504, up to a million tokens
TWO_PARTS = 65536  # keys whose places are exact in two parts of bfloat16, 8 bits each


@dataclass(frozen=True)
class Places:
    """Where one call's tokens stand: cache index of the first query and of the first key; whether keys are rotated; on
    an image, its grid.
    """

    query: int | Tensor = 0
    key: int | Tensor = 0
    keys_rotated: bool = False
    grid: Grid | None = None


@dataclass
class Text:
    """The text in the forward that runs, S tokens, where those of an image follow it and count from 0 again.

    `positions`: what the caller says of its tokens, (B, S), less the `first` position id of the family.
    """

    first: int = 0
    length: int | None = None
    positions: Tensor | None = None

    def places(self, count: int, device: torch.device) -> Tensor:
        """Where `count` tokens stand, (count,), or (B, count) where that is said row by row."""
        places = torch.arange(count, device=device)
        if self.length is None:
            return places
        if self.positions is None:
            return torch.where(places < self.length, places, places - self.length)
        image = places[: count - self.length].expand(len(self.positions), -1)
        return torch.cat([self.positions.to(device), image], dim=-1)


class Attached(nn.Module):
    """What a scheme puts inside attention: its learned parameters, its constants, and the functions that read them.

    Everything is float32 and stays so whatever the model is cast to. Constants are no buffers: they have values on a
    model that has none yet, and no checkpoint holds them. `sight`: what tells the grid of an image model's patches.
    `text`: what tells where an image's tokens begin, in models of text whose count begins again there. `joins`: the
    bias that a model hands to its attention stays, beside this one.
    """

    def __init__(
        self,
        change: BiasChange | None = None,
        rotation: Rotation | None = None,
        sight: Sight | None = None,
        text: Text | None = None,
        joins: bool = False,
    ) -> None:
        super().__init__()
        self.change, self.rotation, self.sight, self.text, self.joins = change, rotation, sight, text, joins
        self.memo: dict[tuple, Any] | None = None
        self.constants = {} if change is None else dict(change.constants)
        if change is not None:
            self.change = copy.copy(change)
            object.__setattr__(self.change, "parameters", {})  # they live below from now on
            for name, value in change.parameters.items():
                self.register_parameter(name, nn.Parameter(value.clone().float()))
        if rotation is not None and rotation.learned:
            self.register_parameter("frequencies", nn.Parameter(rotation.frequencies.clone()))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Move, never cast."""

        def keep(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        def follow(tensor: Tensor) -> Tensor:  # fn may also empty or cast what it moves: ask it for the device only
            device = fn(torch.empty(0, device=tensor.device)).device
            return tensor if device.type == "meta" else tensor.to(device)

        self.constants = {name: follow(value) for name, value in self.constants.items()}
        if self.rotation is not None:
            self.rotation = self.rotation.of(follow(self.rotation.frequencies))
        return super()._apply(keep, recurse)

    def once(self, what: str, x: Tensor, keys: int, places: Places, compute: Callable[[], Any]) -> Any:
        """What all layers of one forward compute alike is computed by the first of them; `remember` says when.

        Places of a static cache are tensors, a new one for each layer: layers of one kind agree on their values.
        """
        if self.memo is None:
            return compute()
        offsets = tuple(p if isinstance(p, int) else None for p in (places.query, places.key))
        at = (what, x.shape[-2], keys, *offsets, x.dtype, x.device)
        if at not in self.memo:
            self.memo[at] = compute()
        return self.memo[at]

    @property
    def shared(self) -> bool:
        """Whether all layers of a stack can have this one: none learns anything of its own."""
        return (self.change is None or self.change.shared) and (self.rotation is None or not self.rotation.learned)

    def rotate(self, x: Tensor, first: int | Tensor, is_key: bool, grid: Grid | None = None) -> Tensor:
        """Queries or keys (B, H, S, D), rotated, at the places first, first + 1, ...; on a grid its patches alone."""
        rotation = self.rotation.of(self.frequencies) if self.rotation.learned else self.rotation
        what = "keys" if is_key and rotation.decay is not None else "queries"

        def compute() -> tuple[Tensor, Tensor]:
            if grid is None:
                places = self.places(x.shape[-2], first, x.device)[..., None]
                return rotation.tables(places if places.dim() == 2 else places[:, None], is_key, x.dtype)
            coordinates = grid.coordinates(rotation.ndim, rotation.of_image, x.device)
            cos, sin = rotation.tables(coordinates, is_key, x.dtype)
            return grid.framed(cos, 1.0), grid.framed(sin)

        return rotation.turn(x, *self.once(what, x, 0, Places(first, first), compute))

    def places(self, count: int, first: int | Tensor, device: torch.device) -> Tensor:
        """Where `count` tokens stand: (count,), or (B, count) by what a caller says of a text before an image."""
        return torch.arange(count, device=device) + first if self.text is None else self.text.places(count, device)

    def tensors(self, device: torch.device) -> dict[str, Tensor]:
        return {name: t.to(device) for name, t in [*self._parameters.items(), *self.constants.items()]}

    def by_distance(self, query: Tensor, key: Tensor, places: Places) -> Tensor:
        """The additive bias at the distances of a call, the least first: (H, Q + K - 1), float32."""
        distance = torch.arange(1 - query.shape[2], key.shape[2], device=query.device) + (places.key - places.query)
        return _of_heads(self.change.bias(self.tensors(query.device), distance), query)

    def dense(self, query: Tensor, key: Tensor, places: Places, positions: Tensor | None) -> Tensor:
        """The additive bias, (1, H, Q, K) or (B, H, Q, K), in the queries' dtype."""
        queries, keys, device = query.shape[2], key.shape[2], query.device
        if places.grid is not None:
            return self.on_grid(query, places.grid)[None].to(query.dtype)
        if self.change.placed is None and self.text is None:
            return spread(self.by_distance(query, key, places), queries, keys)[None].to(query.dtype)
        q, k = self.places(queries, places.query, device), self.places(keys, places.key, device)
        if self.change.placed is None:
            q, k = (places.reshape(-1, places.shape[-1]) for places in (q, k))
            bias = self.change.bias(self.tensors(device), k[:, None] - q[..., None])
            return _of_heads(bias, query).transpose(0, 1).to(query.dtype)
        position = (q[None] if positions is None else positions.to(device))[..., None]
        bias = self.change.placed(self.tensors(device), (k - q[:, None])[None], position)
        return _of_heads(bias.transpose(0, 1), query).transpose(0, 1).to(query.dtype)

    def on_grid(self, query: Tensor, grid: Grid) -> Tensor:
        """The additive bias between the tokens of an image, (H, S, S), float32; 0 where one of two has no place."""
        tensors = self.tensors(query.device)
        if self.change.between is not None:
            values = _of_heads(self.change.between(tensors, grid.rows, grid.columns), query)
            return grid.squared(spread_grid(values, grid.rows, grid.columns)) + grid.beside(tensors["beside"])
        distance = torch.arange(1 - grid.patches, grid.patches, device=query.device)
        values = _of_heads(self.change.bias(tensors, distance), query)
        return grid.squared(spread(values, grid.patches, grid.patches))

    def extended(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> tuple[Tensor, Tensor, Tensor]:
        """The bias as extra dimensions of q and k, (..., D) -> (..., D + r): no (Q, K) tensor, on any kernel.

        A row's softmax ignores what is the same for all its keys, so slope * (k - q) needs only slope * k:
            q' = [q | slope / scaling]    k' = [k | place]    q' k' * scaling = q k * scaling + slope * place
        Kernels multiply in the dtype of q and add in float32: in bf16 each factor is a sum of exact parts.
        """
        tensors, dtype, keys = self.tensors(query.device), query.dtype, key.shape[2]
        left, right = self.change.factors(tensors, torch.arange(keys, device=query.device))
        lefts = exact_parts(_of_heads(left, query) / scaling * PLACE_UNIT, dtype, 3)
        rights = exact_parts(right / PLACE_UNIT, dtype, 2 if keys <= TWO_PARTS else 3)
        columns = torch.cat([a for a in lefts for _ in rights], dim=-1)  # (H, r)
        rows = torch.cat([b for _ in lefts for b in rights], dim=-1)  # (K, r)
        spare = -(query.shape[-1] + columns.shape[-1]) % 8  # fused kernels want it; on a CPU 72 are faster than 65
        columns, rows = (nn.functional.pad(t, (0, spare)) for t in (columns, rows))
        extra = columns.shape[-1]
        query = torch.cat((query, columns[None, :, None].expand(*query.shape[:-1], extra)), dim=-1)
        key = torch.cat((key, rows.expand(*key.shape[:-1], extra)), dim=-1)
        return query, key, nn.functional.pad(value, (0, query.shape[-1] - value.shape[-1]))


def _of_heads(values: Tensor, query: Tensor) -> Tensor:
    """What was computed for H heads (H, ...), where a call (B, H, Q, D) has as many."""
    if values.shape[0] != query.shape[1]:
        raise PosSwapError(
            f"the installed bias is of {values.shape[0]} heads, and {query.shape[1]} are computed here; heads with a "
            "bias cannot be split among processes (tensor parallel)"
        )
    return values


class Diagonals:
    """A bias (B, H, Q, K) that FlexAttention reads entry by entry off its `values` (H, Q + K - 1) at distances."""

    def __init__(self, values: Tensor, queries: int) -> None:
        self.values = values
        self.first = torch.full((), queries - 1, device=values.device)  # an int would be a graph for every length

    def __getitem__(self, at: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
        _, head, query, key = at
        return self.values[head, key - query + self.first]


class RotatedKeys:
    """A cache as one attention module sees it for one call: what it writes there is rotated first.

    Keys are turned once, when they are written; nothing is done to those already in the cache.
    """

    def __init__(self, cache: Cache, attached: Attached, first: int | Tensor) -> None:
        self.cache, self.attached, self.first = cache, attached, first

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.cache.update(self.attached.rotate(key, self.first, is_key=True), value, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["cache"], name)


def remember(module: nn.Module, args: tuple, kwargs: dict, *, attached: Attached) -> tuple[tuple, dict]:
    """Before a stack of layers: what its layers share is computed once in this forward.

    Not where gradient checkpointing runs each layer once more by itself, when the others are over; nor where a
    compiler looks on, which finds what is common by itself and would make a graph for every length of a key.
    """
    again = module.training and any(getattr(inner, "gradient_checkpointing", False) for inner in module.modules())
    attached.memo = None if again or torch.compiler.is_compiling() else {}
    return args, kwargs


def forget(module: nn.Module, args: tuple, output: Any, *, attached: Attached) -> None:
    """After a stack of layers."""
    attached.memo = None


def count_text(module: nn.Module, args: tuple, kwargs: dict, *, names: tuple[str, ...], text: Text) -> tuple:
    """Before a model that puts an image's tokens behind the text's: how many the text has."""
    call = given(names, args, kwargs)
    inputs = call.get("inputs_embeds") if call.get("input_ids") is None else call["input_ids"]
    text.length = 0 if inputs is None else inputs.shape[1]
    positions = call.get("position_ids")
    text.positions = None if positions is None else positions - text.first
    return args, kwargs


def hand_places(
    module: nn.Module, args: tuple, kwargs: dict, *, names: tuple[str, ...], attached: Attached
) -> tuple[tuple, dict]:
    """Before an attention module: tell its attention function where queries and keys stand."""
    implementation = module.config._attn_implementation
    if implementation not in NAMES:
        raise PosSwapError(
            f"config._attn_implementation={implementation!r} was set directly and would drop the installed positions; "
            "use model.set_attn_implementation"
        )
    if str(nn.functional.scaled_dot_product_attention.__module__).startswith("torch.distributed"):
        raise PosSwapError(
            "context parallelism (torch's `context_parallel`, cp_size > 1) splits a sequence among processes that do "
            "not know their places in it; a scheme inside attention needs cp_size=1"
        )
    if attached.sight is not None:  # its grids are known, and many image models drop a keyword
        return args, kwargs
    call = given(names, args, kwargs)
    name = next((name for name, value in call.items() if isinstance(value, Cache)), None)
    if name is None:
        return args, kwargs | {PLACES: Places()}
    cache = call[name]
    own = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    query = own.get_query_offset(module.layer_idx)
    if isinstance(query, Tensor):
        query = query.clone()  # a static cache counts on in place
    key = own.get_mask_sizes(call[names[0]].shape[1], module.layer_idx)[1]
    if attached.rotation is not None:
        rotated = RotatedKeys(own, attached, query)
        if own is not cache:
            rotated, around = copy.copy(cache), rotated
            rotated.self_attention_cache = around
        args, kwargs = with_argument(names, args, kwargs, name, rotated)
    return args, kwargs | {PLACES: Places(query, key, attached.rotation is not None)}


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    backend: str,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """An attention function of transformers' interface; query (B, H, Q, D), key and value (B, H', K, D)."""
    places: Places | None = kwargs.pop(PLACES, None)
    forward = stock(module, backend)
    if ATTRIBUTE not in module.__dict__:
        return forward(module, query, key, value, attention_mask, **kwargs)
    (attached,) = module.__dict__[ATTRIBUTE]
    if attached.sight is not None:
        places = Places(grid=attached.sight.grid(query.shape[2]))
    if places is None:
        raise PosSwapError(f"{type(module).__name__} dropped the keyword {PLACES!r}; its positions cannot be installed")
    change, rotation = attached.change, attached.rotation
    if rotation is not None:
        query = attached.rotate(query, places.query, is_key=False, grid=places.grid)
        key = key if places.keys_rotated else attached.rotate(key, places.key, is_key=True, grid=places.grid)
    if change is None:
        return forward(module, query, key, value, attention_mask, **kwargs)
    positions = kwargs.get("position_ids")
    if change.temperature is not None:
        count = torch.arange(query.shape[2], device=query.device)[None] + places.query
        if places.grid is not None:  # every query sees all tokens
            count = torch.full_like(count, query.shape[2] - 1)
        factor = change.temperature(count if positions is None else positions)
        query = query * factor[:, None, :, None].to(query.dtype)
    if change.bias is None and change.placed is None and change.between is None:
        return forward(module, query, key, value, attention_mask, **kwargs)
    if change.factors is not None and backend == "sdpa" and query.shape[2] > 1:  # one query: its bias is small
        scaling, width = kwargs.pop("scaling", None), value.shape[-1]
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        query, key, value = attached.extended(query, key, value, scaling)
        output, weights = forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        return output[..., :width].contiguous(), weights  # some models take a view of it
    own = kwargs.pop("position_bias", None) if attached.joins else None
    kwargs["position_bias"] = None  # the model's own, silenced
    if backend == "flex_attention" and change.placed is None and places.grid is None and own is None:
        values = attached.once("values", query, key.shape[2], places, lambda: attached.by_distance(query, key, places))
        kwargs["position_bias"] = Diagonals(values, query.shape[2])
        return forward(module, query, key, value, attention_mask, **kwargs)
    bias = attached.once("bias", query, key.shape[2], places, lambda: attached.dense(query, key, places, positions))
    bias = bias if own is None else bias + own
    if backend == "flex_attention":
        kwargs["position_bias"] = bias.expand(query.shape[0], -1, -1, -1)
        return forward(module, query, key, value, attention_mask, **kwargs)
    if backend == "eager" or (attention_mask is not None and attention_mask.is_floating_point()):
        if attention_mask is not None:
            lowest = torch.finfo(query.dtype).min  # a row without keys must not become -inf everywhere
            bias = (attention_mask[..., : key.shape[2]] + bias).clamp(min=lowest)
        return forward(module, query, key, value, bias, **kwargs)
    kwargs["position_bias"] = bias
    return forward(module, query, key, value, attention_mask, **kwargs)


def stock(module: nn.Module, backend: str) -> Callable:
    """The function that the module's own file would call for a backend; Llama's, where that file calls none."""
    home = sys.modules[type(module).__module__]
    eager = getattr(home, "eager_attention_forward", modeling_llama.eager_attention_forward)
    return ALL_ATTENTION_FUNCTIONS.get_interface(backend, eager)


def reroute(module: nn.Module, *args: Any, declaration: AttentionDeclaration, names: tuple[str, ...], **kwargs: Any):
    """The forward of an attention module whose own does not call transformers' interface: this one does.

    A causal module's mask (B, 1, Q, K) tells which keys a query sees, and with them its position: nobody else does.
    """
    call = given(names, args, kwargs)
    query, key, value = declaration.project(module, call)
    cache, mask, positions = call.get(declaration.cache), declaration.mask(module, call), None
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    if cache is not None:
        key, value = cache.update(key, value, module.layer_idx)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask, torch.finfo(query.dtype).min)
    if declaration.causal(module):
        if mask is None:  # Megatron-BERT and RoFormer before transformers 5.23 look both ways
            raise PosSwapError(f"{type(module).__name__} is a decoder's and was given no mask; it is not causal here")
        positions = ((mask == 0).sum(-1)[:, 0] - 1).clamp(min=0)
    own = None if declaration.bias is None else declaration.bias(module, query, call)
    if own is not None:
        mask = own if mask is None else (mask + own).clamp(min=torch.finfo(query.dtype).min)
    attention = ALL_ATTENTION_FUNCTIONS.get_interface(module.config._attn_implementation, stock(module, "eager"))
    output, weights = attention(
        module,
        query,
        key,
        value,
        mask,
        scaling=declaration.scaling(module) if declaration.scaling else query.shape[-1] ** -0.5,
        dropout=declaration.dropout(module) if module.training else 0.0,
        position_ids=positions,
        **{PLACES: call[PLACES]},
    )
    return declaration.returns(module, declaration.finish(module, output.flatten(2), call), weights)


# for families that compute with the mask before attention sees it: always a tensor (B, 1, Q, K), of numbers to add
DENSE = "dense_"
NAMES = {f"{PREFIX}{kind}{backend}": backend for kind in ("", DENSE) for backend in BACKENDS}
for _name, _backend in NAMES.items():
    AttentionInterface.register(_name, partial(attend, backend=_backend))
    _mask = "eager" if DENSE in _name else _backend
    AttentionMaskInterface.register(_name, ALL_MASK_ATTENTION_FUNCTIONS[_mask])


def check_backend(implementation: Any, scheme: str, modules: Iterable[nn.Module]) -> str:
    """The backend under an implementation's name. Raises PosSwapError for one that cannot carry a scheme in these
    attention modules.
    """
    backend = NAMES.get(implementation, implementation) if isinstance(implementation, str) else implementation
    if backend not in BACKENDS:
        raise PosSwapError(
            f"attn_implementation={implementation!r} cannot carry {scheme}; choose one of: {', '.join(BACKENDS)}"
        )
    if backend == "eager" and any(getattr(module, "reorder_and_upcast_attn", False) for module in modules):
        raise PosSwapError(
            f"reorder_and_upcast_attn=True: on eager this model computes its attention by itself, without {scheme}; "
            "set it to False in the config, or choose sdpa"
        )
    return backend


def set_implementation(
    model: nn.Module, attn_implementation: Any, *, scheme: str, rerouted: bool, **kwargs: Any
) -> None:
    """A patched model's `set_attn_implementation`: the scheme moves to the new backend, or the call is refused."""
    if rerouted:  # transformers takes such a model for one that cannot choose
        backend = check_backend(attn_implementation, scheme, model.modules())
        if backend == "flex_attention":  # torch's crashes on a CPU with a mask of numbers, which is all there is here
            raise PosSwapError(
                f"attn_implementation={attn_implementation!r}: {type(model).__name__} computes a mask of numbers for "
                "all keys, which FlexAttention does not carry; choose one of: eager, sdpa"
            )
        model.config._attn_implementation_internal = PREFIX + DENSE + backend
        return
    if isinstance(attn_implementation, dict):
        names = {
            key: PREFIX + check_backend(value, scheme, model.modules()) for key, value in attn_implementation.items()
        }
    else:
        names = PREFIX + check_backend(attn_implementation, scheme, model.modules())
    type(model).set_attn_implementation(model, names, **kwargs)


@dataclass
class Route:
    """An edit: attention goes through this package, on the backend that the model has then; swapped again, past it.

    A backend chosen meanwhile stays chosen, but on a model that has no choice: it gets its `own` back.
    """

    modules: list[nn.Module] = field(default_factory=list)
    where: str = ""
    own: str | None = None

    def swap(self) -> None:
        for config in {id(m.config): m.config for m in self.modules}.values():
            now = config._attn_implementation
            config._attn_implementation_internal = self.own or NAMES.get(now, f"{PREFIX}{now}")
            self.own = self.own and now

    def __str__(self) -> str:
        return f"{self.where}: attention goes through {__name__}"
