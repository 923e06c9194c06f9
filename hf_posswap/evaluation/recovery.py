"""How fast a swapped model comes back: what its curves of loss against tokens say, as a table and a plot.

A cell is one model, scheme, recipe and seed: `{"model", "scheme", "recipe", "seed", "curve", "lengths"}`. curve: pairs
(tokens trained on, loss held out), the first at 0. lengths: length in tokens -> loss, at the end. Losses are in nats
per target token.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

from ..runs import replacing
from .plots import COLOURS, DASHES, MARKERS, require_matplotlib

RECIPES = ("cold", "fit", "distil", "fit + distil")
SCRATCH, UNPATCHED = "scratch", "unpatched"
QUARTER, NEAR = 0.25, 0.02  # the goals
HEADINGS = (
    "swap",
    "recipe",
    "before any step",
    "after all tokens",
    "share of the cold swap's tokens to its final loss",
    "at 2x",
    "at 4x",
    "from scratch",
)


def tokens_to_reach(curve: Sequence[Sequence[float]], loss: float) -> float | None:
    """Tokens at which a curve is first at or below a loss, linear between its points; None where it never is."""
    (before_tokens, before_loss), *rest = curve
    if before_loss <= loss:
        return float(before_tokens)
    for tokens, value in rest:
        if value <= loss:
            return before_tokens + (tokens - before_tokens) * (before_loss - loss) / (before_loss - value)
        before_tokens, before_loss = tokens, value
    return None


def share_of_cold(cell: dict[str, Any], cold: dict[str, Any]) -> float | None:
    """The share of a cold swap's tokens after which a cell is where that one ends."""
    tokens, final = cold["curve"][-1]
    reached = tokens_to_reach(cell["curve"], final)
    return None if reached is None else reached / tokens


def table(cells: Sequence[dict[str, Any]], model: str) -> str:
    """Markdown: a row per scheme and recipe of one model; means over seeds [lowest, highest]; - where not run,
    or where a table ends before.
    """
    mine = [cell for cell in cells if cell["model"] == model and not cell.get("tried")]
    lines = [f"| {' | '.join(HEADINGS)} |", "|---|---|" + "---:|" * (len(HEADINGS) - 2)]
    for scheme in dict.fromkeys(cell["scheme"] for cell in mine):
        of_scheme = {(cell["recipe"], cell["seed"]): cell for cell in mine if cell["scheme"] == scheme}
        ceiling = _figure([c["curve"][-1][1] for (recipe, _), c in of_scheme.items() if recipe == SCRATCH])
        for recipe in RECIPES:
            runs = {seed: cell for (one, seed), cell in of_scheme.items() if one == recipe}
            if not runs:
                continue
            paired = [(c, of_scheme["cold", seed]) for seed, c in runs.items() if ("cold", seed) in of_scheme]
            shares = [share_of_cold(cell, cold) for cell, cold in paired]
            first, second, fourth = list(zip(*(_losses(cell) for cell in runs.values()), strict=True))[:3]
            cells_of_row = (
                scheme,
                recipe,
                _figure([cell["curve"][0][1] for cell in runs.values()]),
                _figure(first),
                "-" if scheme == UNPATCHED else _shares(shares),
                _figure(second),
                _figure(fourth),
                ceiling,
            )
            lines.append(f"| {' | '.join(cells_of_row)} |")
    return "\n".join(lines)


def goals(cells: Sequence[dict[str, Any]], model: str) -> str:
    """Markdown: which fitted swaps need at most a quarter of the cold one's tokens to its final loss."""
    mine = {(c["scheme"], c["recipe"], c["seed"]): c for c in cells if c["model"] == model and not c.get("tried")}
    worst: dict[str, float] = {}
    for (scheme, recipe, seed), cell in mine.items():
        if recipe == "fit" and (scheme, "cold", seed) in mine:
            share = share_of_cold(cell, mine[scheme, "cold", seed])
            worst[scheme] = max(worst.get(scheme, 0.0), math.inf if share is None else share)
    said = (
        f"{scheme} {'met' if share <= QUARTER else 'missed'} ({'never there' if share == math.inf else f'{share:.0%}'})"
        for scheme, share in worst.items()
    )
    return f"Goal, fitted: at most {QUARTER:.0%} of the cold swap's tokens to its final loss, in every seed: " + (
        ", ".join(said) + "." if worst else "not measured."
    )


