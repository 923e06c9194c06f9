"""Planning at the embed site: tables of position vectors, biases in tables, and vectors where there is no table."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .. import parts
from ..anatomy import STACKS, Anatomy, TableSite, kind
from ..concat import Concatenation, project
from ..edits import Hook, Replace, same
from ..errors import PosSwapError
from ..positions import SINCOS, resize_grid, root_mean_square, sincos_grid
from ..record import KEY, PORTABLE
from ..scheme import Scheme
from ..sites import EmbedChange, EmbedGeometry
from .images import is_image, patches_read
from .picture import resize_picture, sizes
from .plan import Plan, plain_state, refuse_quantised, trained_length

STREAMS = ("hc_mult", "hc_count")  # where configs of models with hyper-connections count the streams between layers


def embed_geometry(new: Plan, table: TableSite | None = None) -> EmbedGeometry:
    """What an embed scheme is told of the site: the table, or the token embeddings it would be added to."""
    if table is not None:
        rows = table.positions.float()
        rms = partial(_measure, new, rows, "this model's table", rms_key(new.anatomy, table))
        return EmbedGeometry(
            rows.shape[-1], len(rows), rows, rms, table.grid, sizes(new, table)[0], own_resample(table)
        )
    embeddings, config = new.anatomy.model.get_input_embeddings(), new.anatomy.config

    def sample() -> Tensor:  # what the module returns, so that an embedding that scales its rows is measured right
        with torch.no_grad():
            return embeddings(torch.arange(min(1024, embeddings.weight.shape[0]), device=embeddings.weight.device))

    rms = partial(_measure, new, sample, "this model's token embedding", "rms")
    return EmbedGeometry(config.hidden_size, trained_length(new), None, rms)


def own_resample(table: TableSite) -> Callable[[tuple[int, int]], Tensor] | None:
    """The model's own way from its table to that of another grid, None where it has none. All of them take what is
    there for a square: not the patches of an oblong picture, nor the tubelets of a video.
    """
    square = table.grid is not None and len(table.grid) == 2 and table.grid[0] == table.grid[1]
    own = square and hasattr(table.owner, "interpolate_pos_encoding")
    return partial(_resampled, table) if own else None


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


def had_key(anatomy: Anatomy, table: TableSite) -> str:
    """The name in a record of what a table held before the swap, where that was not learned."""
    return "had" if table is anatomy.table else f"had {table.path}"


def held_by(table: TableSite) -> str:
    """What a table holds: `sincos2d`, by the convention that its numbers follow (MAE, I-JEPA), or `learned`."""
    rows = table.positions
    if table.grid is None or len(table.grid) != 2 or rows.shape[1] % 4 or rows.shape[1] < 8 or rows.is_meta:
        return "learned"
    for convention in SINCOS:
        waves = sincos_grid(torch.arange(len(rows)), grid=table.grid, dim=rows.shape[1], convention=convention)
        if (rows.float().cpu() - waves).abs().max() <= torch.finfo(rows.dtype).eps ** 0.5:
            return f"sincos2d ({convention})"
    return "learned"


def _remember(new: Plan, table: TableSite) -> None:
    held = held_by(table)
    if held != "learned":
        new.measured.setdefault(had_key(new.anatomy, table), held)


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
    _exchange(new, table, vectors, scheme.trainable)
    if change.projection is not None:
        added = _concatenate(new, scheme, change)
        reader = getattr(table.owner, table.attribute)
        new.edits.append(Hook(reader, partial(project, side=added.of_position), table.path, after=True))
        new.guard()


def resize_table(new: Plan, scheme: Scheme) -> None:
    """The model's own table, for a picture of another size; nothing else is done to it."""
    for table in new.anatomy.tables:
        grid, rows = sizes(new, table)[0], table.positions
        if grid != table.grid:
            own = own_resample(table)
            rows = own(grid) if own else resize_grid(rows, table.grid, grid, "bicubic")
        _exchange(new, table, rows, table.weight.requires_grad)


def silence_table(new: Plan, scheme: Scheme) -> None:
    """Zero rows; where there are none, a module that computes its vectors returns zeros."""
    keep_image(new)
    for table in new.anatomy.tables:
        _remember(new, table)
        count = table.length if table.grid is None else math.prod(sizes(new, table)[0])
        others = len(table.rows) - table.length
        _write_table(new, table, table.rows.new_zeros(others + count, table.rows.shape[-1]), trainable=False)
        if count != table.length or table.grid is not None:
            _resize_around(new, table, count)
        new.length = count
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


def _exchange(new: Plan, table: TableSite, vectors: Tensor, trainable: bool) -> None:
    """Other position vectors (P, E); the rows of tokens that have no position stay."""
    _remember(new, table)
    before, after = table.others
    rows = torch.cat([before.to(vectors), vectors, after.to(vectors)])
    _write_table(new, table, rows, trainable)
    _resize_around(new, table, len(vectors))
    page = new.anatomy.page
    if page is not None and page.image is not None and not same(table.rows[: page.patches], rows[: page.patches]):
        new.notes.append(f"the {page.patches} image tokens read the first rows of this table, which change too")


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


