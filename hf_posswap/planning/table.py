"""Planning at the embed site: tables of position vectors, biases in tables, and vectors where there is no table."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .. import parts
from ..anatomy import Anatomy, TableSite, kind
from ..concat import Concatenation, project
from ..edits import Hook, Replace, same
from ..errors import PosSwapError
from ..patches import is_patch_convolution, resize_kernel
from ..positions import root_mean_square
from ..record import KEY, PORTABLE
from ..scheme import Scheme
from ..sites import EmbedChange, EmbedGeometry
from .plan import Plan, plain_state, refuse_quantised

STREAMS = ("hc_mult", "hc_count")  # where configs of models with hyper-connections count the streams between layers


def embed_geometry(new: Plan, table: TableSite | None = None) -> EmbedGeometry:
    """What an embed scheme is told of the site: the table, or the token embeddings it would be added to."""
    if table is not None:
        rows = table.rows[table.reserved :].float()
        rms = partial(_measure, new, rows, "this model's table", rms_key(new.anatomy, table))
        own = partial(_resampled, table) if hasattr(table.owner, "interpolate_pos_encoding") else None
        return EmbedGeometry(rows.shape[-1], len(rows), rows, rms, table.grid, table.patch, own)
    embeddings, config = new.anatomy.model.get_input_embeddings(), new.anatomy.config

    def sample() -> Tensor:  # what the module returns, so that an embedding that scales its rows is measured right
        with torch.no_grad():
            return embeddings(torch.arange(min(1024, embeddings.weight.shape[0]), device=embeddings.weight.device))

    rms = partial(_measure, new, sample, "this model's token embedding", "rms")
    return EmbedGeometry(config.hidden_size, config.max_position_embeddings, None, rms)


def _resampled(table: TableSite, grid: tuple[int, int]) -> Tensor:
    """(h * w, E) by the model's own function, which it would call for an image of that grid; in float32."""
    owner = copy.copy(table.owner)  # a view of it, with a table of another dtype
    owner._parameters, owner._modules = dict(owner._parameters), dict(owner._modules)
    rows = table.rows.detach().float()
    if isinstance(getattr(owner, table.attribute), nn.Embedding):
        setattr(owner, table.attribute, nn.Embedding.from_pretrained(rows))
    else:
        setattr(owner, table.attribute, nn.Parameter(rows[None]))
    count = grid[0] * grid[1]
    tokens = rows.new_zeros(1, table.reserved + count, rows.shape[-1])
    height, width = (n * side for n, side in zip(grid, table.patch, strict=True))
    with torch.no_grad():
        return owner.interpolate_pos_encoding(tokens, height, width)[0, -count:]


def rms_key(anatomy: Anatomy, table: TableSite) -> str:
    """The name in a record of a table's root mean square."""
    return "rms" if table is anatomy.table else f"rms {table.path}"


def _measure(new: Plan, vectors: Tensor | Callable[[], Tensor], what: str, key: str) -> float:
    """Root mean square, remembered for the record; a reload uses the remembered number."""
    if key not in new.measured:
        vectors = vectors() if callable(vectors) else vectors
        if vectors.is_meta:
            raise PosSwapError(f"scale='match': {what} is on the meta device and has no values; load it first")
        new.measured[key] = root_mean_square(vectors)
    return new.measured[key]


def install_table(new: Plan, scheme: Scheme) -> None:
    if not new.anatomy.tables:
        raise PosSwapError(f"{scheme.name}: {kind(new.anatomy.model)} computes its sinusoids, and has no table to fill")
    for table in new.anatomy.tables:
        _fill_table(new, scheme, table)


def _fill_table(new: Plan, scheme: Scheme, table: TableSite) -> None:
    change = scheme.embed(embed_geometry(new, table))
    if change.projection is not None and len(new.anatomy.tables) > 1:
        raise PosSwapError(f"{scheme.name}: combine='concat' is for models of one table of positions")
    if change.length != table.length and new.anatomy.stack is not None:
        raise PosSwapError(
            f"{scheme.name}: stack={new.anatomy.stack!r}: one config key says the length of both tables; leave stack "
            f"out, or keep {table.length} positions"
        )
    if change.projection is not None and change.length != table.length:
        raise PosSwapError(
            f"{scheme.name}: max_positions={change.length}: combine='concat' does not resize a table, and this "
            f"model's has {table.length} positions"
        )
    positions = torch.arange(change.length, device=table.weight.device)
    vectors = change.vectors(positions)
    written = torch.cat([table.rows[: table.reserved].to(vectors), vectors])
    _write_table(new, table, written, scheme.trainable)
    _resize_around(new, table, change, written)
    if change.projection is not None:
        added = _concatenate(new, scheme, change)
        reader = getattr(table.owner, table.attribute)
        new.edits.append(Hook(reader, partial(project, side=added.of_position), table.path, after=True))
        new.guard()


