"""Planning outside the model: the length limits that a tokenizer and a processor hold."""

from __future__ import annotations

from typing import Any

import torch

from ..anatomy import find_table, kind, reads_pictures
from ..edits import Replace, same
from ..errors import PosSwapError
from ..pictures import CONFIG_KEYS


def limit_edits(
    model: Any, config: Any, length: int, tokenizer: Any, processor: Any, original: dict[str, Any]
) -> list[Replace]:
    """Edits of the length limits that live outside the model: of a text (tokens), of an image (pixels, channels).

    original: values of the config before the swap, by dotted path.
    """
    edits = []
    if tokenizer is not None:
        check_tokenizer(tokenizer, model)
        edits.append(Replace(tokenizer, "model_max_length", length, "tokenizer"))
    texts = getattr(processor, "tokenizer", None)
    if texts is not None and not reads_pictures(model):
        check_tokenizer(texts, model)
        edits.append(Replace(texts, "model_max_length", length, "processor.tokenizer"))
    elif processor is not None:
        if getattr(config, "image_size", None) is None:
            raise PosSwapError(f"processor={kind(processor)} was given for a model without images; give tokenizer=")
        before = {path.rpartition(".")[2]: value for path, value in original.items()}
        check_processor(processor, model, config, before)
        edits += _image_limits(processor, *_pair(config.image_size))
        edits += _patch_limits(processor, config)
        edits += _channel_limits(processor, getattr(config, "num_channels", 3))
    return [edit for edit in edits if not same(edit.current, edit.value)]


def check_processor(processor: Any, model: Any, config: Any, before: dict[str, Any]) -> None:
    """Raise PosSwapError for a processor that is none of images, or whose pictures this model has never read.

    config: the model's new one; before: what some of its keys were. A model that takes any size has no wrong one.
    """
    name = f"processor={kind(processor)}"
    input_name = "pixel_values" if reads_pictures(model) else model.main_input_name
    if not hasattr(processor, "size"):
        raise PosSwapError(f"{name} has no size to update")
    if input_name not in getattr(processor, "model_input_names", ()):
        raise PosSwapError(f"{name} makes no {input_name}, which {kind(model)} reads")
    read = {key: (before.get(key, value), value) for key, value in vars(config).items() if key in CONFIG_KEYS}
    makes = {
        "num_channels": len(getattr(processor, "image_mean", None) or ()) or None,
        "patch_size": getattr(processor, "patch_size", None),
    }
    for key, value in makes.items():
        if value is not None and key in read and _pair(value) not in map(_pair, read[key]):
            raise PosSwapError(
                f"{name} has {key}={value}, and this {kind(model)} {read[key][0]}: it is another model's"
            )
    made = _made(processor)
    if made is not None and made not in map(_pair, read["image_size"]) and not _takes(model, config, made):
        raise PosSwapError(
            f"{name} makes {made[0]} x {made[1]} pixels, and this {kind(model)} reads {read['image_size'][0]}: it is "
            "another model's"
        )


def _made(processor: Any) -> tuple[int, int] | None:
    """(height, width) of what a processor makes, where it does not depend on the picture."""
    crops = getattr(processor, "do_center_crop", False)
    size = dict((processor.crop_size if crops else processor.size) or {})
    found = size.get("height"), size.get("width")
    return None if None in found else found


def _takes(model: Any, config: Any, size: tuple[int, int]) -> bool:
    """Whether the module that holds the table takes a picture of any size: asked of it, on the meta device."""
    table = find_table(model)
    if table is None or len(table.grid or ()) != 2:
        return False
    try:
        with torch.device("meta"), torch.no_grad():
            type(table.owner)(config)(torch.empty(1, config.num_channels, *size))
    except (ValueError, RuntimeError):
        return False
    return True


def _pair(size: Any) -> tuple[int, ...]:
    """(height, width) of one number, two, or transformers' dict of them."""
    if not isinstance(size, (int, list, tuple)):
        size = dict(size)
        return size["height"], size["width"]
    return tuple(size) if isinstance(size, (list, tuple)) else (size, size)


def _patch_limits(processor: Any, config: Any) -> list[Replace]:
    """The patches that it makes pictures multiples of, where it does."""
    old = getattr(processor, "patch_size", None)
    if old is None or _pair(old) == _pair(config.patch_size):
        return []
    height, width = _pair(config.patch_size)
    one = height if isinstance(old, int) else type(old)(height=height, width=width)
    return [Replace(processor, "patch_size", one, "processor")]


def _channel_limits(processor: Any, channels: int) -> list[Replace]:
    """What it normalises with, as kernels are made: fewer channels share their mean, more repeat them in turn."""
    edits = []
    for name in ("image_mean", "image_std"):
        old = list(getattr(processor, name, None) or ())
        if old and len(old) != channels:
            shared = [sum(old) / len(old)] * channels
            value = shared if channels < len(old) else [old[i % len(old)] for i in range(channels)]
            edits.append(Replace(processor, name, value, "processor"))
    if edits and getattr(processor, "do_convert_rgb", None):
        edits.append(Replace(processor, "do_convert_rgb", False, "processor"))
    return edits


def check_tokenizer(tokenizer: Any, model: Any) -> None:
    """Raise PosSwapError for a tokenizer that is none, or that makes ids the model has no row for."""
    if not hasattr(tokenizer, "model_max_length"):
        raise PosSwapError(f"tokenizer={kind(tokenizer)} is not a tokenizer: it has no model_max_length")
    if reads_pictures(model):
        raise PosSwapError(f"tokenizer={kind(tokenizer)}: {kind(model)} reads images and no tokens; give processor=")
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise PosSwapError(f"tokenizer has {len(tokenizer)} tokens and this {kind(model)} has {rows}: it does not fit")


def _image_limits(processor: Any, height: int, width: int) -> list[Replace]:
    """What it resizes to, or no picture exceeds; where it crops, what it crops to, from an image as much larger as it
    was before.
    """
    exact = {"height": height, "width": width}
    if dict(processor.size).get("longest_edge") is not None:
        return [Replace(processor, "size", type(processor.size)(longest_edge=max(height, width)), "processor")]
    if not getattr(processor, "do_center_crop", False):
        return [Replace(processor, "size", type(processor.size)(**exact), "processor")]
    crop, edge = processor.crop_size, dict(processor.size).get("shortest_edge")
    ratio = max(height, width) / max(crop["height"], crop["width"])
    larger = exact if edge is None else {"shortest_edge": round(edge * ratio)}
    return [
        Replace(processor, "size", type(processor.size)(**larger), "processor"),
        Replace(processor, "crop_size", type(crop)(**exact), "processor"),
    ]
