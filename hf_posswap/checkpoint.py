"""Checkpoints: load what `model.save_pretrained` wrote, native or portable, without running code from the folder."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from .edits import ABSENT
from .errors import PosSwapError
from .record import KEY, PORTABLE, Record, config_values, owner_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def from_pretrained(path: str | os.PathLike, **kwargs: Any) -> PreTrainedModel:
    """Load a checkpoint, patched or not, into the model class that it was saved from.

    Args:
        path: a folder, or a name on the hub.
        kwargs: as for transformers' own `from_pretrained` (dtype, device_map, attn_implementation, ...).

    Raises:
        PosSwapError: the record in the config is broken or from a newer version, or the class is not transformers'.

    A native checkpoint is loaded by transformers alone, then checked against its record; a portable one is loaded
    as the model it was patched from, with its trained weights, and the recorded patch is made again.
    """
    from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

    from .patching import adopt, install
    from .planning import plan

    if kwargs.pop("trust_remote_code", False):
        raise PosSwapError("trust_remote_code=True: this loader never runs code from a checkpoint; leave it out")
    data, _ = PreTrainedConfig.get_config_dict(path)
    if data.get(KEY) is None:
        return model_class(data).from_pretrained(path, **kwargs)
    record = Record.from_dict(data[KEY])
    if record.storage == PORTABLE:
        del data[KEY]
        for where, value in config_values(record.original):
            holder, name = owner_of(data, where)
            holder[name] = value
            if value == ABSENT:
                del holder[name]
        config = CONFIG_MAPPING[data["model_type"]].from_dict(data)
        config.name_or_path = str(path)
        model = model_class(data).from_pretrained(path, config=config, **kwargs)
        new = plan(model, record.make_scheme(), recalled=record)
        if new.storage != PORTABLE or new.original.keys() != record.original.keys():
            raise PosSwapError(f"{KEY} in {path}: the record does not describe this model's {record.scheme!r} swap")
        install(model, new)
        return model
    model = model_class(data).from_pretrained(path, config=AutoConfig.from_pretrained(path), **kwargs)
    adopt(model, record)
    return model


def model_class(config: dict[str, Any]) -> type[PreTrainedModel]:
    """The class that a config's `architectures` asks for, looked up among transformers' own models only."""
    import transformers

    names = config.get("architectures") or []
    for name in names:
        cls = getattr(transformers, str(name), None)
        if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel):
            return cls
    raise PosSwapError(f"architectures={names!r} in the config names no model class of transformers")
