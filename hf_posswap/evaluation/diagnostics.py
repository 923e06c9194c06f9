"""Position diagnostics by length: where attention goes, what a common shift of all positions changes.

Softmax shares a weight of 1 among all the keys that a query sees: one whose score stays what it is gets less with
every key that joins (logn's paper, section 5.3). The score that is followed here is that of the best of the nearest
keys, which does not depend on how many there are behind them.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..anatomy import examine, kind
from ..errors import PosSwapError
from ..planning.attention import find_attention
from ..planning.plan import Plan
from ..probing import probe
from ..runs import versions
from ..scheme import make_scheme
from .perplexity import fingerprint
from .subjects import accepted_length, check_fits, evaluating, sample_of
from .work import Work

NEIGHBOURS = 16  # a length n stands for the queries that see n - n / NEIGHBOURS to n keys


def diagnose(
    model: nn.Module, texts: Sequence[Tensor], lengths: Iterable[int], *, name: str, work: Work | None = None
) -> dict[str, Any]:
    """`{"name", "stage", "seconds", "points", "faults"}`: `attention` and `shift` at each length; `probe`'s faults.

    texts: integer tensors (n,), n at least the greatest length; a model with a table is measured up to its end.
    """
    limit, started = accepted_length(model), time.perf_counter()
    lengths = [n for n in sorted(set(lengths)) if limit is None or n <= limit]
    check_fits(model, texts, lengths, None, name)
    key = {"measure": "diagnostics", "lengths": lengths, "model": sample_of(model)}
    key |= {"texts": fingerprint(texts)["sha256"], "versions": versions()}

    def compute(text: Tensor) -> list[Any]:
        return [attention(model, text[None], lengths), [shift(model, text, n) for n in lengths]]

    found = (work or Work()).map(key, texts, compute)
    points = []
    for i, length in enumerate(lengths):
        rows = [by_text[0][i] for by_text in found]
        point = {what: sum(row[what] for row in rows) / len(rows) for what in ("entropy", "weight")}
        point["distances"] = [sum(layer) / len(rows) for layer in zip(*(row["distances"] for row in rows), strict=True)]
        point["distance"] = sum(point["distances"]) / len(point["distances"])
        shifts = [by_text[1][i] for by_text in found]
        point["shift"] = None if None in shifts else max(shifts)
        points.append({"length": length} | point)
    seconds = round(time.perf_counter() - started, 3)
    return {"name": name, "stage": None, "seconds": seconds, "points": points, "faults": list(probe(model).faults)}


def attention(model: nn.Module, ids: Tensor, lengths: Iterable[int]) -> list[dict[str, Any]]:
    """For each length n, of the queries that see about n keys: means over layers, heads and texts.

    Args:
        model: a causal model whose attention can be run eagerly; left as it was.
        ids: texts (B, S); S at least the greatest length.
        lengths: n, in tokens.

    Returns `{"length", "entropy", "weight", "distances"}` for each: entropy of attention in nats; the weight, from 0 to
    1, of the best of the nearest keys, as many as the least length; and, layer by layer, how many tokens away attention
    looks on average.

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
    found: list[Tensor] = []  # (lengths, 3) of each layer and text

    def reduce(module: nn.Module, _: Any, output: tuple) -> None:
        weights = output[1][0].float()  # (H, S, S)
        found.append(torch.stack([_measured(weights, queries, lengths[0]) for queries in rows]))

    with _eager(model), _hooked(modules, reduce), torch.no_grad():
        for row in ids:  # one text at a time: the weights of one layer are H x S x S numbers
            model(input_ids=row[None], use_cache=False)
    by_layer = torch.stack(found).unflatten(0, (len(ids), len(modules))).mean(0)  # (layers, lengths, 3)
    entropy, weight, _ = by_layer.mean(0).unbind(-1)
    return [
        {"length": n, "entropy": float(entropy[i]), "weight": float(weight[i]), "distances": by_layer[:, i, 2].tolist()}
        for i, n in enumerate(lengths)
    ]


@torch.no_grad()
def shift(model: nn.Module, ids: Tensor, length: int) -> float | None:
    """How the last logits change, over their root mean square, when all positions of the first `length` tokens of
    ids (n,) are moved by a quarter of it. None where the model takes no positions, or has none so far on.
    """
    limit, step = accepted_length(model), max(1, length // 4)
    if "position_ids" not in inspect.signature(model.forward).parameters or (limit or length + step) < length + step:
        return None
    ids = ids[None, :length].to(model.device)
    straight = torch.arange(length, device=ids.device)[None]
    with evaluating(model):
        a, b = (
            model(input_ids=ids, position_ids=p, use_cache=False).logits[0, -1] for p in (straight, straight + step)
        )
    return float((a - b).double().abs().max() / a.double().square().mean().sqrt())


def _measured(weights: Tensor, queries: range, nearest: int) -> Tensor:
    """(entropy, weight of the best of the `nearest` keys, distance), (3,): means over heads and queries of weights
    (H, S, S)."""
    chosen = weights[:, queries]
    entropy = torch.special.entr(chosen).sum(-1)
    best = torch.stack([weights[:, q, q + 1 - nearest : q + 1].amax(-1) for q in queries])
    at = torch.arange(weights.shape[-1], device=weights.device)
    away = (at[queries.start : queries.stop, None] - at).clamp(min=0).to(chosen.dtype)
    return torch.stack([entropy.mean(), best.mean(), (chosen * away).sum(-1).mean()])


@contextmanager
def _eager(model: nn.Module) -> Iterator[None]:
    """Eager attention, which returns its weights; and no dropout."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with evaluating(model):
            yield
    finally:
        model.set_attn_implementation(before.removeprefix("posswap_"))


@contextmanager
def _hooked(modules: Iterable[nn.Module], hook: Any) -> Iterator[None]:
    handles = [module.register_forward_hook(hook) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
