"""Perplexity by length of a causal language model, always beside the unpatched model it came from.

Letters: B windows in a batch, L length of a window in tokens, T targets of a window (the same in a whole
batch), V vocabulary.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..anatomy import find_rotary, find_table, kind, text_config
from ..errors import PosSwapError
from ..patching import record_of
from ..planning.rotary import unscaled
from ..record import published
from ..scheme import name_of
from . import report as reports
from .protocols import Protocol, Window, make_protocol

LOGITS_AT_ONCE = 2**26  # float32 logits widened at a time: 256 MiB


def evaluate(
    model: nn.Module,
    base: nn.Module | None,
    token_documents: Iterable[Sequence[int] | Tensor],
    lengths: Iterable[int],
    *,
    protocol: str = "strict",
    original_length: int | None = None,
    bos_token_id: int | None = None,
    batch_size: int = 1,
    device: str | torch.device | None = None,
    name: str | None = None,
    source: dict[str, Any] | None = None,
    progress: bool = False,
    **parameters: Any,
) -> dict[str, Any]:
    """Perplexity of `model` and of `base`, the model before its swap, by length.

    token_documents: one sequence of token ids per document, special tokens left out; read only as far as the
    protocol needs. lengths: tokens, the BOS included; the original length is always added. protocol: `strict`
    or `yarn`; `parameters` are its own (`protocols.py`). original_length: the length the base was trained at,
    in tokens; read from its config where not given. bos_token_id: put before every window. batch_size:
    windows per forward. device: each model is moved there for its turn and back; None leaves both where they
    are. name: of the model in the report. source: where the documents came from, recorded as it is.

    Returns the report (`report.py` says what is in it, and writes it to files). A base that cannot take some
    length beyond its original one, for want of position vectors, is measured up to where it can.

    Raises PosSwapError for a missing base, an unknown protocol or parameter, documents that are too short,
    token ids outside a vocabulary, a length that the model cannot take, a model that is not causal, a loss
    that is not a number.
    """
    started = time.perf_counter()
    if base is None:
        raise PosSwapError("base=None: a report says what the swap costs, so the unpatched model is needed beside it")
    if base is model:
        raise PosSwapError("base is the same object as model (patch_model works in place); load the base once more")
    if (record := record_of(base)) is not None:
        raise PosSwapError(
            f"base={kind(base)} is itself patched ({name_of(record)}); give the model it came from"
            + (f", {record.source}" if record.source else "")
        )
    _require_language_model(base, "base")
    _require_language_model(model, "model")
    for argument, value in (("batch_size", batch_size), ("original_length", original_length)):
        if value is not None and (type(value) is not int or value < 1):
            raise PosSwapError(f"{argument}={value!r} is not a positive integer")
    original_length = original_length or trained_length(base)
    plan = make_protocol(protocol, [*lengths, original_length], bos_token_id=bos_token_id, **parameters)
    limit = accepted_length(base)
    if limit is not None and original_length > limit:
        raise PosSwapError(f"original_length={original_length} is longer than the {limit} positions of the base")

    documents, read = plan.choose(_as_tokens(document) for document in token_documents)
    arguments = {"batch_size": batch_size, "device": device, "progress": progress}
    _check(model, documents, plan.lengths, bos_token_id, "model")  # now, not after hours of the base
    base_lengths = [length for length in plan.lengths if limit is None or length <= limit]
    series = [
        measure(base, documents, plan, name="base", lengths=base_lengths, **arguments),
        measure(model, documents, plan, name=name or scheme_name(model), **arguments),
    ]
    return reports.build(
        plan,
        series,
        models={"base": describe_model(base), "model": describe_model(model)},
        original_length=original_length,
        data=_fingerprint(documents) | {"read": read, "source": source},
        batch_size=batch_size,
        device=device or next(model.parameters()).device,
        seconds=time.perf_counter() - started,
    )


def measure(
    model: nn.Module,
    documents: Sequence[Tensor],
    protocol: Protocol,
    *,
    name: str,
    stage: str | None = None,
    lengths: Iterable[int] | None = None,
    batch_size: int = 1,
    device: str | torch.device | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """One line of a plot: `{"name", "stage", "points": [{"length", "loss", "perplexity", ...}]}`.

    documents: what `protocol.choose` returned, as integer tensors (n,). lengths: those of the protocol where
    not given. stage: None, or `before` / `after` fine-tuning. loss: nats per token; seconds: of that length.
    """
    from tqdm import tqdm

    lengths = sorted(protocol.lengths if lengths is None else lengths)
    _require_language_model(model, name)
    _check(model, documents, lengths, protocol.bos_token_id, name)
    sizes = [len(document) for document in documents]
    windows = {length: protocol.windows(sizes, length) for length in lengths}
    points = []
    home, training = next(model.parameters()).device, model.training
    try:
        model.eval()
        if device is not None:
            model.to(device)
        if not _is_causal(model):
            raise PosSwapError(
                f"{name}={kind(model)} sees the tokens that follow, so its perplexity means nothing; "
                "masked models need pseudo-perplexity, which is not offered yet"
            )
        with tqdm(total=sum(map(len, windows.values())), desc=name, unit="window", disable=not progress) as bar:
            for length in lengths:
                bar.set_postfix(length=length)
                started = time.perf_counter()
                sums = window_losses(
                    model,
                    documents,
                    windows[length],
                    bos_token_id=protocol.bos_token_id,
                    batch_size=batch_size,
                    on_batch=bar.update,
                )
                loss = protocol.loss(sums, [window.targets for window in windows[length]])
                if not math.isfinite(loss):
                    raise PosSwapError(
                        f"{name}: the loss at length {length} is {loss} in {next(model.parameters()).dtype}; "
                        "where that is float16, try bfloat16 or float32"
                    )
                points.append(_point(length, loss, windows[length], protocol, time.perf_counter() - started))
    finally:
        model.train(training)
        if device is not None:
            model.to(home)
    return {"name": name, "stage": stage, "points": points}


@torch.no_grad()  # not inference_mode: a buffer that a forward leaves behind (dynamic NTK) must stay usable
def window_losses(
    model: nn.Module,
    documents: Sequence[Tensor],
    windows: Sequence[Window],
    *,
    bos_token_id: int | None = None,
    batch_size: int = 1,
    on_batch: Callable[[int], object] = lambda done: None,
) -> list[float]:
    """Summed negative log-likelihood, in nats, of the targets of each window.

    Windows are batched with others of the same shape, so nothing is padded. Logits are asked for at the
    targets only, and widened to float32 a piece at a time. `on_batch` gets the number of windows done since
    its last call.
    """
    device = model.get_input_embeddings().weight.device
    sums = [0.0] * len(windows)
    for group in _batches(windows, batch_size):
        rows = [documents[windows[i].document][windows[i].begin : windows[i].end] for i in group]
        input_ids = torch.stack(rows).to(device)  # (B, L - b)
        if bos_token_id is not None:
            input_ids = F.pad(input_ids, (1, 0), value=bos_token_id)  # (B, L)
        targets = input_ids[:, -windows[group[0]].targets :]  # (B, T)
        logits = _last_logits(model, input_ids, targets.shape[1] + 1)  # (B, T + 1, V)
        for i, row_logits, row_targets in zip(group, logits, targets, strict=True):
            sums[i] = _summed_loss(row_logits[:-1], row_targets)
        on_batch(len(group))
    return sums


def accepted_length(model: nn.Module) -> int | None:
    """The longest sequence, in tokens, that a model takes; None where nothing limits it.

    A table of positions is a limit, a rotation and ALiBi are not; a model that keeps its positions in a way not
    known here is held to the length that its config states.
    """
    table = find_table(model)
    if table is not None:
        return table.length
    if find_rotary(model) is not None or getattr(text_config(model), "alibi", False):
        return None
    return _stated_length(model)


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
    """What a reader needs to load the same model."""
    record = record_of(model)
    return {
        "class": kind(model),
        "source": published(model.config.name_or_path),
        "scheme": None if record is None else name_of(record),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": model.config._attn_implementation,
    }


def _stated_length(model: nn.Module) -> int | None:
    length = getattr(text_config(model), "max_position_embeddings", None)
    return length if isinstance(length, int) and length > 0 else None  # XLNet's is -1


def _require_language_model(model: nn.Module, role: str) -> None:
    """Raise PosSwapError for a model without tokens on both sides; that it is causal is measured later."""
    if (
        getattr(model, "main_input_name", None) != "input_ids"
        or model.config.is_encoder_decoder
        or model.get_output_embeddings() is None
    ):
        raise PosSwapError(f"{role}={kind(model)} is not a causal language model; perplexity is not defined for it")


def _check(
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


def _as_tokens(document: Sequence[int] | Tensor) -> Tensor:
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


def _fingerprint(documents: Sequence[Tensor]) -> dict[str, Any]:
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


def _point(length: int, loss: float, windows: Sequence[Window], protocol: Protocol, seconds: float) -> dict[str, Any]:
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
        "seconds": round(seconds, 3),
    }


def _batches(windows: Sequence[Window], batch_size: int) -> Iterator[list[int]]:
    """Indices of windows that share the number of tokens and of targets, `batch_size` at most at a time.

    Shorter windows first: dynamic NTK keeps the frequencies of the longest sequence it has seen.
    """

    def shape(i: int) -> tuple[int, int]:
        return windows[i].end - windows[i].begin, windows[i].targets

    for _, group in groupby(sorted(range(len(windows)), key=shape), key=shape):
        indices = list(group)
        for start in range(0, len(indices), batch_size):
            yield indices[start : start + batch_size]


def _last_logits(model: nn.Module, input_ids: Tensor, keep: int) -> Tensor:
    """Logits (B, keep, V) at the last `keep` positions of (B, L), in the model's dtype.

    Computed only there where the model can; a model whose forward does not offer it computes all of them.
    """
    offered = inspect.signature(model.forward).parameters
    options = {"logits_to_keep": keep, "use_cache": False}
    output = model(input_ids=input_ids, **{k: v for k, v in options.items() if k in offered})
    return output.logits[:, -keep:]


def _summed_loss(logits: Tensor, targets: Tensor) -> float:
    """Sum over a window of -log p(target), for (T, V) logits and (T,) targets."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    rows = max(1, LOGITS_AT_ONCE // logits.shape[-1])
    targets = targets.to(logits.device)
    pieces = [
        F.cross_entropy(some.to(dtype), those, reduction="none").cpu().double()
        for some, those in zip(logits.split(rows), targets.split(rows), strict=True)
    ]
    return torch.cat(pieces).sum().item()


@torch.no_grad()
def _is_causal(model: nn.Module) -> bool:
    """Whether the logits at the first position stay when every later token changes (in eval mode)."""
    embedding = model.get_input_embeddings().weight
    first = torch.arange(1, 9, device=embedding.device)[None] % len(embedding)
    second = torch.cat([first[:, :1], (first[:, 1:] + len(embedding) // 2) % len(embedding)], dim=1)
    a, b = (model(input_ids=ids).logits[:, 0].float() for ids in (first, second))
    change, rounding = (a - b).abs().max(), 16 * torch.finfo(model.dtype).eps * a.abs().max()
    return not bool(change > rounding)  # nan is not this check's business
