"""Plan: what a patch would do, as validated edits and a new config. Filled by the files beside this one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..anatomy import Anatomy, kind
from ..edits import ABSENT, Hook, Replace, same
from ..errors import PosSwapError
from ..pictures import Picture
from ..record import ATTENTION_KEY, FOREIGN_ATTENTION, KEY, NATIVE, Record, config_values, owner_of, published
from ..scheme import Scheme, named

# Where configs of models without a table say the tokens they were trained on; Bloom's and T5's are extra keys.
LENGTHS = ("max_position_embeddings", "max_seq_len", "seq_length", "n_positions")


@dataclass
class Plan:
    """What a patch would do: print it. `edits` are in order; `config` is the model's own new config."""

    anatomy: Anatomy
    scheme: Scheme
    config: Any
    edits: list[Replace | Hook] = field(default_factory=list)
    original: dict[str, Any] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    storage: str = NATIVE
    length: int = 0
    notes: list[str] = field(default_factory=list)
    configs: dict[int, Any] = field(default_factory=dict)
    effective: bool = False
    recalibrate: bool = False
    layers: tuple[int, ...] | None = None
    ndim: int | None = None
    picture: Picture | None = None

    @classmethod
    def of(cls, anatomy: Anatomy, scheme: Scheme, recalled: Record | None = None) -> Plan:
        """An empty plan. `recalled` is the record of a checkpoint: its numbers are used instead of measuring again."""
        configs: dict[int, Any] = {}
        config = anatomy.model.config
        new = cls(anatomy, scheme, copy.deepcopy(config, configs), configs=configs, source=config.name_or_path)
        if recalled is not None:
            new.measured, new.source = dict(recalled.measured), recalled.source
            new.layers = None if recalled.layers is None else tuple(recalled.layers)
            new.ndim = recalled.ndim
            new.picture = None if recalled.picture is None else Picture(**recalled.picture)
        return new

    @property
    def text(self) -> Any:
        """The new config of the text stack."""
        return self.configs.get(id(self.anatomy.config)) or self.config.get_text_config()

    def set_config(self, key: str, value: Any) -> None:
        """Write a key of the new text config, and remember what was there."""
        prefix = config_path(self.config, self.text)
        old = getattr(self.anatomy.config, key, ABSENT)
        if old != value:
            self.original[f"{prefix}{key}"] = copy.deepcopy(old)
            setattr(self.text, key, value)

    def replace(self, owner: Any, name: str, value: Any, where: str = "") -> None:
        """Plan an exchange; one that would change nothing is dropped."""
        edit = Replace(owner, name, value, where)
        if not same(edit.current, value):
            self.edits.append(edit)

    def follow(self, steps: Sequence[Callable[[Plan, Scheme], None]]) -> None:
        """Silence and install; on the CPU, for a caller may be building on the meta device, which has no numbers."""
        with torch.device("cpu"):
            for step in steps:
                step(self, self.scheme)

    def config_edits(self) -> list[Replace]:
        """What gives the model, and every module of it that keeps a config, the new one."""
        return [
            Replace(module, "config", self.configs[id(module.config)])
            for module in self.anatomy.model.modules()
            if id(getattr(module, "config", None)) in self.configs
        ]

    def finish(self) -> None:
        """Write the record of what was planned into the new config."""
        setattr(self.config, KEY, self.record().to_dict())

    def guard(self) -> None:
        """Have stock transformers stop at the saved config: it is of a portable swap that no other key shows."""
        self.original[ATTENTION_KEY] = ABSENT
        setattr(self.config, ATTENTION_KEY, FOREIGN_ATTENTION)

    def record(self) -> Record:
        return Record(
            scheme=self.scheme.name,
            params=self.scheme.given(),
            storage=self.storage,
            length=self.length,
            original=self.original,
            measured=self.measured,
            source=published(self.source),
            layers=None if self.layers is None else list(self.layers),
            stack=self.anatomy.stack,
            biases=dict(self.anatomy.biases),
            ndim=self.ndim,
            picture=None if self.picture is None else self.picture.given(),
        )

    def __str__(self) -> str:
        swap = named(self.scheme, self.layers, self.ndim, self.picture)
        lines = [f"{kind(self.anatomy.model)} -> {swap} ({self.storage}, {len(self.edits)} edits)"]
        lines += [f"  config.{path}: {old!r} -> {self._new(path)!r}" for path, old in config_values(self.original)]
        lines += [f"  {edit}" for edit in self.edits if not (isinstance(edit, Replace) and edit.is_idle)]
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])

    def _new(self, path: str) -> Any:
        holder, name = owner_of(self.config, path)
        return getattr(holder, name)


def trained_length(new: Plan) -> int:
    """Tokens that the model was trained on, as far as its table or config tells; 0 where neither does."""
    if new.anatomy.table is not None:
        return new.anatomy.table.length
    config = new.anatomy.config
    return next((n for n in (getattr(config, key, None) for key in LENGTHS) if isinstance(n, int)), 0)


def config_path(config: Any, inner: Any) -> str:
    """`` or `text_config.`: where a text stack's config lies in the model's."""
    if inner is config:
        return ""
    for name in config.sub_configs:
        child = getattr(config, name, None)
        if child is inner:
            return f"{name}."
        if child is not None and child.sub_configs and (deeper := config_path(child, inner)):
            return f"{name}.{deeper}"
    return ""


def invalid(config: Any) -> Exception | None:
    """What transformers' own check of a config, made at every save, finds wrong with it."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        getattr(config, "validate", bool)()  # configs of remote code may have none
    except StrictDataclassError as error:
        return error
    return None


def refuse_quantised(model: nn.Module, what: str) -> None:
    if getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None) is not None:
        raise PosSwapError(
            f"{what} changes weights, and this {kind(model)} is quantised; patch it in full precision, then quantise"
        )


def plain_state(module: nn.Module) -> dict[str, Any]:
    """Numbers, strings and containers of them that a module computed from its config when it was built."""
    internal = vars(nn.Module())
    return {
        name: value
        for name, value in vars(module).items()
        if name not in internal and isinstance(value, (int, float, str, tuple, list, dict)) and name != "training"
    }
