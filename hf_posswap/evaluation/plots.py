"""Perplexity against length, readable in colour, in black and white, and by the colour-blind."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from typing import Any

from ..errors import PosSwapError
from ..runs import replacing

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
) -> None:
    """Draw one line per series into the PNG file `path`.

    report_or_series: a report, or series as `measure` returns them (`{"name", "stage", "points"}`). The
    series called `base` is black. Series of one name share colour and marker; a `stage` of `before` is drawn
    dashed with hollow markers, `after` solid. original_length: tokens, the vertical line; a report has its
    own. Perplexity is on a log axis where it spans more than a factor of four.
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

    figure = Figure(figsize=(9, 4.5), dpi=200, layout="constrained")
    axes = figure.add_subplot()
    values = [point["perplexity"] for one in series for point in one["points"]]
    ticks = _ticks(sorted({point["length"] for one in series for point in one["points"]}))
    names = list(dict.fromkeys(one["name"] for one in series if one["name"] != "base"))
    for one in series:
        rank = names.index(one["name"]) if one["name"] in names else None
        label = one["name"] + (f", {one['stage']} fine-tuning" if one["stage"] else "")
        lengths = [point["length"] for point in one["points"]]
        axes.plot(
            lengths,
            [point["perplexity"] for point in one["points"]],
            label=textwrap.fill(label, width=36, break_on_hyphens=False),
            markevery=[i for i, length in enumerate(lengths) if length in ticks or length == lengths[-1]],
            **_style(rank, one["stage"]),
        )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    if max(values) > 4 * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("length of the window (tokens)")
    axes.set_ylabel("perplexity (per token; lower is better)")
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


def plot_dilution(
    series: Sequence[dict[str, Any]], path: str | os.PathLike, *, original_length: int, title: str
) -> None:
    """Draw entropy, and the weight left to a score that stays, against the keys a query sees into the PNG file `path`.

    series: `{"name", "points"}`, the points as `dilution` returns them; the one called `base` is black.
    """
    require_matplotlib()
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

    figure = Figure(figsize=(9, 4), dpi=200, layout="constrained")
    entropy, weight = figure.subplots(1, 2)
    lengths = [point["length"] for point in series[0]["points"]]
    names = [one["name"] for one in series if one["name"] != "base"]
    for one in series:
        style = _style(names.index(one["name"]) if one["name"] in names else None, None)
        for axes, key in ((entropy, "entropy"), (weight, "weight")):
            axes.plot(lengths, [point[key] for point in one["points"]], label=one["name"], **style)
    for axes in (entropy, weight):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(_ticks(lengths)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.set_xlabel("keys that a query sees (tokens)")
        axes.axvline(original_length, color="0.4", linewidth=1.2, linestyle=(0, (2, 2)), zorder=1)
        axes.grid(True, color="0.9", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(bottom=0)
    entropy.set_ylabel("entropy of attention (nats)")
    weight.set_ylabel(f"weight of the best of the nearest {lengths[0]} keys")
    figure.suptitle(f"{title}; dotted: trained length {original_length:,}", fontsize=11)
    handles, labels = entropy.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, handlelength=4)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png")


def _style(rank: int | None, stage: str | None) -> dict[str, Any]:
    """Colour and marker of the `rank`-th scheme (None: the base); the line tells stages, or schemes."""
    if rank is None:
        return BASE | {"linestyle": "solid"} | STAGES.get(stage, {})
    style = {"color": COLOURS[rank % len(COLOURS)], "marker": MARKERS[rank % len(MARKERS)]}
    style |= {"markersize": 7, "linewidth": 1.8}
    return style | (STAGES[stage] if stage else {"linestyle": DASHES[rank % len(DASHES)]})


def _ticks(lengths: Sequence[int]) -> list[int]:
    """The measured lengths; where they would collide, only those at least twice the last one kept."""
    if len(lengths) <= 8:
        return list(lengths)
    kept = [lengths[0]]
    for length in lengths:
        if length >= 2 * kept[-1]:
            kept.append(length)
    return kept