def silence_table(new: Plan, scheme: Scheme) -> None:
    """Zero rows; where there are none, a module that computes its vectors returns zeros."""
    keep_image(new)
    for table in new.anatomy.tables:
        _write_table(new, table, torch.zeros_like(table.rows), trainable=False)
        new.length = table.length
    for path, module in new.anatomy.fixed.items():
        new.edits.append(Replace(module, "forward", partial(parts.no_vectors, module), path))
        new.length = new.anatomy.config.max_position_embeddings
        new.effective = True
        new.guard()
        new.storage = PORTABLE


def keep_image(new: Plan) -> None:
    """Image tokens that read the rows to be silenced get them from a copy."""
    page = new.anatomy.page
    if page is None or page.image is None:
        return
    module, table = new.anatomy.model.get_submodule(page.image), new.anatomy.table
    kept = parts.KeptRows(table.rows[table.reserved :][: page.patches])
    new.edits.append(Replace(module, KEY, kept, page.image))
    new.edits.append(Hook(module, partial(parts.add_rows, kept=kept), page.image, after=True))
    new.guard()
    new.storage = PORTABLE


def _write_table(new: Plan, table: TableSite, rows: Tensor, trainable: bool) -> None:
    """Exchange the Parameter: same dtype, device and form as the one it replaces."""
    refuse_quantised(new.anatomy.model, str(new.scheme))
    holder, name = table.holder
    old = table.weight
    value = nn.Parameter(rows.to(old.device, old.dtype).reshape(*old.shape[:-2], *rows.shape), trainable)
    new.effective |= not same(old, value)
    new.edits.append(Replace(holder, name, value, table.path))
    if isinstance(holder, nn.Embedding):
        new.replace(holder, "num_embeddings", len(rows), table.path)


def _resize_around(new: Plan, table: TableSite, change: EmbedChange, written: Tensor) -> None:
    """Everything that has the table's length: index buffers, the config, the patch grid, the length check."""
    new.length = change.length
    rows = change.length + table.reserved
    if rows != table.rows.shape[0]:
        _resize_masks(new, table, rows)
    owner_path = table.path.rpartition(".")[0]
    if table.grid is not None:
        _resize_image(new, table, change.grid, change.patch or table.patch)
    for name in table.buffers:
        old = table.owner.get_buffer(name)
        counts = torch.arange(rows) if name == "position_ids" else torch.zeros(rows)
        value = counts.to(old.device, old.dtype).expand(*old.shape[:-1], -1)
        new.replace(table.owner, name, value, owner_path)
    if table.grid is not None:
        return
    new.set_config("max_position_embeddings", rows if table.counted else change.length)
    page = new.anatomy.page
    if page is not None and page.image is not None and not same(table.rows[: page.patches], written[: page.patches]):
        new.notes.append(f"the {page.patches} image tokens read the first rows of this table, which change too")
    caller = new.anatomy.caller(table)
    names = tuple(inspect.signature(caller.forward).parameters)
    check = partial(parts.refuse_longer, names=names, limit=change.length)
    new.edits.append(Hook(caller, check, owner_path if caller is table.owner else kind(caller)))


def _resize_masks(new: Plan, table: TableSite, rows: int) -> None:
    """Causal masks as large as the table grow with it. Raises PosSwapError for a mask of another kind."""
    old = table.rows.shape[0]
    for path, buffer in new.anatomy.model.named_buffers():
        if buffer.shape[-2:] != (old, old):
            continue
        causal = torch.ones(rows, rows, dtype=torch.bool, device=buffer.device).tril()
        if not same(buffer.reshape(old, old), causal[:old, :old].to(buffer.dtype)):
            model = kind(new.anatomy.model)
            raise PosSwapError(
                f"{new.scheme}: {model} holds a mask of {old} x {old} at {path}, which cannot be resized"
            )
        owner, _, name = path.rpartition(".")
        value = causal.to(buffer.dtype).reshape(*buffer.shape[:-2], rows, rows)
        new.replace(new.anatomy.model.get_submodule(owner), name, value, owner)