def _resize_around(new: Plan, table: TableSite, length: int) -> None:
    """Everything that has the table's length: index buffers, the config, the patch grid, the length check."""
    new.length = length
    rows = length + len(table.rows) - table.length
    if rows != table.rows.shape[0]:
        _resize_masks(new, table, rows)
    owner_path = table.path.rpartition(".")[0]
    if table.grid is not None:
        resize_picture(new, table)
    for name in table.buffers:
        old = table.owner.get_buffer(name)
        counts = torch.arange(rows) if name == "position_ids" else torch.zeros(rows)
        counts = counts[table.rows.shape[0] - old.shape[-1] :]  # some leave the reserved rows out
        value = counts.to(old.device, old.dtype).expand(*old.shape[:-1], -1)
        new.replace(table.owner, name, value, owner_path)
    if table.grid is not None:
        return
    if getattr(new.text, "relative_attention", False) and new.text.max_relative_positions < 1:  # DeBERTa: as many
        new.set_config("max_relative_positions", new.text.max_position_embeddings)
    new.set_config("max_position_embeddings", rows if table.counted else length)
    _recompute(new)
    caller = new.anatomy.caller(table)
    names = tuple(inspect.signature(caller.forward).parameters)
    check = partial(parts.refuse_longer, names=names, limit=length)
    new.edits.append(Hook(caller, check, owner_path if caller is table.owner else kind(caller)))


def _recompute(new: Plan) -> None:
    """What modules computed from the config's length when they were built: MRA, how many blocks it compares."""
    built: dict[type, dict[str, Any]] = {}
    for path, module in new.anatomy.text_modules():
        cls = type(module)
        whole = any(isinstance(inner, nn.ModuleList) for inner in module.modules())
        if whole or [*inspect.signature(cls.__init__).parameters] != ["self", "config"]:
            continue
        if cls not in built:
            with torch.device("meta"):
                before, after = (plain_state(cls(config)) for config in (new.anatomy.config, new.text))
            built[cls] = {name: value for name, value in after.items() if value != before[name]}
        for name, value in built[cls].items():
            new.replace(module, name, value, path)


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


def silence_bias(new: Plan, scheme: Scheme) -> None:
    """Zeros for the biases of the chosen layers, which transformers adds as before."""
    refuse_quantised(new.anatomy.model, str(new.scheme))
    resized = {id(e.owner): e.value for e in new.edits if isinstance(e, Replace) and isinstance(e.value, nn.Parameter)}
    for path, table in new.anatomy.bias.tables.items():
        if not new.anatomy.is_in(path, new.layers):
            continue
        zeros = nn.Parameter(torch.zeros_like(resized.get(id(table.owner), table.weight)), requires_grad=False)
        new.edits.append(Replace(table.owner, table.attribute, zeros, path))
    if is_image(new.anatomy):
        new.length = patches_read(new)
    new.effective = True


def install_addition(new: Plan, scheme: Scheme) -> None:
    """Position vectors added, on a model that has no table: to what enters the first layer, where somebody tells it
    positions, else to the token embeddings.
    """
    if is_image(new.anatomy):
        raise PosSwapError(f"{scheme.name}: {kind(new.anatomy.model)} has no table of positions to resize or to fill")
    entries = _entries(new.anatomy)
    geometry = embed_geometry(new)
    if entries:
        geometry = replace(geometry, dim=new.anatomy.model.get_input_embeddings().weight.shape[-1])
    change = scheme.embed(geometry)
    if getattr(scheme, "max_positions", None) is not None and not scheme.trainable:
        raise PosSwapError(
            f"{scheme.name}: max_positions={scheme.max_positions} sizes a table, and this model gets none: "
            "every position is computed; leave it out"
        )
    vectors, new.length = change.vectors, geometry.length
    if change.projection is not None:
        if len(entries) > 1:
            raise PosSwapError(f"{scheme.name}: combine='concat' is for models of one stack")
        computed = {"table": vectors(torch.arange(change.length))} if scheme.trainable else {"vectors": vectors}
        vectors = _concatenate(new, scheme, change, **computed)
    for stack in entries or [_add_in_first_layer(new, vectors)]:
        names = tuple(inspect.signature(stack.forward).parameters)
        if scheme.trainable:
            new.length = change.length
            longest = partial(parts.refuse_longer, names=names, limit=change.length)
            new.edits.append(Hook(stack, longest, kind(stack)))
        if entries:
            new.edits.append(
                Hook(stack, partial(parts.embed_with_positions, names=names, vectors=vectors), kind(stack))
            )
    new.storage = PORTABLE
    new.effective = True


def _entries(anatomy: Anatomy) -> list[nn.Module]:
    """The stacks (one, or encoder and decoder) that embed tokens and tell no layer positions; none where one does."""
    model = anatomy.model
    try:
        anatomy.first_layer()
    except PosSwapError:
        decoded = model.config.is_encoder_decoder
        names = [name for name in STACKS if anatomy.stack in (None, name)] if decoded else []
        stacks = [getattr(model, f"get_{name}")() for name in names] or [model.base_model]
        if all(inspect.signature(one.forward).parameters.keys() >= {"input_ids", "inputs_embeds"} for one in stacks):
            return stacks
        raise
    return []


def _add_in_first_layer(new: Plan, vectors: Callable[[Tensor], Tensor]) -> nn.Module:
    """Edits that add vectors to what enters the first layer; the stack that calls it."""
    path, layer, stack = new.anatomy.first_layer()
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
    return stack


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
