"""The report of one evaluation: what it holds, its tables, its files.

measure             what `series` are of: perplexity, pseudo-perplexity, sentence, features
protocol, summary   what was computed
settings            the protocol's parameters, resolved, the batch size and the number of processes
original_length     tokens (pixels); the length the base was trained at
short               what the last model's swap costs up to that length, see `short_cost`; `shorts` of all, by name
series              one of each model, the bases first: {name, stage, base, seconds, points}; a point has length and,
                    of perplexity, loss (nats per token), perplexity, and counts: windows, targets, tokens_fed (the
                    windows' tokens), shortest_window, longest_window; of key tokens key_loss, key_perplexity,
                    key_targets
measures            what else was measured, by name: {title, value, label, series}, of the same form
models              by name (`base` and `model` where there are two): class, source, scheme, parameters, dtype,
                    attention, sample
data                documents scored and read, their tokens, shortest, longest, sha256 of the ids, source
command, hardware, versions, seconds
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import PosSwapError
from ..runs import command, hardware, replacing, versions
from .protocols import Protocol

COLUMNS = (
    "length",
    "loss",
    "perplexity",
    "windows",
    "targets",
    "tokens_fed",
    "shortest_window",
    "longest_window",
)


@dataclass(frozen=True)
class Shown:
    """How a measure is shown: a title, the number of a point that is drawn, and what that is."""

    title: str
    value: str
    label: str


TOKENS, CONTEXT = "length of the window (tokens)", "tokens before the target"
SHOWN = {
    "perplexity": Shown("Perplexity by length", "perplexity", "perplexity (per token; lower is better)"),
    "key_perplexity": Shown("Perplexity on key tokens", "key_perplexity", "perplexity (key tokens; lower is better)"),
    "pseudo-perplexity": Shown("Pseudo-perplexity by length", "perplexity", "pseudo-perplexity (lower is better)"),
    "curve": Shown("Loss by position", "loss", "loss (nats per token; lower is better)"),
    "sentence": Shown("A sentence found in a long text", "accuracy", "found first (share; higher is better)"),
    "features": Shown("Feature shift by size", "shift", "1 - cosine to the base at its own size (lower is better)"),
    "accuracy": Shown("Accuracy by size", "accuracy", "right classes (share; higher is better)"),
    "diagnostics": Shown("Position diagnostics", "entropy", "entropy of attention (nats)"),
    "similarity": Shown("Short texts as before", "vector", "1 - cosine to the base (lower is better)"),
    "tasks": Shown("Tasks of lm-eval", "value", "the task's metric"),
}


def shown(name: str) -> Shown:
    """How a measure is shown; a retrieval task is called by its own name and its protocol's."""
    if name in SHOWN:
        return SHOWN[name]
    task, _, protocol = name.rpartition("_")
    return Shown(f"Retrieval: {task.replace('_', ' ')} (protocol: {protocol})", "accuracy", "right (higher is better)")


class Measures(dict):
    """Series by the name of their measure, in the order in which they came."""

    def add(self, name: str, series: dict[str, Any]) -> None:
        self.setdefault(name, []).append(series)


def build(
    protocol: Protocol,
    series: Sequence[dict[str, Any]],
    bases: Mapping[str, str | None],
    *,
    batch_size: int,
    evaluator: str | None = None,
    **rest: Any,
) -> dict[str, Any]:
    """The report of causal models as one JSON-ready dict. bases: of each model, the name of the one it came from; None
    of an unpatched one."""
    settings = asdict(protocol) | {"lengths": list(protocol.lengths), "batch_size": batch_size, "evaluator": evaluator}
    head = {"measure": "perplexity", "protocol": protocol.name, "summary": protocol.summary, "settings": settings}
    return _assemble(head, series, bases, **rest)


def build_other(
    measure: str,
    series: Sequence[dict[str, Any]],
    bases: Mapping[str, str | None],
    *,
    settings: dict[str, Any],
    **rest: Any,
) -> dict[str, Any]:
    """The report of encoders, or of image models."""
    summary = "the same targets at every length" if measure == "pseudo-perplexity" else shown(measure).label
    head = {"measure": measure, "protocol": "strict", "summary": summary, "settings": settings}
    return _assemble(head, series, bases, **rest)


def _assemble(
    head: dict[str, Any],
    series: Sequence[dict[str, Any]],
    bases: Mapping[str, str | None],
    *,
    measures: Measures,
    models: dict[str, Any],
    original_length: int,
    data: dict[str, Any],
    device: torch.device | str,
    seconds: float,
    processes: int,
) -> dict[str, Any]:
    by_name = {one["name"]: one for one in series}
    similarity = {one["name"]: one for one in measures.pop("similarity", [])}
    if head["measure"] == "sentence":
        shorts = {name: similarity_cost(similarity[name]) for name, base in bases.items() if base}
    elif head["measure"] == "features":
        shorts = {name: size_cost(by_name[name], original_length) for name, base in bases.items() if base}
    else:
        shorts = {
            name: short_cost(by_name[base], by_name[name], original_length) for name, base in bases.items() if base
        }
        for name in shorts.keys() & similarity.keys():
            shorts[name] |= {"vector": similarity[name]["vector"], "similarity": similarity[name]["similarity"]}
    if len(bases) == 2:  # a card reads this form
        models = dict(zip(("base", "model"), (models[name] for name in bases), strict=True))
    head["settings"]["processes"] = processes
    return head | {
        "original_length": original_length,
        "short": shorts[[*shorts][-1]],
        "shorts": shorts,
        "series": [one | {"base": bases[one["name"]]} for one in series],
        "measures": {
            name: asdict(shown(name)) | {"series": [one | {"base": bases[one["name"]]} for one in found]}
            for name, found in measures.items()
        },
        "models": models,
        "data": data,
        "command": command(),
        "hardware": hardware(device),
        "versions": versions(),
        "seconds": round(seconds, 3),
    }


