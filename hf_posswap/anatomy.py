"""Anatomy: where one live model keeps its positions. Structure is asked, names of classes never.

Rotary sites are found by the contract that transformers' rotary modules share; tables of position vectors, and
attention outside of transformers' attention interface, by the declarations in `anatomies/`, each checked on the
model before anything else happens.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .errors import PosSwapError, nearest
from .heads import always, finished, given_mask, with_weights
from .sites import BIAS, EMBED, KEEP, RELATIVE, ROTARY, ROTARY_2D, SILENCE, SPATIAL

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


STACKS = ("encoder", "decoder")
# Tables by relative distance, by what their owners call them: those of T5, MPNet and LayoutLM hold biases, DeBERTa's
# vectors that meet q and k
RELATIVE_TABLES = {"relative_attention_bias": "t5", "rel_pos_bias": "t5", "rel_embeddings": "disentangled"}


@dataclass(frozen=True)
class RotarySite:
    """Every rotary module of the text stack (path -> module). They read one config, so they change together.

    `layer_types` are the keys of `config.rope_parameters` where parameters are nested per layer type, else empty.
    """

    modules: dict[str, nn.Module]
    config: PreTrainedConfig
    layer_types: tuple[str, ...]

    def buffers(self) -> Iterator[str]:
        """Names of the frequency buffers of one module."""
        for prefix in [f"{layer_type}_" for layer_type in self.layer_types] or [""]:
            yield f"{prefix}inv_freq"

    def parameters(self, config: PreTrainedConfig, layer_type: str | None) -> dict[str, Any]:
        """The flat dict of rotary parameters, of one layer type where there are several."""
        return config.rope_parameters[layer_type] if self.layer_types else config.rope_parameters


@dataclass(frozen=True)
class TableSite:
    """A learned table of position vectors, and everything on the model that has its length.

    `owner` holds the table under `attribute`, an nn.Embedding (rows, E) or a Parameter (1, rows, E). The first
    `reserved` rows are not positions (padding, offsets, prefix tokens), nor are the last `trailing`. `counted` says
    whether the config's length counts them. `buffers` are index buffers of the owner, as long as the table. `grid`:
    patches along each axis of an image (rows, columns) or a video (frames first), `patch` the pixels of one.
    """

    family: str
    path: str
    owner: nn.Module
    attribute: str
    reserved: int
    counted: bool
    config: PreTrainedConfig
    buffers: tuple[str, ...] = ()
    grid: tuple[int, ...] | None = None
    patch: tuple[int, ...] | None = None
    trailing: int = 0

    @property
    def holder(self) -> tuple[nn.Module, str]:
        """The module that holds the table's Parameter, and its name there."""
        table = getattr(self.owner, self.attribute)
        return (table, "weight") if isinstance(table, nn.Embedding) else (self.owner, self.attribute)

    @property
    def weight(self) -> nn.Parameter:
        holder, name = self.holder
        return getattr(holder, name)

    @property
    def rows(self) -> Tensor:
        """The whole table as (rows, E), reserved rows first."""
        return self.weight.detach().reshape(-1, self.weight.shape[-1])

    @property
    def length(self) -> int:
        """Positions that the table holds."""
        return self.rows.shape[0] - self.reserved - self.trailing

    @property
    def positions(self) -> Tensor:
        """The rows that are positions, (P, E)."""
        return self.rows[self.reserved : self.reserved + self.length]

    @property
    def others(self) -> tuple[Tensor, Tensor]:
        """The rows before and behind them."""
        return self.rows[: self.reserved], self.rows[self.reserved + self.length :]


@dataclass(frozen=True)
class BiasTable:
    """Learned numbers for each distance: the Parameter `attribute` of `owner`: of an nn.Embedding (buckets, H), of
    LayoutLM's nn.Linear (H, buckets) that reads distances as one-hot vectors, or of BEiT's module (distances, H).
    """

    owner: nn.Module
    attribute: str = "weight"

    @property
    def weight(self) -> nn.Parameter:
        return getattr(self.owner, self.attribute)

    @property
    def count(self) -> int:
        """Distances, or buckets of them, that have numbers."""
        return self.owner.in_features if isinstance(self.owner, nn.Linear) else len(self.weight)


