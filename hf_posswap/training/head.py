"""What reaches a language model's head: the hidden states from which all of its logits are made."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


LogitsOf = Callable[[Tensor], Tensor]


@contextmanager
def instead_of_logits(head: nn.Module, compute: Callable[[LogitsOf, Tensor], Tensor]) -> Iterator[None]:
    """Within it `head(hidden)` returns `compute(own, hidden)`; `own` makes logits of hidden states (..., E).

    Whatever is made of the head's weights is made while it is called: they are elsewhere before and after, where
    FSDP or ZeRO-3 spread them.
    """
    own, before = head.forward, vars(head).get("forward")
    head.forward = partial(compute, own)
    try:
        yield
    finally:
        del head.forward
        if before is not None:
            head.forward = before


@contextmanager
def withheld(head: nn.Module) -> Iterator[list[Tensor]]:
    """Within it the head makes no logits; what would have reached it, (B, S, E), is put on the list."""
    reached: list[Tensor] = []

    def hand_over(own: LogitsOf, hidden: Tensor) -> Tensor:
        reached.append(hidden)
        return hidden.new_zeros(*hidden.shape[:-1], 1)

    with instead_of_logits(head, hand_over):
        yield reached


@torch.no_grad()
def is_plain(model: PreTrainedModel, causal: bool) -> bool:
    """Whether logits are what the head makes of what reaches it, and the loss their mean cross-entropy, measured."""
    head = model.get_output_embeddings()
    if head is None:
        return False
    training = model.training
    model.eval()
    try:
        ids = torch.arange(16, device=head.weight.device)[None] % head.weight.shape[0]
        options = {"use_cache": False} if causal else {}
        own = model(input_ids=ids, labels=ids, **options)
        with withheld(head) as reached:
            model(input_ids=ids, **options)
        if len(reached) != 1 or not torch.equal(head(reached[0]), own.logits):
            return False
        logits, targets = (own.logits[0, :-1], ids[0, 1:]) if causal else (own.logits[0], ids[0])
        return math.isclose(F.cross_entropy(logits.float(), targets), own.loss, rel_tol=1e-6)
    finally:
        model.train(training)
