"""What is asked of a model before it is measured: its kind, its lengths, its name, and that it fits the data."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..anatomy import find_rotary, find_table, kind, text_config
from ..attention import ATTRIBUTE
from ..errors import PosSwapError
from ..patching import record_of
from ..planning.attention import VARYING
from ..planning.rotary import unscaled
from ..record import published
from ..scheme import name_of, scheme_of

CAUSAL, MASKED, ENCODER, IMAGE = "causal", "masked", "encoder", "image"


def kind_of(model: nn.Module) -> str:
    """`causal` or `masked` (it predicts tokens), `encoder` (it predicts none), `image`: asked, or measured.

    Raises PosSwapError for a model that is none of them.
    """
    name = getattr(model, "main_input_name", None)
    if name == "pixel_values":
        return IMAGE
    if name != "input_ids" or model.config.is_encoder_decoder:
        raise PosSwapError(f"model={kind(model)} reads neither one text nor one image; it cannot be measured here")
    if model.get_output_embeddings() is None:
        return ENCODER
    return CAUSAL if is_causal(model) else MASKED


@torch.no_grad()
def is_causal(model: nn.Module) -> bool:
    """Whether the logits at the first position stay when every later token changes (in eval mode)."""
    embedding = model.get_input_embeddings().weight
    first = torch.arange(1, 9, device=embedding.device)[None] % len(embedding)
    second = torch.cat([first[:, :1], (first[:, 1:] + len(embedding) // 2) % len(embedding)], dim=1)
    with evaluating(model):
        a, b = (model(input_ids=ids).logits[:, 0].float() for ids in (first, second))
    change, rounding = (a - b).abs().max(), 16 * torch.finfo(model.dtype).eps * a.abs().max()
    return not bool(change > rounding)  # nan is not this check's business


def depends_on_length(model: nn.Module) -> bool:
    """Whether a causal model says something else of a text's beginning when the text goes on: dynamic NTK, LongRoPE."""
    rotary = find_rotary(model)
    if rotary is None:
        return False
    types = {rotary.parameters(rotary.config, one).get("rope_type") for one in rotary.layer_types or (None,)}
    return bool(types & VARYING)


def accepted_length(model: nn.Module) -> int | None:
    """The longest sequence, in tokens, that a model takes; None where nothing limits it.

    A table of positions is a limit, a rotation and ALiBi are not; a model that keeps its positions in a way not
    known here is held to the length that its config states.
    """
    if find_table(model) is not None:
        return table_limit(model)
    if find_rotary(model) is not None or getattr(text_config(model), "alibi", False):
        return None
    return _stated_length(model)


def table_limit(model: nn.Module) -> int | None:
    """Positions of a model's table; None where it has none, or where a swap inside attention has silenced it."""
    table, record = find_table(model), record_of(model)
    inside = any(ATTRIBUTE in vars(module) for module in model.modules())
    if table is None or (inside and not scheme_of(record).stacks):
        return None
    return table.length


def trained_length(base: nn.Module) -> int:
    """The length a model was trained at, in tokens, any context scaling in its config set aside.

    Raises PosSwapError where the config does not say.
    """
    rotary, length = find_rotary(base), accepted_length(base) or _stated_length(base)
    if rotary is not None:
        layer_types = rotary.layer_types or (None,)
        length = min(unscaled(rotary.parameters(rotary.config, one), rotary.config)[1] for one in layer_types)
    if length is None:
        raise PosSwapError(f"original_length is needed: the config of {kind(base)} does not state a trained length")
    return length


def scheme_name(model: nn.Module) -> str:
    """The scheme in the model's record, such as `yarn(factor=4)`; `model` where it was not patched."""
    record = record_of(model)
    return "model" if record is None else name_of(record).removesuffix("()")


def describe_model(model: nn.Module) -> dict[str, Any]:
    """What a reader needs to load the same model, and to know that it is the same."""
    record = record_of(model)
    return {
        "class": kind(model),
        "source": published(model.config.name_or_path),
        "scheme": None if record is None else name_of(record),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": model.config._attn_implementation,
        "sample": sample_of(model),
    }


def sample_of(model: nn.Module) -> str:
    """16 hex digits of a sha256 over the config and 64 numbers of every tensor: another model has others."""
    config = {key: value for key, value in model.config.to_dict().items() if key != "_name_or_path"}
    digest = hashlib.sha256(repr(sorted(config.items(), key=str)).encode())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        flat = tensor.detach().flatten()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(flat[:: max(1, len(flat) // 64)].cpu().double().numpy().tobytes())
    return digest.hexdigest()[:16]


def require_language_model(model: nn.Module, role: str) -> None:
    """Raise PosSwapError for a model without tokens on both sides; that it is causal is measured later."""
    if (
        getattr(model, "main_input_name", None) != "input_ids"
        or model.config.is_encoder_decoder
        or model.get_output_embeddings() is None
    ):
        raise PosSwapError(f"{role}={kind(model)} is not a causal language model; perplexity is not defined for it")


def check_fits(
    model: nn.Module, documents: Sequence[Tensor], lengths: Iterable[int], bos_token_id: int | None, role: str
) -> None:
    """Raise PosSwapError unless the model can be fed these documents at these lengths."""
    rows = model.get_input_embeddings().weight.shape[0]
    highest = max([int(document.max()) for document in documents if len(document)] + [bos_token_id or 0])
    if highest >= rows:
        raise PosSwapError(
            f"{role}={kind(model)}: token id {highest} is outside its vocabulary of {rows}; "
            "the documents were made with another model's tokenizer"
        )
    longest, limit = max(lengths), accepted_length(model)
    if limit is not None and longest > limit:
        raise PosSwapError(
            f"{role}={kind(model)}: length {longest} is longer than its {limit} positions; "
            f"the greatest length is {limit}"
        )


def takes(model: nn.Module, argument: str) -> bool:
    """Whether the model's forward has this argument."""
    return argument in inspect.signature(model.forward).parameters


@contextmanager
def evaluating(model: nn.Module, device: str | torch.device | None = None) -> Iterator[None]:
    """Evaluation mode on a device; afterwards the mode and the device that were before."""
    home, training = next(model.parameters()).device, model.training
    try:
        model.eval()
        if device is not None:
            model.to(device)
        yield
    finally:
        model.train(training)
        if device is not None:
            model.to(home)


def _stated_length(model: nn.Module) -> int | None:
    length = getattr(text_config(model), "max_position_embeddings", None)
    return length if isinstance(length, int) and length > 0 else None  # XLNet's is -1
