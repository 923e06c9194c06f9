"""What a swap does to an image model's features, by resolution, against the unpatched model at its own."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..anatomy import find_table
from ..errors import PosSwapError
from ..runs import versions
from .perplexity import fingerprint
from .subjects import evaluating, sample_of, takes
from .work import Work

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


def read_images(folder: str, processor: Any) -> list[Tensor]:
    """Pixels (C, height, width) of every picture in a folder, in the order of paths, normalised and not resized.

    Raises PosSwapError where there is no picture.
    """
    from PIL import Image

    files = sorted(path for path in Path(folder).rglob("*") if path.suffix.lower() in SUFFIXES)
    if not files:
        raise PosSwapError(f"image_dir={folder!r} holds no picture ({', '.join(SUFFIXES)})")
    pictures = [Image.open(file).convert("RGB") for file in files]
    return [
        processor(p, do_resize=False, do_center_crop=False, return_tensors="pt")["pixel_values"][0] for p in pictures
    ]


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
    table = find_table(model)
    options: dict[str, Any] = {}
    if table is None or table.patch is None or size % table.patch:
        raise PosSwapError(f"size={size} is not a whole number of this model's patches")
    if (size // table.patch,) * 2 != table.grid:
        if not takes(model, "interpolate_pos_encoding"):
            raise PosSwapError(f"size={size}: this model takes {table.grid[0] * table.patch} pixels only")
        options = {"interpolate_pos_encoding": True}

    @torch.no_grad()
    def compute(image: Tensor) -> list[float]:
        pixels = F.interpolate(image[None].float(), (size, size), mode="bicubic", antialias=True)
        output = model.base_model(pixel_values=pixels.to(model.device, model.dtype), **options)
        return output.last_hidden_state[0, 0].double().tolist()

    data = fingerprint([(image.flatten() * 2**16).long() for image in images])["sha256"]
    key = {"measure": "features", "size": size, "images": data, "model": sample_of(model), "versions": versions()}
    with evaluating(model):
        return [torch.tensor(one, dtype=torch.float64) for one in (work or Work()).map(key, images, compute)]
