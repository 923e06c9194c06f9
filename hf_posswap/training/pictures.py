"""Pictures in, training batches out: a folder for each class, or a dataset with a column of each.

Letters: B pictures in one forward, C channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from datasets import ClassLabel, Dataset, Image, load_dataset
from datasets.exceptions import DatasetGenerationError
from torch import Tensor

from ..anatomy import examine, kind, text_config
from ..errors import PosSwapError, nearest
from ..planning.images import trained_grid
from ..planning.limits import check_processor
from .arguments import FinetuneArguments
from .data import Batches

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MODES = {1: "L", 3: "RGB"}  # channels -> how PIL calls them
OF_TEXT = {
    "packing": "concat",
    "curriculum": None,
    "pose_length": None,
    "distil": 0.0,
    "train_file": None,
    "train_dir": None,
    "block_size": None,
}


def for_pictures(model: PreTrainedModel, arguments: FinetuneArguments) -> FinetuneArguments:
    """The arguments with the patches of a picture as its row. Raises PosSwapError for those that are for text."""
    for name, unset in OF_TEXT.items():
        if getattr(arguments, name) != unset:
            raise PosSwapError(f"{name}={getattr(arguments, name)!r} is for text, and {kind(model)} reads pictures")
    return replace(arguments, block_size=math.prod(trained_grid(examine(model))))


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


def read_pictures(model: PreTrainedModel, processor: Any, arguments: FinetuneArguments) -> Album:
    """The pictures. The model's classes take the names that the data gives them.

    Raises PosSwapError for a source that is none, a processor of another model, or another number of classes.
    """
    check_processor(processor, model, text_config(model), {})
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
    """Batches of `pixel_values` (B, C, height, width), as the processor makes them, and `labels` (B,)."""

    def targets(self, batch: dict[str, Tensor]) -> int:
        return len(batch["labels"])

    def _collate(self, epoch: int, rows: np.ndarray, length: int) -> dict[str, Tensor]:
        mode = MODES.get(len(self.tokenizer.image_mean))
        examples = [self.blocks[int(row)] for row in rows]
        images = [image.convert(mode) if mode else image for image, _ in examples]
        pixels = self.tokenizer(images=images, return_tensors="pt")["pixel_values"]
        return {"pixel_values": pixels, "labels": torch.tensor([label for _, label in examples])}


def calibration_pictures(
    model: PreTrainedModel, processor: Any, arguments: FinetuneArguments, patches: int
) -> list[Tensor]:
    """Pictures for `patch_model(fit=...)`, (B, C, height, width) with B of 8 at most, drawn by the seed: `patches` of
    them.

    Raises PosSwapError where these fill no picture, or there are fewer.
    """
    arguments = for_pictures(model, arguments)
    album, each = read_pictures(model, processor, arguments), arguments.block_size
    wanted = patches // each
    if not 0 < wanted <= len(album):
        raise PosSwapError(
            f"fit_tokens={patches}: a picture has {each} patches, and there are {len(album)} of them; give a number "
            f"from {each} to {len(album) * each}"
        )
    batches = PictureBatches(album, processor, arguments, "", 1)
    order = torch.randperm(len(album), generator=torch.Generator().manual_seed(arguments.seed))[:wanted]
    return [batches._collate(0, rows.numpy(), each)["pixel_values"] for rows in order.split(8)]
