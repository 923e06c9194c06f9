"""Saving a portable model: transformers' own save, and beside it the code that makes the swap again, and a guard."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .edits import ABSENT, Replace
from .errors import PosSwapError
from .record import KEY, Record, config_values, owner_of
from .runs import replacing

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# transformers reads the name of the weights' file here and stops, quoting it, at one that is none: no class and no
# argument makes it load a portable checkpoint as the model that it no longer is
GUARD_KEY = "transformers_weights"
GUARD = "positions were swapped: load it with hf_posswap.from_pretrained, or an Auto class and trust_remote_code=True"

# arguments of `from_pretrained` that say where on the hub its files are
HUB = frozenset({"cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token"})

CODE = "modeling_posswap"  # the module that travels
Travel = Callable[[], tuple[str, dict[str, str]]]  # its source, and the config's auto_map


def save_edit(model: PreTrainedModel, travel: Travel) -> Replace:
    """The edit that makes `model.save_pretrained` write a checkpoint that is complete by itself."""
    return Replace(model, "save_pretrained", partial(save_portable, model, travel))


def save_portable(
    model: PreTrainedModel,
    travel: Travel,
    save_directory: str | os.PathLike,
    is_main_process: bool = True,
    *args: Any,
    **kwargs: Any,
) -> None:
    """A portable model's `save_pretrained`. Raises PosSwapError, before it writes anything, for `push_to_hub=True`,
    which would push half of it, and for a model class whose code cannot travel.
    """
    if kwargs.pop("push_to_hub", False):
        raise PosSwapError("push_to_hub=True: save the model and push the folder, or call model.push_to_hub")
    source, auto_map = travel()
    type(model).save_pretrained(model, save_directory, is_main_process, *args, **kwargs)
    config = Path(save_directory, "config.json")
    if not is_main_process or not config.exists():  # of an adapter there is none
        return
    data = json.loads(config.read_text(encoding="utf-8"))
    if KEY not in data:
        return
    data |= {"auto_map": auto_map, GUARD_KEY: GUARD}
    with replacing(Path(save_directory, f"{CODE}.py")) as path:
        path.write_text(source, encoding="utf-8")
    with replacing(config) as path:
        path.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def unswapped(data: dict[str, Any], record: Record) -> dict[str, Any]:
    """The dict of a config as it was before the recorded swap. Raises PosSwapError where the record does not fit."""
    before = {key: value for key, value in data.items() if key not in (KEY, GUARD_KEY)}
    if all(str(name).rpartition("--")[2].startswith(f"{CODE}.") for name in before.get("auto_map", {}).values()):
        before.pop("auto_map", None)  # read from the hub, every name has the repository and `--` before it
    for path, value in config_values(record.original):
        try:
            holder, name = owner_of(before, path)
            if value == ABSENT:
                holder.pop(name, None)
            else:
                holder[name] = value
        except (KeyError, TypeError, AttributeError) as error:
            raise PosSwapError(f"{KEY}.original names {path!r}, which this config does not have") from error
    return before
