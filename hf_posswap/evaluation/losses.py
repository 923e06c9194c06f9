"""The loss of every target of many windows, each forward as few times as gives the same answer.

Letters: B rows in a batch, L tokens of a row (the BOS counts), T scored positions of a row, V vocabulary.

A window is scored from the tokens it begins with. Where several begin at the same token, the shorter ones are prefixes
of the longest, and a causal model says of a prefix what it says of it alone: one forward serves them all. That is
exact but for models whose frequencies follow the length (`subjects.depends_on_length`), which get every window apart.
Windows that begin elsewhere share nothing: a token's hidden states hold all that precedes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .protocols import Window
from .subjects import depends_on_length, takes
from .work import Work

LOGITS_AT_ONCE = 2**26  # float32 logits widened at a time: 256 MiB
LOGITS_HELD = 2**28  # logits of one row in the model's dtype


@dataclass(frozen=True)
class Row:
    """Tokens `begin` to `end` of a document, and the windows, by their index, that are scored in it."""

    document: int
    begin: int
    end: int
    windows: tuple[int, ...]


def window_losses(
    model: nn.Module,
    documents: Sequence[Tensor],
    windows: Sequence[Window],
    *,
    bos_token_id: int | None = None,
    batch_size: int = 1,
    reduce: Callable[[int, Tensor], Any] = lambda index, losses: losses.sum().item(),
    work: Work | None = None,
    key: dict[str, Any] | None = None,
) -> list[Any]:
    """For each window `reduce(its index, the losses of its targets)`: without it their sum, in nats.

    The losses are float64 (targets,), -log p each. Rows are batched with others of the same shape, so nothing is
    padded. Logits are asked for at the targets only, and widened to float32 a piece at a time. key: what the results
    depend on, for `work`.
    """
    apart = depends_on_length(model)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    rows = list(rows_of(windows, apart=apart, most=max(1, LOGITS_HELD // vocabulary)))
    batches = list(_batches(rows, windows, batch_size))

    def compute(batch: Sequence[Row]) -> list[tuple[int, Any]]:
        return [(i, reduce(i, losses)) for i, losses in _scored(model, documents, windows, batch, bos_token_id)]

    key = (key or {}) | {"apart": apart, "batch_size": batch_size}
    found = (work or Work()).map(key, batches, compute)
    by_index = {i: value for batch in found for i, value in batch}
    return [by_index[i] for i in range(len(windows))]


def rows_of(windows: Sequence[Window], *, apart: bool, most: int) -> Iterator[Row]:
    """The rows that serve all windows; `most` targets in one, where it serves several. Shorter rows first: dynamic NTK
    keeps the frequencies of the longest sequence it has seen.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, window in enumerate(windows):
        groups.setdefault((window.document, window.begin, *([i] if apart else [])), []).append(i)
    rows = []
    for (document, begin, *_), members in groups.items():
        members = sorted(members, key=lambda i: windows[i].end)
        while members:
            taken, targets = [], 0
            while members and (not taken or targets + windows[members[-1]].targets <= most):
                taken.append(members.pop())
                targets += windows[taken[-1]].targets
            rows.append(Row(document, begin, windows[taken[0]].end, tuple(reversed(taken))))
    return iter(sorted(rows, key=lambda row: (row.end - row.begin, row.document, row.begin)))


def _batches(rows: Sequence[Row], windows: Sequence[Window], batch_size: int) -> Iterator[list[Row]]:
    """Rows that share their number of tokens and the places of their targets, `batch_size` at most at a time."""
    shapes: dict[tuple, list[Row]] = {}
    for row in rows:
        ends = tuple((windows[i].end - row.begin, windows[i].targets) for i in row.windows)
        shapes.setdefault((row.end - row.begin, ends), []).append(row)
    for alike in shapes.values():
        for start in range(0, len(alike), batch_size):
            yield alike[start : start + batch_size]


@torch.no_grad()  # not inference_mode: a buffer that a forward leaves behind (dynamic NTK) must stay usable
def _scored(
    model: nn.Module, documents: Sequence[Tensor], windows: Sequence[Window], batch: Sequence[Row], bos: int | None
) -> Iterator[tuple[int, Tensor]]:
    """(index of a window, losses of its targets) for every window of a batch of rows."""
    first, head = batch[0], int(bos is not None)
    input_ids = torch.stack([documents[row.document][row.begin : row.end] for row in batch])
    input_ids = input_ids.to(model.get_input_embeddings().weight.device)  # (B, L - b)
    if bos is not None:
        input_ids = F.pad(input_ids, (1, 0), value=bos)  # (B, L)
    spans = []  # of each window: where its targets stand in the row
    for i in first.windows:
        end = windows[i].end - first.begin + head
        spans.append(range(end - windows[i].targets, end))
    places = sorted({place - 1 for span in spans for place in span})  # a target is predicted at the place before it
    assert places[0] >= 0, "a protocol asks for a target that nothing precedes"
    logits = _logits(model, input_ids, places)  # (B, T, V)
    index = {place + 1: i for i, place in enumerate(places)}
    targets = input_ids[:, torch.tensor(places) + 1]  # (B, T)
    for row, row_logits, row_targets in zip(batch, logits, targets, strict=True):
        losses = _losses(row_logits, row_targets)
        for i, span in zip(row.windows, spans, strict=True):
            yield i, losses[[index[place] for place in span]]


def _logits(model: nn.Module, input_ids: Tensor, places: list[int]) -> Tensor:
    """Logits (B, T, V) at the given places of rows (B, L), in the model's dtype.

    Computed only there where the model can; a model whose forward does not offer it computes all of them.
    """
    at = torch.tensor(places, device=input_ids.device)
    options: dict[str, Any] = {"use_cache": False} if takes(model, "use_cache") else {}
    if not takes(model, "logits_to_keep"):
        return model(input_ids=input_ids, **options).logits[:, at]
    last = input_ids.shape[1] - places[0]
    together = len(places) == places[-1] - places[0] + 1  # the common form: the last so many, and a number says so
    kept = model(input_ids=input_ids, logits_to_keep=last if together else at, **options).logits
    return kept[:, : len(places)]


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    """-log p(target), float64 (T,), for (T, V) logits and (T,) targets."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    rows = max(1, LOGITS_AT_ONCE // logits.shape[-1])
    targets = targets.to(logits.device)
    pieces = [
        F.cross_entropy(some.to(dtype), those, reduction="none").cpu().double()
        for some, those in zip(logits.split(rows), targets.split(rows), strict=True)
    ]
    return torch.cat(pieces)
