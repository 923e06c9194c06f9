"""What patching leaves inside a model: small functions without state, so that nothing has to be saved or rebuilt."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from .errors import PosSwapError

TOLD = "posswap_positions"  # the keyword by which a stack tells its first layer where tokens stand


def move_without_cast(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """An `nn.Module._apply` that moves tensors between devices and leaves their dtype alone.

    `.to(bfloat16)`, `.half()` and mixed-precision engines go through `_apply`; a frequency rounded to bf16 is off
    by a whole turn after a few hundred positions.
    """

    return type(module)._apply(module, keeping_dtype(fn), recurse)


def keeping_dtype(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """What moves a tensor as `fn` does and does not cast it."""

    def keep(tensor: Tensor) -> Tensor:
        moved = fn(tensor)
        return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

    return keep


def zero_frequencies(config: Any, *_: Any, size: int = 0, **__: Any) -> tuple[Tensor, float]:
    """A silenced rotary module's `compute_default_rope_parameters`: no dimension turns, R / 2 = `size` zeros."""
    return torch.zeros(size), 1.0


def given(names: tuple[str, ...], args: tuple, kwargs: dict) -> dict[str, Any]:
    """The arguments of a call by name."""
    return dict(zip(names, args, strict=False)) | kwargs


def with_argument(names: tuple[str, ...], args: tuple, kwargs: dict, name: str, value: Any) -> tuple[tuple, dict]:
    """The same call with one argument exchanged, in the place where the caller put it."""
    index = names.index(name)
    if index < len(args):
        return (*args[:index], value, *args[index + 1 :]), kwargs
    return args, kwargs | {name: value}


def exchange_rotation(
    module: nn.Module,
    args: tuple,
    kwargs: dict,
    *,
    names: tuple[str, ...],
    rotary: nn.Module | None,
    layer_type: str | None,
) -> tuple[tuple, dict]:
    """Hand a layer the rotation of another rotary module than its stack's; None: no rotation, cos 1 and sin 0."""
    call = given(names, args, kwargs)
    handed = call.get("position_embeddings")
    if rotary is not None:
        positions = call.get("position_ids")
        if positions is None:
            raise PosSwapError(f"no position_ids reached {type(module).__name__}; its own rotation cannot be computed")
        handed = rotary(call["hidden_states"], positions, *([] if layer_type is None else [layer_type]))
    elif isinstance(handed, Tensor):  # complex numbers cos + i sin
        handed = torch.ones_like(handed)
    else:
        handed = torch.ones_like(handed[0]), torch.zeros_like(handed[1])
    return with_argument(names, args, kwargs, "position_embeddings", handed)


def add_positions(
    module: nn.Module,
    args: tuple,
    kwargs: dict,
    *,
    names: tuple[str, ...],
    vectors: Callable[[Tensor], Tensor],
    streams: int = 1,
) -> tuple[tuple, dict]:
    """Add position vectors to the hidden states that enter a layer: (B, S, E), or with several streams of width E
    (B, S, `streams`, E) or (B, S, `streams` * E).
    """
    call = given(names, args, kwargs)
    told, hidden_states = call.get(TOLD), call["hidden_states"]
    position_ids = call.get("position_ids") if told is None else told
    if position_ids is None or position_ids.dim() != 2:
        raise PosSwapError(
            f"position_ids={position_ids if position_ids is None else tuple(position_ids.shape)} reached the first "
            "layer where (batch, sequence) is needed; the installed position vectors cannot be added"
        )
    added = vectors(position_ids).to(hidden_states.dtype)
    if streams > 1:
        added = added[:, :, None].expand(-1, -1, streams, -1)
        added = added if hidden_states.dim() == 4 else added.flatten(2)
    moved = hidden_states + added
    return with_argument(names, args, kwargs, "hidden_states", moved)


