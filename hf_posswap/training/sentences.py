"""Sentence encoders: texts in, batches out. A text's vector is taught by the model before its swap, and told apart.

Letters: R texts in one forward, N vectors (R, or 2 R of their crops), S tokens of the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor

from ..errors import PosSwapError
from ..evaluation.encoders import special_tokens
from ..evaluation.subjects import evaluating, trained_length
from ..patching import record_of, unpatched
from ..scheme import name_of
from .arguments import FinetuneArguments
from .data import OF_PICTURES, Batches, read_documents, refuse_given, tokenize
from .packing import Stream, pieces
from .vectors import SentenceLoss, SentenceTeacher, embed_for_loss, make_sentence_teacher, padded, pool

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

OF_TOKENS = (
    "packing",
    "curriculum",
    "pose_length",
    "pose_chunks",
    "mlm_probability",
    "distil_temperature",
    "distil_hidden",
)
CROP = (0.05, 0.5)  # the least and the greatest share of a text, as in Contriever
AT_START = 16  # texts that a swap's cost is measured on
APART = 0.9  # mean cosine of different texts: below it an encoder has learned something; E5's is from 0.7 on


class Texts:
    """Documents, in pieces of at most `block_size` tokens with the tokenizer's special ones around each."""

    def __init__(self, documents: Dataset, tokenizer: PreTrainedTokenizerBase, block_size: int) -> None:
        self.block_size, self.around = block_size, special_tokens(tokenizer)
        self.stream = Stream(tokenize(documents, tokenizer, special=False))
        self.pieces = pieces(self.stream, block_size - sum(map(len, self.around)))
        self.tokens = self.stream.tokens

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, row: int) -> np.ndarray:
        """Token ids of one piece, without special ones."""
        begin, length = self.pieces[row]
        return self.stream[begin : begin + length]

    def longest_document(self) -> int:
        return max(length for _, length in self.pieces) + sum(map(len, self.around))


@dataclass(frozen=True)
class SentenceBatches(Batches):
    """Batches of `input_ids` and `attention_mask`, (N, S): texts, or where they are told apart two crops of each, one
    after the other.

    Both crops are drawn apart from each other (Izacard et al. 2021, https://arxiv.org/abs/2112.09118, section 3.1).
    """

    reads: ClassVar[str] = "text, for one vector"
    unit: ClassVar[str] = "1 - cosine (contrast: nats) per text"
    foreign: ClassVar[tuple[str, ...]] = (*OF_PICTURES, *OF_TOKENS)
    headed: ClassVar[bool] = False
    vectors: ClassVar[int] = 1

    @classmethod
    def check(
        cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, arguments: FinetuneArguments, objective: str
    ) -> FinetuneArguments:
        """The arguments. Raises PosSwapError for what does not fit model or tokenizer, or leaves nothing to learn."""
        super().check(model, tokenizer, arguments, objective)
        if tokenizer.pad_token_id is None:
            raise PosSwapError(
                "tokenizer: pad_token=None, and texts of several lengths need it; set tokenizer.pad_token"
            )
        group, rows = arguments.contrast_rows, arguments.per_device_train_batch_size
        if arguments.distil == 1:
            refuse_given(arguments, ("contrast_rows", "contrast_temperature"), "has no share of the loss with distil=1")
        if arguments.distil < 1 and arguments.teacher_cache is not None:
            raise PosSwapError(
                f"teacher_cache={arguments.teacher_cache!r}: with distil={arguments.distil:g} texts are cropped anew "
                "in every epoch, so what the teacher reads cannot be read before; use distil=1, or leave it out"
            )
        if arguments.distil < 1 and (group < 2 or rows % group):
            raise PosSwapError(
                f"contrast_rows={group}: with distil={arguments.distil:g} texts are told apart, in groups of 2 or more "
                f"that divide per_device_train_batch_size={rows}; or use distil=1"
            )
        return arguments

    @staticmethod
    def read(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, arguments: FinetuneArguments) -> Texts:
        return Texts(read_documents(arguments), tokenizer, arguments.block_size)

    def check_start(self, model: PreTrainedModel) -> dict[str, float] | None:
        return check_vectors(model, self)

    def make_teacher(self, teacher: PreTrainedModel, model: PreTrainedModel, device: torch.device) -> SentenceTeacher:
        pad, around = self.tokenizer.pad_token_id, self.blocks.around
        return make_sentence_teacher(teacher, model, around, pad, self.arguments.pooling, self.teachers(device))

    def lay_loss(self, model: PreTrainedModel, head: None) -> bool:
        """Have the model return its `Losses`, which need no logits."""
        arguments = self.arguments
        temperature, pooling = arguments.contrast_temperature, arguments.pooling
        embed_for_loss(model, SentenceLoss(arguments.distil, arguments.contrast_rows, temperature, pooling))
        return False

    def read_by_teacher(self) -> dict[str, Any]:
        return super().read_by_teacher() | {"pooling": self.arguments.pooling, "around": self.blocks.around}

    def summary(self, scheme: dict[str, Any] | None) -> str:
        blocks = self.blocks
        return (
            f"{blocks.tokens:,} tokens of text in {len(blocks):,} texts; the longest has {blocks.longest_document()} "
            f"tokens, special ones included"
        )

    def targets(self, batch: dict[str, Tensor]) -> int:
        return len(batch["input_ids"])

    def tokens(self, batch: dict[str, Tensor]) -> int:
        return int(batch["attention_mask"].sum())

    def first(self) -> dict[str, Tensor]:
        """Texts of the first global batch, whole."""
        _, rows = self.rows(0)
        return self._padded([self.blocks[int(row)] for row in rows[:AT_START]])

    def _collate(self, epoch: int, rows: np.ndarray, length: int) -> dict[str, Tensor]:
        return self._padded([ids for row in rows for ids in self._views(epoch, int(row))])

    def _views(self, epoch: int, row: int) -> list[np.ndarray]:
        ids = self.blocks[row]
        if self.arguments.distil == 1:
            return [ids]
        rng = np.random.default_rng((self.arguments.seed, 3, epoch, row))
        return [crop(rng, ids) for _ in range(2)]

    def _padded(self, texts: Sequence[np.ndarray]) -> dict[str, Tensor]:
        start, stop = self.blocks.around
        rows = [torch.from_numpy(np.concatenate([start, ids, stop]).astype(np.int64)) for ids in texts]
        return padded(rows, self.tokenizer.pad_token_id)