def tried(cells: Sequence[dict[str, Any]], hardest: tuple[str, str, str], base: float) -> str:
    """Markdown: how near the swap with a goal of its own comes to the un-patched loss, and what was tried for it."""
    mine = [c for c in cells if (c["model"], c["scheme"], c["recipe"]) == hardest and c["seed"] == 0]
    rows = [(c.get("tried") or "as in the table", *c["curve"][-1]) for c in mine]
    lines = [
        f"Goal: {hardest[1]}, {hardest[2]}, within {NEAR:.0%} of the loss before the swap, on its share of the tokens.",
        "",
        "| trained | tokens | after all of them | above the loss before the swap |",
        "|---|---:|---:|---:|",
    ]
    lines += [f"| {name} | {tokens:,} | {loss:.3f} | {loss / base - 1:.1%} |" for name, tokens, loss in rows]
    return "\n".join(lines) + "\n"


def untaught(cells: Sequence[dict[str, Any]], model: str, base: float) -> bool:
    """Whether no cold swap costs more than NEAR before any step: there is nothing to recover."""
    cold = [c["curve"][0][1] for c in cells if (c["model"], c["recipe"]) == (model, "cold")]
    return max(cold, default=math.inf) < (1 + NEAR) * base


def _losses(cell: dict[str, Any]) -> tuple[float, float, float]:
    """The loss at the end of the curve, and at twice and four times the trained length, None where it cannot be."""
    return cell["curve"][-1][1], *[cell["lengths"][length] for length in sorted(cell["lengths"], key=int)[1:]]


def _shares(shares: Sequence[float | None]) -> str:
    if not shares:
        return "-"
    return "not reached" if None in shares else _figure([100 * share for share in shares], "{:.0f} %")


def _figure(values: Sequence[float | None], form: str = "{:.3f}") -> str:
    if not values or None in values:
        return "-"
    low, high = form.format(min(values)), form.format(max(values))
    mean = form.format(sum(values) / len(values))
    return mean if len(values) == 1 else f"{mean} [{low}, {high}]"


def plot_recovery(cells: Sequence[dict[str, Any]], path: str | os.PathLike, base: dict[str, float]) -> None:
    """Draw loss against tokens into the PNG file `path`: a panel per model and scheme, a line per recipe and seed.

    base: model -> loss before the swap, the horizontal line.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    cells = [cell for cell in cells if not cell.get("tried")]
    panels = list(dict.fromkeys((c["model"], c["scheme"]) for c in cells if c["recipe"] in RECIPES))
    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(3.2 * columns, 2.6 * rows + 0.6), dpi=160, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    handles: dict[str, Any] = {}
    for axes, (model, scheme) in zip(grid.flat, panels, strict=False):
        handles["before the swap"] = axes.axhline(base[model], color="black", linewidth=1, linestyle=(0, (1, 1)))
        for rank, recipe in enumerate(RECIPES):
            style = {
                "color": COLOURS[rank],
                "linestyle": DASHES[rank - 1] if rank else "solid",
                "marker": MARKERS[rank],
            }
            for cell in cells:
                if (cell["model"], cell["scheme"], cell["recipe"]) == (model, scheme, recipe):
                    tokens, losses = zip(*cell["curve"], strict=True)
                    (line,) = axes.plot([t / 1000 for t in tokens], losses, markersize=4, linewidth=1.4, **style)
                    handles[recipe] = line
        axes.set_title(f"{model}: {scheme}", fontsize=9)
        axes.set_xlabel("thousand tokens", fontsize=8)
        axes.set_ylabel("loss held out (nats)", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(True, color="0.9", linewidth=0.8)
    across = min(len(handles), 2 * columns)
    look = {"ncols": across, "frameon": False, "handlelength": 3, "fontsize": 8}
    figure.legend(handles.values(), handles, loc="outside lower center", **look)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png")
