"""Drawing: every scheme draws itself. python -m hf_posswap.drawing --output_dir docs/pictures

Lines differ by style and tables by lightness, so that a picture reads in black and white.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .scheme import Scheme, make_scheme, registry
from .sites import BIAS, EMBED, ROTARY, BiasGeometry, EmbedGeometry, RotaryGeometry

LENGTH, FACTOR, HEAD_DIM, THETA = 4096, 4, 128, 10000.0  # the model that a rotary scheme is drawn on
ROWS, WIDTH = 128, 64  # the table that an embed scheme is drawn on

STEPS = [1 + 3 * (i / 63) ** 2 for i in range(64)]
# scheme -> the variants drawn, one beside or over the other; any other scheme is drawn with EXAMPLE
EXAMPLE = [{"factor": FACTOR}]
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "rope": [{"rope_theta": 500000.0}],
    "dynamic": [{"factor": FACTOR}, {"factor": FACTOR, "freeze_at": FACTOR * LENGTH}],
    "longrope": [{"factor": FACTOR, "long_factor": STEPS}],
    "proportional": [{"partial_rotary_factor": 0.75}],
    "sinusoidal": [{"layout": "interleaved"}, {"layout": "halves"}, {"init": "fit"}],
    "learned": [{"init": init} for init in ("interpolate", "tile", "hierarchical", "fit", "random")],
    "learned2d": [{"resize": "bicubic"}, {"resize": "bilinear"}, {"resize": "tile"}],
    "sincos2d": [{"convention": "mae"}, {"convention": "moco"}, {"convention": "big_vision"}, {"init": "fit"}],
    "nope": [{}],
    "alibi": [{}],
    "t5": [{}],
    "kerple": [{"kernel": "log"}, {"kernel": "power"}],
    "fire": [{"init_L": 64}],
    "sandwich": [{}],
    "logn": [{}, {"clip": False}],
    "xpos": [{}],
    "rope2d": [{}, {"kind": "mixed"}],
    "bias2d": [{}],
}
STYLES = ("-", "-.", (0, (1, 1)))


def draw(name: str) -> Any:
    """A matplotlib figure of one scheme. Raises NotImplementedError for a site that has no picture."""
    cls = registry()[name]
    variants = [_variant(name, params) for params in VARIANTS.get(name, EXAMPLE)]
    if cls.ndim == 2 and cls.sites <= {BIAS, ROTARY}:
        figure = _draw_offsets(variants)
    elif cls.sites == {BIAS}:
        figure = _draw_temperature(variants) if cls.stacks else _draw_bias(variants)
    elif cls.in_attention:
        figure = _draw_decay(variants)
    elif cls.sites <= {ROTARY}:
        figure = _draw_rotary(variants)
    elif cls.sites == {EMBED}:
        figure = (_draw_maps if name.endswith("2d") else _draw_tables)(variants)
    else:
        raise NotImplementedError(f"{name}: no picture for {', '.join(sorted(cls.sites))}")
    figure.suptitle(name, fontweight="bold")
    return figure


def _variant(name: str, params: dict[str, Any]) -> Scheme:
    cls = registry()[name]
    sized = {"max_positions": FACTOR * ROWS} if cls.sites == {EMBED} and not name.endswith("2d") else {}
    return make_scheme(name, params | sized)


def _axes(columns: int, width: float, **options: Any) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # no pyplot: nothing global, and no display needed

    figure = Figure(figsize=(width, 3.2), layout="constrained", dpi=120)
    return figure, figure.subplots(1, columns, squeeze=False, **options)[0]


# --- rotary: how much each period is stretched, and what two equal vectors score at a distance


def _draw_rotary(variants: list[Scheme]) -> Any:
    site = RotaryGeometry({"rope_type": "default", "rope_theta": THETA}, LENGTH, HEAD_DIM, HEAD_DIM, "halves")
    plain, _ = frequencies(site.rope_parameters, LENGTH)
    figure, (stretch, score) = _axes(2, 9.5)
    distance = torch.arange(0, FACTOR * LENGTH)

    drawn = []
    for scheme in variants:
        if not scheme.sites:
            drawn.append((str(scheme), torch.zeros_like(plain), 1.0))
            continue
        change = scheme.rotary(site)
        for seen in (2 * LENGTH, FACTOR * LENGTH) if change.rope_parameters["rope_type"] == "dynamic" else (None,):
            label = str(scheme) if seen is None else f"{scheme} at {seen} tokens"
            drawn.append((label, *frequencies(change.rope_parameters, change.config_length, seen)))

    period = 2 * torch.pi / plain
    for (label, found, scale), style in zip(drawn, STYLES, strict=False):
        turns = found > 0
        stretch.plot(period[turns], plain[turns] / found[turns], color="black", linestyle=style, label=_short(label))
        if not turns.all():
            stretch.plot(period[~turns], torch.ones(int((~turns).sum())), "x", color="black", label="does not turn")
        score.plot(*_score(found, distance, scale), color="black", linestyle=style, linewidth=1)
    score.plot(*_score(plain, distance), color="0.6", linewidth=1, zorder=0, label="un-scaled rope")
    score.axvline(LENGTH, color="0.5", linestyle=":")
    stretch.axvline(LENGTH, color="0.5", linestyle=":", label="trained length")
    stretch.set(
        xscale="log", xlabel="period of a pair of dimensions, un-scaled (tokens)", ylabel="period multiplied by"
    )
    stretch.set_ylim(0, 1.15 * stretch.get_ylim()[1])
    stretch.legend(fontsize=8, loc="best")
    score.set(xlabel="distance (tokens)", ylabel="q·k of equal vectors, smoothed")
    score.legend(fontsize=8, loc="upper right")
    return figure


# --- inside attention: what a logit gets at a distance, from a few heads


HEADS, REACH = 8, 512


def _draw_bias(variants: list[Scheme]) -> Any:
    figure, axes = _axes(len(variants), 4.75 * max(2, len(variants)) / (1 if len(variants) > 1 else 1.6), sharey=False)
    distance = torch.arange(REACH)
    for axis, scheme in zip(axes, variants, strict=True):
        change = scheme.bias(BiasGeometry(HEADS, REACH, causal=True))
        tensors = change.parameters | change.constants
        if change.bias is not None:
            rows = {"": change.bias(tensors, -distance)}
        else:  # it depends on the query's place too: the last query, and one in the middle
            rows = {
                f", query at {place}": change.placed(tensors, -distance[None, : place + 1], torch.tensor([[place]]))[
                    ..., 0, :
                ]
                for place in (REACH - 1, REACH // 4)
            }
        for label, values in rows.items():
            style = STYLES[list(rows).index(label)]
            for head in (0, HEADS // 2, HEADS - 1):
                shade = str(0.6 * head / (HEADS - 1))
                values_of = values[head].detach()
                axis.plot(
                    distance[: len(values_of)], values_of, color=shade, linestyle=style, label=f"head {head + 1}{label}"
                )
        given = ", ".join(f"{k}={v}" for k, v in scheme.given().items())
        axis.set_title(given or "as it starts", fontsize=9)
        axis.set(xlabel="distance to the key (tokens)", ylabel=f"added to the logit ({HEADS} heads)")
        axis.legend(fontsize=8)
    return figure


def _draw_temperature(variants: list[Scheme]) -> Any:
    figure, (axis,) = _axes(1, 5.5)
    position = torch.arange(FACTOR * LENGTH)
    for scheme, style in zip(variants, STYLES, strict=False):
        change = scheme.bias(BiasGeometry(HEADS, LENGTH, causal=True))
        axis.plot(position, change.temperature(position), color="black", linestyle=style, label=str(scheme))
    axis.axvline(LENGTH, color="0.5", linestyle=":", label="trained length")
    axis.set(xlabel="position of the query (tokens)", ylabel="logits multiplied by")
    axis.legend(fontsize=8)
    return figure


def _draw_decay(variants: list[Scheme]) -> Any:
    """The score of two equal vectors, turned by the package's own rotation, beside that of rope."""
    from .rotation import Rotation

    site = RotaryGeometry({"rope_type": "default", "rope_theta": THETA}, LENGTH, HEAD_DIM, HEAD_DIM, "halves")
    plain, _ = frequencies(site.rope_parameters, LENGTH)
    figure, (axis,) = _axes(1, 5.5)
    same = torch.ones(1, 1, LENGTH, HEAD_DIM, dtype=torch.float64)
    decays = [("rope", None), *((str(scheme), scheme.rotary(site).decay) for scheme in variants)]
    for (label, decay), shade in zip(decays, ("0.6", "black"), strict=False):
        rotation, places = Rotation(plain[None], decay=decay, centre=LENGTH // 2), torch.arange(LENGTH)[:, None]
        tables = (rotation.tables(places, is_key, same.dtype) for is_key in (False, True))
        query, key = (rotation.turn(same, *pair)[0, 0] for pair in tables)
        score = (key.flip(0) @ query[-1]) / HEAD_DIM  # by distance from the last query
        x, y = (t.unfold(0, 64, 16).double().mean(1) for t in (torch.arange(LENGTH), score))
        axis.plot(x, y, color=shade, linewidth=1, label=label)
    axis.set(xlabel="distance (tokens)", ylabel="q·k of equal vectors, smoothed")
    axis.legend(fontsize=8)
    return figure


PATCHES = 14  # patches of a side of the image that a scheme of two dimensions is drawn on


def _draw_offsets(variants: list[Scheme]) -> Any:
    """What a patch in the middle adds to its logits, or scores with vectors equal to its own, over all offsets."""
    maps = [one for scheme in variants for one in _offsets(scheme)]
    figure, axes = _axes(len(maps), 2.7 * len(maps) + 1.2, sharey=True)
    reach = (0.5 - PATCHES, PATCHES - 0.5)
    for axis, (label, values) in zip(axes, maps, strict=True):
        image = axis.imshow(values, cmap="gray", extent=(*reach, *reach[::-1]), interpolation="nearest")
        axis.set_title(label, fontsize=9)
        axis.set_xlabel("columns to the key")
        figure.colorbar(image, ax=axis, shrink=0.8)
    axes[0].set_ylabel("rows to the key")
    return figure


def _offsets(scheme: Scheme) -> list[tuple[str, Tensor]]:
    """(label, values (2 PATCHES - 1, 2 PATCHES - 1) by rows and columns from query to key) of a few heads."""
    given = ", ".join(f"{k}={v}" for k, v in scheme.given().items()) or "as it starts"
    if BIAS in scheme.sites:
        change = scheme.bias(BiasGeometry(HEADS, PATCHES * PATCHES, causal=False, grid=(PATCHES, PATCHES)))
        values = change.between(change.parameters, PATCHES, PATCHES)
        return [(f"{given}, head {head + 1} of {HEADS}", values[head]) for head in (0, HEADS // 2, HEADS - 1)]
    change = scheme.rotary(RotaryGeometry({}, PATCHES * PATCHES, HEAD_DIM, HEAD_DIM, None, heads=HEADS))
    offset = torch.arange(1 - PATCHES, PATCHES)
    away = torch.stack(torch.meshgrid(offset, offset, indexing="ij"), -1).double()
    if change.frequencies.dim() == 2:
        return [("kind=axial, every head", (away @ change.frequencies.double()).cos().mean(-1))]
    return [
        (f"{given}, head {head + 1} of {HEADS}", (away @ change.frequencies[head].double()).cos().mean(-1))
        for head in (0, HEADS // 2, HEADS - 1)
    ]


def _short(label: str) -> str:
    """A scheme's parameters, without long lists of factors."""
    import re

    return re.sub(r"\([\d., -]{40,}\)", "(...)", label)


def frequencies(parameters: dict[str, Any], length: int, seen: int | None = None) -> tuple[Tensor, float]:
    """(radians per token of every pair, (R / 2,); multiplier of cos and sin), by transformers' own functions."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(head_dim=HEAD_DIM, max_position_embeddings=length, rope_parameters=dict(parameters))
    if parameters["rope_type"] == "default":
        return parameters["rope_theta"] ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM), 1.0
    return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu", seq_len=seen or length)


def _score(found: Tensor, distance: Tensor, scale: float = 1.0, window: int = 256) -> tuple[Tensor, Tensor]:
    """(distances, scores) of two equal vectors: the mean over pairs of cos(distance * frequency), smoothed."""
    found = found.double()
    score = (distance[:, None] * found).cos().mean(1) * scale**2
    return distance.unfold(0, window, window // 4).double().mean(1), score.unfold(0, window, window // 4).mean(1)


# --- tables: a heat map for each variant


def _draw_tables(variants: list[Scheme]) -> Any:
    table = _trained_table()
    site = EmbedGeometry(WIDTH, ROWS, table, lambda: table.square().mean().sqrt().item())
    figure, axes = _axes(len(variants), 2.1 * len(variants) + 1.2, sharey=True)
    for axis, scheme in zip(axes, variants, strict=True):
        change = scheme.embed(site)
        rows = change.vectors(torch.arange(change.length))
        limit = 2.5 * table.std().item()
        image = axis.imshow(rows.numpy(), cmap="gray", aspect="auto", vmin=-limit, vmax=limit, interpolation="nearest")
        axis.axhline(ROWS - 0.5, color="black", linestyle="--", linewidth=1)
        given = {k: v for k, v in scheme.given().items() if k != "max_positions"}
        axis.set_title(", ".join(f"{k}={v}" for k, v in given.items()) or _default(scheme), fontsize=9)
        axis.set_xlabel("dimension")
    axes[0].set_ylabel("position (dashed: trained length)")
    figure.colorbar(image, ax=list(axes), shrink=0.8)
    return figure


def _default(scheme: Scheme) -> str:
    return {"sinusoidal": "layout=interleaved", "learned": "init=interpolate"}[scheme.name]


def _trained_table() -> Tensor:
    """A table (ROWS, WIDTH) as training leaves them: waves of every length, and noise."""
    generator = torch.Generator().manual_seed(0)
    phase, noise = torch.rand(WIDTH, generator=generator), torch.randn(ROWS, WIDTH, generator=generator)
    cycles = torch.linspace(8, 0.5, WIDTH)
    turns = torch.arange(ROWS)[:, None] / ROWS * cycles + phase
    return 0.05 * ((2 * torch.pi * turns).sin() + 0.1 * noise)


# --- tables of patches: how alike the vector of one patch is to all others (An Image is Worth 16x16 Words, fig. 7)

SIDE = 8  # patches of the picture, along each side; twice that after the swap


def _draw_maps(variants: list[Scheme]) -> Any:
    rows, columns = torch.arange(SIDE * SIDE) // SIDE, torch.arange(SIDE * SIDE) % SIDE
    waves = _trained_table()[: 4 * SIDE : 4]
    table = torch.cat([waves[rows, : WIDTH // 2], waves[columns, : WIDTH // 2]], dim=1)
    site = EmbedGeometry(
        WIDTH, len(table), table, lambda: table.square().mean().sqrt().item(), (SIDE, SIDE), (2 * SIDE, 2 * SIDE)
    )
    figure, axes = _axes(1 + len(variants), 2.4 * (1 + len(variants)) + 0.8)
    drawn = [("before", table, SIDE)]
    for scheme in variants:
        given = ", ".join(f"{k}={v}" for k, v in scheme.given().items())
        change = scheme.embed(site)
        drawn.append((given or "by default", change.vectors(torch.arange(change.length)), 2 * SIDE))
    for axis, (label, vectors, side) in zip(axes, drawn, strict=True):
        image = axis.imshow(similarity(vectors, side, side // 4, side // 4), cmap="gray", vmin=-1, vmax=1)
        axis.set_title(label, fontsize=9)
        axis.set(xlabel="column", ylabel="row")
    figure.colorbar(image, ax=list(axes), shrink=0.8, label=f"cosine with the patch at {side // 4}, {side // 4}")
    return figure


def similarity(vectors: Tensor, columns: int, row: int, column: int) -> Tensor:
    """(h, w): cosines of the vectors (h * w, E) of all patches with that of one."""
    unit = torch.nn.functional.normalize(vectors.double(), dim=-1)
    return (unit @ unit[row * columns + column]).reshape(-1, columns)


def draw_all(folder: Path, report: Callable[[str], None] = print) -> list[Path]:
    """Write `NAME.png` for every scheme that has a picture; returns what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name in registry():
        try:
            figure = draw(name)
        except NotImplementedError as missing:
            report(f"skipped {missing}")
            continue
        written.append(folder / f"{name}.png")
        figure.savefig(written[-1], metadata={"Software": None})
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw every scheme.")
    parser.add_argument("--output_dir", type=Path, required=True, help="Folder for one PNG per scheme.")
    for path in draw_all(parser.parse_args().output_dir):
        print(path)


if __name__ == "__main__":
    main()
