"""What a swap costs before any step, measured on the run's own first rows: a broken model shows there."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import PosSwapError
from ..evaluation.subjects import trained_length
from ..patching import record_of, unpatched
from ..scheme import name_of
from .loss import chunked

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .data import Batches

TRAINED = 0.9  # of ln(vocabulary): a model whose loss is below that has learned something


def check_start(model: PreTrainedModel, batches: Batches) -> dict[str, float] | None:
    """Losses, in nats per token, of the first rows cut to the length that the model knew before its swap:
    `unpatched` and `swapped`, and `tokens`, that length. None for a model without a swap, or one that its checkpoint
    no longer tells how to undo.

    Raises PosSwapError where a model that was trained is left no better than guessing, ln(vocabulary).
    """
    if record_of(model) is None:
        return None
    training, first = model.training, batches.first()
    model.eval()
    try:
        with unpatched(model):
            length = min(trained_length(model), first["input_ids"].shape[1])
            before = _loss(model, first, length, batches.objective)
        after = _loss(model, first, length, batches.objective)
    except PosSwapError:
        return None
    finally:
        model.train(training)
    guessing = math.log(model.get_output_embeddings().weight.shape[0])
    if before < TRAINED * guessing and not after < guessing:
        raise PosSwapError(
            f"{name_of(record_of(model))}: the first rows cost {after:.2f} nats per token, and {before:.2f} before the "
            f"swap; guessing costs {guessing:.2f}. The swapped model is broken: patch the model anew, and see what "
            "hf_posswap.probe says of it"
        )
    if not math.isfinite(before + after):  # of few masked tokens none may be left in the cut rows
        return None
    return {"unpatched": round(before, 4), "swapped": round(after, 4), "tokens": length}


@torch.no_grad()
def _loss(model: PreTrainedModel, batch: dict[str, Tensor], length: int, objective: str) -> float:
    """Mean loss in nats per token of the rows of a batch, each cut to its first `length` tokens."""
    inputs = {name: batch[name][:, :length].to(model.device) for name in ("input_ids", "labels")}
    causal = objective == "causal"
    with chunked(model, causal):
        return model(**inputs, **({"use_cache": False} if causal else {})).loss.item()