@dataclass(frozen=True)
class BiasSite:
    """Biases per relative distance: learned ones (path -> table), as T5, MPNet, LayoutLMv2 and DeBERTa have them, or
    BEiT of two dimensions, or the ALiBi of a declared family, which holds no numbers. `shared`: layers cannot have them
    apart.
    """

    tables: dict[str, BiasTable]
    name: str = "t5"
    shared: bool = True


@dataclass(frozen=True)
class PageSite:
    """What a document model knows of a page; swaps of the order of its words leave it where it is.

    `reader` takes the boxes, `bbox` (B, S, 4), whose coordinates go from 0 to `largest`. `spatial`: tables (path ->
    table) of a bias of distances on the page. `restarts`: the tokens of an image follow those of the text and count
    from 0 again. `image`: the path of the module that makes `patches` image tokens, where these read the first rows of
    the text's own table.
    """

    reader: nn.Module
    largest: float
    spatial: dict[str, BiasTable]
    restarts: bool = False
    image: str | None = None
    patches: int = 0


@dataclass(frozen=True)
class PageDeclaration:
    """One thing that a family of document models has of a page, on a module that `holds` these attributes.

    `largest(module)`: the largest coordinate of a box. `spatial(module)`: names of those attributes that make a bias
    on the page. `restarts`, `image`, `patches(module)`: as in PageSite, `image` the name of an attribute.
    """

    holds: frozenset[str]
    largest: Callable[[nn.Module], float] | None = None
    spatial: Callable[[nn.Module], tuple[str, ...]] | None = None
    restarts: bool = False
    image: str | None = None
    patches: Callable[[nn.Module], int] | None = None


@dataclass(frozen=True)
class TableDeclaration:
    """Where a family keeps its table: what `anatomies/*.py` say.

    `attribute`: the table's name on its owner. `fits(owner, config)`: whether this owner is of the family.
    `reserved(owner)`, `trailing(owner)`: rows that are not positions. `beside`: a second table of the same positions,
    of another width. The rest is as in TableSite.
    """

    family: str
    attribute: str
    fits: Callable[[nn.Module, PreTrainedConfig], bool]
    reserved: Callable[[nn.Module], int]
    counted: bool = True
    buffers: tuple[str, ...] = ()
    grid: Callable[[nn.Module], tuple[int, ...]] | None = None
    patch: Callable[[nn.Module], tuple[int, ...]] | None = None
    trailing: Callable[[nn.Module], int] | None = None
    beside: bool = False


