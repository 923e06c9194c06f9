"""Vectors of whole texts: how they are made, the loss that is made of them, and the teacher's.

Letters: R texts in one forward, N vectors (R, or 2 R of their crops), S tokens of the longest, E width, C texts that
are told apart from each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ..errors import PosSwapError
from .distil import Taught, check_teacher, known_length
from .loss import Losses

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def padded(rows: list[Tensor], pad: int) -> dict[str, Tensor]:
    """Rows of ids as `input_ids` and `attention_mask`, (N, S)."""
    lengths = torch.tensor([len(row) for row in rows], device=rows[0].device)
    ids = pad_sequence(rows, batch_first=True, padding_value=pad)
    return {
        "input_ids": ids,
        "attention_mask": (torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]).long(),
    }


def pool(states: Tensor, mask: Tensor, pooling: str) -> Tensor:
    """Vectors (N, E) of length 1, float32, of states (N, S, E): of their `mean` over the mask (N, S), or the first."""
    states = states.float()
    chosen = states[:, 0] if pooling == "cls" else (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    return F.normalize(chosen, dim=-1)


# --- the loss


@dataclass(frozen=True)
class SentenceLoss:
    """The loss of a vector:

        (1 - weight) * contrast + weight * (1 - cosine to the teacher's vector of the same tokens)

    contrast: -log of the share that a crop's partner has, in a softmax of cosines / temperature over the other crops
    of C texts, in nats; each crop of a pair seeks the other (InfoNCE: van den Oord et al. 2018,
    https://arxiv.org/abs/1807.03748). 0.05 is SimCSE's and Contriever's temperature.
    """

    weight: float
    group: int
    temperature: float
    pooling: str

    def __call__(self, states: Tensor, mask: Tensor, taught: Taught | None) -> Losses:
        vectors = pool(states, mask, self.pooling)
        distance = 0.0 if taught is None else (1 - (vectors * taught.reached).sum(-1)).mean()
        if self.weight == 1:
            return Losses(loss=distance)
        contrast = self.contrast(vectors)
        return Losses(loss=(1 - self.weight) * contrast + self.weight * distance, task=contrast.detach())

    def contrast(self, vectors: Tensor) -> Tensor:
        """The mean over vectors (N, E), two for each text."""
        one, other = vectors.unflatten(0, (-1, self.group, 2)).unbind(2)  # (R / C, C, E)
        with torch.autocast(vectors.device.type, enabled=False):  # bfloat16 has cosines to 0.004, and 0.05 divides them
            logits = one @ other.mT / self.temperature
        right = torch.arange(self.group, device=logits.device).expand(len(logits), -1)
        return (F.cross_entropy(logits, right) + F.cross_entropy(logits.mT, right)) / 2


def embed_for_loss(model: PreTrainedModel, loss: SentenceLoss) -> None:
    """Have `model(input_ids, attention_mask, taught=...)` return its `Losses`; what has no share in them is frozen.

    DDP waits for the gradient of everything that is trained, and a pooler's never comes.
    """
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    ids = torch.arange(8, device=model.device)[None] % len(model.get_input_embeddings().weight)
    mask = torch.ones_like(ids)
    with torch.enable_grad():
        total = pool(model(input_ids=ids, attention_mask=mask).last_hidden_state, mask, loss.pooling)[0, 0]
        found = torch.autograd.grad(total, weights, allow_unused=True)
    for parameter, gradient in zip(weights, found, strict=True):
        parameter.requires_grad_(gradient is not None)
    model.forward = MethodType(_forward(model.forward, loss), model)


def _forward(own: Callable[..., Any], loss: SentenceLoss) -> Callable[..., Losses]:
    """A method that takes input_ids and attention_mask, (N, S), and what the teacher made of them."""

    def forward(self: nn.Module, input_ids: Tensor, attention_mask: Tensor, taught: Taught | None = None) -> Losses:
        states = own(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return loss(states, attention_mask, taught)

    return forward


# --- the teacher


@dataclass
class SentenceTeacher:
    """A model whose vectors are to be reached. A text longer than the `length` tokens that it knows has the mean of the
    vectors of its windows, each with as many shares as tokens: no part goes unread, and the vector stays among those
    of short texts (the parallel context windows of LongEmbed: Zhu et al. 2024, https://arxiv.org/abs/2404.12096).

    around: the tokenizer's special tokens before and after a text. pad: its padding.
    """

    model: PreTrainedModel
    length: int
    around: tuple[list[int], list[int]]
    pad: int
    pooling: str
    device: torch.device

    @torch.no_grad()
    def read(self, batch: dict[str, Tensor]) -> Taught:
        """Its vectors (N, E) of a batch's texts, float32, on the batch's device; as many windows at once as texts."""
        texts = [row[mask.bool()] for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
        windows = [(text, window) for text, ids in enumerate(texts) for window in self.windows(ids)]
        vectors = []
        for begin in range(0, len(windows), len(texts)):
            inputs = padded([window.to(self.device) for _, window in windows[begin : begin + len(texts)]], self.pad)
            states = self.model.base_model(**inputs).last_hidden_state
            vectors.append(pool(states, inputs["attention_mask"], self.pooling))
        shares = torch.cat(vectors) * torch.tensor([[len(window)] for _, window in windows], device=self.device)
        owner = torch.tensor([text for text, _ in windows], device=self.device)
        total = torch.zeros(len(texts), shares.shape[1], device=self.device).index_add_(0, owner, shares)
        return Taught(F.normalize(total, dim=-1).to(batch["input_ids"].device))

    def head_on(self, device: torch.device) -> None:
        """None: vectors are compared as they are."""

    def windows(self, ids: Tensor) -> list[Tensor]:
        """A text of special tokens around others, cut into such ones of at most `length`."""
        start, stop = (ids.new_tensor(special) for special in self.around)
        inside = ids[len(start) : len(ids) - len(stop)]
        return [torch.cat([start, part, stop]) for part in inside.split(self.length - len(start) - len(stop))]


def make_sentence_teacher(
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    around: tuple[list[int], list[int]],
    pad: int,
    pooling: str,
    device: torch.device,
) -> SentenceTeacher:
    """A teacher of `student`; it is moved to `device` and put into eval mode.

    Raises PosSwapError for one that carries the student's own swap, or whose vocabulary or width differs.
    """
    name = check_teacher(teacher, student)
    shapes = [tuple(model.get_input_embeddings().weight.shape) for model in (teacher, student)]
    if shapes[0] != shapes[1]:
        raise PosSwapError(
            f"{name} embeds tokens (rows, width) as {shapes[0]}, and the model as {shapes[1]}; give one of the same"
        )
    return SentenceTeacher(teacher.to(device).eval(), known_length(teacher), around, pad, pooling, device)