def short_cost(base: dict[str, Any], model: dict[str, Any], original_length: int) -> dict[str, Any]:
    """What the swap costs up to the original length: model minus base, loss in nats per token.

    `delta` is the difference at the original length, `lengths` has it, and the ratio of the perplexities, at
    each measured length up to that. Positive means worse than the base.
    """
    ours = {point["length"]: point for point in model["points"]}
    lengths = [
        {
            "length": point["length"],
            "delta": ours[point["length"]]["loss"] - point["loss"],
            "perplexity_ratio": ours[point["length"]]["perplexity"] / point["perplexity"],
        }
        for point in base["points"]
        if point["length"] <= original_length
    ]
    return {
        "length": original_length,
        "delta": lengths[-1]["delta"],
        "unit": "nats per token",
        "lengths": lengths,
    }


def similarity_cost(found: dict[str, Any]) -> dict[str, Any]:
    """The same of an encoder: how far the embeddings of short texts moved."""
    return {
        "length": found["length"],
        "delta": found["vector"],
        "unit": "1 - cosine",
        "similarity": found["similarity"],
    }


def size_cost(found: dict[str, Any], size: int) -> dict[str, Any]:
    """The same of an image model: how far its features moved at the base's own size."""
    point = next(point for point in found["points"] if point["length"] == size)
    return {"length": size, "delta": point["shift"], "unit": "1 - cosine"}


def table(report: dict[str, Any]) -> str:
    """The main measure by length in plain text, one column per series; `-` where a base cannot go."""
    series, how = report["series"], shown(report["measure"])
    heads = ["length", *(one["name"] for one in series)]
    lines = [heads]
    for length in sorted({point["length"] for one in series for point in one["points"]}):
        found = [next((p for p in one["points"] if p["length"] == length), None) for one in series]
        mark = "*" if length == report["original_length"] else ""
        lines.append([f"{length}{mark}", *(f"{p[how.value]:.4g}" if p else "-" for p in found)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    costs = [f"{name} {short['delta']:+.4f} {short['unit']}" for name, short in report["shorts"].items()]
    return "\n".join(
        [
            f"{report['measure']}, protocol {report['protocol']} ({report['summary']})",
            *rows,
            f"* original length; there, against the base: {'; '.join(costs)}",
        ]
    )


def write_report(report: dict[str, Any], folder: str | os.PathLike, stem: str = "evaluation") -> dict[str, Path]:
    """Write `stem`.json, .csv, .png (and one more picture per further measure) and .md into `folder`; each replaces an
    older one only when complete.

    Returns their paths by kind. Raises PosSwapError where matplotlib is missing (the first two are written
    then).
    """
    from .pages import page
    from .plots import plot_report

    paths = {kind: Path(folder) / f"{stem}.{kind}" for kind in ("json", "csv", "png", "md")}
    try:
        with replacing(paths["json"]) as path:
            path.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        with replacing(paths["csv"]) as path, path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            columns = [column for column in COLUMNS if column in report["series"][0]["points"][0]]
            columns += [column for column in report["series"][0]["points"][0] if column not in columns]
            writer.writerow(["name", "stage", "protocol", *columns])
            for one in report["series"]:
                head = [one["name"], one["stage"], report["protocol"]]
                writer.writerows([*head, *(point.get(column) for column in columns)] for point in one["points"])
    except OSError as error:
        raise PosSwapError(f"{folder}: the report cannot be written there: {error}") from error
    pictures = plot_report(report, folder, stem)
    with replacing(paths["md"]) as path:
        path.write_text(page(report, pictures), encoding="utf-8")
    return paths


def comparison(series: Sequence[dict[str, Any]], original_length: int) -> str:
    """A Markdown table of perplexities, a row per series and a column per length, with the change of the loss at the
    original length (nats per token, against the series called `base`) beside it."""
    lengths = sorted({point["length"] for one in series for point in one["points"]})
    by_name = {one["name"]: one for one in series}
    staged = any(one["stage"] for one in series)
    tuned = ["fine-tuned"] if staged else []
    heads = ["scheme", *tuned, *(f"{n:,}{'*' if n == original_length else ''}" for n in lengths), "change at *"]
    lines = [heads, ["---", *(["---"] if staged else []), *(["---:"] * (len(lengths) + 1))]]
    for one in series:
        base = by_name[one.get("base") or ("base" if "base" in by_name else one["name"])]
        found = {point["length"]: point["perplexity"] for point in one["points"]}
        cells = [f"{found[n]:.3f}" if n in found else "-" for n in lengths]
        stage = {None: "", "before": "no", "after": "yes"}[one["stage"]]
        delta = "" if one is base else f"{short_cost(base, one, original_length)['delta']:+.4f}"
        lines.append([one["name"], *([stage] if staged else []), *cells, delta])
    note = (
        "Perplexity by length in tokens. * is the trained length; the change there is of the loss, in nats per token."
    )
    return "\n".join([markdown(lines), "", note])


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table from rows of cells, its second row the alignments."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines)
