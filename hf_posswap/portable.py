"""Loading a portable checkpoint: the model as it was, then the recorded swap again, then the parameters it added.

`bundle.py` writes this file and what it needs into the checkpoints themselves, so that `trust_remote_code=True` loads
them where this package is not installed; `checkpoint.py` calls the same functions from here and runs nothing of a
checkpoint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from .anatomy import Anatomy, find_sites
from .edits import Journal
from .errors import PosSwapError
from .planning.plan import Plan
from .record import FOREIGN_ATTENTION, KEY, PORTABLE, Record
from .saving import HUB, Travel, is_of_picture, save_edit, unswapped
from .scheme import Scheme, from_params

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADDED = r"(^|\.)posswap\."  # names in a state dict


def rebuild(
    anatomy: Anatomy,
    record: Record,
    scheme: Scheme,
    steps: Sequence[Callable[[Plan, Scheme], None]],
    travel: Travel,
) -> Plan:
    """Plan a recorded swap again, on a model that was just loaded without it."""
    new = Plan.of(anatomy, scheme, recalled=record)
    new.follow(steps)
    new.original |= {path: value for path, value in record.original.items() if is_of_picture(path)}  # loaded so
    if new.storage != PORTABLE or new.original.keys() != record.original.keys():
        raise PosSwapError(f"{KEY} in the config does not describe this model's {record.scheme!r} swap")
    new.finish()
    new.edits.append(save_edit(anatomy.model, travel))
    return new


def load_added(model: PreTrainedModel, path: str | os.PathLike, **hub: Any) -> None:
    """Fill the parameters that a swap added; transformers, which loads the model first, knows nothing of them.

    It renames what it saves, for some families, and so does it with them.
    """
    from safetensors import safe_open
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

    live = {name: parameter for name, parameter in model.named_parameters() if KEY in name.split(".")}
    added = {saved: p for name, p in live.items() for saved in revert_weight_conversion(model, {name: p})}
    if not added:
        return
    index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False, **hub)
    shards = {SAFE_WEIGHTS_NAME}
    if index is not None:
        with open(index, encoding="utf-8") as file:
            shards = {shard for name, shard in json.load(file)["weight_map"].items() if name in added}
    filled = set()
    for shard in sorted(shards):
        with safe_open(cached_file(path, shard, **hub), framework="pt") as weights:
            for name in sorted(weights.keys() & added.keys()):
                added[name].data.copy_(weights.get_tensor(name))
                filled.add(name)
    missing = sorted(added.keys() - filled)
    if missing:
        raise PosSwapError(f"{path} lacks {missing[0]}, a parameter that the recorded swap added")


class Portable:
    """Beside a transformers model class: its `from_pretrained` makes the recorded swap again.

    scheme, steps: what was swapped, and how. travel: the source of the module that holds the class, to be saved again.
    """

    scheme: ClassVar[type[Scheme]]
    steps: ClassVar[Sequence[Callable[[Plan, Scheme], None]]]
    travel: ClassVar[Travel]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._keys_to_ignore_on_load_unexpected = [*(cls._keys_to_ignore_on_load_unexpected or ()), ADDED]

    @classmethod
    def is_custom_code(cls) -> bool:
        """No: modules and weights are transformers' own, and so is what it renames when it loads and saves them."""
        return False

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        hub = {name: kwargs[name] for name in HUB & kwargs.keys()}
        if config is None:
            config = cls.config_class.from_pretrained(path, **hub)
        data = config.to_dict()
        record = Record.from_dict(data[KEY])
        before = type(config).from_dict(unswapped(data, record))
        before.name_or_path = str(path)
        if config._attn_implementation not in (None, FOREIGN_ATTENTION):
            kwargs.setdefault("attn_implementation", config._attn_implementation)
        loaded = super().from_pretrained(path, *args, config=before, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        anatomy = find_sites(model).within(record.stack, record.biases)
        new = rebuild(anatomy, record, from_params(cls.scheme, record.params), cls.steps, cls.travel)
        Journal([*new.config_edits(), *new.edits]).apply()
        load_added(model, path, **hub)
        return loaded