@dataclass(frozen=True)
class AttentionDeclaration:
    """A family whose attention does not call transformers' attention interface, in terms of its own modules.

    `holds`: attributes by which an attention module of the family is known. `project(module, call)`: query
    (B, H, S, D), key and value (B, H', S, D) from the arguments of a call of its forward, by name.
    `finish(module, output, call)`: what the forward makes of the attention output (B, S, H D), and
    `returns(module, output, weights)` what it returns. `mask(module, call)`: a tensor (B, 1, Q, K) or none, as
    `given_mask` says. `bias(module, query, call)`: what the model itself adds to the logits, None or of a shape that
    broadcasts to (B, H, Q, K). `scaling(module)` multiplies the logits, D**-0.5 where None; `dropout(module)` is its
    probability; `groups(module)`: H / H', 1 where None; `cache`: the argument that is the cache, if there is one.
    `causal(module)`: keys never follow queries. `alibi`: whether each layer adds it by itself, or the key of the config
    that says whether the stack adds it for all. `off`: what the attributes of that stack are without it. `does`: every
    name that the forward of a module uses, where others hold the same attributes and compute otherwise; None: not
    looked at. `when(module)`: whether it is set to compute so. `layer`: its name for the layer's index in the cache.
    `turns(module)`: dimensions R that it turns by itself, in interleaved pairs, which `project` leaves as they are.
    """

    holds: frozenset[str]
    project: Callable[[nn.Module, Mapping[str, Any]], Sequence[Tensor]]
    dropout: Callable[[nn.Module], float]
    finish: Callable[[nn.Module, Tensor, Mapping[str, Any]], Any] = finished
    returns: Callable[[nn.Module, Any, Tensor | None], Any] = with_weights
    mask: Callable[[nn.Module, Mapping[str, Any]], Tensor | None] = given_mask
    scaling: Callable[[nn.Module], float] | None = None
    cache: str | None = None
    causal: Callable[[nn.Module], bool] = always
    groups: Callable[[nn.Module], int] | None = None
    bias: Callable[[nn.Module, Tensor, Mapping[str, Any]], Tensor | None] | None = None
    alibi: bool | str = False
    off: Mapping[str, Any] = field(default_factory=dict)
    does: frozenset[str] | None = None
    when: Callable[[nn.Module], bool] = always
    layer: str = "layer_idx"
    turns: Callable[[nn.Module], int] | None = None

    def fits(self, module: nn.Module, held: KeysView[str]) -> bool:
        """Whether this is an attention module of the family; `held`: the names of what it holds."""
        if not (held >= self.holds and self.when(module)):
            return False
        code = inspect.unwrap(type(module).forward).__code__
        return self.does is None or self.does.issuperset(code.co_names)


@dataclass(frozen=True)
class MixingDeclaration:
    """A family whose tokens reach each other without a logit for each query and key, where a scheme inside attention
    could act. `holds`, `when`: as in AttentionDeclaration. `how`: what they do instead, after "its tokens".
    """

    holds: frozenset[str]
    how: str
    when: Callable[[nn.Module], bool] = always


