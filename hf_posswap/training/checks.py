"""What is asked of model, tokenizer and rows before the first step: each a mistake that would train in silence."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from accelerate.utils import DistributedType
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from ..anatomy import kind
from ..attention import ATTRIBUTE
from ..errors import PosSwapError
from ..evaluation.subjects import table_limit
from ..patching import record_of
from ..scheme import name_of
from .arguments import FinetuneArguments

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def find_objective(model: PreTrainedModel, asked: str | None) -> str:
    """`causal`, `masked` or `images`, by the model's class; `sentences` where that is asked of one without a head.

    PosSwapError where it has no head for it, or another.
    """
    classes = {
        "causal": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "masked": MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "images": MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    }
    fitting = [name for name, mapping in classes.items() if kind(model) in _names(mapping)]
    if model.config.is_encoder_decoder:  # BART and its kin stand in both tables
        fitting = []
    without = kind(model) in _names(MODEL_MAPPING_NAMES) and model.main_input_name == "input_ids"
    if asked == "sentences" and without and not model.config.is_encoder_decoder:
        return asked
    if not fitting:
        raise PosSwapError(
            f"model={kind(model)} has no language-model head to train; save it from AutoModelForCausalLM or "
            "AutoModelForMaskedLM (AutoModelForImageClassification for pictures)"
            + (", or train the vectors of its texts with objective='sentences'" if without else "")
        )
    if asked is None:
        return fitting[0]
    if asked not in fitting:
        raise PosSwapError(f"objective={asked!r} does not fit {kind(model)}; choose {fitting[0]!r}")
    return asked


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, objective: str) -> None:
    """Raise PosSwapError unless every token has an embedding, and masking a mask token."""
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise PosSwapError(
            f"tokenizer: its {len(tokenizer)} tokens do not fit the {rows} rows of the model's embedding; "
            f"use the model's own tokenizer, or model.resize_token_embeddings({len(tokenizer)})"
        )
    if objective == "masked" and tokenizer.mask_token_id is None:
        raise PosSwapError("tokenizer: mask_token=None, and the masked objective needs one; set tokenizer.mask_token")


def check_length(model: PreTrainedModel, arguments: FinetuneArguments) -> None:
    """Raise PosSwapError for positions beyond the model's table; what turns or biases attention has no end."""
    name = "block_size" if arguments.pose_length is None else "pose_length"
    limit, length = table_limit(model), getattr(arguments, name)
    if limit is not None and length > limit:
        raise PosSwapError(
            f"{name}={length} is longer than the {limit} positions of {kind(model)}; the greatest is "
            f"{limit}, or make room with --scheme learned --max_positions {length}"
        )


def check_parallelism(
    accelerator: Accelerator, model: PreTrainedModel, objective: str, arguments: FinetuneArguments
) -> None:
    """Raise PosSwapError for a way to spread the work that this model, its scheme or this loop does not survive."""
    kind_of = accelerator.distributed_type
    sharded = kind_of in (DistributedType.FSDP, DistributedType.DEEPSPEED)
    if arguments.train == "lora" and sharded:
        raise PosSwapError(
            f"train='lora' merges whole weights, and {kind_of.value} holds a part of each in a process; use DDP"
        )
    if kind_of == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise PosSwapError("fsdp_version=1 is not carried; use fsdp_version: 2, as in scripts/configs/fsdp2.yaml")
    asked = {"ACCELERATE_USE_FSDP": DistributedType.FSDP, "ACCELERATE_USE_DEEPSPEED": DistributedType.DEEPSPEED}
    for variable, meant in asked.items():
        if os.environ.get(variable, "false").lower() == "true" and kind_of != meant:
            raise PosSwapError(
                f"{meant.value} was asked for, and accelerate leaves it out here ({kind_of.value} on "
                f"{accelerator.device.type}): every process would hold the whole model; launch with --multi_gpu"
            )
    parallelism = accelerator.parallelism_config
    if parallelism is None:
        return
    if parallelism.cp_size > 1:
        why = "this loop gives every process whole rows"
        if any(ATTRIBUTE in vars(module) for module in model.modules()):
            why = f"a part of a row does not know its place, which {name_of(record_of(model))} needs inside attention"
        elif objective != "causal":
            why = f"its hooks make every attention causal, and {kind(model)} looks both ways"
        elif arguments.packing != "concat":
            why = f"its hooks drop the mask that keeps documents apart, and packing={arguments.packing!r} needs it"
        raise PosSwapError(f"cp_size={parallelism.cp_size}: {why}; use cp_size=1")
    for name in ("tp_size", "sp_size"):
        size = getattr(parallelism, name, 1)
        if size > 1:
            raise PosSwapError(f"{name}={size}: this loop gives every process whole rows and layers; use {name}=1")


@torch.no_grad()
def check_documents_apart(model: PreTrainedModel) -> None:
    """Raise PosSwapError unless two documents in one row give the logits they give alone; asked of the model itself.

    Positions that begin anew are not enough, attention must end at the edge too. Models whose masks do not come
    from transformers' masking functions, or that take no position_ids, fail here.
    """
    refusal = PosSwapError(f"packing: {kind(model)} does not keep the documents of a row apart; use packing='concat'")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise refusal
    ids = _some_tokens(model)
    with _evaluated(model):
        alone = [model(input_ids=part[None], use_cache=False).logits for part in ids.split([10, 14])]
        positions = torch.cat([torch.arange(10), torch.arange(14)]).to(ids.device)
        together = model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits
    if not _same(together, torch.cat(alone, dim=1)):
        raise refusal


@torch.no_grad()
def check_positions_spread(model: PreTrainedModel, pose_length: int) -> None:
    """Raise PosSwapError unless tokens at positions with a gap see each other over the distance; asked of the model.

    It must give the logits that it gives with masked tokens in the gap, and other ones than without a gap. A scheme
    inside attention, which counts places in the row, and a model without positions fail here.
    """
    refusal = PosSwapError(
        f"pose_length={pose_length}: {kind(model)} does not take its distances from position_ids; use a scheme of its "
        "own rotary modules (yarn, say), or rows of that length"
    )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise refusal
    ids = _some_tokens(model)[None]
    everywhere, kept = torch.arange(24, device=ids.device)[None], [*range(10), *range(18, 24)]
    mask = torch.zeros_like(ids)
    mask[:, kept] = 1
    with _evaluated(model):
        whole = model(input_ids=ids, attention_mask=mask, position_ids=everywhere).logits[:, kept]
        rest = {"input_ids": ids[:, kept], "attention_mask": mask[:, kept]}
        spread = model(**rest, position_ids=everywhere[:, kept]).logits
        near = model(**rest, position_ids=everywhere[:, : len(kept)]).logits
    if not _same(spread, whole) or _same(spread, near):
        raise refusal


def _some_tokens(model: PreTrainedModel) -> torch.Tensor:
    """Ids (24,)."""
    embedding = model.get_input_embeddings().weight
    return torch.arange(24, device=embedding.device) % embedding.shape[0]


@contextmanager
def _evaluated(model: PreTrainedModel) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal to half the mantissa: beyond any rounding, and a leak moves logits by far more."""
    return bool((one - other).abs().max() <= torch.finfo(one.dtype).eps ** 0.5 * one.abs().max())


def _names(mapping: dict) -> set[str]:
    return {name for names in mapping.values() for name in ([names] if isinstance(names, str) else names)}
