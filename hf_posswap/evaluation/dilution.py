"""Attention dilution: how the weight that a key gets falls as the keys become many (logn's paper, section 5.3).

Softmax shares a weight of 1 among all the keys that a query sees: one whose score stays what it is gets less with
every key that joins. The score that is followed here is that of the best of the nearest keys, which does not depend
on how many there are behind them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..anatomy import examine, kind
from ..errors import PosSwapError
from ..planning.attention import find_attention
from ..planning.plan import Plan
from ..scheme import make_scheme

NEIGHBOURS = 16  # a length n stands for the queries that see n - n / NEIGHBOURS to n keys


def dilution(model: nn.Module, ids: Tensor, lengths: Iterable[int]) -> list[dict[str, float]]:
    """For each length n, of the queries that see about n keys: the mean entropy of their attention, and the mean
    weight of the best of their nearest keys, as many as the least length; over layers, heads and texts.

    Args:
        model: a causal model whose attention can be run eagerly; left as it was.
        ids: texts (B, S); S at least the greatest length.
        lengths: n, in tokens.

    Returns `{"length", "entropy", "weight"}` for each: entropy in nats, weight between 0 and 1.

    Raises PosSwapError where a model is of another kind, or the texts are shorter.
    """
    lengths = sorted(set(lengths))
    if ids.dim() != 2 or not lengths or lengths[0] < 2 or ids.shape[1] < lengths[-1]:
        raise PosSwapError(f"ids={tuple(ids.shape)}, lengths={lengths}: texts of (B, S) tokens with 2 <= length <= S")
    scheme = make_scheme("logn", {})
    site = find_attention(Plan.of(examine(model), scheme), scheme)
    modules = [module for stack in site.stacks for module in stack.attentions.values()]
    if not site.causal:
        raise PosSwapError(f"model={kind(model)} sees what follows; how many keys a query sees is not its place")
    ids = ids[:, : lengths[-1]].to(model.device)
    rows = [range(max(lengths[0], n - n // NEIGHBOURS) - 1, n) for n in lengths]
    found: list[Tensor] = []  # (lengths, 2) of each layer and text

    def reduce(module: nn.Module, _: Any, output: tuple) -> None:
        weights = output[1][0].float()  # (H, S, S)
        found.append(torch.stack([_measured(weights, queries, lengths[0]) for queries in rows]))

    with _eager(model), _hooked(modules, reduce), torch.no_grad():
        for row in ids:  # one text at a time: the weights of one layer are H x S x S numbers
            model(input_ids=row[None], use_cache=False)
    means = torch.stack(found).mean(0).tolist()
    return [{"length": n, "entropy": e, "weight": w} for n, (e, w) in zip(lengths, means, strict=True)]


def _measured(weights: Tensor, queries: range, nearest: int) -> Tensor:
    """(entropy, weight of the best of the `nearest` keys), (2,): means over heads and queries of weights (H, S, S)."""
    entropy = torch.special.entr(weights[:, queries]).sum(-1)
    best = torch.stack([weights[:, q, q + 1 - nearest : q + 1].amax(-1) for q in queries])
    return torch.stack([entropy.mean(), best.mean()])


@contextmanager
def _eager(model: nn.Module) -> Iterator[None]:
    """Eager attention, which returns its weights; and no dropout."""
    before, training = model.config._attn_implementation, model.training
    model.set_attn_implementation("eager")
    model.eval()
    try:
        yield
    finally:
        model.train(training)
        model.set_attn_implementation(before.removeprefix("posswap_"))


@contextmanager
def _hooked(modules: Iterable[nn.Module], hook: Any) -> Iterator[None]:
    handles = [module.register_forward_hook(hook) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
