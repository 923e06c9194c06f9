"""A small ViT at twice and three times its resolution, under every scheme: before and after a short fine-tune.

python scripts/image_study.py --run runs/image_study --output_dir docs/images

Pictures are drawn on the spot: a red and a blue disc on noise; the class is where the blue one stands, seen from the
red one, so that a model without positions guesses. The base is trained with a learned table; each scheme then takes
its place, at each resolution. Base and twice the resolution took eight minutes on a busy core; a run that was stopped
goes on. Writes results.json, table.md and similarity.png.
"""

from __future__ import annotations

import json
import shutil
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hf_posswap.arguments import parse, run

CLASSES = ("above", "below", "left", "right")
SIDE, PATCH = 24, 4  # pixels
DISC, APART = 5, 8  # pixels: a disc, and the least distance between two along the axis that tells the class
INITIALIZER_RANGE = 0.1  # at transformers' 0.02 a model this small had learned nothing after 300 steps
DRAWN = ("learned2d", "sincos2d")  # schemes whose table is drawn
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


@dataclass
class StudyArguments:
    """Sizes of the study."""

    output_dir: str = field(metadata={"help": "Folder for results.json, table.md and similarity.png."})
    run: str = field(default="runs/image_study", metadata={"help": "Folder for pictures, models and finished cells."})
    scales: list[int] = field(default_factory=lambda: [2, 3], metadata={"help": "Resolutions, times the base's 24."})
    schemes: list[str] | None = field(default=None, metadata={"help": f"Some of: {'; '.join(SWAPS)}. All, else."})
    train_pictures: int = field(default=8192, metadata={"help": "Pictures that the base is trained on."})
    tune_pictures: int = field(default=1024, metadata={"help": "Pictures of each fine-tune."})
    test_pictures: int = field(default=400, metadata={"help": "Pictures that are classified, the same at every size."})
    steps: int = field(default=800, metadata={"help": "Steps of the base, 64 pictures each."})
    tune_steps: int = field(default=48, metadata={"help": "Steps of a fine-tune, 16 pictures each."})
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
    found = [study.base_cell()] + [study.cell(name, scale) for name, scale in tqdm(cells, unit="cell")]
    output.mkdir(parents=True, exist_ok=True)
    results = {
        "arguments": asdict(given),
        "unit": "share of right classes",
        "cells": found,
        "command": runs.command(),
        "hardware": runs.hardware("cpu"),
        "versions": runs.versions(),
    }
    with runs.replacing(output / "results.json") as path:
        path.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    page = table(found, given)
    (output / "table.md").write_text(page, encoding="utf-8")
    draw(study, output / "similarity.png")
    print(page, end="")


