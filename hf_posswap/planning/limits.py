"""Planning outside the model: the length limits that a tokenizer and a processor hold."""

from __future__ import annotations

from typing import Any

from ..anatomy import kind
from ..edits import Replace, same
from ..errors import PosSwapError


def limit_edits(model: Any, config: Any, length: int, tokenizer: Any, processor: Any) -> list[Replace]:
    """Edits of the length limits that live outside the model: of a text (tokens), of an image (pixels)."""
    edits = []
    if tokenizer is not None:
        check_tokenizer(tokenizer, model)
        edits.append(Replace(tokenizer, "model_max_length", length, "tokenizer"))
    texts = getattr(processor, "tokenizer", None)
    if texts is not None and getattr(model, "main_input_name", None) != "pixel_values":
        check_tokenizer(texts, model)
        edits.append(Replace(texts, "model_max_length", length, "processor.tokenizer"))
    elif processor is not None:
        size = getattr(config, "image_size", None)
        if size is None:
            raise PosSwapError(f"processor={kind(processor)} was given for a model without images; give tokenizer=")
        if not hasattr(processor, "size"):
            raise PosSwapError(f"processor={kind(processor)} has no size to update")
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        edits += _image_limits(processor, height, width)
    return [edit for edit in edits if not same(edit.current, edit.value)]


def check_tokenizer(tokenizer: Any, model: Any) -> None:
    """Raise PosSwapError for a tokenizer that is none, or that makes ids the model has no row for."""
    if not hasattr(tokenizer, "model_max_length"):
        raise PosSwapError(f"tokenizer={kind(tokenizer)} is not a tokenizer: it has no model_max_length")
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise PosSwapError(f"tokenizer has {len(tokenizer)} tokens and this {kind(model)} has {rows}: it does not fit")


def _image_limits(processor: Any, height: int, width: int) -> list[Replace]:
    """What it resizes to; where it crops, what it crops to, from an image as much larger as it was before."""
    exact = {"height": height, "width": width}
    if not getattr(processor, "do_center_crop", False):
        return [Replace(processor, "size", type(processor.size)(**exact), "processor")]
    crop, edge = processor.crop_size, dict(processor.size).get("shortest_edge")
    ratio = max(height, width) / max(crop["height"], crop["width"])
    larger = exact if edge is None else {"shortest_edge": round(edge * ratio)}
    return [
        Replace(processor, "size", type(processor.size)(**larger), "processor"),
        Replace(processor, "crop_size", type(crop)(**exact), "processor"),
    ]
