"""What is trained: everything, the parameters of positions alone, or LoRA beside frozen weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..anatomy import examine, kind
from ..errors import PosSwapError
from ..record import KEY
from .arguments import FinetuneArguments

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FILE = "trained.safetensors"
ADAPTER = "default"


def position_parameters(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Those that a swap added, and the model's own learned table of positions or of biases."""
    anatomy = examine(model)
    own = [] if anatomy.table is None else [anatomy.table.weight]
    if anatomy.bias is not None:
        own += [table.weight for table in anatomy.bias.tables.values()]
    of_table = {id(parameter) for parameter in own if parameter.requires_grad}
    named = model.named_parameters()
    return {name: p for name, p in named if (KEY in name.split(".") and p.requires_grad) or id(p) in of_table}


@dataclass
class Trained:
    """The model while it is trained. positions: ids of the parameters with a learning rate of their own."""

    model: PreTrainedModel
    positions: frozenset[int]
    lora: Any = None

    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    def weights(self) -> dict[str, Tensor]:
        """The state dict of the model as it would be with its adapters merged; they stay as they are."""
        state = self.model.state_dict()
        merged = {name.replace(".base_layer.", "."): value for name, value in state.items() if ".lora_" not in name}
        for name, layer in self._adapted():
            merged[f"{name}.weight"] = merged[f"{name}.weight"] + layer.get_delta_weight(ADAPTER)
        return merged

    def write(self, folder: Path) -> None:
        """Write what is trained beside the frozen weights."""
        tensors = {name: p.detach().cpu().contiguous() for name, p in self.parameters().items()}
        save_file(tensors, folder / FILE)

    def read(self, folder: Path) -> None:
        """Read what `write` wrote. Raises PosSwapError where it is of other parameters."""
        parameters, tensors = self.parameters(), load_file(folder / FILE)
        if parameters.keys() != tensors.keys():
            odd = sorted(parameters.keys() ^ tensors.keys())[0]
            raise PosSwapError(f"{folder / FILE} is of another choice of what is trained: {odd!r}")
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(tensors[name])

    def merge(self) -> None:
        """Make an ordinary model of it again, with what the adapters learned in its weights."""
        if self.lora is not None:
            self.lora.merge_and_unload()
            self.lora = None

    def _adapted(self) -> list[tuple[str, nn.Module]]:
        return [(name, m) for name, m in self.model.named_modules() if ADAPTER in getattr(m, "lora_A", ())]


@contextmanager
def trained(model: PreTrainedModel, arguments: FinetuneArguments) -> Iterator[Trained]:
    """Choose what is trained; afterwards the model is without adapters, its parameters trainable as before.

    Raises PosSwapError where there is nothing of the kind to train.
    """
    positions = position_parameters(model)
    if arguments.train == "positions" and not positions:
        raise PosSwapError(
            f"train='positions': {kind(model)} has no parameters of positions to train; use train='all' or 'lora'"
        )
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    frozen = {id(parameter) for parameter in model.parameters() if not parameter.requires_grad}
    chosen = Trained(model, frozenset(map(id, positions.values())))
    try:
        if arguments.train != "all":
            model.requires_grad_(False)
        if arguments.train == "lora":
            chosen.lora = _add_lora(model, arguments)
            for parameter in _beside_lora(model, arguments):
                parameter.requires_grad_(id(parameter) not in frozen)
        for parameter in positions.values():
            parameter.requires_grad_(True)
        yield chosen
    finally:
        if chosen.lora is not None:
            chosen.lora.unload()
        for name, parameter in model.named_parameters():  # FSDP has put others in their places
            parameter.requires_grad_(before[name])


def _add_lora(model: PreTrainedModel, arguments: FinetuneArguments) -> Any:
    """Put PEFT's adapters into the model; what takes them out again. What a swap added is trained as it is."""
    try:
        from peft import LoraConfig
        from peft.tuners.lora import LoraModel
    except ImportError:
        raise PosSwapError("train='lora' needs the package peft: pip install 'peft>=0.17'") from None
    settings = LoraConfig(
        r=arguments.lora_rank,
        lora_alpha=arguments.lora_alpha,
        target_modules=arguments.lora_targets or "all-linear",
        exclude_modules=rf"(.*\.)?{KEY}(\..*)?",
    )
    try:
        return LoraModel(model, {ADAPTER: settings}, ADAPTER)
    except ValueError as error:
        raise PosSwapError(f"lora_targets={arguments.lora_targets}: {error}") from None


def _beside_lora(model: PreTrainedModel, arguments: FinetuneArguments) -> list[nn.Parameter]:
    """Parameters that are trained whole: those of norms, which have one dimension, and the token embedding."""
    found = []
    if arguments.lora_norms:
        for module in model.modules():
            weight = module._parameters.get("weight")
            if weight is not None and weight.dim() == 1:
                found += module.parameters(recurse=False)
    if arguments.lora_embeddings:
        found += model.get_input_embeddings().parameters()
    return found
