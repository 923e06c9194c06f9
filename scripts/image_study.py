"""A small ViT at twice and three times its resolution, under every scheme: before and after a short fine-tune.

python scripts/image_study.py --output_dir docs/images

Pictures are drawn on the spot: a red and a blue disc on noise; the class is where the blue one stands, seen from the
red one, so that a model without positions guesses. The base is trained with a learned table; each scheme then takes
its place, at each resolution, and is tuned as scripts/finetune.py does it. Writes results.json, table.md and
similarity.png; a study that was stopped goes on.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hf_posswap.arguments import parse, run

CLASSES = ("above", "below", "left", "right")
SIDE, PATCH = 24, 4  # pixels
DISC, APART = 5, 8  # pixels: a disc, and the least distance between two along the axis that tells the class
BASE_ROWS, TUNE_ROWS = 64, 16  # pictures in a step
BASE_RATE, TUNE_RATES = 1e-3, (1e-4, 3e-4, 1e-3)  # of the latter the greatest that does no harm
UNHARMED = "learned2d bicubic"  # the swap that has nothing to learn, and could only lose by a rate too great
SWAPS: dict[str, tuple[str, dict[str, Any]]] = {
    "learned2d bicubic": ("learned2d", {}),
    "learned2d bilinear": ("learned2d", {"resize": "bilinear"}),
    "learned2d tile": ("learned2d", {"resize": "tile"}),
    "sincos2d": ("sincos2d", {}),
    "sincos2d fit": ("sincos2d", {"init": "fit"}),
    "nope": ("nope", {}),
    "rope, row by row": ("rope", {"ndim": 1}),
    "alibi, row by row": ("alibi", {"ndim": 1}),
    "rope2d": ("rope2d", {}),
    "bias2d": ("bias2d", {}),
    "bias2d fit": ("bias2d", {}),
}
FITTED = ("bias2d fit",)  # to what the base's table does on every fourth picture of a fine-tune, at the base's own size
DRAWN = ("learned2d", "sincos2d")  # schemes whose table is drawn
TILES = SIDE // PATCH  # of a side of the drawing: a patch of the base each


@dataclass
class StudyArguments:
    """Sizes of the study."""

    output_dir: str = field(metadata={"help": "Folder for results.json, table.md and similarity.png."})
    work_dir: str = field(default="runs/images", metadata={"help": "Folder for pictures, models and finished cells."})
    scales: list[int] = field(default_factory=lambda: [2, 3], metadata={"help": f"Resolutions, times {SIDE} pixels."})
    schemes: list[str] | None = field(default=None, metadata={"help": f"Some of: {'; '.join(SWAPS)}. All, else."})
    train_pictures: int = field(default=8192, metadata={"help": "Pictures that the base is trained on."})
    tune_pictures: int = field(default=1024, metadata={"help": "Pictures of a fine-tune, which sees each once."})
    test_pictures: int = field(default=400, metadata={"help": "Pictures that are classified, the same at every size."})
    steps: int = field(default=800, metadata={"help": f"Steps of the base, {BASE_ROWS} pictures each."})
    width: int = field(default=64, metadata={"help": "Hidden size; a multiple of 16."})
    layers: int = field(default=3, metadata={"help": "Layers."})
    seed: int = field(default=0, metadata={"help": "Of every draw."})


def main() -> None:
    (given,) = parse(StudyArguments, description=__doc__.splitlines()[0])
    import datasets
    import transformers
    from tqdm import tqdm

    from hf_posswap import runs
    from hf_posswap.errors import PosSwapError, nearest

    for name in given.schemes or ():
        if name not in SWAPS:
            raise PosSwapError(f"--schemes={name!r} is unknown; {nearest(name, SWAPS)}")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    study, output = Study(given), Path(given.output_dir)
    cells = [(name, scale) for scale in given.scales for name in given.schemes or SWAPS]
    results = {
        "arguments": {name: value for name, value in asdict(given).items() if not name.endswith("_dir")},
        "unit": "share of right classes",
        "base": study.base_cell(),
        "rate": study.rate(),
        "cells": [study.cell(name, scale) for name, scale in tqdm(cells, unit="cell")],
        "command": runs.command(),
        "hardware": runs.hardware("cpu"),
        "versions": runs.versions(),
    }
    runs.write_json(output / "results.json", results)
    (output / "table.md").write_text(table(results), encoding="utf-8")
    draw(study, output / "similarity.png")
    print(table(results), end="")


class Study:
    """Pictures, the base, and one cell at a time; everything that is done lies in the work folder."""

    def __init__(self, given: StudyArguments) -> None:
        self.given = given
        elsewhere = ("output_dir", "work_dir", "scales", "schemes")
        sizes = [str(value) for name, value in asdict(given).items() if name not in elsewhere]
        self.folder = Path(given.work_dir) / "-".join(sizes)  # other sizes, another study

    def pictures(self, split: str, scale: int) -> Path:
        """A folder of classes. A split's scenes are the same at every scale; `held` is as large as `test`."""
        splits = {
            "train": self.given.train_pictures,
            "tune": self.given.tune_pictures,
            "test": self.given.test_pictures,
            "held": self.given.test_pictures,
        }
        folder = self.folder / "pictures" / f"{split}-{scale}"
        if not folder.exists():
            partial = folder.with_name(f".{folder.name}")
            shutil.rmtree(partial, ignore_errors=True)
            write_pictures(partial, splits[split], scale, (self.given.seed, list(splits).index(split)))
            partial.rename(folder)
        return folder

    def base(self) -> Path:
        """The folder of the trained ViT and its processor."""
        folder = self.folder / "base"
        if not (folder / "train_log.json").exists():
            pictures = self.pictures("train", 1)
            self.train(*self.fresh(), folder, pictures, steps=self.given.steps, rows=BASE_ROWS, rate=BASE_RATE)
        return folder

    def fresh(self) -> tuple[Any, Any]:
        import torch
        from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

        torch.manual_seed(self.given.seed)
        width = self.given.width
        config = ViTConfig(
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=self.given.layers,
            num_attention_heads=width // 16,
            image_size=SIDE,
            patch_size=PATCH,
            num_labels=len(CLASSES),
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=0.1,  # at ViT's 0.02 a model this small had learned nothing after 300 steps
        )
        return ViTForImageClassification(config), ViTImageProcessor(size={"height": SIDE, "width": SIDE})

    def train(
        self, model: Any, processor: Any, folder: Path, pictures: Path, *, steps: int, rows: int, rate: float
    ) -> Any:
        from hf_posswap.training.arguments import FinetuneArguments
        from hf_posswap.training.loop import finetune

        arguments = FinetuneArguments(
            output_dir=str(folder),
            image_dir=str(pictures),
            max_steps=steps,
            per_device_train_batch_size=rows,
            learning_rate=rate,
            lr_scheduler_type="cosine",
            warmup_steps=max(1, steps // 10),
            weight_decay=0.01,
            seed=self.given.seed,
            save_steps=0,
            logging_steps=max(1, steps // 20),
        )
        return finetune(model, processor, arguments)

    def trained(self) -> tuple[Any, Any]:
        """The base and its processor."""
        from transformers import AutoImageProcessor

        from hf_posswap import from_pretrained

        return from_pretrained(self.base()), AutoImageProcessor.from_pretrained(self.base())

    def swapped(self, name: str, scale: int) -> tuple[Any, Any]:
        """The base under a scheme, at a resolution, and its processor."""
        from hf_posswap import RecalibrationWarning, patch_model

        (scheme, params), (model, processor) = SWAPS[name], self.trained()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RecalibrationWarning)  # that is what is measured here
            fit = self.calibration(processor) if name in FITTED else None
            patch_model(model, scheme, **params, image_size=scale * SIDE, processor=processor, fit=fit)
        return model, processor

    def calibration(self, processor: Any) -> list[Any]:
        """Pixels (32, C, height, width) at a time, for `fit`."""
        import torch

        from hf_posswap.evaluation.images import read_images

        return list(torch.stack(read_images(str(self.pictures("tune", 1)), processor)[::4]).split(32))

    def tune(self, model: Any, processor: Any, scale: int, rate: float) -> Any:
        """Train on each picture once, at a resolution; returns the log."""
        folder, pictures = self.folder / "tuned", self.pictures("tune", scale)
        shutil.rmtree(folder, ignore_errors=True)
        steps = self.given.tune_pictures // TUNE_ROWS
        return self.train(model, processor, folder, pictures, steps=steps, rows=TUNE_ROWS, rate=rate)

    def right(self, model: Any, processor: Any, split: str, scale: int) -> float:
        """The share of a split's pictures whose class is found."""
        from hf_posswap.evaluation.images import accuracy, read_images, read_labels

        folder = str(self.pictures(split, scale))
        images, labels = read_images(folder, processor), read_labels(folder, CLASSES)
        return accuracy(model, images, labels, [scale * SIDE], name="")["points"][0]["accuracy"]

    def base_cell(self) -> dict[str, float]:
        """The base at its own resolution."""
        return self.kept("base-1", lambda: {"untuned": self.right(*self.trained(), "test", 1)})

    def rate(self) -> dict[str, Any]:
        """The learning rate of every fine-tune, chosen by what it does to UNHARMED at twice the resolution, on pictures
        that are neither trained nor tested on.
        """

        def found() -> dict[str, Any]:
            tuned, before = {}, self.right(*self.swapped(UNHARMED, 2), "held", 2)
            for rate in TUNE_RATES:
                model, processor = self.swapped(UNHARMED, 2)
                self.tune(model, processor, 2, rate)
                tuned[rate] = self.right(model, processor, "held", 2)
            return {"untuned": before, "tuned": tuned, "chosen": harmless(before, tuned)}

        return self.kept("rate", found)

    def cell(self, name: str, scale: int) -> dict[str, Any]:
        """One scheme at one resolution: right classes before and after the fine-tune."""

        def found() -> dict[str, Any]:
            from hf_posswap import describe

            model, processor = self.swapped(name, scale)
            untuned, storage = self.right(model, processor, "test", scale), describe(model).storage
            log = self.tune(model, processor, scale, self.rate()["chosen"])
            return {
                "scheme": name,
                "scale": scale,
                "untuned": untuned,
                "tuned": self.right(model, processor, "test", scale),
                "storage": storage,
                "last_loss": log.entries[-1]["loss"],
                "seconds": round(log.wall_seconds, 1),
            }

        return self.kept(f"{name.replace(', ', '-').replace(' ', '-')}-{scale}", found)

    def kept(self, name: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What `compute` gives, now or in an earlier run."""
        from hf_posswap.runs import kept

        return kept(self.folder / f"{name}.json", compute)


def harmless(before: float, tuned: dict[float, float]) -> float:
    """The greatest of the rates that leave no fewer right classes than there were; the least, where all do harm."""
    return max((rate for rate, right in tuned.items() if right >= before), default=min(tuned))


def write_pictures(folder: Path, count: int, scale: int, seed: tuple[int, int]) -> None:
    """`count` pictures, as many of each class, of SIDE * scale pixels."""
    import numpy as np
    from PIL import Image, ImageDraw

    rng = np.random.default_rng(seed)
    for name in CLASSES:
        (folder / name).mkdir(parents=True)
    for number in range(count):
        label = CLASSES[number % len(CLASSES)]
        grey = rng.integers(0, 256, (SIDE * scale, SIDE * scale, 1), dtype=np.uint8)
        picture = Image.fromarray(grey.repeat(3, axis=2))
        pen = ImageDraw.Draw(picture)
        for place, colour in zip(draw_places(rng, label), ("red", "blue"), strict=True):
            pen.ellipse([*(scale * place).tolist(), *(scale * (place + DISC) - 1).tolist()], fill=colour)
        picture.save(folder / label / f"{number:05d}.png")


def draw_places(rng: Any, label: str) -> tuple[Any, Any]:
    """(red, blue): their upper left corners, (x, y) in pixels of SIDE, the blue one on the side that the class says."""
    axis, sign = ("left", "right", "above", "below").index(label) // 2, 1 if label in ("right", "below") else -1
    while True:
        red, blue = rng.integers(0, SIDE - DISC, (2, 2), endpoint=True)
        away = blue - red
        if sign * away[axis] >= APART and abs(away[1 - axis]) < abs(away[axis]) - 2:
            return red, blue


def table(results: dict[str, Any]) -> str:
    """A row per scheme; untuned and tuned at each resolution."""
    given, rate = results["arguments"], results["rate"]
    by_cell = {(one["scheme"], one["scale"]): one for one in results["cells"]}
    sizes = [f"{scale * SIDE} x {scale * SIDE}" for scale in given["scales"]]
    lines = [
        f"| | {' | '.join(f'{size}, as swapped | {size}, tuned' for size in sizes)} |",
        f"|---|{'---:|' * 2 * len(sizes)}",
    ]
    for name in dict.fromkeys(cell["scheme"] for cell in results["cells"]):
        cells = [by_cell[name, scale] for scale in given["scales"]]
        shares = [f"{100 * cell[when]:.1f} %" for cell in cells for when in ("untuned", "tuned")]
        lines.append(f"| {name} | {' | '.join(shares)} |")
    tried = ", ".join(f"{100 * right:.1f} % at {float(one):g}" for one, right in rate["tuned"].items())
    facts = [
        f"Right classes of {given['test_pictures']} pictures; guessing finds {100 / len(CLASSES):.0f} %. The base, a",
        f"ViT of {given['layers']} layers and width {given['width']} trained for {given['steps']} steps at",
        f"{SIDE} x {SIDE} in patches of {PATCH} pixels, finds {100 * results['base']['untuned']:.1f} % there. Tuned:",
        f"{given['tune_pictures']} pictures of the new size once, {TUNE_ROWS} in a step, at a learning rate of",
        f"{rate['chosen']:g}: the greatest that cost {UNHARMED} nothing, at twice the size and on pictures that were",
        f"held out of the training and are not those tested on ({100 * rate['untuned']:.1f} % as swapped; {tried}).",
        "",
        "![Similarity of the positions of patches](similarity.png)",
    ]
    return "\n".join([*lines, "", *facts]) + "\n"


def draw(study: Study, path: Path) -> None:
    """Position similarities (An Image is Worth 16x16 Words, fig. 7) of the base, and of every swap that has a table."""
    from matplotlib.figure import Figure

    from hf_posswap import runs
    from hf_posswap.anatomy import examine

    names, scales = [name for name in study.given.schemes or SWAPS if SWAPS[name][0] in DRAWN], study.given.scales
    figure = Figure(figsize=(2.6 * (1 + len(names)) + 0.8, 2.9 * len(scales) + 0.4), layout="constrained", dpi=120)
    axes = figure.subplots(len(scales), 1 + len(names), squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    drawn = [(axes[0][0], "before", 1, study.trained()[0])]
    for row, scale in zip(axes, scales, strict=True):
        swapped = [(name, scale, study.swapped(name, scale)[0]) for name in names]
        drawn += [(axis, *one) for axis, one in zip(row[1:], swapped, strict=True)]
    for axis, name, scale, model in drawn:
        side = scale * SIDE // PATCH
        image = axis.imshow(mosaic(examine(model).table.positions, side), vmin=-1, vmax=1, interpolation="nearest")
        axis.set_title(f"{name}\n{side} x {side} patches", fontsize=10)
    label = "cosine of the position of one patch,\nwhose place is the tile's, with all others"
    figure.colorbar(image, ax=list(axes.flat), shrink=0.8, label=label)
    with runs.replacing(path) as temporary:
        figure.savefig(temporary, format="png", metadata={"Software": None})


def mosaic(vectors: Any, side: int) -> Any:
    """One tile for each of TILES x TILES patches, in their places: its similarity to all; blank lines between."""
    import torch

    from hf_posswap.drawing import similarity

    places = [(2 * i + 1) * side // (2 * TILES) for i in range(TILES)]
    pad = torch.nn.functional.pad
    tiles = [[pad(similarity(vectors, side, y, x), (0, 1, 0, 1), value=torch.nan) for x in places] for y in places]
    return torch.cat([torch.cat(row, dim=1) for row in tiles])


if __name__ == "__main__":
    run(main)
