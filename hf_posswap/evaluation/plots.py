"""Numbers against length, readable in colour, in black and white, and by the colour-blind."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import PosSwapError
from ..runs import replacing
from .report import shown

# the base lies on top, and is smaller so that a line under it still shows
BASE = {"color": "black", "marker": "o", "markersize": 4.5, "linewidth": 1.2, "zorder": 3}
# Okabe and Ito, https://jfly.uni-koeln.de/color/, less black (the base) and yellow (too pale on white).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("s", "^", "D", "v", "P", "X")
DASHES = ((0, (5, 2)), (0, (1, 1.5)), (0, (5, 2, 1, 2)), (0, (3, 1, 1, 1, 1, 1)), (0, (8, 3)), (0, (2, 2)))
STAGES = {"before": {"linestyle": (0, (4, 2)), "markerfacecolor": "white"}, "after": {"linestyle": "solid"}}


def require_matplotlib() -> None:
    """Raise PosSwapError, with the remedy, where plots cannot be drawn; call it before hours of computing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise PosSwapError("plots need matplotlib; pip install 'hf_posswap[plots]'") from None


def plot_lengths(
    report_or_series: dict[str, Any] | Sequence[dict[str, Any]],
    path: str | os.PathLike,
    *,
    original_length: int | None = None,
    title: str | None = None,
    value: str = "perplexity",
    xlabel: str = "length of the window (tokens)",
    ylabel: str = "perplexity (per token; lower is better)",
) -> None:
    """Draw one line per series, of the points' `value`, into the PNG file `path`.

    report_or_series: a report, or series as `measure` returns them (`{"name", "stage", "points"}`). The
    series that has no base of its own is black. Series of one name share colour and marker; a `stage` of `before` is
    drawn dashed with hollow markers, `after` solid. original_length: tokens, the vertical line; a report has its
    own. A perplexity is on a log axis where it spans more than a factor of four.
    """
    require_matplotlib()
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter, NullLocator, StrMethodFormatter

    series = report_or_series
    if isinstance(report_or_series, dict):
        series, original_length = report_or_series["series"], report_or_series["original_length"]
        title = title or f"Perplexity by length (protocol: {report_or_series['protocol']})"
    if not series:
        raise PosSwapError("report_or_series=[] holds nothing to draw")

    series = [one | {"points": [p for p in one["points"] if p.get(value) is not None]} for one in series]
    figure = Figure(figsize=(9, 4.5), dpi=160, layout="constrained")
    axes = figure.add_subplot()
    values = [point[value] for one in series for point in one["points"]]
    ticks = _ticks(sorted({point["length"] for one in series for point in one["points"]}))
    ranks = _ranks(series)
    for one in series:
        label = one["name"] + (f", {one['stage']} fine-tuning" if one["stage"] else "")
        lengths = [point["length"] for point in one["points"]]
        axes.plot(
            lengths,
            [point[value] for point in one["points"]],
            label=textwrap.fill(label, width=36, break_on_hyphens=False),
            markevery=[i for i, length in enumerate(lengths) if length in ticks or length == lengths[-1]],
            **_style(ranks[one["name"]], one["stage"]),
        )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    if "perplexity" in value and max(values) > 4 * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(True, color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if original_length is not None:
        axes.axvline(original_length, color="0.4", linewidth=1.2, linestyle=(0, (2, 2)), zorder=1)
        axes.annotate(
            f"trained length {original_length:,}",
            xy=(original_length, 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=8,
            color="0.3",
        )
    if title:
        axes.set_title(title, fontsize=11, pad=18)
    figure.legend(loc="outside right upper", frameon=False, fontsize=9, handlelength=4, labelspacing=0.8)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png")


def plot_panels(
    series: Sequence[dict[str, Any]],
    path: str | os.PathLike,
    panels: Sequence[tuple[str, str]],
    *,
    original_length: int,
    title: str,
    xlabel: str = "keys that a query sees (tokens)",
) -> None:
    """Draw several numbers of the same points side by side, against length, into the PNG file `path`.

    panels: (number, what it is) each; a number that no point has is left out.
    """
    require_matplotlib()
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

    panels = [(key, label) for key, label in panels if any(p.get(key) is not None for o in series for p in o["points"])]
    figure = Figure(figsize=(4.5 * len(panels), 4), dpi=160, layout="constrained")
    every = figure.subplots(1, len(panels), squeeze=False)[0]
    ticks = _ticks(sorted({point["length"] for one in series for point in one["points"]}))
    ranks = _ranks(series)
    for axes, (key, label) in zip(every, panels, strict=True):
        for one in series:
            points = [point for point in one["points"] if point.get(key) is not None]
            values = [point[key] for point in points]
            axes.plot([p["length"] for p in points], values, label=one["name"], **_style(ranks[one["name"]], None))
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.set_xlabel(xlabel)
        axes.set_ylabel(label)
        axes.axvline(original_length, color="0.4", linewidth=1.2, linestyle=(0, (2, 2)), zorder=1)
        axes.grid(True, color="0.9", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(bottom=0)
    figure.suptitle(f"{title}; dotted: trained length {original_length:,}", fontsize=11)
    handles, labels = every[0].get_legend_handles_labels()
    columns = min(len(labels), 3 * len(panels))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, handlelength=4)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png")


def plot_depths(series: Sequence[dict[str, Any]], path: str | os.PathLike, *, original_length: int, title: str) -> None:
    """Draw a map of accuracy, length by depth, for each series into the PNG file `path`; the numbers stand in it, with
    the right answer's loss.

    A task without depths has one row. Dark is right: one scale of lightness, which a black and white print keeps.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    columns = min(3, len(series))
    rows = -(-len(series) // columns)
    lengths = sorted({point["length"] for one in series for point in one["points"]})
    depths = sorted({point["depth"] for one in series for point in one["points"]}, key=lambda d: -1 if d is None else d)
    height = 1.2 + 0.45 * len(depths)
    figure = Figure(
        figsize=(1.2 + columns * (1.2 + 0.62 * len(lengths)), rows * height + 0.5), dpi=160, layout="constrained"
    )
    every = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, one in zip(every, series, strict=False):
        cells = {(point["depth"], point["length"]): point for point in one["points"]}
        grid = [[cells[d, n]["accuracy"] if (d, n) in cells else float("nan") for n in lengths] for d in depths]
        axes.imshow(grid, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        for (depth, length), point in cells.items():
            place = {"x": lengths.index(length), "y": depths.index(depth), "ha": "center", "va": "center"}
            colour = "white" if point["accuracy"] > 0.6 else "black"
            text = f"{point['accuracy']:.2f}\n{point['answer_loss']:.1f} nats"
            axes.text(s=text, fontsize=7, color=colour, **place)
        axes.set_title(textwrap.fill(one["name"], width=34), fontsize=9)
        axes.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths], fontsize=8)
        axes.set_yticks(range(len(depths)), ["" if d is None else f"{d:.0%}" for d in depths], fontsize=8)
        if depths != [None]:
            axes.set_ylabel("depth", fontsize=8)
        beyond = sum(length <= original_length for length in lengths)
        if 0 < beyond < len(lengths):
            axes.axvline(beyond - 0.5, color="black", linewidth=1.2, linestyle=(0, (2, 2)))
    for axes in every[len(series) :]:
        axes.set_visible(False)
    note = f"right of the dotted line: beyond the trained length {original_length:,}"
    if lengths[0] > original_length:
        note = f"all beyond the trained length {original_length:,}"
    figure.suptitle(
        f"{title}\nshare of right answers, and the loss of the right one, by length (tokens);\n{note}", fontsize=10
    )
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png")


DIAGNOSTICS = (
    ("entropy", "entropy of attention (nats)"),
    ("weight", "weight of the best of the nearest keys"),
    ("distance", "attention distance, mean of layers (tokens)"),
    ("shift", "change under a common shift (relative)"),
)


def plot_report(report: dict[str, Any], folder: str | os.PathLike, stem: str) -> dict[str, Path]:
    """Draw every measure of a report that has a picture; their paths by measure."""
    original, main = report["original_length"], report["measure"]
    paths = {main: Path(folder) / f"{stem}.png"}
    axis = {"xlabel": "size (pixels)"} if main == "features" else {}
    how = shown(main)
    options = {"original_length": original, "value": how.value, "ylabel": how.label} | axis
    plot_lengths(report["series"], paths[main], title=f"{how.title} (protocol: {report['protocol']})", **options)
    if any(point.get("key_loss") is not None for one in report["series"] for point in one["points"]):
        how, paths["key_perplexity"] = shown("key_perplexity"), Path(folder) / f"{stem}_key_perplexity.png"
        options = {"original_length": original, "value": how.value, "ylabel": how.label}
        plot_lengths(report["series"], paths["key_perplexity"], title=how.title, **options)
    for name, found in report["measures"].items():
        path, title, series = Path(folder) / f"{stem}_{name}.png", found["title"], found["series"]
        if name == "tasks":
            continue
        if name == "diagnostics":
            plot_panels(series, path, DIAGNOSTICS, original_length=original, title=title)
        elif "depth" in series[0]["points"][0]:
            plot_depths(series, path, original_length=original, title=title)
        else:
            xlabels = {"curve": "tokens up to the target", "accuracy": "size (pixels)"}
            xlabel = xlabels.get(name, "length of the text (tokens)")
            options = {"original_length": original, "value": found["value"], "ylabel": found["label"], "xlabel": xlabel}
            plot_lengths(series, path, title=title, **options)
        paths[name] = path
    return paths


def _ranks(series: Sequence[dict[str, Any]]) -> dict[str, int | None]:
    """The place of each name among the patched models; None for an unpatched one."""
    patched = [
        one["name"] for one in series if one.get("base") is not None or ("base" not in one and one["name"] != "base")
    ]
    names = list(dict.fromkeys(patched))
    return {one["name"]: names.index(one["name"]) if one["name"] in names else None for one in series}


def _style(rank: int | None, stage: str | None) -> dict[str, Any]:
    """Colour and marker of the `rank`-th scheme (None: the base); the line tells stages, or schemes."""
    if rank is None:
        return BASE | {"linestyle": "solid"} | STAGES.get(stage, {})
    style = {"color": COLOURS[rank % len(COLOURS)], "marker": MARKERS[rank % len(MARKERS)]}
    style |= {"markersize": 7, "linewidth": 1.8}
    turn = rank // len(COLOURS)
    if turn % 2:  # the colours begin again: hollow markers, another dash
        style |= {"markerfacecolor": "white", "markeredgewidth": 1.6}
    return style | (STAGES[stage] if stage else {"linestyle": DASHES[(rank + turn) % len(DASHES)]})


def _ticks(lengths: Sequence[int]) -> list[int]:
    """The measured lengths; where they would collide, only those at least twice the last one kept."""
    if len(lengths) <= 8:
        return list(lengths)
    kept = [lengths[0]]
    for length in lengths:
        if length >= 2 * kept[-1]:
            kept.append(length)
    return kept
