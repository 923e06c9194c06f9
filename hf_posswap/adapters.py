"""Adapters (PEFT): an adapter holds no swap, so its base must have the one that it was trained on."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

from torch import nn

from .errors import PosSwapError, RecalibrationWarning
from .patching import patch_model, record_of
from .record import FIT, KEY, Record
from .scheme import scheme_of

OF_ONE_REPOSITORY = ("revision", "subfolder")  # arguments that say nothing of where the base is


def load_adapter(path: str | os.PathLike, config: Path, hub: dict[str, Any], kwargs: dict[str, Any]) -> nn.Module:
    """A saved adapter on the base that it names; `hub` says where the adapter is, `kwargs` go to the base.

    Where the patched model's config lies beside it (`adapted.config.save_pretrained(path)`), the base must carry that
    swap; one without any is given it.

    Raises:
        PosSwapError: the adapter names no base, or one with another swap, or one that lacks the swap's parameters.
    """
    from peft import PeftModel

    from .checkpoint import from_pretrained

    name = json.loads(config.read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not name:
        raise PosSwapError(
            f"path={str(path)!r} is an adapter that names no base; load the patched base with "
            "hf_posswap.from_pretrained, and peft.PeftModel.from_pretrained(base, path)"
        )
    base = from_pretrained(name, **{key: hub[key] for key in hub if key not in OF_ONE_REPOSITORY}, **kwargs)
    beside = config.with_name("config.json")
    data = json.loads(beside.read_text(encoding="utf-8")).get(KEY) if beside.exists() else None
    if data is not None:
        _meet(base, name, Record.from_dict(data))
    return PeftModel.from_pretrained(base, path, **hub)


def _meet(base: nn.Module, name: str, asked: Record) -> None:
    """Make the base what the adapter was trained on."""
    scheme = scheme_of(asked)
    if record_of(base) is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RecalibrationWarning)
            patch_model(base, scheme, layers=asked.layers, stack=asked.stack, ndim=asked.ndim, **(asked.picture or {}))
        if (
            scheme.trainable
            or FIT in asked.measured
            or any(KEY in parameter.split(".") for parameter, _ in base.named_parameters())
        ):
            raise PosSwapError(
                f"the adapter was trained on {name} with {scheme.name}, whose parameters are not in that base; save "
                "the patched base and name it in the adapter, or merge the adapter before it is saved"
            )
    found = record_of(base)
    for key in ("scheme", "params", "layers", "stack", "ndim", "picture", "original"):
        has, needs = getattr(found, key), getattr(asked, key)
        if has != needs:
            raise PosSwapError(f"the adapter was trained on a base with {key}={needs!r}, and {name} has {has!r}")
