"""Saving a patched model, whole or not at all; a portable one with the code that makes the swap again, and a guard."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .edits import ABSENT, Replace
from .errors import PosSwapError
from .pictures import CONFIG_KEYS
from .record import KEY, Record, config_values, owner_of
from .runs import can_replace, replacing, replacing_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# transformers reads the name of the weights' file here and stops, quoting it, at one that is none: no class and no
# argument makes it load a portable checkpoint as the model that it no longer is
GUARD_KEY = "transformers_weights"
GUARD = "positions were swapped: load it with hf_posswap.from_pretrained, or an Auto class and trust_remote_code=True"

# arguments of `from_pretrained` that say where on the hub its files are
HUB = frozenset({"cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token"})

CONFIG = "config.json"
CODE = "modeling_posswap"  # the module that travels
Travel = Callable[[], tuple[str, dict[str, str]]]  # its source, and the config's auto_map


def save_edit(model: PreTrainedModel, travel: Travel | None) -> Replace:
    """The edit that makes `model.save_pretrained` write a checkpoint that is complete by itself.

    `travel`: None for a native swap, of which no code travels.
    """
    return Replace(model, "save_pretrained", partial(save_whole, model, travel))


def save_whole(
    model: PreTrainedModel,
    travel: Travel | None,
    save_directory: str | os.PathLike,
    is_main_process: bool = True,
    *args: Any,
    **kwargs: Any,
) -> None:
    """A patched model's `save_pretrained`: the folder holds the old checkpoint or the new one, whenever it is killed.

    It is written in place where there is no older one in it, and where it cannot be replaced (`runs.can_replace`).
    Raises PosSwapError, before it writes anything, for a portable swap with `push_to_hub=True`, which would push half
    of it, and for one of a model class whose code cannot travel.
    """
    save = partial(type(model).save_pretrained, model)
    if travel is not None:
        if kwargs.pop("push_to_hub", False):
            raise PosSwapError("push_to_hub=True: save the model and push the folder, or call model.push_to_hub")
        save = partial(_save_portable, save, travel())
    in_place = kwargs.get("push_to_hub") or kwargs.get("distributed_checkpoint")  # others read or write the folder too
    older = Path(save_directory, CONFIG).exists()
    if not is_main_process or not older or in_place or not can_replace(save_directory):
        save(save_directory, is_main_process, *args, **kwargs)
        return
    with replacing_folder(save_directory, keep=is_not_weights) as folder:
        save(folder, is_main_process, *args, **kwargs)


def _save_portable(
    save: Callable[..., None],
    code: tuple[str, dict[str, str]],
    folder: str | os.PathLike,
    is_main_process: bool,
    *args: Any,
    **kwargs: Any,
) -> None:
    save(folder, is_main_process, *args, **kwargs)
    config = Path(folder, CONFIG)
    if not is_main_process or not config.exists():  # of an adapter there is none
        return
    data = json.loads(config.read_text(encoding="utf-8"))
    if KEY not in data:
        return
    source, auto_map = code
    data |= {"auto_map": auto_map, GUARD_KEY: GUARD}
    with replacing(Path(folder, f"{CODE}.py")) as path:
        path.write_text(source, encoding="utf-8")
    with replacing(config) as path:
        path.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def is_not_weights(name: str) -> bool:
    """Whether a file stays when the checkpoint beside it is replaced: not its weights, shards or code."""
    return re.fullmatch(rf"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?|{CODE}\.py", name) is None


def unswapped(data: dict[str, Any], record: Record) -> dict[str, Any]:
    """The dict of a config as it was before the recorded swap, but for what an image model reads: the weights in the
    checkpoint are of that size. Raises PosSwapError where the record does not fit.
    """
    before = {key: value for key, value in data.items() if key not in (KEY, GUARD_KEY)}
    if all(str(name).rpartition("--")[2].startswith(f"{CODE}.") for name in before.get("auto_map", {}).values()):
        before.pop("auto_map", None)  # read from the hub, every name has the repository and `--` before it
    for path, value in config_values(record.original):
        if is_of_picture(path):
            continue
        try:
            holder, name = owner_of(before, path)
            if value == ABSENT:
                holder.pop(name, None)
            else:
                holder[name] = value
        except (KeyError, TypeError, AttributeError) as error:
            raise PosSwapError(f"{KEY}.original names {path!r}, which this config does not have") from error
    return before


def is_of_picture(path: str) -> bool:
    """Whether a key of a config, by its dotted path, says what an image model reads."""
    return path.rpartition(".")[2] in CONFIG_KEYS