@dataclass(frozen=True)
class Anatomy:
    """The sites of one model, absent ones None or empty.

    `tables`: one, or one for each stack of an encoder-decoder model, or two of one stack that are read together.
    `fixed`: modules (path -> module) that compute sinusoids and whose output is added. `turning`: the module (path ->
    module) that hands all layers of an image model their rotation by row and column. `stack`: `encoder` or `decoder`
    where only what is in there is looked at. `turned`: dimensions that attention modules of a declared family turn by
    themselves; no site, for no scheme can be put in its place but inside attention. `page`: what is no site of an order
    of words. `biases`: what was decided of the model's own, by RELATIVE and SPATIAL.
    """

    model: PreTrainedModel
    rotary: RotarySite | None = None
    tables: tuple[TableSite, ...] = ()
    bias: BiasSite | None = None
    fixed: Mapping[str, nn.Module] = field(default_factory=dict)
    turning: Mapping[str, nn.Module] = field(default_factory=dict)
    stack: str | None = None
    turned: int | None = None
    page: PageSite | None = None
    biases: Mapping[str, str] = field(default_factory=dict)

    @property
    def table(self) -> TableSite | None:
        """The first table: the others are of the same length."""
        return self.tables[0] if self.tables else None

    @property
    def known(self) -> frozenset[str]:
        """Where it knows positions."""
        return self.sites | ({ROTARY} if self.turned else frozenset())

    @property
    def sites(self) -> frozenset[str]:
        present = {ROTARY: self.rotary is not None, EMBED: self.tables or self.fixed, BIAS: self.bias is not None}
        present[ROTARY_2D] = self.turning
        return frozenset(name for name, has in present.items() if has)

    def within(self, stack: str | None, biases: Mapping[str, str] | None = None) -> Anatomy:
        """What one stack has of it; all, where None. Raises PosSwapError for a model that has no such stack, or has not
        the bias that was decided on.
        """
        if biases:
            refuse_unheld(self, biases)
            return replace(self, biases=dict(biases)).within(stack)
        if stack in (None, "both"):
            return self
        if stack not in STACKS:
            raise PosSwapError(f"stack={stack!r} is unknown; {nearest(stack, (*STACKS, 'both'))}")
        if not self.model.config.is_encoder_decoder:
            raise PosSwapError(f"stack={stack!r}: {kind(self.model)} has one stack; leave it out")
        if self.rotary is not None:
            raise PosSwapError(f"stack={stack!r}: one config describes the rotation in both stacks; leave it out")
        part = replace(self, stack=stack)
        inside = {id(module) for _, module in part.text_modules()}
        bias = self.bias
        if bias is not None and bias.tables:
            bias = replace(bias, tables={p: t for p, t in bias.tables.items() if id(t.owner) in inside})
        return replace(
            part,
            tables=tuple(table for table in self.tables if id(table.owner) in inside),
            fixed={path: module for path, module in self.fixed.items() if id(module) in inside},
            bias=bias,
        )

    @property
    def config(self) -> PreTrainedConfig:
        return text_config(self.model)

    def text_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """(path, module) of the text stack and what is around it, without vision towers and other parts whose config
        neither is nor holds the text's.
        """
        own, foreign, others = self.config, {id(None): False}, ()
        root = None if self.stack is None else getattr(self.model, f"get_{self.stack}")()
        inside = None if root is None else {id(module) for module in root.modules()}
        for path, module in self.model.named_modules():
            if inside is not None and id(module) not in inside:
                continue
            config = vars(module).get("config")
            if id(config) not in foreign:
                holds = not isinstance(config, type(own)) and hasattr(config, "get_text_config")
                foreign[id(config)] = holds and config.get_text_config() is not own
            others += (f"{path}.",) if foreign[id(config)] else ()
            if not f"{path}.".startswith(others):
                yield path, module

    def caller(self, table: TableSite) -> nn.Module:
        """The module that is called with the tokens of a table: its owner, or who reads it there without calling it."""
        if type(table.owner).forward is not nn.Module.forward:
            return table.owner
        return self.model.get_submodule(table.path.rpartition(".")[0].rpartition(".")[0])

    def layers(self) -> tuple[str, nn.ModuleList]:
        """(path, layers) of the text stack (of the image stack, where there is no text)."""
        count = self.config.num_hidden_layers
        lists = [(p, m) for p, m in self.text_modules() if isinstance(m, nn.ModuleList) and len(m)]
        # a few models count sub-layers or build several stacks: then the first list of layers that attend
        attending = [(p, m) for p, m in lists if "position_embeddings" in inspect.signature(m[0].forward).parameters]
        found = [(p, m) for p, m in lists if len(m) == count] or attending
        if not found:
            raise PosSwapError(f"no list of {count} layers was found in {kind(self.model)}")
        return found[0]

    def is_in(self, path: str, layers: Sequence[int] | None) -> bool:
        """Whether a module or parameter is of one of these layers; None: of all."""
        stack = "" if layers is None else self.layers()[0]
        return layers is None or any(path.startswith(f"{stack}.{index}.") for index in layers)

    def first_layer(self) -> tuple[str, nn.Module, nn.Module]:
        """(path, module) of the first layer, and the stack that calls it.

        Raises PosSwapError where they do not take `position_ids`: nothing could then be added there by position. A
        layer may take it as one of its further keywords, which it hands to its attention.
        """
        path, layers = self.layers()
        stack = self.model.get_submodule(path.rpartition(".")[0])
        for module, names in ((stack, {"position_ids"}), (layers[0], {"position_ids", "kwargs"})):
            if not names & inspect.signature(module.forward).parameters.keys():
                raise PosSwapError(
                    f"{kind(module)} takes no position_ids, so no position vector can be added to {path}.0"
                )
        return f"{path}.0", layers[0], stack


def refuse_unheld(anatomy: Anatomy, biases: Mapping[str, str]) -> None:
    """Raise PosSwapError for a decision on a bias that is no decision, or that a model has no numbers for."""
    held_here = {
        RELATIVE: anatomy.bias is not None and bool(anatomy.bias.tables),
        SPATIAL: anatomy.page is not None and bool(anatomy.page.spatial),
    }
    where = {RELATIVE: "of distances in tokens", SPATIAL: "of distances on a page"}
    for name, decision in biases.items():
        if decision not in (KEEP, SILENCE):
            raise PosSwapError(f"{name}_bias={decision!r} is unknown; {nearest(decision, (KEEP, SILENCE))}")
        if not held_here[name]:
            raise PosSwapError(
                f"{name}_bias={decision!r}: {kind(anatomy.model)} has no learned bias {where[name]}; leave it out"
            )


