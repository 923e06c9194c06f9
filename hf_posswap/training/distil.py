"""Distillation: the model as it was before the swap teaches the swapped one, on the lengths that it knows.

Letters: B batch, S sequence, K its first tokens that the teacher reads, E width, V vocabulary, T target tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..anatomy import kind
from ..checkpoint import from_pretrained
from ..errors import PosSwapError
from ..evaluation.subjects import trained_length
from ..patching import record_of
from .arguments import FinetuneArguments
from .head import LogitsOf, is_plain, withheld

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..record import Record


@dataclass
class Taught:
    """What a teacher makes of a batch: what reaches its head, (B, K, E), and the states of its layers, where asked; of
    texts, their vectors (N, E).
    """

    reached: Tensor
    layers: tuple[Tensor, ...] = ()

    def known(self, kept: Tensor) -> Tensor:
        """kept: which tokens (B, S) have a target. Of those, (T,): which ones the teacher has read."""
        within = torch.arange(kept.shape[1], device=kept.device) < self.reached.shape[1]
        return within.expand_as(kept)[kept]

    def final(self, kept: Tensor) -> Tensor:
        """Rows of `reached` for the targets that the teacher knows."""
        return self.reached[kept[:, : self.reached.shape[1]]]


@dataclass(frozen=True)
class Distillation:
    """The loss of a target that the teacher knows:

        (1 - weight) * cross-entropy + weight * (temperature**2 * KL(teacher || student) + hidden * distance)

    KL in nats, of the distributions at `temperature` (Hinton et al. 2015, https://arxiv.org/abs/1503.02531, whose
    factor temperature**2 keeps the gradient's size). distance: the mean over layers of |student - teacher|**2 /
    |teacher|**2 of the layers' outputs. A target that the teacher does not know has the cross-entropy alone.
    `head`: the teacher's, on the device of training; it takes no part in the training.
    """

    head: nn.Module
    weight: float
    temperature: float = 1.0
    hidden: float = 0.0

    def losses(self, logits_of: LogitsOf, hidden: Tensor, targets: Tensor, taught: Tensor) -> Tensor:
        """Sums (2,) over hidden (T, E), targets (T,) and the teacher's (T, E): the loss, and its cross-entropy."""
        logits = logits_of(hidden).float()
        with torch.no_grad():
            teachers = self.head(taught).float()
        task = F.cross_entropy(logits, targets, reduction="sum")
        student, teacher = ((x / self.temperature).log_softmax(-1) for x in (logits, teachers))
        divergence = F.kl_div(student, teacher, log_target=True, reduction="sum") * self.temperature**2
        return torch.stack([(1 - self.weight) * task + self.weight * divergence, task])

    def between_layers(self, layers: Sequence[Tensor], taught: Taught, kept: Tensor) -> Tensor:
        """The sum over the known targets of the distance between the layers' outputs, with its weights."""
        known = taught.layers[0].shape[1]
        chosen = kept[:, :known]
        distances = []
        for ours, theirs in zip(layers, taught.layers, strict=True):
            ours, theirs = ours[:, :known][chosen].float(), theirs[chosen].float()
            distances.append(((ours - theirs).square().sum(-1) / theirs.square().sum(-1)).sum())
        return self.weight * self.hidden * torch.stack(distances).mean()


@dataclass
class Teacher:
    """A model that is read and not trained: its body on a device of its own, a head beside the student.

    length: the tokens of a row that it reads, those it was trained on. layers: whether their states are asked for.
    """

    model: PreTrainedModel
    length: int
    causal: bool
    layers: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @torch.no_grad()
    def read(self, batch: dict[str, Tensor]) -> Taught:
        """What it makes of the first `length` tokens of each row, on the batch's device."""
        inputs = {n: t[:, : self.length].to(self.device) for n, t in batch.items() if n != "labels"}
        options = {"use_cache": False} if self.causal else {}
        with withheld(self.model.get_output_embeddings()) as reached:
            output = self.model(**inputs, output_hidden_states=self.layers, **options)
        back = batch["input_ids"].device
        layers = tuple(state.to(back) for state in output.hidden_states) if self.layers else ()
        return Taught(reached[0].to(back), layers)

    def head_on(self, device: torch.device) -> nn.Module:
        """Its head: the module itself where it lies there already, else a copy."""
        head = self.model.get_output_embeddings()
        return head if self.device == device else copy.deepcopy(head).to(device)


def load_teacher(arguments: FinetuneArguments) -> PreTrainedModel | None:
    """The model that teaches, None where nothing is distilled, or where `precompute` loads it if it has to.

    Raises PosSwapError where there is none to load.
    """
    return open_teacher(arguments) if arguments.distil and arguments.teacher_cache is None else None


def teacher_folder(arguments: FinetuneArguments) -> str:
    folder = arguments.teacher or arguments.model
    if folder is None:
        raise PosSwapError(f"distil={arguments.distil:g} needs a teacher; give the folder of the unpatched model")
    return folder


def open_teacher(arguments: FinetuneArguments) -> PreTrainedModel:
    folder = teacher_folder(arguments)
    try:
        return from_pretrained(folder, dtype="auto")
    except OSError as error:
        raise PosSwapError(f"teacher={folder!r} cannot be loaded: {error}") from error


def make_teacher(
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    *,
    causal: bool,
    longest: int,
    layers: bool,
    device: torch.device,
) -> Teacher:
    """A teacher of `student` for rows of `longest` tokens; it is moved to `device` and put into eval mode.

    A causal teacher reads the beginning of a longer row; what a masked token is depends on the whole row.

    Raises PosSwapError for one that carries the student's own swap, whose vocabulary or widths differ, that makes
    more of its logits than its head does, or that does not know rows of that length.
    """
    name = check_teacher(teacher, student)
    check_vocabulary(name, teacher.get_output_embeddings(), student)
    shapes = [
        (m.config.get_text_config().num_hidden_layers, m.config.get_text_config().hidden_size)
        for m in (teacher, student)
    ]
    if layers and shapes[0] != shapes[1]:
        raise PosSwapError(
            f"distil_hidden: {name} has {shapes[0][0]} layers of width {shapes[0][1]}, and the model {shapes[1][0]} of "
            f"{shapes[1][1]}; use distil_hidden=0"
        )
    length = known_length(teacher)
    if not causal and longest > length:
        raise PosSwapError(
            f"block_size={longest} is longer than the {length} tokens that {name} knows; a masked model is distilled "
            f"on rows of at most {length}"
        )
    teacher.to(device).eval()
    if not is_plain(teacher, causal):
        raise PosSwapError(f"{name} makes more of its logits than its head does (a cap, a scale); distil=0")
    return Teacher(teacher, length, causal, layers, torch.device(device))


def check_teacher(teacher: PreTrainedModel, student: PreTrainedModel) -> str:
    """What messages call the teacher. Raises PosSwapError for one that carries the student's own swap."""
    name = f"teacher={kind(teacher)}"
    check_swap(name, record_of(teacher), student)
    return name


def check_swap(name: str, own: Record | None, student: PreTrainedModel) -> None:
    """own: what the teacher's config says of a swap. Raises PosSwapError where it is the student's."""
    mine = record_of(student)
    if own is not None and mine is not None and (own.scheme, own.params) == (mine.scheme, mine.params):
        raise PosSwapError(f"{name} carries the swap of the model that it is to teach; give the unpatched model")


def check_vocabulary(name: str, head: nn.Module | None, student: PreTrainedModel) -> None:
    """Raise PosSwapError unless the teacher's head has as many tokens as the student's."""
    tokens = student.get_output_embeddings().weight.shape[0]
    if head is None or head.weight.shape[0] != tokens:
        rows = "no head" if head is None else f"{head.weight.shape[0]} tokens"
        raise PosSwapError(f"{name} has {rows}, and the model {tokens}; both need one vocabulary")


def known_length(teacher: PreTrainedModel) -> int:
    """Tokens of the longest row that it was trained on, or that its own swap is meant for."""
    record = record_of(teacher)
    return trained_length(teacher) if record is None else record.length
