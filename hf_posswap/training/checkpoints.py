"""Checkpoints of a run: `checkpoint-N` is an ordinary model folder, with the training's state beside the model.

One is written under another name and renamed when it is whole, so that every `checkpoint-N` can be used.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import PosSwapError
from .arguments import FinetuneArguments
from .log import TrainingLog

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn
    from transformers import PreTrainedTokenizerBase

STATE = "training_state"


def find_checkpoint(arguments: FinetuneArguments) -> Path | None:
    """The folder to resume from, None for a new run. Raises PosSwapError where there is none, or one is in the way."""
    saved = _checkpoints(Path(arguments.output_dir))
    asked = arguments.resume_from_checkpoint
    if asked is None:
        if saved:
            raise PosSwapError(
                f"output_dir={arguments.output_dir!r} already holds {saved[-1].name}; "
                "continue it with --resume_from_checkpoint latest, or choose another folder"
            )
        return None
    if asked == "latest":
        if not saved:
            raise PosSwapError(f"resume_from_checkpoint='latest': no checkpoint in output_dir={arguments.output_dir!r}")
        return saved[-1]
    if not (Path(asked) / STATE).is_dir():
        nearest = f"the newest in output_dir is {saved[-1]}" if saved else "output_dir has none either"
        raise PosSwapError(f"resume_from_checkpoint={asked!r} is not a checkpoint of a run; {nearest}")
    return Path(asked)


def save_model(accelerator: Accelerator, model: nn.Module, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write model and tokenizer as `save_pretrained` does; called by every process."""
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(folder, state_dict=weights)
        tokenizer.save_pretrained(folder)
    accelerator.wait_for_everyone()


def save_checkpoint(
    accelerator: Accelerator,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    log: TrainingLog,
    output_dir: Path,
) -> None:
    """Write `output_dir/checkpoint-N`, N the steps done; called by every process."""
    target = output_dir / f"checkpoint-{log.steps}"
    partial, outdated = output_dir / f".{target.name}.partial", output_dir / f".{target.name}.outdated"
    if accelerator.is_main_process:
        for leftover in (partial, outdated):
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir(parents=True)
    accelerator.wait_for_everyone()
    save_model(accelerator, model, tokenizer, partial)
    accelerator.save_state(str(partial / STATE))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        log.write(partial)
        if target.exists():  # written by a run that this one took up before it
            os.rename(target, outdated)
        os.rename(partial, target)
        shutil.rmtree(outdated, ignore_errors=True)
    accelerator.wait_for_everyone()


def leave_model_to_transformers(accelerator: Accelerator) -> None:
    """Keep `accelerate` from writing, and reading, the weights a second time: `save_pretrained` has them."""
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: weights.clear())
    accelerator.register_load_state_pre_hook(lambda models, folder: models.clear())


def _checkpoints(output_dir: Path) -> list[Path]:
    """Every whole checkpoint, by step."""
    found = [path for path in output_dir.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint-")))
