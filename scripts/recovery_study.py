"""How fast swapped models come back: cold, fitted, distilled, and both, on a small LLaMA and a small BERT.

python scripts/recovery_study.py --demo runs/demo --output_dir docs/recovery

The LLaMA is the demo's base, the BERT is trained here in the same way. Every cell (model, scheme, recipe, seed) is
trained on 5 % of its model's tokens and kept in --work_dir, so that a study which was stopped goes on. Writes
results.json, table.md and recovery.png; and keeps one of the models, with a card that has its part of them.
"""

from __future__ import annotations

import json
import shutil
import time
import warnings
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hf_posswap.arguments import parse, run

LLAMA, BERT = "llama", "bert"
POINTS = 9  # of a curve, after its first
FIT_TOKENS = 16_384
WINDOWS = 16  # of text held out
BERT_LENGTH, BERT_ROWS, BERT_STEPS, BERT_WIDTH = 64, 16, 3000, 96
PER_LAYER = {"per_layer": True}
SCHEMES: dict[str, dict[str, tuple[str | None, dict[str, Any]]]] = {
    LLAMA: {
        "unpatched": (None, {}),
        "t5": ("t5", PER_LAYER),
        "alibi": ("alibi", PER_LAYER | {"learnable": True}),
        "kerple": ("kerple", {}),
        "fire": ("fire", PER_LAYER),
        "nope": ("nope", {}),
        "xpos": ("xpos", {}),
        "yarn x4": ("yarn", {"factor": 4}),
    },
    BERT: {
        "unpatched": (None, {}),
        "t5": ("t5", PER_LAYER),
        "alibi": ("alibi", PER_LAYER | {"learnable": True}),
        "sinusoidal": ("sinusoidal", {"max_positions": 4 * BERT_LENGTH}),
        "rope": ("rope", {}),
    },
}
INIT_FITS = {"sinusoidal"}  # fitted to the table they replace, without text
LONG = {"yarn x4"}  # trained at the length that they extend to
HARDEST = (LLAMA, "t5", "fit + distil")  # the swap with a goal of its own; its first model is kept
TRIED = {  # to come nearer to it: factors of the tokens, rows in a step, learning rates
    "four times the tokens": {"tokens": 4},
    "2 rows in a step, rate 5e-4": {"rows": 2, "learning_rate": 5e-4},
    "1 row in a step, rate 3e-4": {"rows": 1, "learning_rate": 3e-4},
}


@dataclass
class StudyArguments:
    """What to run; the parts that are there already are kept."""

    output_dir: str = field(metadata={"help": "Folder for results.json, table.md and recovery.png."})
    demo: str = field(
        default="runs/demo", metadata={"help": "Folder of scripts/demo.py; its base is trained if absent."}
    )
    work_dir: str = field(default="runs/recovery", metadata={"help": "Folder for the BERT and the finished cells."})
    seeds: int = field(default=3, metadata={"help": "Orders of the training rows."})
    scratch_seeds: int = field(default=0, metadata={"help": "Models of each scheme trained from scratch beside them."})
    only: list[str] | None = field(default=None, metadata={"help": "Cells by name, or the beginnings of their names."})
    cells: int | None = field(default=None, metadata={"help": "Stop after so many new cells."})
    share: float = field(default=0.05, metadata={"help": "Of the tokens the model was trained on, for each cell."})
    distil: float = field(default=0.5, metadata={"help": "Share of the teacher in the loss, where it is distilled."})
    learning_rate: float = field(default=1e-3, metadata={"help": "Peak learning rate of every cell."})


@dataclass(frozen=True)
class Cell:
    """One run of the study. tried: a key of TRIED where it is trained otherwise than the others."""

    model: str
    scheme: str
    recipe: str
    seed: int
    tried: str = ""

    @property
    def name(self) -> str:
        parts = (self.model, self.scheme, self.recipe, str(self.seed), self.tried)
        return "-".join(filter(None, parts)).replace(" ", "")

    @property
    def fits(self) -> bool:
        return self.recipe.startswith("fit")

    @property
    def distils(self) -> bool:
        return self.recipe.endswith("distil")


KEPT = Cell(*HARDEST, seed=0)


def main() -> None:
    (given,) = parse(StudyArguments, description=__doc__.splitlines()[0])
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    study = Study(given)
    left = given.cells
    for cell in study.cells():
        if study.found(cell) is None and left != 0:
            study.measure(cell)
            left = None if left is None else left - 1
    study.report()


