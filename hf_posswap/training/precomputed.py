"""What a teacher makes of every row, read once before training and kept on disk: training then holds no teacher.

Letters: N rows, B rows in one forward, P parts of a row that the teacher reads apart (those of an early stage of a
curriculum; else 1), K tokens of a part that it reads, E width.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedConfig
from transformers.utils import find_adapter_config_file

from ..anatomy import kind
from ..errors import PosSwapError
from ..record import KEY, Record
from ..runs import replacing, write_json
from .checks import check_documents_apart
from .distil import Taught, Teacher, check_swap, check_vocabulary, open_teacher, teacher_folder

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel

    from .arguments import FinetuneArguments
    from .data import Batches
    from .vectors import SentenceTeacher

AT_ONCE = 2**14  # vectors in a file: 128 MiB at a width of 4096 in bfloat16
HEAD = "head.safetensors"
MODEL_FILES = ("config.json", "*.safetensors", "*.index.json", "pytorch_model*.bin")
TENSOR = "reached"


@dataclass(frozen=True)
class Precomputed:
    """A folder with what a teacher made of N rows, (N, P, K, E), or of N texts, (N, 1, E), in its own dtype.

    Each file has the next so many rows and is written under another name first: one that is there is whole, and those
    that are there are not made again. lengths: those of the rows that are trained on, each with files of its own.
    vectors: of a row. headed: whether the loss needs the teacher's head, which then lies there too.
    """

    folder: Path
    rows: int
    vectors: int
    lengths: tuple[int, ...]
    headed: bool

    @property
    def rows_in_file(self) -> int:
        return max(1, AT_ONCE // self.vectors)

    def files(self) -> dict[Path, tuple[int, range]]:
        """Of each: the length of its rows, and their numbers."""
        starts, size = range(0, self.rows, self.rows_in_file), self.rows_in_file
        return {
            self._file(length, start): (length, range(start, min(start + size, self.rows)))
            for length in self.lengths
            for start in starts
        }

    def missing(self, process: int = 0, processes: int = 1) -> list[Path]:
        """What one of several processes has to write; the first one writes the head, whatever it has to."""
        files = [self.folder / HEAD, *self.files()] if self.headed else list(self.files())
        return [file for file in files[process::processes] if not file.exists()]

    def read(self, rows: Sequence[int], length: int, device: torch.device) -> Taught:
        """What the teacher made of these rows, of that length, as it would be given for a batch of them."""
        found = []
        for row in map(int, rows):
            file, place = self._file(length, row - row % self.rows_in_file), row % self.rows_in_file
            with safe_open(file, "pt") as opened:  # maps the file to memory, and reads that row alone
                found.append(opened.get_slice(TENSOR)[place : place + 1][0])
        return Taught(torch.cat(found).to(device))

    def head_on(self, device: torch.device) -> nn.Linear | None:
        """The teacher's head, None where the loss has no use for it."""
        if not self.headed:
            return None
        with _reading(self.folder / HEAD):
            tensors = load_file(self.folder / HEAD)
        height, width = tensors["weight"].shape
        head = nn.Linear(width, height, bias="bias" in tensors, device="meta")
        head.load_state_dict(tensors, assign=True)
        return head.requires_grad_(False).to(device)

    def write_head(self, teacher: Teacher | SentenceTeacher) -> None:
        """Raises PosSwapError for a head that is more than a product and a bias."""
        head = teacher.head_on(teacher.device)
        if type(head) is not nn.Linear:
            raise PosSwapError(
                f"teacher_cache keeps a head that is a Linear, and the teacher's is {kind(head)}; leave it out"
            )
        with _writing(self.folder), replacing(self.folder / HEAD) as path:
            save_file({name: tensor.contiguous() for name, tensor in head.state_dict().items()}, path)

    def write(
        self, accelerator: Accelerator, teacher: Teacher | SentenceTeacher, batches: Batches, files: Sequence[Path]
    ) -> None:
        """Have the teacher read the rows of these files, as every other process does those of as many.

        Raises PosSwapError where the disk has no room for them.
        """
        of_file = self.files()
        files = [file for file in files if file in of_file]
        total, quiet = sum(len(of_file[file][1]) for file in files), not accelerator.is_main_process
        with tqdm(total=total, unit="row", desc="teacher", disable=quiet) as bar:
            for left, file in zip(reversed(range(len(files))), files, strict=True):
                reached = self._have_read(teacher, batches, *of_file[file])
                with _writing(self.folder), replacing(file) as path:
                    save_file({TENSOR: reached}, path)
                bar.update(len(reached))
                needed = file.stat().st_size * left * accelerator.num_processes
                free = shutil.disk_usage(self.folder).free
                if needed > free:
                    raise PosSwapError(
                        f"teacher_cache={str(self.folder.parent)!r}: {needed / 2**30:.3g} GiB are still to be written, "
                        f"and {free / 2**30:.3g} are free; give a folder with more room, or leave it out"
                    )

    @staticmethod
    def _have_read(teacher: Teacher | SentenceTeacher, batches: Batches, length: int, numbers: range) -> Tensor:
        """What the teacher makes of the rows of these numbers, as many at once as in a forward of the training."""
        size, found = batches.arguments.per_device_train_batch_size, []
        for first in range(numbers.start, numbers.stop, size):
            # past the last row the first ones: all forwards have one shape, and so one rounding
            rows = np.arange(first, first + size) % len(batches.blocks)
            reached = teacher.read(batches.of_rows(rows, length)).reached.unflatten(0, (size, -1))
            found.append(reached[: numbers.stop - first])
        return torch.cat(found)

    def check(self) -> None:
        """Raise PosSwapError unless every file is there, and has what it should."""
        for file, (_, numbers) in self.files().items():
            with _reading(file), safe_open(file, "pt") as opened:
                found = opened.get_slice(TENSOR).get_shape()[0]
            if found != len(numbers):
                raise PosSwapError(f"teacher_cache: {file} has {found} rows, and should have {len(numbers)}; remove it")

    def width(self) -> int:
        with safe_open(next(iter(self.files())), "pt") as opened:
            return opened.get_slice(TENSOR).get_shape()[-1]

    def bytes(self) -> int:
        return sum(file.stat().st_size for file in self.folder.glob("*.safetensors"))

    def _file(self, length: int, start: int) -> Path:
        return self.folder / f"{length}-{start:09d}.safetensors"