def embed_with_positions(
    module: nn.Module, args: tuple, kwargs: dict, *, names: tuple[str, ...], vectors: Callable[[Tensor], Tensor]
) -> tuple[tuple, dict]:
    """Hand a stack whose layers know no positions the embeddings of its tokens with position vectors added, (B, S, E).

    The real tokens of each row are numbered from 0 by the padding mask, where there is one, unless the caller does it.
    """
    call = given(names, args, kwargs)
    inputs, mask, positions = (call.get(name) for name in ("inputs_embeds", "attention_mask", "position_ids"))
    inputs = module.get_input_embeddings()(call["input_ids"]) if inputs is None else inputs
    length = inputs.shape[1]
    if positions is not None:
        positions = positions.expand(inputs.shape[:2])
    elif isinstance(mask, Tensor) and mask.dim() == 2:
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, mask.shape[1] - length :]
    else:
        cache = call.get("past_key_values")
        positions = torch.arange(length, device=inputs.device)[None] + (0 if cache is None else cache.get_seq_length())
    moved = inputs + vectors(positions).to(inputs.dtype)
    args, kwargs = with_argument(names, args, kwargs, "input_ids", None)
    return with_argument(names, args, kwargs, "inputs_embeds", moved)


def positions_from_mask(module: nn.Module, args: tuple, kwargs: dict, *, names: tuple[str, ...]) -> tuple[tuple, dict]:
    """Number the real tokens of each row from 0 where the caller gave a padding mask (B, S) and no position_ids.

    A rotary model does not notice where its positions start, so callers leave them out; an absolute one does.
    """
    call = given(names, args, kwargs)
    mask = call.get("attention_mask")
    if call.get("position_ids") is not None or not isinstance(mask, Tensor) or mask.dim() != 2:
        return args, kwargs
    inputs = call["inputs_embeds"] if call.get("input_ids") is None else call["input_ids"]
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, mask.shape[1] - inputs.shape[1] :]
    return with_argument(names, args, kwargs, "position_ids", positions)


def tell_positions(module: nn.Module, args: tuple, kwargs: dict, *, names: tuple[str, ...]) -> tuple[tuple, dict]:
    """Hand a stack its positions once more, by a keyword that it passes on to its layers: its own it keeps."""
    call = given(names, args, kwargs)
    positions = call.get("position_ids")
    if positions is None:
        inputs = call["inputs_embeds"] if call.get("input_ids") is None else call["input_ids"]
        cache = call.get("past_key_values")
        past = 0 if cache is None else cache.get_seq_length()
        positions = torch.arange(inputs.shape[1], device=inputs.device)[None] + past
    return args, kwargs | {TOLD: positions}


def refuse_longer(
    module: nn.Module, args: tuple, kwargs: dict, *, names: tuple[str, ...], limit: int
) -> tuple[tuple, dict]:
    """Raise PosSwapError for a sequence that does not fit the table; read from shapes, without a device sync."""
    call = given(names, args, kwargs)
    inputs = call.get("inputs_embeds") if call.get("input_ids") is None else call["input_ids"]
    if inputs is not None:
        cache = call.get("past_key_values")
        past = call.get("past_key_values_length", 0) if cache is None else cache.get_seq_length()
        length = inputs.shape[1] + past
        if isinstance(length, int) and length > limit:
            raise PosSwapError(
                f"input_ids: a sequence of {length} tokens is longer than this model's {limit} positions; "
                f"patch_model(model, 'learned', max_positions={length}) makes room"
            )
    return args, kwargs