class Study:
    """The cells over one folder."""

    def __init__(self, given: StudyArguments) -> None:
        self.given, self.folder = given, Path(given.work_dir)
        self.kept = self.folder / "models" / f"demo-{KEPT.model}-{KEPT.scheme}"
        self.subjects: dict[str, Subject] = {}

    def cells(self) -> list[Cell]:
        """Every cell asked for; first seeds first, so that a study which is stopped has something of each."""
        from hf_posswap.evaluation.recovery import RECIPES, SCRATCH

        asked = [
            Cell(model, scheme, recipe, seed)
            for seed in range(self.given.seeds)
            for model, schemes in SCHEMES.items()
            for scheme in schemes
            for recipe in RECIPES
            if applies(scheme, schemes[scheme][0], recipe)
        ]
        asked += [
            Cell(model, scheme, SCRATCH, seed)
            for seed in range(self.given.scratch_seeds)
            for model, schemes in SCHEMES.items()
            for scheme in schemes
            if scheme not in LONG and scheme != "unpatched"
        ]
        asked += [Cell(*HARDEST, seed=0, tried=tried) for tried in TRIED]
        only = self.given.only
        return [cell for cell in asked if only is None or any(cell.name.startswith(one) for one in only)]

    def found(self, cell: Cell) -> dict[str, Any] | None:
        file = self.folder / "cells" / f"{cell.name}.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None

    def subject(self, model: str) -> Subject:
        if model not in self.subjects:
            self.subjects[model] = (LlamaSubject if model == LLAMA else BertSubject)(self.given)
        return self.subjects[model]

    def measure(self, cell: Cell) -> None:
        """Run a cell, and keep what it found."""
        from hf_posswap import describe, from_pretrained, runs
        from hf_posswap.evaluation.recovery import SCRATCH
        from hf_posswap.training.loop import finetune

        print(f"\n{cell.name}", flush=True)
        subject, started = self.subject(cell.model), time.perf_counter()
        model = subject.start(cell)
        fit = describe(model).fit
        change = TRIED.get(cell.tried, {})
        tokens = 1 if cell.recipe == SCRATCH else self.given.share * change.get("tokens", 1)
        steps = max(POINTS, round(subject.steps * tokens * subject.rows / change.get("rows", subject.rows)))
        folder = self.folder / "running" / cell.name
        shutil.rmtree(folder, ignore_errors=True)
        arguments = subject.training(cell, str(folder), steps)
        curve = [(0, subject.loss(model))]
        teacher = from_pretrained(subject.base) if cell.distils else None
        if teacher is not None:
            arguments = replace(arguments, distil=self.given.distil)
        if "rows" in change:
            arguments = replace(
                arguments, per_device_train_batch_size=change["rows"], learning_rate=change["learning_rate"]
            )
        log = finetune(model, subject.tokenizer, arguments, teacher)
        for checkpoint in sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1])):
            step = int(checkpoint.name.split("-")[1])
            if step < steps:
                curve.append((log.tokens * step // steps, subject.loss(from_pretrained(checkpoint))))
        curve.append((log.tokens, subject.loss(model)))
        found = asdict(cell) | {
            "curve": curve,
            "lengths": {n: subject.loss_at(model, n) for n in (subject.length * i for i in (1, 2, 4))},
            "fit": None if fit is None else asdict(fit),
            "steps": steps,
            "training_loss": log.entries[-1]["loss"],
            "seconds": round(time.perf_counter() - started, 1),
        }
        if cell == KEPT:
            shutil.rmtree(self.kept, ignore_errors=True)
            shutil.copytree(folder, self.kept, ignore=shutil.ignore_patterns("checkpoint-*"))
        runs.write_json(self.folder / "cells" / f"{cell.name}.json", found)
        shutil.rmtree(folder)

    def report(self) -> None:
        """The results of every cell that is there, asked for now or not."""
        from hf_posswap import runs
        from hf_posswap.evaluation.recovery import plot_recovery

        everything = Study(replace(self.given, only=None, seeds=max(3, self.given.seeds), scratch_seeds=1)).cells()
        cells = [found for cell in everything if (found := self.found(cell)) is not None]
        output = Path(self.given.output_dir)
        subjects = {model: self.subject(model) for model in dict.fromkeys(cell["model"] for cell in cells)}
        base = {model: subject.base_loss() for model, subject in subjects.items()}
        results = {
            "arguments": {k: v for k, v in asdict(self.given).items() if k in ("share", "distil", "learning_rate")},
            "unit": "nats per target token",
            "fit_tokens": FIT_TOKENS,
            "models": {model: subject.facts() | {"loss": base[model]} for model, subject in subjects.items()},
            "cells": cells,
            "hardware": runs.hardware("cpu"),
            "versions": runs.versions(),
        }
        page = f"{len(cells)} of the study's {len(everything)} cells were run.\n\n" + self.page(cells, subjects, base)
        runs.write_json(output / "results.json", results)
        (output / "table.md").write_text(page, encoding="utf-8")
        plot_recovery(cells, output / "recovery.png", base)
        print(page, end="")
        if self.kept.is_dir():
            self.write_card(results)

    def write_card(self, results: dict[str, Any]) -> None:
        """Of the model that is kept, with every cell of its swap."""
        from hf_posswap import runs
        from hf_posswap.card import RECOVERY, record_in, write_card
        from hf_posswap.evaluation.recovery import plot_recovery
        from hf_posswap.record import DIGEST, digest

        record, facts = record_in(self.kept), results["models"][KEPT.model]
        cells = [cell for cell in results["cells"] if (cell["model"], cell["scheme"]) == (KEPT.model, KEPT.scheme)]
        of_swap = {
            "scheme": {"scheme": record.scheme, "params": record.params},
            "model": KEPT.model,
            "plot": "recovery.png",
            "cells": cells,
            "command": runs.command(),
            **{key: results[key] for key in ("unit", "hardware", "versions")},
            **{key: facts[key] for key in ("loss", "length")},
        }
        runs.write_json(self.kept / RECOVERY, of_swap | {DIGEST: digest(of_swap)})
        plot_recovery(cells, self.kept / of_swap["plot"], {KEPT.model: facts["loss"]})
        print(f"\nwritten  {write_card(self.kept)}")

    def page(self, cells: list[dict[str, Any]], subjects: dict[str, Subject], base: dict[str, float]) -> str:
        from hf_posswap.evaluation.recovery import goals, table, tried, untaught

        parts = []
        for model, subject in subjects.items():
            tokens = subject.steps * subject.tokens_per_step
            seeds = max(cell["seed"] for cell in cells if cell["model"] == model) + 1
            parts.append(
                f"## {model}\n\nTrained on {tokens:,} tokens in rows of {subject.length}; loss held out before the "
                f"swap {base[model]:.3f}. Every recipe: {self.given.share:.0%} of these tokens, {seeds} seed(s) at "
                f"most; fit reads {FIT_TOKENS:,}.\n\n{table(cells, model)}\n\n{goals(cells, model)}\n"
            )
            if untaught(cells, model, base[model]):
                parts.append(
                    "No swap costs this base anything: it had not learned what its positions are for, and these rows "
                    "say little of recovery.\n"
                )
            if model == HARDEST[0]:
                parts.append(tried(cells, HARDEST, base[model]))
        return "\n".join(parts)


def applies(scheme: str, name: str | None, recipe: str) -> bool:
    """Whether a recipe has a meaning for a scheme."""
    from hf_posswap.scheme import registry

    if name is None:
        return recipe == "cold"
    return not recipe.startswith("fit") or registry()[name].fits or name in INIT_FITS


class Subject:
    """A trained model of the study, its text, and its losses on text held out."""

    name: str
    length: int
    rows: int
    steps: int
    objective: str
    rate: float

    def __init__(self, given: StudyArguments) -> None:
        import demo

        self.given = given
        self.base, self.train, self.held_out, self.tokenizer = self.prepare(demo)

    @property
    def tokens_per_step(self) -> int:
        return self.rows * self.length

    def facts(self) -> dict[str, Any]:
        return {"length": self.length, "steps": self.steps, "tokens": self.steps * self.tokens_per_step}

    def base_loss(self) -> float:
        from hf_posswap import from_pretrained

        return self.loss(from_pretrained(self.base))

    def start(self, cell: Cell) -> Any:
        """The model of a cell before its first step."""
        import torch

        from hf_posswap import RecalibrationWarning, from_pretrained, patch_model
        from hf_posswap.evaluation.recovery import SCRATCH

        name, params = SCHEMES[cell.model][cell.scheme]
        if cell.recipe == SCRATCH:
            torch.manual_seed(cell.seed)
        model = self.fresh() if cell.recipe == SCRATCH else from_pretrained(self.base)
        if name is None:
            return model
        if cell.fits and name in INIT_FITS:
            params = params | {"init": "fit"}
        elif cell.fits:
            params = params | {"fit": self.calibration(model, cell.seed)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RecalibrationWarning)
            return patch_model(model, name, **params)

    def calibration(self, model: Any, seed: int) -> list[Any]:
        """FIT_TOKENS of training text, in batches."""
        from hf_posswap.training.data import Batches

        arguments = replace(self.training(Cell(self.name, "", "", seed), "", 1), fit_tokens=FIT_TOKENS)
        return Batches.calibration(model, self.tokenizer, arguments)

    def training(self, cell: Cell, folder: str, steps: int) -> Any:
        from hf_posswap.evaluation.recovery import SCRATCH
        from hf_posswap.training.arguments import FinetuneArguments

        scale = 4 if cell.scheme in LONG else 1
        return FinetuneArguments(
            output_dir=folder,
            train_file=[str(path) for path in self.train],
            block_size=self.length * scale,
            max_steps=steps,
            per_device_train_batch_size=self.rows // scale,
            learning_rate=self.rate if cell.recipe == SCRATCH else self.given.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=max(1, steps // 20),
            seed=cell.seed,
            save_steps=0 if cell.recipe == SCRATCH else max(1, steps // POINTS),
            logging_steps=max(1, steps // 20),
        )

    def windows(self, length: int, scored: int) -> tuple[Any, Any]:
        """(inputs, labels), both (WINDOWS, length): windows of text held out that end where those of any length do;
        the last `scored` tokens are targets, of a masked model those among them that are masked.
        """
        import numpy as np
        import torch

        from hf_posswap.training.data import IGNORED

        longest, rng = 4 * self.length, np.random.default_rng(0)
        text = [t for path in self.held_out for t in self.tokenizer(path.read_text("utf-8", "ignore"))["input_ids"]]
        ends = rng.choice(len(text) // longest, WINDOWS * (256 // self.length), replace=False) * longest + longest
        ids = torch.tensor([text[end - longest : end] for end in ends])
        labels = ids.clone()
        if self.objective == "masked":
            masked = torch.from_numpy(rng.random(ids.shape) < 0.15)
            labels[~masked] = IGNORED
            ids = ids.masked_fill(masked, self.tokenizer.mask_token_id)
        labels[:, :-scored] = IGNORED
        return ids[:, -length:].contiguous(), labels[:, -length:].contiguous()

    def loss(self, model: Any) -> float:
        """At the trained length, all tokens."""
        return self._loss(model, *self.windows(self.length, self.length - 1))

    def loss_at(self, model: Any, length: int) -> float | None:
        """Of the last half of the trained length, with more and more text before it; None beyond a table's end."""
        from hf_posswap.evaluation.subjects import accepted_length

        if length > (accepted_length(model) or length):
            return None
        return self._loss(model, *self.windows(length, self.length // 2))

    def _loss(self, model: Any, ids: Any, labels: Any) -> float:
        import torch

        model.eval()
        total = count = 0
        with torch.no_grad():
            for one, wanted in zip(ids.split(8), labels.split(8), strict=True):
                targets = int((wanted != -100).sum())
                total += model(input_ids=one, labels=wanted).loss.item() * targets
                count += targets
        return round(total / count, 5)


class LlamaSubject(Subject):
    """The demo's base."""

    name, objective, rate = LLAMA, "causal", 2e-3

    def prepare(self, demo: Any) -> tuple[Path, list[Path], list[Path], Any]:
        self.demo = demo
        made = demo.Demo(demo.DemoArguments(output_dir=self.given.demo))
        self.length, self.rows, self.steps = made.arguments.length, demo.ROWS, made.arguments.steps
        self.arguments = made.arguments
        return made.base(), made.train, demo.split_by_file(made.arguments)[1], made.tokenizer

    def fresh(self) -> Any:
        return self.demo.tiny_llama(self.arguments, len(self.tokenizer))


class BertSubject(Subject):
    """A BERT with a learned table, trained on masked bytes of the demo's text."""

    name, objective, rate = BERT, "masked", 1e-3
    length, rows, steps = BERT_LENGTH, BERT_ROWS, BERT_STEPS

    def prepare(self, demo: Any) -> tuple[Path, list[Path], list[Path], Any]:
        from hf_posswap.training.loop import finetune

        text = demo.DemoArguments(length=self.length, steps=self.steps * self.rows // demo.ROWS, factor=4)
        self.train, self.held_out = demo.split_by_file(text)
        self.tokenizer = demo.byte_tokenizer()
        self.tokenizer.add_special_tokens({"mask_token": "<mask>"})
        base = Path(self.given.work_dir) / BERT
        if not (base / "train_log.json").is_file():
            print("\nbert", flush=True)
            import torch

            torch.manual_seed(0)
            arguments = self.training(Cell(BERT, "", "scratch", 0), str(base), self.steps)
            finetune(self.fresh(), self.tokenizer, arguments)
        return base, self.train, self.held_out, self.tokenizer

    def fresh(self) -> Any:
        from transformers import BertConfig, BertForMaskedLM

        return BertForMaskedLM(
            BertConfig(
                vocab_size=len(self.tokenizer),
                hidden_size=BERT_WIDTH,
                intermediate_size=4 * BERT_WIDTH,
                num_hidden_layers=2,
                num_attention_heads=3,
                max_position_embeddings=self.length,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                pad_token_id=self.tokenizer.pad_token_id,
                initializer_range=BERT_WIDTH**-0.5,  # 0.02 is for 768: narrow, it learns nothing of its positions
            )
        )


if __name__ == "__main__":
    run(main)
