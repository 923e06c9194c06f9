"""Pictures in, training batches out: a folder for each class, or a dataset with a column of each.

Letters: B pictures in one forward, C channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from datasets import ClassLabel, Dataset, Image, load_dataset
from datasets.exceptions import DatasetGenerationError
from torch import Tensor
from transformers import AutoImageProcessor

from ..anatomy import examine, kind, text_config
from ..errors import PosSwapError, nearest
from ..evaluation.images import with_channels
from ..planning.limits import check_processor
from .arguments import FinetuneArguments
from .data import OF_SENTENCES, Batches, draw_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OF_TEXT = (
    "block_size",
    "curriculum",
    "distil",
    "file_pattern",
    "mlm_probability",
    "packing",
    "pose_chunks",
    "pose_length",
    "teacher",
    "teacher_cache",
    "text_column",
    "train_dir",
    "train_file",
)


@dataclass(frozen=True)
class Album:
    """N pictures and their classes; `block_size` patches in each."""

    rows: Dataset
    columns: tuple[str, str]
    block_size: int

    @property
    def tokens(self) -> int:
        return len(self) * self.block_size

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> tuple[Any, int]:
        """(PIL image, class)."""
        example = self.rows[row]
        return example[self.columns[0]], example[self.columns[1]]

    def longest_document(self) -> int:
        return self.block_size


def read_pictures(model: PreTrainedModel, arguments: FinetuneArguments) -> Album:
    """The pictures. The model's classes take the names that the data gives them.

    Raises PosSwapError for a source that is none, or another number of classes.
    """
    if arguments.image_dir is not None:
        where, columns = f"image_dir={arguments.image_dir!r}", ("image", "label")
        load = {"path": "imagefolder", "data_dir": arguments.image_dir, "split": "train"}
    else:
        where, columns = f"dataset_name={arguments.dataset_name!r}", (arguments.image_column, arguments.label_column)
        load = {
            "path": arguments.dataset_name,
            "name": arguments.dataset_config_name,
            "split": arguments.dataset_split,
        }
    try:
        rows = load_dataset(**load)
    except (OSError, ValueError, DatasetGenerationError) as error:
        raise PosSwapError(f"{where} cannot be read: {error.__cause__ or error}") from error
    for column, feature in zip(columns, (Image, ClassLabel), strict=True):
        if not isinstance(rows.features.get(column), feature):
            fitting = [name for name, one in rows.features.items() if isinstance(one, feature)]
            hint = nearest(column, fitting) if fitting else "it has none; give a subfolder for each class"
            raise PosSwapError(f"{where}: {column!r} is no column of {feature.__name__}; {hint}")
    _name_classes(model, rows.features[columns[1]].names, where)
    return Album(rows, columns, arguments.block_size)


def _name_classes(model: PreTrainedModel, names: list[str], where: str) -> None:
    config = model.config
    if len(names) != config.num_labels:
        raise PosSwapError(
            f"{where} has {len(names)} classes ({', '.join(names[:8])}), and {kind(model)} has {config.num_labels}; "
            f"load it with num_labels={len(names)}"
        )
    if set(config.label2id) == set(names) and [config.label2id[name] for name in names] != list(range(len(names))):
        raise PosSwapError(f"{where}: its classes are those of {kind(model)} in another order, {', '.join(names[:8])}")
    config.id2label, config.label2id = dict(enumerate(names)), {name: i for i, name in enumerate(names)}


@dataclass(frozen=True)
class PictureBatches(Batches):
    """Batches of `pixel_values` (B, C, height, width), as the processor makes them, and `labels` (B,).

    `tokenizer` is the processor; `blocks` is an Album.
    """

    reader: ClassVar[type] = AutoImageProcessor
    reader_name: ClassVar[str] = "processor"
    reads: ClassVar[str] = "pictures"
    unit: ClassVar[str] = "nats per picture"
    foreign: ClassVar[tuple[str, ...]] = (*OF_TEXT, *OF_SENTENCES)

    @classmethod
    def check(
        cls, model: PreTrainedModel, tokenizer: Any, arguments: FinetuneArguments, objective: str
    ) -> FinetuneArguments:
        """The arguments with the patches of a picture as its row. Raises PosSwapError for those that are for text, a
        processor of another model, and a model whose patches cannot be counted.
        """
        cls.check_flags(model, arguments)
        check_processor(tokenizer, model, text_config(model), {})
        anatomy = examine(model)
        if anatomy.table is None:
            raise PosSwapError(f"model={kind(model)} has no table of patches, so their number is not known here")
        return replace(arguments, block_size=math.prod(anatomy.table.grid))

    @staticmethod
    def read(model: PreTrainedModel, tokenizer: Any, arguments: FinetuneArguments) -> Album:
        return read_pictures(model, arguments)

    @classmethod
    def calibration(cls, model: PreTrainedModel, tokenizer: Any, arguments: FinetuneArguments) -> list[Tensor]:
        arguments = cls.check(model, tokenizer, arguments, "images")
        album, each = read_pictures(model, arguments), arguments.block_size
        told = f"a picture has {each} patches, and there are {len(album)} of them"
        batches = cls(album, tokenizer, arguments, "images", 1)
        drawn = draw_rows(len(album), each, arguments, told).split(8)
        return [batches._collate(0, rows.numpy(), each)["pixel_values"] for rows in drawn]

    def check_count(self) -> None:
        """Raise PosSwapError where the pictures do not fill one global batch."""
        if len(self.blocks) < self.global_batch_size:
            raise PosSwapError(
                f"{len(self.blocks)} pictures do not fill one global batch, which takes {self.global_batch_size}"
            )

    def check_start(self, model: PreTrainedModel) -> None:
        """None: the model before its swap may not read pictures of this size."""

    def lay_loss(self, model: PreTrainedModel, head: None) -> bool:
        """The model's own loss: one class for each picture is few logits."""
        return False

    def summary(self, scheme: dict[str, Any] | None) -> str:
        return f"{len(self.blocks):,} pictures of {self.blocks.block_size} patches"

    def targets(self, batch: dict[str, Tensor]) -> int:
        return len(batch["labels"])

    def tokens(self, batch: dict[str, Tensor]) -> int:
        return len(batch["labels"]) * self.blocks.block_size

    def _collate(self, epoch: int, rows: np.ndarray, length: int) -> dict[str, Tensor]:
        examples = [self.blocks[int(row)] for row in rows]
        images = [with_channels(image, self.tokenizer) for image, _ in examples]
        pixels = self.tokenizer(images=images, return_tensors="pt")["pixel_values"]
        return {"pixel_values": pixels, "labels": torch.tensor([label for _, label in examples])}
