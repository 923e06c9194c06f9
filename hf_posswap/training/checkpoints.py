"""Checkpoints of a run: `checkpoint-N` is an ordinary model folder, with the training's state beside the model.

One is written under another name and renamed when it is whole, so that every `checkpoint-N` can be used.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import PosSwapError
from ..runs import trade_names
from .arguments import FinetuneArguments
from .log import TrainingLog
from .trained import Trained

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn
    from transformers import PreTrainedTokenizerBase

STATE = "training_state"
BASE = "base"  # beside the checkpoints of adapters: the model without them


def find_checkpoint(arguments: FinetuneArguments) -> Path | None:
    """The folder to resume from, None for a new run. Raises PosSwapError for one that is no checkpoint."""
    saved, asked = _checkpoints(Path(arguments.output_dir)), arguments.resume_from_checkpoint
    if asked == "latest":
        return saved[-1] if saved else None
    if not (Path(asked) / STATE).is_dir():
        nearest = f"the newest in output_dir is {saved[-1]}" if saved else "output_dir has none either"
        raise PosSwapError(f"resume_from_checkpoint={asked!r} is not a checkpoint of a run; {nearest}")
    return Path(asked)


def model_folder(checkpoint: Path, arguments: FinetuneArguments) -> Path:
    """The folder of the model that a resumed run loads: adapters are put on it as it was before them."""
    return checkpoint.parent / BASE if arguments.train == "lora" else checkpoint


def save_model(
    accelerator: Accelerator,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    chosen: Trained | None = None,
) -> None:
    """Write model and tokenizer as `save_pretrained` does, adapters merged; called by every process."""
    adapted = chosen is not None and chosen.lora is not None
    weights = chosen.weights() if adapted else accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(folder, state_dict=weights)
        tokenizer.save_pretrained(folder)
    accelerator.wait_for_everyone()


def save_checkpoint(
    accelerator: Accelerator,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    chosen: Trained,
    log: TrainingLog,
    output_dir: Path,
) -> None:
    """Write `output_dir/checkpoint-N`, N the steps done; called by every process."""
    with _whole(accelerator, output_dir / f"checkpoint-{log.steps}") as partial:
        save_model(accelerator, model, tokenizer, partial, chosen)
        accelerator.save_state(str(partial / STATE))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            if chosen.lora is not None:
                chosen.write(partial / STATE)
            log.write(partial)


def save_base(
    accelerator: Accelerator,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    chosen: Trained,
    output_dir: Path,
) -> None:
    """Write the model under adapters that have learned nothing yet, once for all checkpoints; by every process."""
    with _whole(accelerator, output_dir / BASE) as partial:
        save_model(accelerator, model, tokenizer, partial, chosen)


@contextmanager
def _whole(accelerator: Accelerator, target: Path) -> Iterator[Path]:
    """A folder to write to; it takes the place of `target` when the block ends without an error."""
    partial = target.with_name(f".{target.name}.partial")
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    accelerator.wait_for_everyone()
    yield partial
    if accelerator.is_main_process:
        if target.exists():  # written by a run that this one took up before it
            trade_names(partial, target)
            shutil.rmtree(partial)
        else:
            os.rename(partial, target)
    accelerator.wait_for_everyone()


def leave_model_to_transformers(accelerator: Accelerator) -> None:
    """Keep `accelerate` from writing, and reading, the weights a second time: `save_pretrained` has them."""
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: weights.clear())
    accelerator.register_load_state_pre_hook(lambda models, folder: models.clear())


def _checkpoints(output_dir: Path) -> list[Path]:
    """Every whole checkpoint, by step."""
    found = [path for path in output_dir.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint-")))
