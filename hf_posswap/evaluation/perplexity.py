"""Perplexity by length, the loss by position, and perplexity on the tokens that need a long context."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..anatomy import kind
from ..errors import PosSwapError
from ..runs import versions
from .losses import window_losses
from .protocols import Protocol, Window
from .subjects import check_fits, evaluating, is_causal, require_language_model, sample_of
from .work import Work

# a key token: the long context lowers its loss by more than GAIN and leaves it less than KNOWN, in nats; both are
# LongPPL's (Fang and others, 2024, https://arxiv.org/abs/2410.23771, alpha = 2, beta = -2)
GAIN, KNOWN = 2.0, 2.0
POINTS = 16  # of a curve


def measure(
    model: nn.Module,
    documents: Sequence[Tensor],
    protocol: Protocol,
    *,
    name: str,
    stage: str | None = None,
    lengths: Iterable[int] | None = None,
    keys: Sequence[Tensor] | None = None,
    batch_size: int = 1,
    device: str | torch.device | None = None,
    work: Work | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """One line of a plot: `{"name", "stage", "seconds", "points": [{"length", "loss", "perplexity", ...}]}`.

    documents: what `protocol.choose` returned, as integer tensors (n,). lengths: those of the protocol where
    not given. stage: None, or `before` / `after` fine-tuning. keys: what `key_tokens` returned; the points then say
    the loss of those too. loss: nats per token. work: where results are kept, and shared among processes.
    """
    lengths = sorted(protocol.lengths if lengths is None else lengths)
    _require_causal(model, documents, lengths, protocol.bos_token_id, name)
    sizes = [len(document) for document in documents]
    windows = {length: protocol.windows(sizes, length) for length in lengths}
    flat = [window for length in lengths for window in windows[length]]
    started = time.perf_counter()

    def reduce(index: int, losses: Tensor) -> list[float]:
        total = losses.sum().item()
        if keys is None:
            return [total]
        window = flat[index]
        return [total, losses[keys[window.document][window.end - window.targets : window.end]].sum().item()]

    work = work or Work(progress=progress)
    what = ["sum", *([] if keys is None else [key.nonzero().flatten().tolist() for key in keys])]
    with evaluating(model, device):
        found = _losses(model, documents, flat, protocol.bos_token_id, reduce, batch_size, work, name, what)
    results, points = iter(found), []
    for length in lengths:
        some = [next(results) for _ in windows[length]]
        loss = protocol.loss([one[0] for one in some], [window.targets for window in windows[length]])
        _require_finite(loss, length, model, name)
        point = _point(length, loss, windows[length], protocol)
        if keys is not None:
            point |= _key_point(some, windows[length], keys)
        points.append(point)
    return {"name": name, "stage": stage, "seconds": round(time.perf_counter() - started, 3), "points": points}


def curve(
    model: nn.Module,
    documents: Sequence[Tensor],
    length: int,
    *,
    name: str,
    rows: int = 16,
    bos_token_id: int | None = None,
    batch_size: int = 1,
    work: Work | None = None,
) -> dict[str, Any]:
    """The loss by the number of tokens before a target, over `rows` rows of `length` tokens: the first of each
    document, then the second, and so on.

    The points are of the form that `measure` gives: `length` is the greatest number of tokens up to and with a
    target, `loss` the mean of the targets since the point before. Every row is one forward: that is the loss that
    each of its prefixes would have by itself, but for schemes that follow the length of a forward.

    Raises PosSwapError where no document has so many tokens.
    """
    _require_causal(model, documents, [length], bos_token_id, name)
    room, head = length - int(bos_token_id is not None), int(bos_token_id is not None)
    windows = [
        Window(i, begin, begin + room, room - 1 + head)
        for begin in range(0, max(map(len, documents)), room)
        for i, document in enumerate(documents)
        if begin + room <= len(document)
    ][:rows]
    if not windows:
        longest = max(map(len, documents))
        raise PosSwapError(f"length={length} of the curve needs {room} tokens and the longest document has {longest}")
    ends = sorted({max(2, round(length * k / POINTS)) for k in range(1, POINTS + 1)})

    def reduce(index: int, losses: Tensor) -> list[float]:
        return [part.sum().item() for part in losses.tensor_split([end - 1 for end in ends[:-1]])]

    started = time.perf_counter()
    what = ["by position", *ends]
    found = _losses(model, documents, windows, bos_token_id, reduce, batch_size, work, name, what)
    points = []
    for k, (before, end) in enumerate(zip([1, *ends], ends, strict=False)):
        targets = (end - before) * len(windows)
        loss = math.fsum(one[k] for one in found) / targets
        _require_finite(loss, end, model, name)
        points.append({"length": end, "loss": loss, "perplexity": math.exp(loss), "targets": targets})
    return {"name": name, "stage": None, "seconds": round(time.perf_counter() - started, 3), "points": points}


def key_tokens(
    model: nn.Module,
    documents: Sequence[Tensor],
    protocol: Protocol,
    *,
    batch_size: int = 1,
    work: Work | None = None,
) -> list[Tensor]:
    """For each document, bool (n,): which of its tokens need a long context, as `model` shows.

    Those that it predicts better from the protocol's greatest length than from its least, by GAIN, and well, within
    KNOWN. Raises PosSwapError where there are none.
    """
    lengths = [protocol.lengths[0], protocol.lengths[-1]]
    _require_causal(model, documents, lengths, protocol.bos_token_id, "evaluator")
    sizes = [len(document) for document in documents]
    windows = [window for length in lengths for window in protocol.windows(sizes, length)]
    every, bos = (lambda index, losses: losses.tolist()), protocol.bos_token_id
    found = _losses(model, documents, windows, bos, every, batch_size, work, "key tokens", ["every"])
    tables = [[torch.full((size,), math.nan, dtype=torch.float64) for size in sizes] for _ in lengths]
    half = len(protocol.windows(sizes, lengths[0]))
    for i, (window, losses) in enumerate(zip(windows, found, strict=True)):
        table = tables[int(i >= half)][window.document]
        table[window.end - window.targets : window.end] = torch.tensor(losses, dtype=torch.float64)
    keys = [(short - long > GAIN) & (long < KNOWN) for short, long in zip(*tables, strict=True)]
    if not any(bool(one.any()) for one in keys):
        raise PosSwapError(
            f"key_tokens: no token gains more than {GAIN:g} nats from {lengths[-1]} tokens against {lengths[0]}; give "
            "longer lengths, more documents or another evaluator"
        )
    return keys


def _losses(
    model: nn.Module,
    documents: Sequence[Tensor],
    windows: Sequence[Window],
    bos_token_id: int | None,
    reduce: Callable[[int, Tensor], Any],
    batch_size: int,
    work: Work | None,
    name: str,
    what: list[Any],
) -> list[Any]:
    """`window_losses` with a key that says everything they depend on; `what` says what `reduce` makes of them."""
    work = work or Work()
    work.label = work.label or name
    key = {
        "measure": "losses",
        "what": what,
        "model": sample_of(model),
        "documents": fingerprint(documents)["sha256"],
        "windows": hashlib.sha256(repr([*windows]).encode()).hexdigest(),
        "bos": bos_token_id,
        "versions": versions(),
    }
    options = {"bos_token_id": bos_token_id, "batch_size": batch_size, "reduce": reduce}
    with evaluating(model):
        return window_losses(model, documents, windows, work=work, key=key, **options)


def _require_causal(
    model: nn.Module, documents: Sequence[Tensor], lengths: Sequence[int], bos_token_id: int | None, name: str
) -> None:
    require_language_model(model, name)
    check_fits(model, documents, lengths, bos_token_id, name)
    if not is_causal(model):
        raise PosSwapError(
            f"{name}={kind(model)} sees the tokens that follow, so its perplexity means nothing; "
            "masked models have a pseudo-perplexity (evaluation.encoders)"
        )


def _require_finite(loss: float, length: int, model: nn.Module, name: str) -> None:
    if not math.isfinite(loss):
        raise PosSwapError(
            f"{name}: the loss at length {length} is {loss} in {next(model.parameters()).dtype}; "
            "where that is float16, try bfloat16 or float32"
        )


def as_tokens(document: Sequence[int] | Tensor) -> Tensor:
    """One document as int64 (n,)."""
    if isinstance(document, str):
        raise PosSwapError("token_documents holds text; tokenize it first (evaluation.tokenize)")
    tokens = torch.as_tensor(document, device="cpu")
    if tokens.dim() != 1 or (tokens.numel() and tokens.is_floating_point()):
        raise PosSwapError(
            f"token_documents holds {tokens.dtype} of shape {tuple(tokens.shape)}; "
            "a document is a sequence of integer token ids"
        )
    return tokens.long()


def fingerprint(documents: Sequence[Tensor]) -> dict[str, Any]:
    """Sizes, and the sha256 of all token ids: per document its size, then its ids, as little-endian int64."""
    sizes = [len(document) for document in documents]
    digest = hashlib.sha256()
    for document in documents:
        digest.update(len(document).to_bytes(8, "little"))
        digest.update(document.numpy().astype("<i8").tobytes())
    return {
        "documents": len(sizes),
        "tokens": sum(sizes),
        "shortest": min(sizes),
        "longest": max(sizes),
        "sha256": digest.hexdigest(),
    }


def _point(length: int, loss: float, windows: Sequence[Window], protocol: Protocol) -> dict[str, Any]:
    fed = [window.end - window.begin + length - protocol.room(length) for window in windows]
    return {
        "length": length,
        "loss": loss,
        "perplexity": math.exp(loss),
        "windows": len(windows),
        "targets": sum(window.targets for window in windows),
        "tokens_fed": sum(fed),
        "shortest_window": min(fed),
        "longest_window": max(fed),
    }


def _key_point(found: Sequence[list[float]], windows: Sequence[Window], keys: Sequence[Tensor]) -> dict[str, Any]:
    """The key tokens among a length's targets, all weighed alike whatever the protocol."""
    count = sum(int(keys[w.document][w.end - w.targets : w.end].sum()) for w in windows)
    if not count:
        return {"key_targets": 0, "key_loss": None, "key_perplexity": None}
    loss = math.fsum(one[1] for one in found) / count
    return {"key_targets": count, "key_loss": loss, "key_perplexity": math.exp(loss)}