def _resize_image(new: Plan, table: TableSite, grid: tuple[int, int], patch: tuple[int, int]) -> None:
    """The image's size and the patch's in the config, and in every module that computed with them when it was built."""
    path = table.path.rpartition(".")[0]
    _set_size(new, "image_size", (grid[0] * patch[0], grid[1] * patch[1]))
    if patch != table.patch:
        _set_size(new, "patch_size", patch)
        _resize_patches(new, table, patch)
    try:
        with torch.device("meta"):
            twin = type(table.owner)(new.text)
    except Exception as error:
        raise PosSwapError(
            f"{new.scheme}: {kind(table.owner)} cannot be built with image_size={new.text.image_size!r} and "
            f"patch_size={new.text.patch_size!r}: {type(error).__name__}: {error}"
        ) from error
    for (name, live), fresh in zip(table.owner.named_modules(prefix=path), twin.modules(), strict=True):
        if live is not table.holder[0] or live is table.owner:  # the table's own size goes with its rows
            for key, value in plain_state(fresh).items():
                new.replace(live, key, value, name)


def _set_size(new: Plan, key: str, size: tuple[int, int]) -> None:
    """One number where that says it and the config has one, as its family allows."""
    whole = isinstance(getattr(new.text, key), int)
    new.set_config(key, size[0] if whole and size[0] == size[1] else list(size))


def _resize_patches(new: Plan, table: TableSite, patch: tuple[int, int]) -> None:
    found = {path: module for path, module in table.owner.named_modules() if is_patch_convolution(module)}
    if len(found) != 1:
        raise PosSwapError(f"{new.scheme}: {kind(new.anatomy.model)} has no patch embedding that could be resized")
    ((path, convolution),) = found.items()
    old = convolution.weight
    new.effective = True
    kernel = nn.Parameter(resize_kernel(old.detach(), patch), old.requires_grad)
    new.edits.append(Replace(convolution, "weight", kernel, f"{table.path.rpartition('.')[0]}.{path}"))


def silence_bias(new: Plan, scheme: Scheme) -> None:
    refuse_quantised(new.anatomy.model, str(new.scheme))
    for path, table in new.anatomy.bias.tables.items():
        zeros = nn.Parameter(torch.zeros_like(table.weight), requires_grad=False)
        new.edits.append(Replace(table, "weight", zeros, path))
    new.effective = True


def install_addition(new: Plan, scheme: Scheme) -> None:
    """Position vectors added to what enters the first layer, on a model that has no table."""
    path, layer, stack = new.anatomy.first_layer()
    geometry = embed_geometry(new)
    change = scheme.embed(geometry)
    if getattr(scheme, "max_positions", None) is not None and not scheme.trainable:
        raise PosSwapError(
            f"{scheme.name}: max_positions={scheme.max_positions} sizes a table, and this model gets none: "
            "every position is computed; leave it out"
        )
    vectors, new.length = change.vectors, geometry.length
    if change.projection is not None:
        computed = {"table": vectors(torch.arange(change.length))} if scheme.trainable else {"vectors": vectors}
        vectors = _concatenate(new, scheme, change, **computed)
    stack_names, names = (tuple(inspect.signature(m.forward).parameters) for m in (stack, layer))
    for module in dict.fromkeys((new.anatomy.model.base_model, stack)):  # the whole may number tokens for its stack
        of_module = tuple(inspect.signature(module.forward).parameters)
        if "position_ids" in of_module:
            new.edits.append(Hook(module, partial(parts.positions_from_mask, names=of_module), kind(module)))
    if "position_ids" not in names:
        new.edits.append(Hook(stack, partial(parts.tell_positions, names=stack_names), kind(stack)))
    streams = next((n for n in (getattr(new.text, key, None) for key in STREAMS) if n), 1)
    add = partial(parts.add_positions, names=names, vectors=vectors, streams=streams)
    new.edits.append(Hook(layer, add, path))
    if scheme.trainable:
        new.length = change.length
        longest = partial(parts.refuse_longer, names=stack_names, limit=change.length)
        new.edits.append(Hook(stack, longest, kind(stack)))
    new.storage = PORTABLE
    new.effective = True


def _concatenate(new: Plan, scheme: Scheme, change: EmbedChange, **read: Any) -> Concatenation:
    """The projection of token and position, on the model; its half for the token works after the token embedding."""
    model = new.anatomy.model
    embeddings, stack = model.get_input_embeddings(), model.base_model
    width, of_tokens = len(change.projection), embeddings.weight.shape[-1]
    if of_tokens != width:
        raise PosSwapError(
            f"{scheme.name}: combine='concat' needs token and position embeddings of one width; those of {kind(model)} "
            f"have {of_tokens} and {width}"
        )
    added = Concatenation(change.projection, **read).to(embeddings.weight.device)
    where = {id(module): path for path, module in model.named_modules()}
    new.edits.append(Replace(stack, KEY, added, where[id(stack)]))
    new.edits.append(Hook(embeddings, partial(project, side=added.of_token), where[id(embeddings)], after=True))
    new.storage = PORTABLE
    new.effective = True
    return added
