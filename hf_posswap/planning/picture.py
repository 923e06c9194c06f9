"""Planning of what an image model reads: its size, its patches and their channels, in the config and in its modules."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from ..anatomies.vit import pair
from ..anatomy import Anatomy, TableSite, kind, reads_pictures
from ..edits import Replace
from ..errors import PosSwapError
from ..patches import is_patch_convolution, linear_form, rechannel_kernel, resize_kernel
from ..pictures import LINEAR, Size
from ..sites import KEEP, RELATIVE
from .plan import Plan, plain_state, refuse_quantised

if TYPE_CHECKING:
    from ..scheme import Scheme

GRID = "grid"  # in `measured`: the patches that a model was trained on, where it reads others now


def sizes(new: Plan, table: TableSite) -> tuple[Size | None, Size | None]:
    """(patches, pixels of a patch) along each axis that a table of patches is to have; (None, None) of text."""
    if table.grid is None or new.picture is None:
        return table.grid, table.patch
    return new.picture.sizes(table.grid, table.patch)


def frames(anatomy: Anatomy) -> list[TableSite]:
    """What can read patches of another picture: every table of them, or what there is without one: BEiT's embeddings
    where it has a bias alone, and what holds the patch convolution of a model that rotates by itself (DINOv3, Pixtral).
    """
    if anatomy.tables:
        return [table for table in anatomy.tables if table.grid is not None]
    found, config = [], anatomy.config
    for path, owner in anatomy.text_modules():
        patches = getattr(owner, "patch_embeddings", None)
        if getattr(owner, "position_embeddings", owner) is None and hasattr(patches, "num_patches"):
            size, patch, name = pair(patches.image_size), pair(patches.patch_size), "position_embeddings"
        elif anatomy.turning and (name := _patch_child(owner)) is not None:
            size, patch = pair(config.image_size), getattr(owner, name).kernel_size
        else:
            continue
        grid = size[0] // patch[0], size[1] // patch[1]
        where = f"{path}.{name}".lstrip(".")
        found.append(TableSite("vit", where, owner, name, 0, True, config, grid=grid, patch=patch))
    return found


def _patch_child(owner: nn.Module) -> str | None:
    """The name of a convolution right below a module, if it embeds patches."""
    convolutions = ((name, child) for name, child in owner.named_children() if isinstance(child, nn.Conv2d))
    return next((name for name, child in convolutions if is_patch_convolution(child)), None)


def resize_frames(new: Plan, scheme: Scheme) -> None:
    """A model without a table, for a picture of another size: what it computed from the old one, and its own biases.

    Raises PosSwapError for a table's scheme where these do not stay: nothing of it would be left. A rotation of its own
    stays with such a scheme.
    """
    silent = new.anatomy.bias is not None and new.anatomy.biases.get(RELATIVE) != KEEP
    if scheme.trainable and (silent or scheme.given()):
        has, kept = ("a rotation", "") if new.anatomy.turning else ("a bias", f", with {RELATIVE}_bias={KEEP!r}")
        raise PosSwapError(
            f"{scheme}: {kind(new.anatomy.model)} has no table of positions, and {has} of its own; give {scheme.name} "
            f"alone{kept}, to have that resized"
        )
    for frame in frames(new.anatomy):
        resize_picture(new, frame)
        new.length = math.prod(sizes(new, frame)[0])
    for path, module in new.anatomy.turning.items():
        with _told(new, module):
            fresh = type(module)(new.text)
        for key, value in (plain_state(fresh) | fresh._buffers).items():
            new.replace(module, key, value, path)


def refuse_picture(new: Plan) -> None:
    """Raise PosSwapError where a picture is asked for of a model that reads none."""
    if new.picture is not None and not frames(new.anatomy):
        name, value = next(iter(new.picture.given().items()))
        model, given = kind(new.anatomy.model), f"{new.scheme}: {name}={value!r}"
        if not reads_pictures(new.anatomy.model):
            raise PosSwapError(f"{given} is for image models, and {model} is none")
        takes = "it takes images of every size as they come; " if name == "image_size" else ""
        raise PosSwapError(f"{given}: {model} has no table of patches to resize; {takes}leave {name} out")


def resize_picture(new: Plan, table: TableSite) -> None:
    """The sizes in the config, the kernels, and every module that computed with them when it was built."""
    if new.picture is None:
        return
    grid, patch = sizes(new, table)
    channels = new.picture.num_channels or new.text.num_channels
    new.effective |= (grid, patch, channels) != (table.grid, table.patch, new.text.num_channels)
    if grid != table.grid:
        new.measured.setdefault(GRID, list(table.grid))
        _resize_bias(new, grid)
    _write_sizes(new, table, grid, patch)
    new.set_config("num_channels", channels)
    around, old = {*table.owner.modules()}, getattr(new.anatomy.config, "patch_size", None)
    for path, module in new.anatomy.text_modules():  # BEiT's layers count patches by themselves
        if old is not None and vars(module).get("patch_size") == old and module not in around:
            new.replace(module, "patch_size", new.text.patch_size, path)
    path, convolution = patch_convolution(new.anatomy, table)
    kernel = rechannel_kernel(resize_kernel(convolution.weight.detach(), patch), channels)
    if kernel.shape != convolution.weight.shape:
        refuse_quantised(new.anatomy.model, str(new.scheme))
        new.edits.append(Replace(convolution, "weight", nn.Parameter(kernel, convolution.weight.requires_grad), path))
    _rebuild(new, table, grid, patch)
    for edit in form_edits(new.anatomy, table, new.picture.patch_form):
        new.effective = True
        new.edits.append(edit)


def form_edits(anatomy: Anatomy, table: TableSite, form: str | None) -> Iterator[Replace]:
    """The edit that has the patches embedded in a form, where that is not transformers' own."""
    if form == LINEAR:
        path, convolution = patch_convolution(anatomy, table)
        edit = linear_form(convolution)
        edit.where = path
        yield edit