def crop(rng: np.random.Generator, ids: np.ndarray) -> np.ndarray:
    """A part of a text without a gap, its length and its place drawn evenly."""
    size = max(1, round(len(ids) * rng.uniform(*CROP)))
    begin = rng.integers(len(ids) - size, endpoint=True)
    return ids[begin : begin + size]


# --- the guard


@torch.no_grad()
def check_vectors(model: PreTrainedModel, batches: SentenceBatches) -> dict[str, float] | None:
    """What the swap costs the first texts, cut to the length that the model knew before it: `unpatched`, 0, `swapped`,
    1 - cosine to the vectors before it, and `tokens`, that length. None for a model without a swap.

    Raises PosSwapError where a text's vector is no nearer to what it was than to what the other texts' were.
    """
    if record_of(model) is None:
        return None
    first, pooling = batches.first(), batches.arguments.pooling
    with evaluating(model):
        try:
            with unpatched(model):
                length = min(trained_length(model), first["input_ids"].shape[1])
                cut = {name: tensor[:, :length].to(model.device) for name, tensor in first.items()}
                before = pool(model(**cut).last_hidden_state, cut["attention_mask"], pooling)
        except PosSwapError:  # its checkpoint no longer tells how to undo the swap
            return None
        after = pool(model(**cut).last_hidden_state, cut["attention_mask"], pooling)
    (_, among), (own, others) = (_cosines(vectors, before) for vectors in (before, after))
    if among < APART and not own > others:
        raise PosSwapError(
            f"{name_of(record_of(model))}: the first texts' vectors have a cosine of {own:.3f} to what they were "
            f"before the swap, and of {others:.3f} to the other texts'. The swapped model is broken: patch the model "
            "anew, and see what hf_posswap.probe says of it"
        )
    return {"unpatched": 0.0, "swapped": round(1 - own, 4), "tokens": length}


def _cosines(vectors: Tensor, before: Tensor) -> tuple[float, float]:
    """Means over vectors (N, E) of the cosine to the same text's `before`, and to the others', 1 if there are none."""
    cosines = vectors @ before.T
    own, texts = cosines.diagonal().mean().item(), len(cosines)
    return own, (cosines.sum().item() - texts * own) / (texts * (texts - 1)) if texts > 1 else 1.0
