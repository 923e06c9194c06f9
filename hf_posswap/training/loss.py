"""The causal loss without its logits: S x V of them are what runs out of memory first at long lengths.

Letters: B batch, S sequence, E width of the hidden states, V vocabulary, T target tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import CausalLMOutput

from .data import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOGITS_AT_ONCE = 2**26  # 256 MiB in float32


def chunk_loss(model: PreTrainedModel, chunk: int | None = None) -> bool:
    """Have `model(input_ids, labels)` return its loss alone, made from a piece of the logits at a time, if it can.

    chunk: target tokens per piece; as many as keep to LOGITS_AT_ONCE where not given. Whether it can is asked of the
    model itself: its logits must be bit for bit what its head makes of its last hidden states, and its loss their
    mean cross-entropy. A model that does more (a cap or a scale on the logits, a loss on its router) is left alone.
    Returns whether the model now does so; `del model.forward` gives it its own forward back.
    """
    if not _is_plain(model):
        return False
    chunk = chunk or max(1, LOGITS_AT_ONCE // model.get_output_embeddings().weight.shape[0])
    model.forward = MethodType(_forward(chunk), model)
    return True


def _forward(chunk: int) -> Callable[..., CausalLMOutput]:
    """A method that takes input_ids and labels, both (B, S), and what else the model below its head takes."""

    def forward(self: PreTrainedModel, input_ids: Tensor, labels: Tensor, **inputs: Any) -> CausalLMOutput:
        hidden = self.base_model(input_ids=input_ids, **inputs).last_hidden_state  # (B, S, E)
        targets = labels[:, 1:].flatten()
        kept = targets != IGNORED
        hidden = hidden[:, :-1].flatten(0, 1)[kept]  # (T, E)
        return CausalLMOutput(loss=mean_cross_entropy(self.get_output_embeddings(), hidden, targets[kept], chunk))

    return forward


def mean_cross_entropy(head: nn.Module, hidden: Tensor, targets: Tensor, chunk: int) -> Tensor:
    """Mean cross-entropy in nats of `head(hidden)`: hidden (T, E), targets (T,); `chunk` x V logits live at a time.

    Each piece is computed again in the backward. One piece is computed once: there is nothing to save.
    """
    pieces = list(zip(hidden.split(chunk), targets.split(chunk), strict=True))
    if len(pieces) == 1:
        sums = [_summed_cross_entropy(head, *pieces[0])]
    else:
        sums = [checkpoint(_summed_cross_entropy, head, *piece, use_reentrant=False) for piece in pieces]
    return torch.stack(sums).sum() / max(1, len(targets))


def _summed_cross_entropy(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(head(hidden).float(), targets, reduction="sum")


@torch.no_grad()
def _is_plain(model: PreTrainedModel) -> bool:
    """Whether logits are the head of the last hidden states and the loss their mean cross-entropy, measured."""
    head = model.get_output_embeddings()
    if head is None or model.base_model is model:
        return False
    training = model.training
    model.eval()
    try:
        ids = torch.arange(16, device=head.weight.device)[None] % head.weight.shape[0]
        own = model(input_ids=ids, labels=ids, use_cache=False)
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        ours = F.cross_entropy(own.logits[0, :-1].float(), ids[0, 1:])
        return torch.equal(head(hidden), own.logits) and math.isclose(ours, own.loss, rel_tol=1e-6)
    finally:
        model.train(training)
