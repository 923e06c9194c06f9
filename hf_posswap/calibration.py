"""Calibration: what `fit=` is given, as inputs that a model can be run on, rows of one length at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from .errors import PosSwapError

SECONDS_BEFORE_A_BAR = 5
UNDERSTOOD = ("input_ids", "attention_mask", "token_type_ids", "bbox")


@dataclass
class Images:
    """Images of one size: dicts of `pixel_values` (B, C, height, width). Counts their `tokens`, `each` of an image."""

    batches: Any
    size: tuple[int, int, int]
    each: int
    tokens: int = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for batch in each_of(self.batches):
            inputs = dict(batch) if isinstance(batch, Mapping) else {"pixel_values": batch}
            inputs.pop("labels", None)
            pixels = inputs.pop("pixel_values", None)
            for name in inputs:
                raise refuse(name, "among the inputs is not understood; give pixel_values alone")
            if not isinstance(pixels, Tensor) or not pixels.is_floating_point() or pixels.dim() not in (3, 4):
                raise refuse(batch, "holds no pixel_values of shape (batch, channels, height, width), of floats")
            if pixels.shape[-3:] != self.size:
                raise PosSwapError(
                    f"fit=: pixel_values of shape {tuple(pixels.shape)}, and this model was trained on images of "
                    f"{self.size} (channels, height, width); resize them"
                )
            pixels = pixels.reshape(-1, *self.size)
            self.tokens += len(pixels) * self.each
            if len(pixels):
                yield {"pixel_values": pixels}
        if not self.tokens:
            raise refuse(self.batches, "holds no images")


@dataclass
class Rows:
    """Text as rows of equal length without padding: dicts of (B, S) inputs, boxes (B, S, 4) among them. Counts its
    `tokens`.

    limit: tokens of the longest row, 0 where the model does not tell. vocabulary: ids that the model knows. whole:
    names of inputs that are of a row, not of its tokens: the image of a page.
    """

    batches: Any
    tokenizer: Any
    limit: int
    vocabulary: int
    whole: frozenset[str] = field(default_factory=frozenset)
    tokens: int = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for batch in each_of(self.batches):
            for rows in self._unpadded(self._inputs(batch)):
                self.tokens += rows["input_ids"].numel()
                yield rows
        if not self.tokens:
            raise refuse(self.batches, "holds no tokens")

    def _inputs(self, batch: Any) -> dict[str, Tensor]:
        """Tensors (B, S) by name; `input_ids` among them."""
        texts = [batch] if isinstance(batch, str) else batch
        if isinstance(texts, (list, tuple)) and texts and all(isinstance(text, str) for text in texts):
            return self._tokenized(texts)
        if isinstance(batch, (list, tuple)):
            try:
                batch = torch.tensor(batch)
            except (TypeError, ValueError):
                raise refuse(batch, "is no rectangle of token ids") from None
        inputs = dict(batch) if isinstance(batch, Mapping) else {"input_ids": batch}
        inputs.pop("labels", None)
        ids = inputs.get("input_ids")
        if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dim() not in (1, 2):
            raise refuse(batch, "holds no token ids of shape (batch, sequence) or (sequence,)")
        if ids.numel() and not 0 <= ids.min() <= ids.max() < self.vocabulary:
            raise refuse(batch, f"holds ids that are not among this model's {self.vocabulary}")
        inputs = {name: value[None] if ids.dim() == 1 else value for name, value in inputs.items()}
        for name, value in inputs.items():
            shape, of_token = inputs["input_ids"].shape, value.shape[2:] if name == "bbox" else ()
            shape = (shape[0], *value.shape[1:]) if name in self.whole else (*shape, *of_token)
            if name not in {*UNDERSTOOD, *self.whole} or value.shape != shape:
                raise refuse(name, "among the inputs is not understood; give input_ids and attention_mask alone")
        return inputs

    def _tokenized(self, texts: list[str]) -> dict[str, Tensor]:
        """Texts, cut into rows of the trained length."""
        if self.tokenizer is None:
            raise refuse(texts[0][:40], "is text; give tokenizer= too, or token ids")
        documents = self.tokenizer(list(texts), truncation=False, verbose=False)["input_ids"]
        size = self.limit or max(1, *map(len, documents))
        rows = [ids[begin : begin + size] for ids in documents for begin in range(0, len(ids), size)]
        longest = max(map(len, rows), default=0)
        padded = torch.zeros(len(rows), longest, dtype=torch.long)
        mask = torch.zeros_like(padded)
        for index, ids in enumerate(rows):
            padded[index, : len(ids)], mask[index, : len(ids)] = torch.tensor(ids), 1
        return {"input_ids": padded, "attention_mask": mask}

    def _unpadded(self, inputs: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """The real tokens of each row; rows of one length together."""
        mask = inputs.pop("attention_mask", None)
        real = torch.ones_like(inputs["input_ids"]).bool() if mask is None else mask.bool()
        lengths = real.sum(-1)
        for length in lengths.unique().tolist():
            if length > self.limit > 0:
                raise PosSwapError(
                    f"fit=: a sequence of {length} tokens is longer than the {self.limit} that this model was trained "
                    "on; cut it"
                )
            chosen = lengths == length
            if length:
                yield {name: self._real(name, v[chosen], real[chosen], length) for name, v in inputs.items()}

    def _real(self, name: str, rows: Tensor, real: Tensor, length: int) -> Tensor:
        return rows if name in self.whole else rows[real].reshape(-1, length, *rows.shape[2:])


def each_of(batches: Any) -> Iterator[Any]:
    """The batches, with a bar where they take long. Raises PosSwapError for what is one batch, or none."""
    if isinstance(batches, (str, Tensor, Mapping)) or not isinstance(batches, Iterable):
        raise refuse(batches, "is not an iterable of batches; put it into a list")
    yield from tqdm(batches, desc="fit", unit="batch", delay=SECONDS_BEFORE_A_BAR)


def refuse(value: Any, reason: str) -> PosSwapError:
    shown = repr(value)
    return PosSwapError(f"fit={shown if len(shown) < 80 else type(value).__name__} {reason}")