class Study:
    """Pictures, the base, and one cell at a time; everything that is done lies in the run's folder."""

    def __init__(self, given: StudyArguments) -> None:
        self.given, self.folder = given, Path(given.run)
        keys = ("train_pictures", "tune_pictures", "test_pictures", "steps", "tune_steps", "width", "layers", "seed")
        name = "-".join(str(getattr(given, key)) for key in keys)
        self.folder = self.folder / name  # other sizes, another study

    def pictures(self, split: str, scale: int) -> Path:
        """A folder of classes. A split's scenes are the same at every scale."""
        folder, count = self.folder / "pictures" / f"{split}-{scale}", getattr(self.given, f"{split}_pictures")
        if not folder.exists():
            partial = folder.with_name(f".{folder.name}")
            shutil.rmtree(partial, ignore_errors=True)
            seed = (self.given.seed, ("train", "tune", "test").index(split))
            write_pictures(partial, count, scale, seed)
            partial.rename(folder)
        return folder

    def base(self) -> Path:
        """The folder of the trained ViT and its processor."""
        folder = self.folder / "base"
        if not (folder / "train_log.json").exists():
            self.train(*self.fresh(), folder, "train", 1, self.given.steps, 64, 1e-3)
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
            initializer_range=INITIALIZER_RANGE,
        )
        return ViTForImageClassification(config), ViTImageProcessor(size={"height": SIDE, "width": SIDE})

    def train(
        self, model: Any, processor: Any, folder: Path, split: str, scale: int, steps: int, rows: int, rate: float
    ) -> Any:
        from hf_posswap.training.arguments import FinetuneArguments
        from hf_posswap.training.loop import finetune

        arguments = FinetuneArguments(
            output_dir=str(folder),
            image_dir=str(self.pictures(split, scale)),
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
        import torch

        from hf_posswap.evaluation.images import read_images

        return list(torch.stack(read_images(str(self.pictures("tune", 1)), processor)[::4]).split(32))

    def right(self, model: Any, processor: Any, scale: int) -> float:
        """The share of the test pictures whose class is found."""
        from hf_posswap.evaluation.images import accuracy, read_images, read_labels

        folder = str(self.pictures("test", scale))
        labels = read_labels(folder, CLASSES)
        images = read_images(folder, processor)
        return accuracy(model, images, labels, [scale * SIDE], name="")["points"][0]["accuracy"]

    def trained(self) -> tuple[Any, Any]:
        """The base and its processor."""
        from transformers import AutoImageProcessor

        from hf_posswap import from_pretrained

        return from_pretrained(self.base()), AutoImageProcessor.from_pretrained(self.base())

    def base_cell(self) -> dict[str, Any]:
        """The base at its own resolution."""
        return {"scheme": "base", "scale": 1, "untuned": self.right(*self.trained(), 1), "tuned": None}

    def cell(self, name: str, scale: int) -> dict[str, Any]:
        """One scheme at one resolution: right classes before and after the fine-tune."""
        file = self.folder / f"{name.replace(', ', ' ').replace(' ', '-')}-{scale}.json"
        if file.exists():
            return json.loads(file.read_text(encoding="utf-8"))
        from hf_posswap import describe, runs

        model, processor = self.swapped(name, scale)
        found = {"scheme": name, "scale": scale, "untuned": self.right(model, processor, scale)}
        folder = self.folder / "tuned"
        shutil.rmtree(folder, ignore_errors=True)
        log = self.train(model, processor, folder, "tune", scale, self.given.tune_steps, 16, 1e-3)
        found |= {
            "tuned": self.right(model, processor, scale),
            "storage": describe(model).storage,
            "last_loss": log.entries[-1]["loss"],
            "seconds": round(log.wall_seconds, 1),
        }
        with runs.replacing(file) as path:
            path.write_text(json.dumps(found) + "\n", encoding="utf-8")
        return found


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


def table(found: list[dict[str, Any]], given: StudyArguments) -> str:
    """A row per scheme; untuned -> tuned at each resolution."""
    base = found[0]["untuned"]
    by_cell = {(one["scheme"], one["scale"]): one for one in found}
    scales = [f"{scale * SIDE} x {scale * SIDE}" for scale in given.scales]
    lines = [
        f"| scheme | {' | '.join(f'{s}, untuned | {s}, tuned' for s in scales)} |",
        f"|---|{'---:|' * 2 * len(scales)}",
    ]
    for name in given.schemes or SWAPS:
        cells = [by_cell[name, scale] for scale in given.scales]
        shares = [f"{cell[when]:.3f}" for cell in cells for when in ("untuned", "tuned")]
        lines.append(f"| {name} | {' | '.join(shares)} |")
    return "\n".join(lines) + (
        f"\n\nShare of {given.test_pictures} pictures whose class is found; guessing finds {1 / len(CLASSES):.2f}. "
        f"The base, a ViT of {given.layers} layers and width {given.width} trained at {SIDE} x {SIDE} in patches of "
        f"{PATCH} pixels, finds {base:.3f} there. Tuned: {given.tune_steps} steps of 16 pictures at the new size.\n"
    )


def draw(study: Study, path: Path) -> None:
    """Position similarities (An Image is Worth 16x16 Words, fig. 7) of the base, and of every swap that has a table."""
    from matplotlib.figure import Figure

    from hf_posswap import runs
    from hf_posswap.anatomy import examine
    from hf_posswap.drawing import similarity

    names = [name for name in study.given.schemes or SWAPS if SWAPS[name][0] in DRAWN]
    scale = study.given.scales[0]
    models = [("base", 1, *study.trained()), *((name, scale, *study.swapped(name, scale)) for name in names)]
    figure = Figure(figsize=(2.5 * len(models), 5.2), layout="constrained", dpi=120)
    axes = figure.subplots(2, len(models), squeeze=False)
    for column, (name, times, model, _) in enumerate(models):
        rows, side = examine(model).table.positions, times * SIDE // PATCH
        for row, place in enumerate((side // 4, side // 2)):
            axis = axes[row][column]
            image = axis.imshow(similarity(rows, side, place, place), cmap="gray", vmin=-1, vmax=1)
            axis.plot(place, place, "o", color="white", markeredgecolor="black", markersize=5)
            axis.set(xlabel="column", ylabel="row")
        axes[0][column].set_title(f"{name}\n{side} x {side} patches", fontsize=9)
    figure.colorbar(image, ax=list(axes.flat), shrink=0.6, label="cosine with the marked patch's position")
    with runs.replacing(path) as temporary:
        figure.savefig(temporary, format="png", metadata={"Software": None})


if __name__ == "__main__":
    run(main)
