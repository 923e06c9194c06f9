"""The report of one evaluation: what it holds, its table, its files.

protocol, summary   what was computed
settings            the protocol's parameters, resolved, and the batch size
original_length     tokens; the length the base was trained at
short               what the swap costs up to that length, see `short_cost`
series              [base, model], each {name, stage, points}; a point has length, loss (nats per token),
                    perplexity, seconds, and counts: windows, targets, tokens_fed, shortest_window,
                    longest_window
models              {base, model}: class, source, scheme, parameters, dtype, attention
data                documents scored and read, their tokens, shortest, longest, sha256 of the ids, source
command, hardware, versions, seconds
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
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


def build(
    protocol: Protocol,
    series: Sequence[dict[str, Any]],
    *,
    models: dict[str, Any],
    original_length: int,
    data: dict[str, Any],
    batch_size: int,
    device: torch.device | str,
    seconds: float,
) -> dict[str, Any]:
    """The report as one JSON-ready dict; `series` begins with the base's and ends with the model's."""
    base, *_, model = series
    return {
        "protocol": protocol.name,
        "summary": protocol.summary,
        "settings": asdict(protocol) | {"lengths": list(protocol.lengths), "batch_size": batch_size},
        "original_length": original_length,
        "short": short_cost(base, model, original_length),
        "series": list(series),
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


def table(report: dict[str, Any]) -> str:
    """Perplexity by length in plain text, one column per series; `-` where the base cannot go."""
    series = report["series"]
    heads = ["length", *(one["name"] for one in series)]
    lines = [heads]
    for length in sorted({point["length"] for one in series for point in one["points"]}):
        found = [next((p for p in one["points"] if p["length"] == length), None) for one in series]
        mark = "*" if length == report["original_length"] else ""
        lines.append([f"{length}{mark}", *(f"{p['perplexity']:.4g}" if p else "-" for p in found)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    short = report["short"]
    return "\n".join(
        [
            f"perplexity, protocol {report['protocol']} ({report['summary']})",
            *rows,
            f"* original length; there {short['delta']:+.4f} {short['unit']} against the base",
        ]
    )


def write_report(report: dict[str, Any], folder: str | os.PathLike, stem: str = "evaluation") -> dict[str, Path]:
    """Write `stem`.json, .csv and .png into `folder`; each replaces an older one only when complete.

    Returns their paths by kind. Raises PosSwapError where matplotlib is missing (the first two are written
    then).
    """
    from .plots import plot_lengths

    paths = {kind: Path(folder) / f"{stem}.{kind}" for kind in ("json", "csv", "png")}
    try:
        with replacing(paths["json"]) as path:
            path.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        with replacing(paths["csv"]) as path, path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["name", "stage", "protocol", *COLUMNS])
            for one in report["series"]:
                head = [one["name"], one["stage"], report["protocol"]]
                writer.writerows([*head, *(point[column] for column in COLUMNS)] for point in one["points"])
    except OSError as error:
        raise PosSwapError(f"{folder}: the report cannot be written there: {error}") from error
    plot_lengths(report, paths["png"])
    return paths


def comparison(series: Sequence[dict[str, Any]], original_length: int) -> str:
    """A Markdown table of perplexities, a row per series and a column per length, with the change of the loss at the
    original length (nats per token, against the series called `base`) beside it."""
    lengths = sorted({point["length"] for one in series for point in one["points"]})
    base = next(one for one in series if one["name"] == "base")
    heads = ["scheme", "fine-tuned", *(f"{n:,}{'*' if n == original_length else ''}" for n in lengths), "change at *"]
    lines = [heads, ["---", "---", *(["---:"] * (len(lengths) + 1))]]
    for one in series:
        found = {point["length"]: point["perplexity"] for point in one["points"]}
        cells = [f"{found[n]:.3f}" if n in found else "-" for n in lengths]
        stage = {None: "", "before": "no", "after": "yes"}[one["stage"]]
        delta = "" if one is base else f"{short_cost(base, one, original_length)['delta']:+.4f}"
        lines.append([one["name"], stage, *cells, delta])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |" for line in lines]
    note = (
        "Perplexity by length in tokens. * is the trained length; the change there is of the loss, in nats per token."
    )
    return "\n".join([*rows, "", note])
