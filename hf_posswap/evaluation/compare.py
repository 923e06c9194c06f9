"""Several models measured alike, each beside the unpatched model it came from: causal ones, encoders, image models."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..anatomy import find_table, kind
from ..errors import PosSwapError
from ..patching import record_of
from ..scheme import name_of
from . import encoders, images, report
from .diagnostics import diagnose
from .perplexity import as_tokens, curve, fingerprint, key_tokens, measure
from .prompts import Strict, Yarn
from .protocols import make_protocol
from .retrieval import passkey_context, retrieve
from .subjects import (
    MASKED,
    accepted_length,
    check_fits,
    describe_model,
    evaluating,
    kind_of,
    require_language_model,
    scheme_name,
    trained_length,
)
from .tasks import Tasks
from .work import Work

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Entry:
    """One model of a comparison. load: gives it, and is called again for each turn. base: the name of the entry that
    it came from; None for an unpatched one."""

    name: str
    load: Callable[[], nn.Module]
    base: str | None = None


@dataclass(frozen=True, kw_only=True)
class Extras:
    """What is measured of causal models besides perplexity by length.

    curve: rows of text for the loss by position at the greatest length; 0: none. evaluator: the name of the entry that
    chooses key tokens; None scores none. askers: retrieval tasks, at `ask_lengths`. diagnostics: documents on which
    attention and shift are looked at; 0: none. tasks: of lm-eval.
    """

    curve: int = 0
    evaluator: str | None = None
    askers: Sequence[Strict | Yarn] = ()
    ask_lengths: Sequence[int] = ()
    diagnostics: int = 0
    tasks: Tasks | None = None


def evaluate(
    model: nn.Module,
    base: nn.Module | None,
    token_documents: Iterable[Sequence[int] | Tensor],
    lengths: Iterable[int],
    *,
    name: str | None = None,
    progress: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """`compare_causal` of one model with the one before its swap, both in memory. name: of the model in the report.

    Raises PosSwapError also for a missing base.
    """
    if base is None:
        raise PosSwapError("base=None: a report says what the swap costs, so the unpatched model is needed beside it")
    if base is model:
        raise PosSwapError("base is the same object as model (patch_model works in place); load the base once more")
    require_language_model(model, "model")
    entries = [Entry("base", lambda: base), Entry(name or scheme_name(model), lambda: model, "base")]
    return compare_causal(entries, token_documents, lengths, work=Work(progress=progress), **options)


def compare_causal(
    entries: Sequence[Entry],
    token_documents: Iterable[Sequence[int] | Tensor],
    lengths: Iterable[int],
    *,
    protocol: str = "strict",
    original_length: int | None = None,
    bos_token_id: int | None = None,
    batch_size: int = 1,
    device: str | torch.device | None = None,
    source: dict[str, Any] | None = None,
    extras: Extras | None = None,
    work: Work | None = None,
    **parameters: Any,
) -> dict[str, Any]:
    """Perplexity by length of every entry, and what `extras` ask for.

    token_documents: one sequence of token ids per document, special tokens left out; read only as far as the
    protocol needs. lengths: tokens, the BOS included; the original length is always added. protocol: `strict`
    or `yarn`; `parameters` are its own (`protocols.py`). original_length: the length the base was trained at,
    in tokens; read from its config where not given. bos_token_id: put before every window. batch_size:
    windows per forward. device: each model is moved there for its turn and back; None leaves them where they
    are. source: where the documents came from, recorded as it is.

    Returns the report (`report.py` says what is in it, and writes it to files). A base that cannot take some
    length beyond its original one, for want of position vectors, is measured up to where it can.

    Raises PosSwapError for a missing base, an unknown protocol or parameter, documents that are too short,
    token ids outside a vocabulary, a length that the model cannot take, a model that is not causal, a loss
    that is not a number.
    """
    started, work, extras = time.perf_counter(), work or Work(), extras or Extras()
    for argument, value in (("batch_size", batch_size), ("original_length", original_length)):
        if value is not None and (type(value) is not int or value < 1):
            raise PosSwapError(f"{argument}={value!r} is not a positive integer")
    check_bases(entries)
    bases = [entry for entry in entries if entry.base is None]
    for entry in bases:
        require_language_model(entry.load(), entry.name)
    original_length = original_length or min(trained_length(entry.load()) for entry in bases)
    plan = make_protocol(protocol, [*lengths, original_length], bos_token_id=bos_token_id, **parameters)
    limits = {entry.name: accepted_length(entry.load()) for entry in bases}
    for limit in limits.values():
        if limit is not None and original_length > limit:
            raise PosSwapError(f"original_length={original_length} is longer than the {limit} positions of the base")
    documents, read = plan.choose(as_tokens(document) for document in token_documents)
    described = {}
    for entry in entries:  # now, not after hours of the base
        model = entry.load()
        require_language_model(model, entry.name)
        within = [n for n in plan.lengths if limits.get(entry.name) is None or n <= limits[entry.name]]
        check_fits(model, documents, within, bos_token_id, "base" if entry.base is None else "model")
        described[entry.name] = describe_model(model)
        del model
    if extras.evaluator is not None and extras.evaluator not in described:
        raise PosSwapError(
            f"evaluator={extras.evaluator!r} is none of the models; choose one of: {', '.join(described)}"
        )

    keys = None
    if extras.evaluator is not None:
        entry = next(one for one in entries if one.name == extras.evaluator)
        with _turn(entry, device, work, "key tokens") as model:
            keys = key_tokens(model, documents, plan, batch_size=batch_size, work=work)
    series, found = [], report.Measures()
    for number, entry in enumerate(entries, 1):
        with _turn(entry, device, work, f"[{number}/{len(entries)}] {entry.name}") as model:
            name, label, limit = entry.name, work.label, limits.get(entry.name)
            within = [length for length in plan.lengths if limit is None or length <= limit]
            options = {"batch_size": batch_size, "work": work}
            series.append(measure(model, documents, plan, name=name, lengths=within, keys=keys, **options))
            if extras.curve:
                work.label = f"{label}, curve"
                bos = plan.bos_token_id
                rows = {"rows": extras.curve, "bos_token_id": bos}
                found.add("curve", curve(model, documents, within[-1], name=name, **rows, **options))
            for asker in extras.askers:
                work.label = f"{label}, {asker.task}"
                asked = [length for length in extras.ask_lengths if limit is None or length <= limit]
                one = retrieve(model, asker, asked, name=name, work=work)
                if isinstance(asker, Yarn):
                    one["passkey"] = passkey_context(one["points"])
                found.add(f"{asker.task}_{asker.name}", one)
            if extras.diagnostics:
                work.label = f"{label}, diagnostics"
                texts = documents[: extras.diagnostics]
                found.add("diagnostics", diagnose(model, texts, within, name=name, work=work))
            if extras.tasks is not None:
                work.label = f"{label}, tasks"
                found.add("tasks", extras.tasks.measure(model, name=name, work=work))
    return report.build(
        plan,
        series,
        bases_of(entries),
        measures=found,
        models=described,
        original_length=original_length,
        data=fingerprint(documents) | {"read": read, "source": source},
        batch_size=batch_size,
        device=device or next(entries[0].load().parameters()).device,
        seconds=time.perf_counter() - started,
        processes=work.processes,
        evaluator=extras.evaluator,
    )


def compare_encoders(
    entries: Sequence[Entry],
    token_documents: Iterable[Sequence[int] | Tensor],
    lengths: Iterable[int],
    tokenizer: PreTrainedTokenizerBase,
    *,
    original_length: int | None = None,
    targets: int = 64,
    batch_size: int = 1,
    device: str | torch.device | None = None,
    source: dict[str, Any] | None = None,
    work: Work | None = None,
) -> dict[str, Any]:
    """What longer texts do to text encoders: pseudo-perplexity by length (masked language models), a sentence found
    beyond the old limit, and how far the embeddings of short texts moved. The arguments are those of `compare_causal`.
    """
    started, work = time.perf_counter(), work or Work()
    check_bases(entries)
    documents = [as_tokens(document) for document in token_documents]
    if not documents:
        raise PosSwapError("token_documents is empty; give at least one document")
    base = next(entry for entry in entries if entry.base is None)
    original_length = original_length or trained_length(base.load())
    lengths = sorted({*lengths, original_length})
    masked = all(kind_of(entry.load()) == MASKED for entry in entries)
    described = {entry.name: describe_model(entry.load()) for entry in entries}
    filler = torch.cat(documents).tolist()
    vectors, series, found = {}, [], report.Measures()
    for number, entry in enumerate(entries, 1):
        with _turn(entry, device, work, f"[{number}/{len(entries)}] {entry.name}") as model:
            name, limit = entry.name, accepted_length(model)
            if entry.base is not None and limit is not None and lengths[-1] > limit:
                raise PosSwapError(f"{name}={kind(model)}: length {lengths[-1]} is longer than its {limit} positions")
            vectors[name] = encoders.short_vectors(model, tokenizer, work)
            of_base = vectors[entry.base or name]
            one = encoders.find_sentence(model, filler, lengths, tokenizer, name=name, cut=limit, work=work)
            found.add("sentence", one)
            found.add("similarity", encoders.similarity_shift(model, of_base, tokenizer, name=name, work=work))
            if masked:
                options = {"targets": targets, "batch_size": batch_size, "upto": limit, "work": work}
                series.append(encoders.pseudo_perplexity(model, documents, lengths, tokenizer, name=name, **options))
    return report.build_other(
        "pseudo-perplexity" if masked else "sentence",
        series or found["sentence"],
        bases_of(entries),
        measures=found,
        models=described,
        original_length=original_length,
        data=fingerprint(documents) | {"source": source},
        settings={"lengths": lengths, "targets": targets, "batch_size": batch_size},
        device=device or next(base.load().parameters()).device,
        seconds=time.perf_counter() - started,
        processes=work.processes,
    )


def compare_images(
    entries: Sequence[Entry],
    pictures: Sequence[Tensor],
    sizes: Iterable[int],
    *,
    device: str | torch.device | None = None,
    labels: Sequence[str] | None = None,
    source: dict[str, Any] | None = None,
    work: Work | None = None,
) -> dict[str, Any]:
    """How far the features of image models lie from the base's at its own size, by size in pixels; with the names of
    the pictures' classes, as the models know them, also how many a classifier finds.
    """
    started, work = time.perf_counter(), work or Work()
    check_bases(entries)
    for entry in entries if labels is not None else ():  # now, not after hours of the base
        images.check_labels(entry.load(), labels, entry.name)
    base = next(entry for entry in entries if entry.base is None)
    table = find_table(base.load())
    if table is None or table.grid is None or table.grid[0] * table.patch[0] != table.grid[1] * table.patch[1]:
        raise PosSwapError(f"base={kind(base.load())} has no square table of patch positions")
    own = table.grid[0] * table.patch[0]
    with _turn(base, device, work, "base") as model:
        before = images.features(model, pictures, own, work)
    series, found = [], report.Measures()
    for number, entry in enumerate(entries, 1):
        with _turn(entry, device, work, f"[{number}/{len(entries)}] {entry.name}") as model:
            if labels is not None:
                found.add(
                    "accuracy", images.accuracy(model, pictures, labels, [own, *sizes], name=entry.name, work=work)
                )
            series.append(images.feature_shift(model, pictures, [own, *sizes], before, name=entry.name, work=work))
    return report.build_other(
        "features",
        series,
        bases_of(entries),
        measures=found,
        models={entry.name: describe_model(entry.load()) for entry in entries},
        original_length=own,
        data={"images": len(pictures), "source": source}
        | fingerprint([(picture.flatten() * 2**16).long() for picture in pictures]),
        settings={"sizes": sorted({own, *sizes})},
        device=device or next(base.load().parameters()).device,
        seconds=time.perf_counter() - started,
        processes=work.processes,
    )


def check_bases(entries: Sequence[Entry]) -> None:
    """Raise PosSwapError unless there is an unpatched model for each that is compared with one."""
    names = [entry.name for entry in entries]
    if len(set(names)) != len(names):
        raise PosSwapError(f"two models are called alike: {', '.join(names)}")
    bases: Mapping[str, Entry] = {entry.name: entry for entry in entries if entry.base is None}
    for entry in entries:
        if entry.base is not None and entry.base not in bases:
            raise PosSwapError(f"base={entry.base!r} of {entry.name} is not among the models")
    if not bases or len(bases) == len(entries):
        raise PosSwapError("a comparison needs an unpatched model and at least one that came from it")
    for entry in bases.values():
        model = entry.load()
        if (record := record_of(model)) is not None:
            raise PosSwapError(
                f"base={kind(model)} is itself patched ({name_of(record)}); give the model it came from"
                + (f", {record.source}" if record.source else "")
            )


def bases_of(entries: Sequence[Entry]) -> dict[str, str | None]:
    return {entry.name: entry.base for entry in entries}


@contextmanager
def _turn(entry: Entry, device: str | torch.device | None, work: Work, label: str) -> Iterator[nn.Module]:
    """An entry's model on its device, and the bar's label."""
    work.label, model = label, entry.load()
    with evaluating(model, device):
        yield model
    work.label = ""
