"""The record of a run, `train_log.json`: enough to run it again and to say what it cost."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import PosSwapError
from ..record import published
from ..runs import command, hardware, replacing, versions

if TYPE_CHECKING:
    from accelerate import Accelerator

FILE = "train_log.json"

# Arguments that a resumed run may change: they name places, or how the same steps are computed and reported.
FREE = frozenset(
    {
        "output_dir",
        "model",
        "teacher",
        "teacher_device",
        "teacher_cache",
        "max_steps",
        "train_file",
        "train_dir",
        "image_dir",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "gradient_checkpointing",
        "max_start_loss",
        "logging_steps",
        "peak_tflops",
        "save_steps",
        "resume_from_checkpoint",
        "report_to",
    }
)


def without_paths(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with local files by their names alone: the log is published with the model."""
    return {
        name: [published(one) for one in value]
        if name == "train_file" and value
        else published(value)
        if name in ("model", "teacher", "teacher_cache", "output_dir", "train_dir", "image_dir") and value
        else value
        for name, value in arguments.items()
    }


@dataclass(kw_only=True)
class TrainingLog:
    """arguments: of the run. scheme: the model's record of its swap. objective: as in `FinetuneArguments`. unit: of its
    losses.

    chunked_loss: whether the loss was made without all logits at once. corpus_tokens, rows, block_size and
    longest_document: of the text, in tokens, of pictures in patches; longest_document is the most that attention spans
    where documents are packed apart. global_batch_size: rows per step.

    precomputed: where the teacher read the rows before training: `key`, the name of what it made of them in
    `teacher_cache`; its `gib` on disk; the `seconds` of this run that went into it; and the `files_written`, 0 where an
    earlier run had left them all.

    start: what the first rows cost before any step, see `guard.check_start`. steps, tokens: done so far.
    wall_seconds: loading of data, checkpoints and earlier parts of a resumed run included. peak_memory_gib: the most
    that the main process held, on its accelerator where it has one.

    peak_tflops: what one process' device could do, in 10**12 operations a second, where that is known.

    entries: one dict per logged step: step, loss (the mean over the targets of that step's global batch), task_loss
    (what is in it of the task itself, where a teacher has a share too), learning_rate, grad_norm (before clipping),
    tokens_per_second (input tokens, since the entry before), mfu (the share of peak_tflops that was used).
    """

    arguments: dict[str, Any]
    scheme: dict[str, Any] | None
    model_class: str
    parameters: int
    trained_parameters: int
    objective: str
    chunked_loss: bool
    corpus_tokens: int
    rows: int
    block_size: int
    longest_document: int
    global_batch_size: int
    unit: str = "nats per token"
    peak_tflops: float | None = None
    command: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    hardware: dict[str, Any] = field(default_factory=dict)
    precomputed: dict[str, Any] | None = None
    start: dict[str, float] | None = None
    steps: int = 0
    tokens: int = 0
    wall_seconds: float = 0.0
    peak_memory_gib: float = 0.0
    entries: list[dict[str, float]] = field(default_factory=list)

    def describe_machine(self, accelerator: Accelerator) -> None:
        """Fill in command, versions and hardware."""
        self.command, self.versions = command(), versions("accelerate", "datasets")
        self.hardware = hardware(accelerator.device) | {
            "processes": accelerator.num_processes,
            "distributed": accelerator.distributed_type.value,
            "mixed_precision": accelerator.mixed_precision,
        }

    def continue_from(self, earlier: TrainingLog) -> None:
        """Take over what an interrupted run had done. Raises PosSwapError where this one would not continue it."""
        for name in self.arguments.keys() - FREE:
            if self.arguments[name] != earlier.arguments.get(name):
                raise PosSwapError(
                    f"{name}={self.arguments[name]!r} differs from the {earlier.arguments.get(name)!r} of the run that "
                    "is resumed; give the same, or start a new run"
                )
        for name in ("global_batch_size", "corpus_tokens", "objective"):
            if getattr(self, name) != getattr(earlier, name):
                raise PosSwapError(
                    f"{name}={getattr(self, name)!r} differs from the {getattr(earlier, name)!r} of the run that is "
                    "resumed: its steps cannot be continued"
                )
        self.steps, self.tokens, self.wall_seconds = earlier.steps, earlier.tokens, earlier.wall_seconds
        self.entries, self.start = list(earlier.entries), earlier.start

    def write(self, folder: Path) -> None:
        """Replace `folder/train_log.json`; the former one stays whole until this one is."""
        with replacing(folder / FILE) as path:
            path.write_text(json.dumps(asdict(self), indent=2, allow_nan=False) + "\n", encoding="utf-8")

    @staticmethod
    def read(folder: str | Path) -> TrainingLog:
        """Raises PosSwapError where there is none, or it was written by something else."""
        path = Path(folder) / FILE
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            return TrainingLog(**data)
        except (OSError, ValueError, TypeError) as error:
            names = ", ".join(f.name for f in fields(TrainingLog))
            raise PosSwapError(f"{path} is not the log of a run ({error}); it holds: {names}") from None