def kind(model: nn.Module) -> str:
    return type(model).__name__


def reads_pictures(model: PreTrainedModel) -> bool:
    """Whether pixels are what its forward reads: towers of Idefics3 and others leave transformers' name of a model's
    main input at that of text.
    """
    names = inspect.signature(type(model).forward).parameters
    return model.main_input_name == "pixel_values" or ("pixel_values" in names and "input_ids" not in names)


def text_config(model: PreTrainedModel) -> PreTrainedConfig:
    """The config of the text stack; the model's own where there is no other, its tower's where that is all it has."""
    text, vision = model.config.get_text_config(), getattr(model.config, "vision_config", None)
    if vision is None or not reads_pictures(model):
        return text
    reads = any(getattr(module, "config", None) is text for module in model.modules())
    return text if reads else vision


def examine(model: PreTrainedModel) -> Anatomy:
    """Find the sites of a model. Raises PosSwapError where there is none, or where what is found is not understood."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        inner = next((a for a in ("_orig_mod", "module", "base_model") if hasattr(model, a)), None)
        hint = f"; patch the model inside first (it seems to be under .{inner}), then wrap it" if inner else ""
        raise PosSwapError(f"model={kind(model)} is not a transformers model{hint}")
    anatomy = find_sites(model)
    if not anatomy.known and getattr(model, "_is_stateful", False):  # transformers' mark of a recurrent state
        raise PosSwapError(
            f"{kind(model)} (model_type {model.config.model_type!r}) has no positions to swap: it knows order by "
            "recurrence"
        )
    if not anatomy.known:
        raise PosSwapError(
            f"{kind(model)} (model_type {model.config.model_type!r}) has no site this package recognises: no module "
            "follows transformers' rotary contract, and no table of position vectors matches a declared family"
            f"{_of_windows(model)}"
        )
    if anatomy.tables:
        _refuse_unexplained(anatomy)
    return anatomy


def _of_windows(model: PreTrainedModel) -> str:
    """What else is to be said of a model like Swin."""
    held = (path for path, module in model.named_modules() if "relative_position_bias_table" in module._parameters)
    path = next(held, None)
    return (
        "" if path is None else f"; it has a bias within windows at {path}, which shift and merge from layer to layer"
    )


def find_sites(model: PreTrainedModel) -> Anatomy:
    """The anatomy of a model, not yet judged."""
    page = find_page(model)
    return Anatomy(
        model,
        rotary=find_rotary(model),
        tables=find_tables(model),
        bias=find_bias(model, page),
        fixed=find_fixed(model),
        turning=find_turning(model),
        turned=find_turned(model),
        page=page,
    )


def held(module: nn.Module) -> dict[str, Any]:
    """What a module itself holds, by name: `getattr` takes long to find that there is nothing."""
    return vars(module) | module._parameters | module._modules


def follows_rotary_contract(module: nn.Module) -> bool:
    """Whether a module is one of transformers' rotary modules: buffers, default function and config."""
    if not any(name.endswith("original_inv_freq") for name in module._buffers):
        return False
    parameters = getattr(getattr(module, "config", None), "rope_parameters", None)
    return isinstance(parameters, dict) and hasattr(module, "compute_default_rope_parameters")


def find_rotary(model: PreTrainedModel) -> RotarySite | None:
    config = text_config(model)
    modules = {
        path: module
        for path, module in model.named_modules()
        if follows_rotary_contract(module) and module.config is config
    }
    if not modules or getattr(config, "alibi", False):  # Falcon builds its rotary module even where ALiBi is used
        return None
    first = next(iter(modules.values()))
    layer_types = tuple(
        sorted(n[: -len("_original_inv_freq")] for n in first._buffers if n.endswith("_original_inv_freq"))
    )
    return RotarySite(modules, config, layer_types)


