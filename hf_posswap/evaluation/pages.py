"""The report as a Markdown page: every number beside its picture, and what was run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .report import comparison, markdown, shown

COUNTS = {"diagnostics": ("entropy", "weight", "distance", "shift")}


def page(report: dict[str, Any], pictures: Mapping[str, Path]) -> str:
    """The page of a report. pictures: by measure, beside the page."""
    how = shown(report["measure"])
    main = report["series"]
    lines = [f"# {how.title}", "", f"Protocol `{report['protocol']}`: {report['summary']}.", ""]
    if report["measure"] == "perplexity":
        lines += [comparison(main, report["original_length"])]
    else:
        lines += [_by_length(main, how.value, report["original_length"]), "", f"{how.label}; * is the trained length."]
    lines += ["", "At the trained length, against the unpatched model:", ""]
    lines += [f"- {name}: {short['delta']:+.4f} {short['unit']}" for name, short in report["shorts"].items()]
    lines += _picture(pictures, report["measure"])
    if any("key_loss" in point for one in main for point in one["points"]):
        lines += [
            "",
            "## Perplexity on key tokens",
            "",
            _by_length(main, "key_perplexity", report["original_length"]),
            "",
        ]
        lines += [
            f"Of the targets, the {max(p['key_targets'] for p in main[0]['points']):,} that "
            f"{report['settings']['evaluator']} predicts better by 2 nats from the greatest length than from the "
            "least, and well (after LongPPL). They are chosen by that model, which flatters it."
        ]
        lines += _picture(pictures, "key_perplexity")
    for name, found in report["measures"].items():
        lines += ["", f"## {found['title']}", "", *_numbers(name, found, report["original_length"])]
        lines += _picture(pictures, name)
    return "\n".join([*lines, "", "## What was run", "", *_run(report)]) + "\n"


def _numbers(name: str, found: dict[str, Any], original_length: int) -> list[str]:
    series = found["series"]
    if name == "tasks":
        rows = [(p["task"], p.get("length", ""), p["metric"]) for p in series[0]["points"]]
        lines = [["task", "length", "metric", *(one["name"] for one in series)], ["---"] * (3 + len(series))]
        for i, row in enumerate(rows):
            lines.append([*map(str, row), *(f"{one['points'][i]['value']:.3f}" for one in series)])
        return [markdown(lines)]
    if "depth" in series[0]["points"][0]:
        return [
            _by_length(series, "accuracy", original_length),
            "",
            f"{found['label']}, mean over depths. Loss of the right answer, nats per token:",
            "",
            _by_length(series, "answer_loss", original_length),
            "",
            "Prompts at each length: "
            + ", ".join(_prompts(series[0]["points"], n) for n in sorted({p["length"] for p in series[0]["points"]}))
            + ".",
            *_passkey(series),
        ]
    lines = []
    for value in COUNTS.get(name, (found["value"],)):
        lines += [f"{value}:", ""] if len(COUNTS.get(name, ())) > 1 else []
        lines += [_by_length(series, value, original_length), ""]
    if name == "diagnostics":
        lines += ["Of the queries that see about so many tokens, all in one forward of the greatest length.", ""]
    return lines[:-1]


def _prompts(points: Sequence[dict[str, Any]], length: int) -> str:
    here = [point for point in points if point["length"] == length]
    least, most = min(p["shortest_prompt"] for p in here), max(p["longest_prompt"] for p in here)
    return f"{sum(p['prompts'] for p in here)} of {least:,} to {most:,} tokens"


def _passkey(series: Sequence[dict[str, Any]]) -> list[str]:
    if "passkey" not in series[0]:
        return []
    said = [f"{one['name']} {one['passkey']['context'] or 'none'}" for one in series]
    return ["", f"Passkey context, the greatest length with 80% right: {', '.join(said)}."]


def _by_length(series: Sequence[dict[str, Any]], value: str, original_length: int) -> str:
    """A row per series and a column per length: means of `value` over the points there, `-` without."""
    lengths = sorted({point["length"] for one in series for point in one["points"]})
    heads = ["", *(f"{n:,}{'*' if n == original_length else ''}" for n in lengths)]
    lines = [heads, ["---", *(["---:"] * len(lengths))]]
    for one in series:
        cells = []
        for length in lengths:
            found = [p[value] for p in one["points"] if p["length"] == length and p.get(value) is not None]
            cells.append(f"{sum(found) / len(found):.3f}" if found else "-")
        lines.append([one["name"] + (f", {one['stage']}" if one["stage"] else ""), *cells])
    return markdown(lines)


def _picture(pictures: Mapping[str, Path], name: str) -> list[str]:
    return ["", f"![{shown(name).title}]({pictures[name].name})"] if name in pictures else []


def _run(report: dict[str, Any]) -> list[str]:
    data, hardware = report["data"], report["hardware"]
    counted = (
        f"{data['images']} pictures"
        if "images" in data
        else f"{data['documents']} document(s), {data['tokens']:,} tokens"
    )
    lines = [
        f"- data: {counted}, sha256 `{data['sha256']}`",
        f"- hardware: {hardware['device']}, {hardware['machine']}, {hardware['cpus']} CPUs, "
        f"{hardware['threads']} threads, {report['settings']['processes']} process(es)",
        f"- time: {report['seconds']:.0f} seconds",
        f"- versions: {', '.join(f'{name} {version}' for name, version in report['versions'].items())}",
        f"- command: `{report['command']}`",
    ]
    if report["measure"] == "perplexity":  # the measures that come with it decode
        lines.append("- decoding is greedy; what is drawn at random is seeded")
    return lines
