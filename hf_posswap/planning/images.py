"""Planning on image models: which of the tokens inside attention are patches, and on what grid."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..anatomies.vit import pair
from ..anatomy import Anatomy, kind, reads_pictures
from ..edits import Hook, same
from ..errors import PosSwapError
from ..grid import Sight, look
from ..parts import unturned
from ..patches import is_patch_convolution
from ..quiet import quiet
from ..record import PORTABLE
from .picture import frames, sizes

if TYPE_CHECKING:
    from ..scheme import Scheme
    from .plan import Plan

AROUND = "around"  # in `measured`: tokens before and after the patches


def is_image(anatomy: Anatomy) -> bool:
    return reads_pictures(anatomy.model)


def chosen_ndim(anatomy: Anatomy, scheme: Scheme, ndim: int | None) -> int | None:
    """1 where the patches of an image are to be numbered row by row, else None. PosSwapError for what does not fit."""
    model, inside = kind(anatomy.model), scheme.sites_in_attention(anatomy.sites)
    if ndim is not None and (type(ndim) is not int or ndim not in (1, 2)):
        raise PosSwapError(f"ndim={ndim!r} is no number of dimensions; choose one of: 1, 2")
    if not is_image(anatomy):
        if 2 in (ndim, scheme.ndim):
            what = f"ndim={ndim}" if ndim == 2 else scheme.name
            raise PosSwapError(f"{what}: the tokens of {model} stand in a row, which has one dimension, not two")
        return None
    if inside and scheme.ndim and anatomy.table is not None and len(anatomy.table.grid or ()) > 2:
        raise PosSwapError(
            f"{scheme.name}: {model} reads video, whose patches have frames beside rows and columns; what has places "
            "inside attention is for images"
        )
    if ndim is not None and not (inside and scheme.ndim):
        raise PosSwapError(f"ndim={ndim}: {scheme.name} puts no places inside the attention of {model}; leave ndim out")
    if inside and scheme.ndim and scheme.ndim != (ndim or 2):
        if scheme.ndim == 2:
            raise PosSwapError(f"ndim={ndim}: {scheme.name} has two dimensions; leave ndim out")
        raise PosSwapError(
            f"{scheme.name}: the positions of {model} are a grid, and {scheme.name} has one dimension; give ndim=1 to "
            "number the patches row by row, or choose rope2d or bias2d"
        )
    return 1 if ndim == 1 else None


def patch_embedding(anatomy: Anatomy) -> tuple[str, nn.Module]:
    """(path, module) of the one convolution that makes patches of pixels."""
    found = [(p, m) for p, m in anatomy.model.named_modules() if isinstance(m, nn.Conv2d) and is_patch_convolution(m)]
    if len(found) != 1:
        raise PosSwapError(f"{kind(anatomy.model)} has {len(found)} convolutions that could make its patches; 1 needed")
    return found[0]


def trained_grid(anatomy: Anatomy) -> tuple[int, int]:
    """(rows, columns) of patches of the images that a model was trained on, as its table or its config tells."""
    if anatomy.table is not None:
        return anatomy.table.grid
    patch = patch_embedding(anatomy)[1].kernel_size
    height, width = (pixels // size for pixels, size in zip(pair(anatomy.config.image_size), patch, strict=True))
    return height, width


def patches_read(new: Plan) -> int:
    """How many patches a picture has from now on, in models without a table of them."""
    framed = frames(new.anatomy)
    return math.prod(sizes(new, framed[0])[0] if framed else trained_grid(new.anatomy))


def silence_turning(new: Plan, scheme: Scheme) -> None:
    """The module that hands all layers their rotation hands them none."""
    for path, module in new.anatomy.turning.items():
        new.edits.append(Hook(module, unturned, path, after=True))
    new.length = patches_read(new)
    new.guard()
    new.storage = PORTABLE
    new.effective = True


def watch_images(new: Plan, scheme: Scheme, stack: nn.Module, attention: nn.Module) -> Sight:
    """An edit that notes what images a model gets, and what knows of them from then on. `attention`: its first."""
    path, embedding = patch_embedding(new.anatomy)
    if AROUND not in new.measured:
        new.measured[AROUND] = _around(new.anatomy, scheme, embedding, attention)
    framed = frames(new.anatomy)
    patch = sizes(new, framed[0])[1] if framed else tuple(embedding.kernel_size)
    sight = Sight(patch, *new.measured[AROUND])
    new.edits.append(Hook(embedding, partial(look, sight=sight, stack=stack), path))
    return sight


class Arrived(Exception):
    """Hidden states reached the first attention; nothing behind it has to be run."""


def _around(anatomy: Anatomy, scheme: Scheme, embedding: nn.Module, attention: nn.Module) -> list[int]:
    """[tokens before, tokens after] the patches: of images whose upper half is no numbers, that half arrives as none.

    Raises PosSwapError where the patches do not arrive whole and in order, every image by itself.
    """
    model, (rows, columns) = anatomy.model, trained_grid(anatomy)
    upper, (height, width) = max(1, rows // 2), embedding.kernel_size
    size = (2, embedding.in_channels, rows * height, columns * width)
    pixels = torch.zeros(size, dtype=embedding.weight.dtype, device=embedding.weight.device)
    pixels[:, :, : upper * height] = torch.nan
    arrived: list[Tensor] = []

    def stop(_: nn.Module, args: tuple, kwargs: dict) -> None:
        arrived.append(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])
        raise Arrived

    handle = attention.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        with quiet(model), torch.no_grad(), torch.random.fork_rng(devices=[]):
            model(pixel_values=pixels)
    except Arrived:
        pass
    finally:
        handle.remove()
    if arrived[0].is_meta:
        raise PosSwapError(f"{scheme.name}: {kind(model)} has weights on the meta device; load it first")
    empty = arrived[0].isnan().any(-1)
    tokens, before = empty.shape[-1], int(empty[..., 0, :].float().argmax())
    after = tokens - before - rows * columns
    expected = torch.zeros(2, max(tokens, 1), dtype=torch.bool, device=empty.device)
    expected[:, before : before + upper * columns] = True
    if after < 0 or not same(empty, expected):
        raise PosSwapError(
            f"{scheme.name}: the patches of {kind(model)} do not reach its attention whole and in order, one image in "
            "a row; where they stand is not known there"
        )
    return [before, after]
