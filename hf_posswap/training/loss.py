"""The loss without its logits: S x V of them are what runs out of memory first at long lengths.

Letters: B batch, S sequence, E width of the hidden states, V vocabulary, T target tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.utils import ModelOutput

from .distil import Distillation, Taught
from .head import LogitsOf, instead_of_logits, is_plain

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IGNORED = -100  # the label that transformers' losses leave out
LOGITS_AT_ONCE = 2**26  # 256 MiB in float32


@dataclass
class Losses(ModelOutput):
    """Means over the target tokens: the loss to minimise, and the task's cross-entropy in nats, without a gradient."""

    loss: Tensor | None = None
    task: Tensor | None = None


def chunk_loss(
    model: PreTrainedModel, chunk: int | None = None, *, causal: bool = True, distillation: Distillation | None = None
) -> bool:
    """Have `model(input_ids, labels)` return its `Losses` alone, made from a piece of the logits at a time, if it can.

    chunk: target tokens per piece; as many as keep to LOGITS_AT_ONCE where not given. causal: a token's label is
    predicted from the token before it. distillation: `model(..., taught=...)` mixes that with the task's loss.

    Whether it can is asked of the model itself: its logits must be bit for bit what its head makes of what reaches
    it, and its loss their mean cross-entropy. A model that does more (a cap or a scale on the logits, a loss on its
    router) is left alone. Returns whether the model now does so; `del model.forward` gives it its own forward back.
    """
    if not is_plain(model, causal):
        return False
    chunk = chunk or max(1, LOGITS_AT_ONCE // model.get_output_embeddings().weight.shape[0])
    model.forward = MethodType(_forward(model.forward, chunk, causal, distillation), model)
    return True


@contextmanager
def chunked(model: PreTrainedModel, causal: bool) -> Iterator[None]:
    """Within it `model(input_ids, labels)` is as `chunk_loss` makes it, if it can."""
    before = vars(model).get("forward")
    chunk_loss(model, causal=causal)
    try:
        yield
    finally:
        vars(model).pop("forward", None)
        if before is not None:
            model.forward = before


def _forward(
    own: Callable[..., Any], chunk: int, causal: bool, distillation: Distillation | None
) -> Callable[..., Losses]:
    """A method that takes input_ids and labels, both (B, S), and what else the model's own forward takes."""
    more = {"output_hidden_states": True} if distillation is not None and distillation.hidden else {}

    def forward(self: PreTrainedModel, input_ids: Tensor, labels: Tensor, taught: Taught | None = None, **inputs: Any):
        targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED) if causal else labels
        kept = targets != IGNORED  # (B, S)
        targets = targets[kept]  # (T,)
        known = torch.zeros_like(targets, dtype=torch.bool) if taught is None else taught.known(kept)

        def losses(logits_of: LogitsOf, hidden: Tensor) -> Tensor:
            """Sums over the targets, in the place of logits, (1, 1, 2): the loss, and its cross-entropy."""
            hidden = hidden[kept]  # (T, E)
            sums = _in_pieces(partial(_cross_entropy, logits_of), chunk, hidden[~known], targets[~known])
            if taught is not None:
                asked = partial(distillation.losses, logits_of)
                sums = sums + _in_pieces(asked, chunk, hidden[known], targets[known], taught.final(kept))
            return sums[None, None]

        with instead_of_logits(self.get_output_embeddings(), losses):
            output = own(input_ids=input_ids, **inputs, **more)
        loss, task = output.logits[0, 0] / max(1, len(targets))
        if more:
            loss = loss + distillation.between_layers(output.hidden_states, taught, kept) / max(1, len(targets))
        return Losses(loss=loss, task=task.detach())

    return forward


def _cross_entropy(logits_of: LogitsOf, hidden: Tensor, targets: Tensor) -> Tensor:
    """The summed cross-entropy in nats of hidden (T, E) against targets (T,), twice: (2,)."""
    return F.cross_entropy(logits_of(hidden).float(), targets, reduction="sum").expand(2)


def _in_pieces(summed: Callable[..., Tensor], chunk: int, *rows: Tensor) -> Tensor:
    """`summed(*rows)`, sums over T rows, from `chunk` rows at a time.

    Each piece is computed again in the backward. One piece is computed once: there is nothing to save.
    """
    pieces = list(zip(*(one.split(chunk) for one in rows), strict=True))
    if len(pieces) == 1:
        return summed(*pieces[0])
    return torch.stack([checkpoint(summed, *piece, use_reentrant=False) for piece in pieces]).sum(0)
