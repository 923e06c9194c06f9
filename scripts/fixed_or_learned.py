"""Fixed or learned positions, under the same budget: a small BERT trained from scratch with each of five schemes.

python scripts/fixed_or_learned.py --output_dir docs/fixed_or_learned

Masked bytes of Python's standard library, the same rows and masks for every scheme; what is measured is the loss on
files held out, at the trained length and at twice of it, where the rows of a learned table were never trained. About
ten minutes on one core. Writes results.json and table.md.
"""

from __future__ import annotations

import tempfile
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hf_posswap.arguments import parse, run

# the model is built with a learned table; each of the others replaces it before the first step
SCHEMES = ("learned", "sinusoidal", "rope", "alibi", "nope")
ROWS = 16  # of the trained length, in a training step
HELD_OUT_STEPS = 64  # batches of ROWS that the loss is measured on


@dataclass
class StudyArguments:
    """Sizes of the study."""

    output_dir: str = field(metadata={"help": "Folder for results.json and table.md."})
    length: int = field(default=64, metadata={"help": "Trained length, in bytes (one byte is one token)."})
    steps: int = field(default=1000, metadata={"help": f"Training steps of each model, {ROWS} rows each."})
    seeds: int = field(default=2, metadata={"help": "Models per scheme; each has its own start and order of rows."})
    width: int = field(default=96, metadata={"help": "Hidden size; a multiple of 32."})
    layers: int = field(default=2, metadata={"help": "Layers."})
    learning_rate: float = field(default=3e-3, metadata={"help": "Peak learning rate."})


def main() -> None:
    (given,) = parse(StudyArguments, description=__doc__.splitlines()[0])
    import transformers

    from hf_posswap import runs

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    study, output = Study(given), Path(given.output_dir)
    found = [study.measure(scheme, seed) for scheme in SCHEMES for seed in range(given.seeds)]
    results = {
        "arguments": asdict(given),
        "unit": "nats per masked token",
        "train_files": len(study.train),
        "held_out_files": len(study.held_out),
        "models": found,
        "command": runs.command(),
        "hardware": runs.hardware("cpu"),
        "versions": runs.versions(),
    }
    page = table(found, given)
    runs.write_json(output / "results.json", results)
    (output / "table.md").write_text(page, encoding="utf-8")
    print(page, end="")


class Study:
    """The text, and one model at a time."""

    def __init__(self, given: StudyArguments) -> None:
        import demo

        self.given = given
        text = demo.DemoArguments(length=given.length, steps=given.steps * ROWS // demo.ROWS, factor=2)
        self.train, self.held_out = demo.split_by_file(text)
        self.tokenizer = demo.byte_tokenizer()
        self.tokenizer.add_special_tokens({"mask_token": "<mask>"})

    def measure(self, scheme: str, seed: int) -> dict[str, Any]:
        """A model of one scheme, trained, and its losses on the text held out."""
        from hf_posswap.training.loop import finetune

        given, model = self.given, self.build(scheme, seed)
        with tempfile.TemporaryDirectory() as folder:
            log = finetune(model, self.tokenizer, self.training(folder, seed))
        model.eval()
        return {
            "scheme": scheme,
            "seed": seed,
            "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
            "loss": {length: self.loss(model, length) for length in (given.length, 2 * given.length)},
            "last_training_loss": log.entries[-1]["loss"],
            "seconds": round(log.wall_seconds, 1),
        }

    def build(self, scheme: str, seed: int) -> Any:
        import torch
        from transformers import BertConfig, BertForMaskedLM

        from hf_posswap import RecalibrationWarning, patch_model

        given = self.given
        torch.manual_seed(seed)
        model = BertForMaskedLM(
            BertConfig(
                vocab_size=len(self.tokenizer),
                hidden_size=given.width,
                intermediate_size=4 * given.width,
                num_hidden_layers=given.layers,
                num_attention_heads=given.width // 32,
                max_position_embeddings=2 * given.length,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                pad_token_id=self.tokenizer.pad_token_id,
            )
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RecalibrationWarning)  # nothing was trained yet
            return model if scheme == "learned" else patch_model(model, scheme)

    def training(self, folder: str, seed: int) -> Any:
        from hf_posswap.training.arguments import FinetuneArguments

        given = self.given
        return FinetuneArguments(
            output_dir=folder,
            train_file=[str(path) for path in self.train],
            block_size=given.length,
            max_steps=given.steps,
            per_device_train_batch_size=ROWS,
            learning_rate=given.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=max(1, given.steps // 10),
            seed=seed,
            save_steps=0,
            logging_steps=max(1, given.steps // 20),
        )

    def loss(self, model: Any, length: int) -> float:
        """Nats per masked token of the text held out: the same rows and masks for every model."""
        from dataclasses import replace

        import torch

        from hf_posswap.training.data import Batches, read_documents, tokenize
        from hf_posswap.training.packing import Blocks

        rows = ROWS * self.given.length // length
        source = replace(
            self.training("", 0),
            train_file=[str(path) for path in self.held_out],
            block_size=length,
            per_device_train_batch_size=rows,
        )
        blocks = Blocks(tokenize(read_documents(source), self.tokenizer), length)
        batches, total, count = Batches(blocks, self.tokenizer, source, "masked", rows), 0.0, 0
        for step in range(HELD_OUT_STEPS):
            (batch,) = batches.of_process(step, 0, 1)
            targets = batches.targets(batch)
            with torch.no_grad():
                total += model(**batch).loss.item() * targets
            count += targets
        return total / count


def table(found: list[dict[str, Any]], given: StudyArguments) -> str:
    """A row per scheme: the mean over seeds and, in brackets, the lowest and the highest."""
    lengths = (given.length, 2 * given.length)
    lines = [
        f"| scheme | trained parameters | {' | '.join(f'loss at {length}' for length in lengths)} |",
        "|---|---:|---:|---:|",
    ]
    for scheme in SCHEMES:
        mine = [one for one in found if one["scheme"] == scheme]
        cells = [_figure([one["loss"][length] for one in mine]) for length in lengths]
        lines.append(f"| {scheme} | {mine[0]['trained_parameters']:,} | {' | '.join(cells)} |")
    note = (
        f"\nNats per masked token on files held out: mean of {given.seeds} seeds [lowest, highest]. Every model saw "
        f"the same {given.steps * ROWS * given.length:,} tokens in rows of {given.length}.\n"
    )
    return "\n".join(lines) + "\n" + note


def _figure(values: list[float]) -> str:
    return f"{sum(values) / len(values):.3f} [{min(values):.3f}, {max(values):.3f}]"


if __name__ == "__main__":
    run(main)