def patch_convolution(anatomy: Anatomy, table: TableSite) -> tuple[str, nn.Module]:
    """(path, module) of the convolution that embeds the patches."""
    prefix = table.path.rpartition(".")[0]
    found = [(p, m) for p, m in table.owner.named_modules(prefix=prefix) if is_patch_convolution(m)]
    if len(found) != 1:
        raise PosSwapError(f"{kind(anatomy.model)} has no patch embedding that could be changed")
    return found[0]


def _resize_bias(new: Plan, grid: tuple[int, int]) -> None:
    """BEiT's biases between patches, as its own forward resamples them for every larger image; the class token's stay.

    Raises PosSwapError for a grid that is not square: transformers reads such a table by columns.
    """
    site = new.anatomy.bias
    for path, table in () if site is None else site.tables.items():
        if grid[0] != grid[1]:
            raise PosSwapError(
                f"{new.scheme}: {kind(new.anatomy.model)} has a bias of two dimensions at {path}, which transformers "
                f"reads rightly on a square of patches alone, and {grid[0]} x {grid[1]} are asked for"
            )
        old, side = table.weight, 2 * grid[0] - 1
        square = old.detach()[:-3].T.float().unflatten(1, [2 * n - 1 for n in table.owner.window_size])
        resized = F.interpolate(square[None], size=(side, side), mode="bilinear")[0].flatten(1).T.to(old.dtype)
        rows = nn.Parameter(torch.cat([resized, old.detach()[-3:]]), old.requires_grad)
        new.edits.append(Replace(table.owner, table.attribute, rows, path))
        new.replace(table.owner, "window_size", grid, path)
        new.replace(table.owner, "num_relative_distance", len(rows), path)


def _write_sizes(new: Plan, table: TableSite, grid: Size, patch: Size) -> None:
    """One number where that says it and the config has one, as its family allows."""
    size = tuple(n * side for n, side in zip(grid, patch, strict=True))
    named = {"image_size": size[-2:], "patch_size" if len(grid) == 2 else "tubelet_size": patch}
    for key, value in named.items():
        whole = isinstance(getattr(new.text, key), int)
        new.set_config(key, value[0] if whole and len(set(value)) == 1 else list(value))
    if len(grid) == 3:
        new.set_config("num_frames", size[0])


@contextmanager
def _told(new: Plan, module: nn.Module) -> Iterator[None]:
    """Raise PosSwapError for whatever constructors and forwards of transformers raise at sizes they cannot take."""
    try:
        yield
    except Exception as error:  # theirs to choose: TypeError, ValueError, RuntimeError and more were seen
        raise PosSwapError(
            f"{new.scheme}: {kind(module)} cannot be built with {new.picture} and read such a picture: "
            f"{type(error).__name__}: {error}"
        ) from error


def _rebuild(new: Plan, table: TableSite, grid: Size, patch: Size) -> None:
    """What a twin, built from the new config, computed for itself; the twin must take a picture of the new size."""
    height, width = (n * side for n, side in zip(grid[-2:], patch[-2:], strict=True))
    frames = () if len(grid) == 2 else (grid[0] * patch[0],)
    with _told(new, table.owner), torch.device("meta"), torch.no_grad():
        twin = type(table.owner)(new.text)
        twin(torch.empty(1, *frames, new.text.num_channels, height, width))
    path = table.path.rpartition(".")[0]
    for (name, live), fresh in zip(table.owner.named_modules(prefix=path), twin.modules(), strict=True):
        if live is not table.holder[0] or live is table.owner:  # the table's own size goes with its rows
            for key, value in plain_state(fresh).items():
                new.replace(live, key, value, name)