def refuse_boxes(
    module: nn.Module, args: tuple, kwargs: dict, *, names: tuple[str, ...], largest: float
) -> tuple[tuple, dict]:
    """Raise PosSwapError for boxes (B, S, 4), or corners (B, S, 8), off the page, or turned inside out.

    Their values are read, which waits for an accelerator; a compiler, which has no values, is not stopped.
    """
    boxes = given(names, args, kwargs).get("bbox")
    if not isinstance(boxes, Tensor) or boxes.is_meta or torch.compiler.is_compiling():
        return args, kwargs
    ordered = torch.ones_like(boxes[..., 0], dtype=torch.bool)
    if boxes.shape[-1] == 4:
        ordered = (boxes[..., 0] <= boxes[..., 2]) & (boxes[..., 1] <= boxes[..., 3])
    inside = ((boxes >= 0) & (boxes <= largest)).all(-1)
    wrong = (~(inside & ordered)).nonzero()
    if len(wrong):
        at = tuple(wrong[0].tolist())
        reason = "has x1 < x0 or y1 < y0" if inside[at] else f"is not on the page, which is 0 to {largest:g} both ways"
        box = ", ".join(f"{value:g}" for value in boxes[at].tolist())
        raise PosSwapError(f"bbox[{', '.join(map(str, at))}]=({box}) {reason}; give (x0, y0, x1, y1)")
    return args, kwargs


def number_tokens(module: nn.Module, args: tuple, kwargs: dict, *, names: tuple[str, ...]) -> tuple[tuple, dict]:
    """Number the tokens of each row from 0 where the caller gave no position_ids: a buffer of them would end."""
    call = given(names, args, kwargs)
    if call.get("position_ids") is not None:
        return args, kwargs
    inputs = call["inputs_embeds"] if call.get("input_ids") is None else call["input_ids"]
    positions = torch.arange(inputs.shape[1], device=inputs.device).expand(inputs.shape[:2])
    return with_argument(names, args, kwargs, "position_ids", positions)


class KeptRows(nn.Module):
    """Vectors (V, E) of image tokens that read the first rows of a text's table, when that is silenced; float32."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.rows = nn.Parameter(rows.detach().float().clone())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        return super()._apply(keeping_dtype(fn), recurse)


def add_rows(module: nn.Module, args: tuple, output: Tensor, *, kept: KeptRows) -> Tensor:
    """After the module that makes the image tokens (B, V, E)."""
    return output + kept.rows.to(output.dtype)


def unturned(module: nn.Module, args: tuple, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Behind a module that computes (cos, sin): no rotation. Raises PosSwapError where it computes something else."""
    if not isinstance(output, tuple) or len(output) != 2 or not all(isinstance(one, Tensor) for one in output):
        raise PosSwapError(f"{type(module).__name__} gave no (cos, sin); its rotation cannot be silenced")
    return torch.ones_like(output[0]), torch.zeros_like(output[1])


def no_vectors(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """The forward of a silenced module of position vectors: zeros (1, 1, 1), for any tokens."""
    tensor = next(chain(module.parameters(), module.buffers()))
    return torch.zeros(1, 1, 1, dtype=tensor.dtype, device=tensor.device)


def without_positions(
    module: nn.Module, args: tuple, kwargs: dict, *, names: tuple[str, ...], argument: str
) -> tuple[tuple, dict]:
    """Every token asks a silenced table for its first row: all rows are zero, and no sequence is longer than it.

    Token types come from a buffer as long as the table where the caller gives none: Bros reads a slice of it.
    """
    call = given(names, args, kwargs)
    if isinstance(call.get(argument), Tensor):
        zeros = torch.zeros_like(call[argument])
    else:
        inputs = call["inputs_embeds"] if call.get("input_ids") is None else call["input_ids"]
        zeros = torch.zeros(inputs.shape[:2], dtype=torch.long, device=inputs.device)
    if "token_type_ids" in module._buffers and call.get("token_type_ids") is None:
        inputs = call["inputs_embeds"] if call.get("input_ids") is None else call["input_ids"]
        types = torch.zeros(inputs.shape[:2], dtype=torch.long, device=inputs.device)
        args, kwargs = with_argument(names, args, kwargs, "token_type_ids", types)
    return with_argument(names, args, kwargs, argument, zeros)