def find_turning(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Of an image model whose layers are handed a rotation: the one module that holds its frequencies."""
    if not reads_pictures(model):
        return {}
    found = {path: module for path, module in model.named_modules() if "inv_freq" in module._buffers}
    return found if _hands_rotation(model) is not None and len(found) == 1 else {}


def _hands_rotation(model: PreTrainedModel) -> str | None:
    """The path of a module that is handed a rotation."""
    handed = ((p, inspect.signature(type(m).forward).parameters) for p, m in model.named_modules())
    return next((path for path, names in handed if "position_embeddings" in names), None)


def refuse_foreign_rotary(model: PreTrainedModel, site: RotarySite) -> None:
    """Raise where a rotary module of the same kind reads a config that is not the model's: it would stay behind."""
    kinds = {type(module) for module in site.modules.values()}
    for path, module in model.named_modules():
        if type(module) in kinds and module.config is not site.config:
            raise PosSwapError(f"{kind(model)}: the rotary module at {path} reads a config of its own, not the model's")


def find_table(model: PreTrainedModel) -> TableSite | None:
    """The learned table of a declared family, the encoder's where both stacks have one."""
    return next(iter(find_tables(model)), None)


def find_tables(model: PreTrainedModel) -> tuple[TableSite, ...]:
    """The learned table of each stack. Raises PosSwapError where a stack has several that are not read together."""
    found = [
        (_table_site(model, path, owner, declaration), declaration)
        for path, owner in Anatomy(model).text_modules()
        for declaration in declared("TABLE")
        if declaration.attribute in owner._parameters or declaration.attribute in owner._modules
        if isinstance(getattr(owner, declaration.attribute), (nn.Embedding, nn.Parameter))
        and declaration.fits(owner, text_config(model))
    ]
    stacks = [id(getattr(model, f"get_{stack}")()) for stack in STACKS] if model.config.is_encoder_decoder else ()
    first = [site for site, declaration in found if not declaration.beside]
    if len(first) > 1 and [id(site.owner) for site in first] != stacks:
        raise PosSwapError(f"{kind(model)} has several tables of positions ({', '.join(t.path for t in first)})")
    return tuple(first) + tuple(site for site, declaration in found if first and declaration.beside)


def _table_site(model: PreTrainedModel, path: str, owner: nn.Module, declaration: TableDeclaration) -> TableSite:
    return TableSite(
        family=declaration.family,
        path=f"{path}.{declaration.attribute}".lstrip("."),
        owner=owner,
        attribute=declaration.attribute,
        reserved=declaration.reserved(owner),
        counted=declaration.counted,
        config=text_config(model),
        buffers=tuple(name for name in declaration.buffers if name in owner._buffers),
        grid=declaration.grid(owner) if declaration.grid else None,
        patch=declaration.patch(owner) if declaration.patch else None,
        trailing=declaration.trailing(owner) if declaration.trailing else 0,
    )


def find_fixed(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Modules that compute sinusoids to be added. RoFormer has the same module and rotates with it."""
    if any(hasattr(one, "apply_rotary_position_embeddings") for one in {type(module) for module in model.modules()}):
        return {}
    return sinusoids(model)


def sinusoids(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Modules that compute sinusoids, known by the function that makes their numbers."""
    types = {type(module) for module in model.modules()}
    making = {one for one in types if hasattr(one, "create_weight") or hasattr(one, "make_weights")}
    return {path: module for path, module in Anatomy(model).text_modules() if type(module) in making} if making else {}


def find_turned(model: PreTrainedModel) -> int | None:
    """Dimensions that attention modules of a declared family turn by themselves."""
    turning = ((module, own) for module, own in own_attention(model).items() if own.turns is not None)
    return next((own.turns(module) for module, own in turning), None)


def find_page(model: PreTrainedModel) -> PageSite | None:
    """What a model that is given boxes knows of the page, by the declarations in `anatomies/`."""
    reader = model.get_encoder() if model.config.is_encoder_decoder else model.base_model
    if "bbox" not in inspect.signature(reader.forward).parameters:
        return None
    found = [
        (path, module, declaration)
        for path, module in model.named_modules()
        for names in (held(module).keys(),)
        for declaration in declared("PAGE")
        if names >= declaration.holds
    ]
    largest = [declaration.largest(module) for _, module, declaration in found if declaration.largest is not None]
    if not largest:
        return None
    spatial = {
        f"{path}.{name}": BiasTable(getattr(module, name))
        for path, module, declaration in found
        if declaration.spatial is not None
        for name in declaration.spatial(module)
    }
    restarts = any(declaration.restarts for _, _, declaration in found)
    images = [(path, module, declaration) for path, module, declaration in found if declaration.image is not None]
    if not images:
        return PageSite(reader, largest[0], spatial, restarts)
    path, module, declaration = images[0]
    image = f"{path}.{declaration.image}".lstrip(".")
    return PageSite(reader, largest[0], spatial, restarts, image, declaration.patches(module))


def find_bias(model: PreTrainedModel, page: PageSite | None = None) -> BiasSite | None:
    tables, grids, spatial = {}, {}, page.spatial if page is not None else {}
    for attribute, name in RELATIVE_TABLES.items():
        for path, module in model.named_modules():
            whole = f"{path}.{attribute}"
            if isinstance(module._modules.get(attribute), (nn.Embedding, nn.Linear)) and whole not in spatial:
                tables[whole] = BiasTable(module._modules[attribute])
        if tables:
            return BiasSite(tables, name)
    for path, module in model.named_modules():
        if _is_of_a_grid(module):
            grids[path] = BiasTable(module, "relative_position_bias_table")
    if grids:
        return BiasSite(grids, "bias2d", shared=len(grids) == 1)
    own = next(iter(own_attention(model).values()), None)
    has = own is not None and (getattr(text_config(model), own.alibi) if isinstance(own.alibi, str) else own.alibi)
    if not has:
        return None
    return BiasSite({}, "alibi", shared=bool(own.off))


def _is_of_a_grid(module: nn.Module) -> bool:
    """Whether it is BEiT's bias between all patches, and three numbers for its class token: not one within windows."""
    table, window = module._parameters.get("relative_position_bias_table"), getattr(module, "window_size", None)
    return table is not None and len(table) == (2 * window[0] - 1) * (2 * window[1] - 1) + 3


def own_attention(model: PreTrainedModel) -> dict[nn.Module, AttentionDeclaration]:
    """Attention modules of declared families, each with its declaration."""
    return {
        module: declaration
        for module in model.modules()
        for holds in (held(module).keys(),)
        for declaration in declared("ATTENTION")
        if declaration.fits(module, holds)
    }


def mixing(model: PreTrainedModel) -> str | None:
    """How the tokens of a model reach each other where no query and key have a logit; None where they have."""
    found = (
        declaration.how
        for module in model.modules()
        for declarations in declared("MIXING")
        for declaration in declarations
        if held(module).keys() >= declaration.holds and declaration.when(module)
    )
    return next(found, None)


@cache
def declared(name: str) -> tuple[Any, ...]:
    """Every TABLE, ATTENTION, PAGE or MIXING (of several families) in `anatomies/`; a second one of a file, or of a
    family, has more to its name.
    """
    from . import anatomies

    files = pkgutil.iter_modules(anatomies.__path__)
    modules = [importlib.import_module(f"{anatomies.__name__}.{file.name}") for file in files]
    return tuple(value for module in modules for key, value in vars(module).items() if is_declaration(key, name))


def is_declaration(key: str, name: str) -> bool:
    """Whether a top-level name in `anatomies/` is a declaration of a kind: TABLE, or BOX_TABLE."""
    return key == name or key.endswith(f"_{name}")


def find_pairing(site: RotarySite, model: PreTrainedModel) -> str | None:
    """`halves` or `interleaved`: which dimension turns with dimension 0, asked of the model's own function.

    None where the modeling file has no function of the usual form that turns q and k, or it pairs in another way.
    """
    config = site.config
    if getattr(config, "rope_interleave", False):  # DeepSeek V3 and kin have a function for each pairing
        return "interleaved"
    twin = plain_twin(site)
    arguments = (site.layer_types[0],) if site.layer_types else ()
    positions = torch.ones(1, 1, dtype=torch.long)
    if "mrope_section" in config.rope_parameters:
        positions = positions.expand(3, -1, -1)  # time, row and column
    angles = twin(torch.zeros(1, 1, 1), positions, *arguments)
    is_complex = isinstance(angles, Tensor)  # Llama 4, DeepSeek V2
    name, angles = ("apply_rotary_emb", (angles,)) if is_complex else ("apply_rotary_pos_emb", angles[:2])
    modeling = vars(sys.modules[type(model.base_model).__module__])
    apply = modeling.get(name)
    if apply is None and "rotate_half" in modeling:  # Qwen2-VL of 5.17 turns by coordinate, each like this
        apply, angles = (lambda q, *_: (modeling["rotate_half"](q),)), ()
    if apply is None or any(angle.dim() != 3 for angle in angles):
        return None
    half = twin.get_buffer(next(site.buffers())).shape[-1]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for width in (head_dim, 2 * half):  # Phi hands over the dimensions that turn, GPT-NeoX the whole head
        probe = torch.zeros(1, 1, 1, width)
        probe[..., 0] = 1.0
        try:
            turned = apply(probe, probe, *angles)[0]
        except (TypeError, RuntimeError):
            continue
        partner = [i for i in turned.flatten().nonzero().flatten().tolist() if i != 0]
        return {1: "interleaved", half: "halves"}.get(partner[0]) if len(partner) == 1 else None
    return None


def plain_twin(site: RotarySite) -> nn.Module:
    """A fresh rotary module with the default rotation, whatever scaling the config carries."""
    import copy

    config = copy.deepcopy(site.config)
    for layer_type in site.layer_types or (None,):
        parameters = site.parameters(config, layer_type)
        parameters["rope_type"] = "default"
    return type(next(iter(site.modules.values())))(config)


def _refuse_unexplained(anatomy: Anatomy) -> None:
    """A second, unknown place for positions beside a table would stay behind in silence: refuse the model."""
    model, bias = anatomy.model, anatomy.bias
    known = {id(module) for table in anatomy.tables for module in table.owner.modules()}
    known |= {id(t.owner) for t in (bias.tables.values() if bias else ())}
    known |= {id(t.owner) for t in (anatomy.page.spatial.values() if anatomy.page else ())}
    if not reads_pictures(model):  # a picture's is no table, and some classes do not find it
        known.add(id(model.get_input_embeddings()))
    for path, module in anatomy.text_modules():
        if isinstance(module, nn.Embedding) and id(module) not in known:
            raise PosSwapError(f"{kind(model)} holds another table at {path} whose part in its positions is unknown")
        if "relative_position_bias_table" in module._parameters and id(module) not in known:
            raise PosSwapError(f"{kind(model)} has a bias of two dimensions at {path} too, which is not swapped")
    if reads_pictures(model) and not anatomy.turning and (path := _hands_rotation(model)) is not None:
        raise PosSwapError(f"{kind(model)} hands {path} a rotation too, which is not swapped")
    frames = getattr(anatomy.config, "num_frames", None)
    for path, parameter in model.named_parameters():
        for table in (table for table in anatomy.tables if table.grid and parameter.dim() > 2):
            rows, width = table.rows.shape
            single = parameter.shape[:-2].numel() == 1  # then of another width too: that of a decoder
            alike = parameter.shape[-2] == rows and (single or parameter.shape[-1] == width)
            if (alike or (single and parameter.shape[-2] == frames)) and parameter is not table.weight:
                raise PosSwapError(f"{kind(model)} holds another table of positions at {path}, which is not resized")
