"""Text in, training batches out; the global batch of a step is the same for any number of processes.

Letters: S tokens in a row, s in a row of an early stage, G rows in a global batch, B rows in one forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetGenerationError
from torch import Tensor, nn
from transformers import AutoTokenizer

from ..anatomy import kind
from ..errors import PosSwapError, nearest
from ..evaluation.subjects import trained_length
from .arguments import SHORTEST_BLOCK, FinetuneArguments
from .checks import check_length, check_tokenizer
from .distil import Distillation, Teacher, make_teacher
from .guard import check_start
from .loss import IGNORED, chunk_loss
from .packing import Blocks, WholeDocuments, spread_positions

Rows = Blocks | WholeDocuments

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

OF_PICTURES = ("image_dir", "image_column", "label_column")  # arguments
OF_SENTENCES = ("pooling", "contrast_rows", "contrast_temperature")
ROW_FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


def read_documents(arguments: FinetuneArguments) -> Dataset:
    """One row per document, the text in one column. Raises PosSwapError for a source that is missing or empty."""
    if arguments.dataset_name is not None:
        where = f"dataset_name={arguments.dataset_name!r}"
        load = {
            "path": arguments.dataset_name,
            "name": arguments.dataset_config_name,
            "split": arguments.dataset_split,
        }
    else:
        where, files = _files(arguments)
        suffixes = {file.suffix.lower() for file in files}
        formats = {ROW_FORMATS.get(suffix, "text") for suffix in suffixes} if arguments.train_file else {"text"}
        if len(formats) > 1:
            raise PosSwapError(f"{where} mixes {', '.join(sorted(suffixes))}; give files of one format")
        load = {"path": formats.pop(), "data_files": [str(file) for file in files], "split": "train"}
        if load["path"] == "text":
            load["sample_by"] = "document"
    try:
        documents = load_dataset(**load)
    except (OSError, ValueError, DatasetGenerationError) as error:
        raise PosSwapError(f"{where} cannot be read: {error.__cause__ or error}") from error
    column = "text" if load["path"] == "text" else arguments.text_column
    if column not in documents.column_names:
        raise PosSwapError(f"text_column={column!r} is not a column of it; {nearest(column, documents.column_names)}")
    return documents.select_columns(column)


def tokenize(documents: Dataset, tokenizer: PreTrainedTokenizerBase, special: bool = True) -> Dataset:
    """`input_ids` of each document that is not blank: the tokenizer's special tokens, then EOS where it has one; or
    with special=False, neither.

    Nothing is cut, whatever the tokenizer's `model_max_length`.
    """
    return documents.map(
        _tokens,
        input_columns=documents.column_names,
        fn_kwargs={"tokenizer": tokenizer, "special": special},
        batched=True,
        remove_columns=documents.column_names,
        desc="tokenize",
    )


def pack(tokenized: Dataset, tokenizer: PreTrainedTokenizerBase, arguments: FinetuneArguments) -> Rows:
    """The rows of the text, as `arguments.packing` says."""
    if arguments.packing != "whole":
        return Blocks(tokenized, arguments.block_size)
    # no token sees it and it is no target: any id does
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    return WholeDocuments(tokenized, arguments.block_size, pad)


def draw_rows(count: int, length: int, arguments: FinetuneArguments, told: str) -> Tensor:
    """Those of `count` rows that make `fit_tokens`, (N,), drawn by the seed. Raises PosSwapError where they make none,
    or there are fewer, with what is `told` of them.
    """
    tokens, most = arguments.fit_tokens, count * length
    if not length <= tokens < most + length:
        raise PosSwapError(f"fit_tokens={tokens}: {told}; give a number from {length} to {most}")
    return torch.randperm(count, generator=torch.Generator().manual_seed(arguments.seed))[: tokens // length]


def refuse_given(arguments: FinetuneArguments, names: Sequence[str], why: str) -> None:
    """Raise PosSwapError for one of these that is not as it is where nothing is given."""
    unset = {one.name: one.default for one in fields(FinetuneArguments)}
    for name in names:
        if (value := getattr(arguments, name)) != unset[name]:
            raise PosSwapError(f"{name}={value!r} {why}; leave it out")


@dataclass(frozen=True)
class Batches:
    """The batches of every step: a function of the seed and the step, so that a resumed run needs no bookkeeping.

    Each epoch shuffles the rows anew and leaves out those that fill no global batch. Masks are drawn per epoch and
    row, so that they too are the same for any number of processes. In an early stage of a curriculum a row of S
    tokens is cut into S / s rows: every step takes the same tokens, however long its rows.

    What the loop has to know of the kind of data is here; `reader` makes a row from a file of the model's folder, and
    `patch_model` takes it as `reader_name`; `foreign` are the arguments of another kind.
    """

    reader: ClassVar[type] = AutoTokenizer
    reader_name: ClassVar[str] = "tokenizer"
    reads: ClassVar[str] = "text, a token at a time"
    unit: ClassVar[str] = "nats per token"
    foreign: ClassVar[tuple[str, ...]] = (*OF_PICTURES, *OF_SENTENCES)
    headed: ClassVar[bool] = True  # a teacher's head has a part in the loss

    blocks: Rows
    tokenizer: PreTrainedTokenizerBase
    arguments: FinetuneArguments
    objective: str
    global_batch_size: int

    @classmethod
    def check_flags(cls, model: PreTrainedModel, arguments: FinetuneArguments) -> None:
        """Raise PosSwapError for an argument of another kind of data."""
        refuse_given(arguments, cls.foreign, f"is not for {kind(model)}, which reads {cls.reads}")

    @classmethod
    def check(
        cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, arguments: FinetuneArguments, objective: str
    ) -> FinetuneArguments:
        """The arguments, with the length of a row. Raises PosSwapError for what does not fit model or tokenizer."""
        cls.check_flags(model, arguments)
        if arguments.block_size is None:
            raise PosSwapError("block_size is missing: say how many tokens a training row has")
        if objective == "masked" and arguments.packing != "concat":
            raise PosSwapError(f"packing={arguments.packing!r} is for causal models; use packing='concat'")
        if objective == "masked" and arguments.teacher_cache is not None:
            raise PosSwapError(
                f"teacher_cache={arguments.teacher_cache!r}: which tokens are masked is drawn anew in every epoch, so "
                "what the teacher reads cannot be read before; leave it out"
            )
        check_tokenizer(tokenizer, model, objective)
        check_length(model, arguments)
        return arguments

    @staticmethod
    def read(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, arguments: FinetuneArguments) -> Rows:
        """All rows. Raises PosSwapError for a source that is missing or empty."""
        return pack(tokenize(read_documents(arguments), tokenizer), tokenizer, arguments)

    @classmethod
    def calibration(cls, model: PreTrainedModel, tokenizer: Any, arguments: FinetuneArguments) -> list[Tensor]:
        """For `patch_model(fit=...)`: `fit_tokens` in rows of the trained length, in batches of 8 at most."""
        length = trained_length(model)
        rows = Blocks(tokenize(read_documents(arguments), tokenizer), length)
        told = f"rows have {length} tokens, and the text fills {len(rows)} of them"
        drawn = draw_rows(len(rows), length, arguments, told)
        return list(torch.stack([torch.from_numpy(rows[i][0]) for i in drawn.tolist()]).split(8))

    def check_count(self) -> None:
        """Raise PosSwapError where the text does not fill one global batch."""
        rows, tokens = len(self.blocks), self.blocks.tokens
        if rows < self.global_batch_size:
            greatest = tokens // self.global_batch_size
            raise PosSwapError(
                f"block_size={self.arguments.block_size}: the text's {tokens} tokens fill {rows} rows, and one global "
                f"batch takes {self.global_batch_size}; give more text"
                + (f", or a block_size of at most {greatest}" if greatest >= SHORTEST_BLOCK else "")
            )

    def check_start(self, model: PreTrainedModel) -> dict[str, float] | None:
        """`guard.check_start` on the first of these rows."""
        return check_start(model, self)

    def make_teacher(self, teacher: PreTrainedModel, model: PreTrainedModel, device: torch.device) -> Teacher:
        """What reads these batches for a model that is trained on `device`."""
        return make_teacher(
            teacher,
            model,
            causal=self.objective == "causal",
            longest=self.arguments.block_size,
            layers=self.arguments.distil_hidden > 0,
            device=self.teachers(device),
        )

    def lay_loss(self, model: PreTrainedModel, head: nn.Module | None) -> bool:
        """Have the model return its loss as it is trained; whether that is done without all logits at once.

        head: the teacher's, beside the model; None where nothing is distilled.
        """
        arguments, causal = self.arguments, self.objective == "causal"
        if head is None:
            return chunk_loss(model, causal=causal)
        weights = (arguments.distil, arguments.distil_temperature, arguments.distil_hidden)
        if not chunk_loss(model, causal=causal, distillation=Distillation(head, *weights)):
            raise PosSwapError(
                f"distil={arguments.distil:g}: {kind(model)} makes more of its logits than its head does (a cap, a "
                "scale, a loss of its own); use distil=0"
            )
        return True

    def teachers(self, device: torch.device) -> torch.device:
        """Where the teacher of a model on `device` computes."""
        return torch.device("cpu") if self.arguments.teacher_device == "cpu" else device

    def summary(self, scheme: dict[str, Any] | None) -> str:
        """What is trained on, in a line. scheme: the model's record of its swap."""
        arguments, blocks = self.arguments, self.blocks
        longest = blocks.block_size if arguments.packing == "concat" else blocks.longest_document()
        meant = f" of the {scheme['length']} that the swap is meant for" if scheme else ""
        spread = "" if arguments.pose_length is None else f", at positions up to {arguments.pose_length - 1}"
        return (
            f"{blocks.tokens:,} tokens of text in {len(blocks):,} rows; longest training row: {longest} tokens"
            f"{meant}{spread}"
        )

    def rows(self, step: int) -> tuple[int, np.ndarray]:
        """(epoch, row numbers (G,)) of the global batch of a step, counted from 0."""
        epoch, batch = divmod(step, len(self.blocks) // self.global_batch_size)
        order = np.random.default_rng((self.arguments.seed, 0, epoch)).permutation(len(self.blocks))
        return epoch, order[batch * self.global_batch_size : (batch + 1) * self.global_batch_size]

    def of_process(self, step: int, process: int, processes: int) -> list[dict[str, Tensor]]:
        """One process's share of a step, a batch for each forward.

        A batch has `input_ids` and `labels`, both (B, S) or (B S / s, s); `position_ids` of that shape where documents
        are kept apart or positions spread; and with the latter `attention_mask`, all 1: without one, transformers
        takes a gap between positions for the edge of a document.
        """
        epoch, length = self.rows(step)[0], self.length(step)
        return [self._collate(epoch, rows, length) for rows in self.rows_of_process(step, process, processes)]

    def rows_of_process(self, step: int, process: int, processes: int) -> list[np.ndarray]:
        """The numbers of the rows that one process's share of a step is made of, (B,) for each forward."""
        size, rows = self.arguments.per_device_train_batch_size, self.rows(step)[1]
        return [rows[begin : begin + size] for begin in range(process * size, len(rows), processes * size)]

    def of_rows(self, rows: np.ndarray, length: int) -> dict[str, Tensor]:
        """A batch of rows that are the same in every epoch."""
        return self._collate(0, rows, length)

    @property
    def vectors(self) -> int:
        """What a teacher makes of a row, at most."""
        return self.blocks.block_size

    def read_by_teacher(self) -> dict[str, Any]:
        """All that what a teacher reads depends on, where it is the same in every epoch; ready for JSON."""
        text, asked = self.blocks.stream.digest(), self.arguments
        return {"text": text, "objective": self.objective, "packing": asked.packing, "block_size": asked.block_size}

    def first(self) -> dict[str, Tensor]:
        """The first batch of the first process."""
        epoch, rows = self.rows(0)
        return self._collate(epoch, rows[: self.arguments.per_device_train_batch_size], self.length(0))

    def length(self, step: int) -> int:
        """Tokens in a row of a step."""
        stages, steps = self.arguments.curriculum or [], self.arguments.curriculum_steps
        return stages[step // steps] if step < len(stages) * steps else self.blocks.block_size

    def targets(self, batch: dict[str, Tensor]) -> int:
        """Tokens of a batch that are predicted."""
        labels = batch["labels"] if self.objective == "masked" else batch["labels"][:, 1:]
        return int((labels != IGNORED).sum())

    def tokens(self, batch: dict[str, Tensor]) -> int:
        """Tokens of a batch that are read."""
        return batch["input_ids"].numel()

    def _collate(self, epoch: int, rows: np.ndarray, length: int) -> dict[str, Tensor]:
        examples = [self._example(epoch, int(row), length) for row in rows]
        return {name: torch.from_numpy(np.concatenate([one[name] for one in examples])) for name in examples[0]}

    def _example(self, epoch: int, row: int, length: int) -> dict[str, np.ndarray]:
        """One row, or as many of `length` tokens as it makes: arrays (S / s, s)."""
        seed, arguments = self.arguments.seed, self.arguments
        ids, positions = self.blocks[row]
        if self.objective == "masked":
            example = self._masked(ids, np.random.default_rng((seed, 1, epoch, row)))
        else:
            example = {"input_ids": ids, "labels": ids}
        example = {name: value.reshape(-1, length) for name, value in example.items()}
        if arguments.packing != "concat":
            # a document cut anew begins anew; the end of one does not predict the first token of the next
            positions = np.minimum(positions.reshape(-1, length), np.arange(length))
            example["labels"] = np.where(positions <= 0, IGNORED, example["labels"])
            example["position_ids"] = np.maximum(positions, 0)
        elif arguments.pose_length is not None:
            rng = np.random.default_rng((seed, 2, epoch, row))
            draw = partial(spread_positions, rng, length, arguments.pose_length, arguments.pose_chunks)
            example["position_ids"] = np.stack([draw() for _ in example["input_ids"]])
            example["attention_mask"] = np.ones_like(example["input_ids"])
        return example

    def _masked(self, ids: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """BERT's recipe (section 3.1): 80 % of the chosen tokens masked, 10 % replaced, 10 % kept. At least one is."""
        draws = np.where(np.isin(ids, self.tokenizer.all_special_ids), 1.0, rng.random(len(ids)))
        chosen = draws < self.arguments.mlm_probability
        chosen[draws.argmin()] = True
        fate = np.where(chosen, rng.random(len(ids)), 1.0)
        others = rng.integers(len(self.tokenizer), size=len(ids))
        inputs = np.where(fate < 0.8, self.tokenizer.mask_token_id, np.where(fate < 0.9, others, ids))
        return {"input_ids": inputs, "labels": np.where(chosen, ids, IGNORED)}


def _files(arguments: FinetuneArguments) -> tuple[str, list[Path]]:
    """(the argument that named them, as text; the files in the order of their paths)."""
    if arguments.train_file is not None:
        files = [Path(name) for name in arguments.train_file]
        for file in files:
            if not file.is_file():
                raise PosSwapError(f"train_file={str(file)!r} is not a file")
        return f"train_file={arguments.train_file}", files
    where = f"train_dir={arguments.train_dir!r}"
    if not Path(arguments.train_dir).is_dir():
        raise PosSwapError(f"{where} is not a folder")
    files = sorted(path for path in Path(arguments.train_dir).rglob(arguments.file_pattern) if path.is_file())
    if not files:
        suffixes = sorted({p.suffix for p in Path(arguments.train_dir).rglob("*") if p.is_file() and p.suffix})
        found = f"it holds {', '.join('*' + suffix for suffix in suffixes)}" if suffixes else "it is empty"
        raise PosSwapError(f"{where} has no file that matches file_pattern={arguments.file_pattern!r}; {found}")
    return where, files


def _tokens(texts: list[str | None], tokenizer: PreTrainedTokenizerBase, special: bool) -> dict[str, list[list[int]]]:
    texts = [text for text in texts if text and not text.isspace()]
    if not texts:
        return {"input_ids": []}
    documents = tokenizer(texts, truncation=False, verbose=False, add_special_tokens=special)["input_ids"]
    eos = tokenizer.eos_token_id
    if special and eos is not None:
        documents = [ids if ids and ids[-1] == eos else [*ids, eos] for ids in documents]
    return {"input_ids": [ids for ids in documents if len(ids) > 1]}  # a single token predicts nothing
