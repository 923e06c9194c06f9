"""Checkpoints: load what `model.save_pretrained` wrote, native or portable, without running code from the folder."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from .edits import ABSENT
from .errors import PosSwapError
from .record import KEY, PORTABLE, Record, config_values, owner_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# arguments of `from_pretrained` that say where on the hub its files are
HUB = frozenset({"cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token"})


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
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    from .patching import adopt, forget_replaced, install
    from .planning import plan
    from .scheme import scheme_of

    if kwargs.pop("trust_remote_code", False):
        raise PosSwapError("trust_remote_code=True: this loader never runs code from a checkpoint; leave it out")
    hub = {name: kwargs[name] for name in HUB & kwargs.keys()}
    data, _ = PreTrainedConfig.get_config_dict(path, **hub)
    if data.get(KEY) is None:
        return model_class(data).from_pretrained(path, **kwargs)
    record = Record.from_dict(data[KEY])
    cls = model_class(data)
    if record.storage == PORTABLE:
        del data[KEY]
        for where, value in config_values(record.original):
            holder, name = owner_of(data, where)
            holder[name] = value
            if value == ABSENT:
                del holder[name]
    config = CONFIG_MAPPING[data["model_type"]].from_dict(data)
    config.name_or_path = str(path)
    model = cls.from_pretrained(path, config=config, **kwargs)
    if record.storage == PORTABLE:
        new = plan(model, scheme_of(record), recalled=record, layers=record.layers)
        if new.storage != PORTABLE or new.original.keys() != record.original.keys():
            raise PosSwapError(f"{KEY} in {path}: the record does not describe this model's {record.scheme!r} swap")
        install(model, new)
        load_added(model, path, **hub)
        forget_replaced(model)
    else:
        adopt(model, record)
    return model


def load_added(model: PreTrainedModel, path: str | os.PathLike, **hub: Any) -> None:
    """Fill the parameters that a swap added; transformers, which loads the model first, knows nothing of them."""
    from safetensors import safe_open
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

    from .attention import Attached

    added = {
        f"{where}.{name}": parameter
        for where, module in model.named_modules()
        if isinstance(module, Attached)
        for name, parameter in module.named_parameters()
    }
    if not added:
        return
    index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False, **hub)
    if index is None:
        shards = dict.fromkeys(added, SAFE_WEIGHTS_NAME)
    else:
        with open(index, encoding="utf-8") as file:
            shards = json.load(file)["weight_map"]
    missing = sorted(added.keys() - shards.keys())
    if missing:
        raise PosSwapError(f"{path} lacks {missing[0]}, a parameter that the recorded swap added")
    for shard in sorted({shards[name] for name in added}):
        with safe_open(cached_file(path, shard, **hub), framework="pt") as weights:
            for name in sorted(weights.keys() & added.keys()):
                added[name].data.copy_(weights.get_tensor(name))


def model_class(config: dict[str, Any]) -> type[PreTrainedModel]:
    """The class that a config's `architectures` asks for, looked up among transformers' own models only."""
    import transformers

    names = config.get("architectures") or []
    for name in names:
        cls = getattr(transformers, str(name), None)
        if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel):
            return cls
    raise PosSwapError(f"architectures={names!r} in the config names no model class of transformers")
