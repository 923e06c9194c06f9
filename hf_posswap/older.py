"""Older readers: the config keys from which transformers 4 takes a rotation, beside those of transformers 5.

transformers 4 does not look at `rope_parameters`: it loads a checkpoint that has nothing else with the rotation of an
unscaled model of base 10000, and says nothing. Read and run with 4.57. transformers 5 takes `rope_scaling` from a file
before `rope_parameters`, so the two are one dict; it writes neither twin when it saves the model again.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from .errors import PosSwapError, nearest
from .record import KEY, NATIVE, Record
from .runs import replacing

KNOWN = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")  # rotary types of 4.57
# model_type -> its names in transformers 4, where they are not the ones inside `rope_parameters`
NAMES = {"gpt_neox": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}}
BESIDE = ("rope_theta", "partial_rotary_factor")


def for_transformers_4(folder: str | os.PathLike) -> Path:
    """Add the twins to the `config.json` of a saved native checkpoint, for good until it is saved again.

    Raises:
        PosSwapError: no patched checkpoint, or one whose positions transformers 4 cannot make.
    """
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PosSwapError(f"folder={str(folder)!r} holds no config.json that can be read: {error}") from error
    if config.get(KEY) is None:
        raise PosSwapError(f"folder={str(folder)!r} holds no patched checkpoint: its config.json has no {KEY!r}")
    twins = twins_of(config)
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(config | twins, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return path


def twins_of(config: dict[str, Any]) -> dict[str, Any]:
    """The keys that transformers 4 reads, for a config that says the same in `rope_parameters`; none without."""
    record = Record.from_dict(config[KEY])
    if record.storage != NATIVE:
        raise PosSwapError(f"{record.scheme}: stored portable, which transformers 4 cannot load")
    parameters = config.get("rope_parameters")
    if parameters is None:
        return {}
    if any(isinstance(value, dict) for value in parameters.values()):
        raise PosSwapError("rope_parameters: one for each layer type, which transformers 4 keeps in other ways")
    if parameters["rope_type"] not in KNOWN:
        raise PosSwapError(
            f"rope_type={parameters['rope_type']!r} is not known to transformers 4; "
            f"{nearest(parameters['rope_type'], KNOWN)}"
        )
    names = NAMES.get(config["model_type"], {})
    beside = {names.get(key, key): parameters[key] for key in BESIDE if key in parameters}
    return {"rope_scaling": parameters} | beside
