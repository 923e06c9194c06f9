"""Checkpoints: load what `model.save_pretrained` wrote, native or portable, without running code from the folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import PosSwapError
from .record import KEY, PORTABLE, Record
from .saving import HUB, unswapped
from .scheme import Scheme, scheme_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def from_pretrained(path: str | os.PathLike, **kwargs: Any) -> PreTrainedModel:
    """Load a checkpoint, patched or not, into the model class that it was saved from.

    Args:
        path: a folder, or a name on the hub.
        kwargs: as for transformers' own `from_pretrained` (dtype, device_map, attn_implementation, ...).

    Raises:
        PosSwapError: the record in the config is broken or from a newer version, or the class is not transformers'.

    A native checkpoint is loaded by transformers alone, then checked against its record; a portable one is loaded
    as the model it was patched from, with its trained weights, and the recorded patch is made again; an adapter that
    PEFT saved is put on its base, patched as it was (`adapters.load_adapter`).
    """
    from transformers import PreTrainedConfig
    from transformers.utils import find_adapter_config_file

    from .adapters import load_adapter
    from .patching import adopt

    if kwargs.pop("trust_remote_code", False):
        raise PosSwapError("trust_remote_code=True: this loader never runs code from a checkpoint; leave it out")
    if kwargs.get("output_loading_info"):
        raise PosSwapError("output_loading_info=True: this loader returns the model alone; leave it out")
    hub = {name: kwargs[name] for name in HUB & kwargs.keys()}
    adapter = find_adapter_config_file(os.fspath(path), **hub)
    if adapter is not None:
        return load_adapter(path, Path(adapter), hub, {key: kwargs[key] for key in kwargs.keys() - hub.keys()})
    data, _ = PreTrainedConfig.get_config_dict(path, **hub)
    cls = model_class(data)
    if data.get(KEY) is None:
        return cls.from_pretrained(path, **kwargs)
    record = Record.from_dict(data[KEY])
    scheme = scheme_of(record)
    before = unswapped(data, record) if record.storage == PORTABLE else data
    config = cls.config_class.from_dict(before)
    config.name_or_path = str(path)
    if record.storage == PORTABLE:
        return _load_portable(cls, path, config, record, scheme, hub, kwargs)
    model = cls.from_pretrained(path, config=config, **kwargs)
    adopt(model, record)
    return model


def _load_portable(
    cls: type[PreTrainedModel],
    path: str | os.PathLike,
    config: PreTrainedConfig,
    record: Record,
    scheme: Scheme,
    hub: dict[str, Any],
    kwargs: dict[str, Any],
) -> PreTrainedModel:
    from .anatomy import examine
    from .bundle import travel_of
    from .patching import forget_replaced, install
    from .planning import choose_steps
    from .planning.layers import chosen_layers
    from .portable import ADDED, load_added, rebuild

    # while it loads, a class that does not report the added parameters as unexpected
    ignored = [*(cls._keys_to_ignore_on_load_unexpected or ()), ADDED]
    loader = type(cls.__name__, (cls,), {"_keys_to_ignore_on_load_unexpected": ignored, "__module__": cls.__module__})
    model = loader.from_pretrained(path, config=config, **kwargs)
    model.__class__ = cls
    anatomy = examine(model).within(record.stack, record.biases)
    steps = choose_steps(anatomy, scheme, chosen_layers(anatomy, record.layers), record.picture)
    install(model, rebuild(anatomy, record, scheme, steps, travel_of(anatomy, scheme, steps)))
    load_added(model, path, **hub)
    forget_replaced(model)
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