def precompute(
    accelerator: Accelerator, model: PreTrainedModel, batches: Batches, arguments: FinetuneArguments
) -> tuple[Precomputed, bool, dict[str, Any]]:
    """What the teacher makes of every row; whether the loss, which the model is made to return, is made without all
    logits at once; and what the log says of it.

    The folder in `teacher_cache` is named by all that it depends on: the text's tokens, how rows are made of them, the
    teacher's files and the precision. What an earlier run left there is not made again, and a run with anything else
    makes one beside it. Each process has the teacher read its share.

    Raises PosSwapError for a teacher that cannot teach this model, and where nothing can be written or read there.
    """
    started = time.perf_counter()
    name, key = f"teacher={teacher_folder(arguments)!r}", _key(accelerator, model, batches, arguments)
    kept = Precomputed(
        folder=Path(arguments.teacher_cache, hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]),
        rows=len(batches.blocks),
        vectors=batches.vectors,
        lengths=(*(arguments.curriculum or ()), arguments.block_size),
        headed=batches.headed,
    )
    written, mine = len(kept.missing()), kept.missing(accelerator.process_index, accelerator.num_processes)
    accelerator.wait_for_everyone()  # all have looked before one of them writes
    teacher = None
    if mine:
        with _writing(kept.folder):
            write_json(kept.folder / "key.json", key)
        with torch.random.fork_rng():  # training draws the same numbers, whoever loads a model before it
            loaded = open_teacher(arguments)
        if arguments.packing != "concat":
            check_documents_apart(loaded)
        teacher = batches.make_teacher(loaded, model, accelerator.device)
        del loaded
        if kept.folder / HEAD in mine:
            kept.write_head(teacher)
    accelerator.wait_for_everyone()
    head = kept.head_on(accelerator.device)
    if head is not None:
        check_vocabulary(name, head, model)
    chunked = batches.lay_loss(model, head)
    if teacher is not None:
        with accelerator.autocast():
            kept.write(accelerator, teacher, batches, mine)
    accelerator.wait_for_everyone()
    kept.check()
    own = model.config.get_text_config().hidden_size
    if head is None and kept.width() != own:
        raise PosSwapError(f"{name} has vectors of {kept.width()} numbers, and the model of {own}")
    told = {"key": kept.folder.name, "gib": kept.bytes() / 2**30, "seconds": round(time.perf_counter() - started, 1)}
    return kept, chunked, told | {"files_written": written}


def _key(
    accelerator: Accelerator, model: PreTrainedModel, batches: Batches, arguments: FinetuneArguments
) -> dict[str, Any]:
    """All that what the teacher makes of the rows depends on; its body is not loaded. Raises PosSwapError for an
    adapter, and for one that carries the model's own swap."""
    folder = teacher_folder(arguments)
    try:
        if find_adapter_config_file(folder) is not None:
            raise PosSwapError(f"teacher={folder!r} is an adapter, whose base lies elsewhere; merge it, and save it")
        config, _ = PreTrainedConfig.get_config_dict(folder)
    except OSError as error:
        raise PosSwapError(f"teacher={folder!r} cannot be loaded: {error}") from error
    check_swap(f"teacher={folder!r}", None if config.get(KEY) is None else Record.from_dict(config[KEY]), model)
    files = sorted({file for pattern in MODEL_FILES for file in Path(folder).glob(pattern)})
    teacher = config.get("_commit_hash") or {file.name: _sha256(file) for file in files}
    return batches.read_by_teacher() | {"teacher": teacher, "mixed_precision": accelerator.mixed_precision}


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while piece := opened.read(2**24):
            digest.update(piece)
    return digest.hexdigest()


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise PosSwapError(f"teacher_cache={str(folder.parent)!r} cannot be written: {error}") from error


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise PosSwapError(
            f"teacher_cache: {file} cannot be read ({error}); remove it, and what it held is made again. All processes "
            "need to see one folder"
        ) from error
