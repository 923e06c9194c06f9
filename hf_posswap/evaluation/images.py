"""What a swap does to an image model by resolution: to its features, against the unpatched model at its own, and to the
classes that it finds.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..anatomy import find_table, kind
from ..errors import PosSwapError, nearest
from ..runs import versions
from .perplexity import fingerprint
from .subjects import evaluating, sample_of, takes
from .work import Work

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
MODES = {1: "L", 3: "RGB"}  # channels -> how PIL calls them


def read_images(folder: str, processor: Any) -> list[Tensor]:
    """Pixels (C, height, width) of every picture in a folder, in the order of paths, normalised and not resized.

    Raises PosSwapError where there is no picture.
    """
    from PIL import Image

    pictures = [with_channels(Image.open(file), processor) for file in _files(folder)]
    return [
        processor(p, do_resize=False, do_center_crop=False, return_tensors="pt")["pixel_values"][0] for p in pictures
    ]


def with_channels(picture: Any, processor: Any) -> Any:
    """A PIL image with as many channels as a processor normalises, where PIL has a name for so many."""
    mode = MODES.get(len(processor.image_mean))
    return picture.convert(mode) if mode else picture


def read_labels(folder: str, classes: Iterable[str]) -> list[str] | None:
    """The class of every picture, in the order of paths: the name of its folder. None where that is no class."""
    names, known = [file.parent.name for file in _files(folder)], set(classes)
    return names if known.issuperset(names) else None


def _files(folder: str) -> list[Path]:
    files = sorted(path for path in Path(folder).rglob("*") if path.suffix.lower() in SUFFIXES)
    if not files:
        raise PosSwapError(f"image_dir={folder!r} holds no picture ({', '.join(SUFFIXES)})")
    return files


def check_labels(model: nn.Module, labels: Iterable[str], name: str) -> None:
    """Raise PosSwapError for a label that is none of the model's classes."""
    known = model.config.label2id
    for label in labels:
        if label not in known:
            raise PosSwapError(f"labels: {label!r} is no class of {name}; {nearest(label, known)}")


def accuracy(
    model: nn.Module,
    images: Sequence[Tensor],
    labels: Sequence[str],
    sizes: Iterable[int],
    *,
    name: str,
    work: Work | None = None,
) -> dict[str, Any]:
    """`{"name", "stage", "seconds", "points"}`: the share of pictures whose class a classifier finds at a size (pixels,
    square). A point's `length` is the size.

    images: pixels (C, height, width), resized here (bicubic, antialiased). labels: names of their classes. Raises
    PosSwapError for one that the model does not know.
    """
    check_labels(model, labels, name)
    work, started, points = work or Work(), time.perf_counter(), []
    for size in sorted(set(sizes)):
        options = _options(model, size)

        def compute(image: Tensor, size: int = size, options: dict[str, Any] = options) -> int:
            with torch.no_grad():
                return int(model(pixel_values=_resized(model, image, size), **options).logits[0].argmax())

        with evaluating(model):
            found = work.map(_key("classes", model, images, size), images, compute)
        right = sum(model.config.label2id[label] == one for label, one in zip(labels, found, strict=True))
        points.append({"length": size, "accuracy": right / len(found), "images": len(found)})
    return {"name": name, "stage": None, "seconds": round(time.perf_counter() - started, 3), "points": points}


def feature_shift(
    model: nn.Module,
    images: Sequence[Tensor],
    sizes: Iterable[int],
    base_features: Sequence[Tensor],
    *,
    name: str,
    work: Work | None = None,
) -> dict[str, Any]:
    """`{"name", "stage", "seconds", "points"}`: 1 - cosine between a picture's features at a size (pixels, square) and
    the base's at its own; the mean over pictures. A point's `length` is the size.

    images: pixels (C, height, width), resized here (bicubic, antialiased). base_features: `features` of the unpatched
    model at its own size. A size that is not the model's own asks it to interpolate its positions.
    """
    work, started, points = work or Work(), time.perf_counter(), []
    for size in sorted(set(sizes)):
        found = features(model, images, size, work)
        pairs = zip(found, base_features, strict=True)
        shift = sum(float(1 - F.cosine_similarity(a, b, dim=0)) for a, b in pairs) / len(found)
        points.append({"length": size, "shift": shift, "images": len(found)})
    return {"name": name, "stage": None, "seconds": round(time.perf_counter() - started, 3), "points": points}


def features(model: nn.Module, images: Sequence[Tensor], size: int, work: Work | None = None) -> list[Tensor]:
    """The features (E,) of each picture at a size: the last state of the class token, in float64."""
    options = _options(model, size)

    @torch.no_grad()
    def compute(image: Tensor) -> list[float]:
        output = model.base_model(pixel_values=_resized(model, image, size), **options)
        return output.last_hidden_state[0, 0].double().tolist()

    with evaluating(model):
        found = (work or Work()).map(_key("features", model, images, size), images, compute)
    return [torch.tensor(one, dtype=torch.float64) for one in found]


def _options(model: nn.Module, size: int) -> dict[str, Any]:
    """What has a model read pictures of a size. Raises PosSwapError where it cannot."""
    table = find_table(model)
    if table is None or table.patch is None:
        raise PosSwapError(f"model={kind(model)} has no table of the positions of patches")
    if any(size % side for side in table.patch):
        raise PosSwapError(f"size={size} is not a whole number of this model's patches")
    if tuple(size // side for side in table.patch) == tuple(table.grid):
        return {}
    if not takes(model, "interpolate_pos_encoding"):
        raise PosSwapError(f"size={size}: this model takes {table.grid[0] * table.patch[0]} pixels only")
    return {"interpolate_pos_encoding": True}


def _resized(model: nn.Module, image: Tensor, size: int) -> Tensor:
    """(1, C, size, size)."""
    pixels = F.interpolate(image[None].float(), (size, size), mode="bicubic", antialias=True)
    return pixels.to(model.device, model.dtype)


def _key(measure: str, model: nn.Module, images: Sequence[Tensor], size: int) -> dict[str, Any]:
    data = fingerprint([(image.flatten() * 2**16).long() for image in images])["sha256"]
    return {"measure": measure, "size": size, "images": data, "model": sample_of(model), "versions": versions()}
