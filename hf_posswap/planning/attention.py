"""Planning at the attention site: biases, temperatures, and rotations that the model's own modules cannot carry."""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from .. import attention, parts
from ..anatomy import AttentionDeclaration, TableSite, kind, own_attention, text_config
from ..edits import Hook, Replace
from ..errors import PosSwapError
from ..record import PORTABLE
from ..rotation import Rotation
from ..scheme import Scheme
from ..sites import BIAS, KEEP, RELATIVE, ROTARY, BiasChange, BiasGeometry, RotaryGeometry

if TYPE_CHECKING:
    from .plan import Plan

# What models call a module that attends to another sequence; it has no distances.
CROSS = frozenset({"crossattention", "cross_attn", "cross_attention", "encoder_attn", "EncDecAttention"})
# Where configs of models without a table say the tokens they were trained on; Bloom's and T5's are extra keys.
LENGTHS = ("max_position_embeddings", "max_seq_len", "seq_length", "n_positions")
# rope types whose frequencies change with the longest position of a call
VARYING = frozenset({"dynamic", "longrope"})


@dataclass(frozen=True)
class Stack:
    """Self-attention modules (path -> module) of one stack of layers, which share what a scheme shares."""

    path: str
    module: nn.Module
    attentions: dict[str, nn.Module]
    causal: bool


@dataclass(frozen=True)
class AttentionSite:
    """Every self-attention module of the text stacks, H `heads` of `head_dim` each.

    `own`: declarations of those that do not call transformers' attention interface by themselves.
    """

    stacks: list[Stack]
    own: dict[nn.Module, AttentionDeclaration]
    heads: int
    head_dim: int

    @property
    def causal(self) -> bool:
        return all(stack.causal for stack in self.stacks)


def find_attention(new: Plan, scheme: Scheme) -> AttentionSite:
    """Raises PosSwapError where a scheme cannot be put inside this model's attention."""
    model = new.anatomy.model
    config = text_config(model)
    if model.main_input_name == "pixel_values":
        raise PosSwapError(
            f"{scheme.name}: the positions of {kind(model)} are a grid, and {scheme.name} has one dimension"
        )
    own = own_attention(model)
    found = {
        path: module
        for path, module in new.anatomy.text_modules()
        if (module in own or _calls_interface(module))
        and getattr(module, "config", config).__class__ is config.__class__
        and not CROSS & {*path.split(".")}
    }
    if not found:
        raise PosSwapError(
            f"{scheme.name} works inside attention, and {kind(model)} has an attention of its own that does not go "
            "through transformers' attention interface"
        )
    refuse_other_keys(scheme, found)
    first = next(iter(found.values()))
    if first not in own and "kwargs" not in inspect.signature(first.forward).parameters:
        raise PosSwapError(f"{scheme.name}: the attention of {kind(model)} takes no further keywords")
    heads, groups = config.num_attention_heads, getattr(config, "num_key_value_heads", None) or 1
    if heads % groups:
        raise PosSwapError(
            f"{scheme.name}: num_attention_heads={heads} of {kind(model)} is not a multiple of its "
            f"num_key_value_heads={groups}"
        )
    head_dim = getattr(config, "head_dim", None) or getattr(config, "d_kv", None) or config.hidden_size // heads
    return AttentionSite(_stacks(new, found, own), own, heads, head_dim)


def refuse_other_keys(scheme: Scheme, found: dict[str, nn.Module]) -> None:
    """Raise where the keys of a layer are not its own tokens': shared between layers, or several tokens in one."""
    for path, module in found.items():
        if getattr(module, "is_kv_shared_layer", False):
            raise PosSwapError(f"{scheme.name}: {path} reads the keys of another layer, whose places it is not told")
        if isinstance(getattr(module, "compressor", None), nn.Module):
            raise PosSwapError(f"{scheme.name}: {path} compresses several tokens into one key, which has no place")


def _calls_interface(module: nn.Module) -> bool:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "get_interface" in code.co_names and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def is_causal(module: nn.Module, declaration: AttentionDeclaration | None) -> bool:
    """Whether a module's queries see no keys that follow; declaration: of a family with an attention of its own."""
    if declaration is not None:
        return declaration.causal(module)
    said = [owner.is_causal for owner in (module, getattr(module, "config", module)) if hasattr(owner, "is_causal")]
    # LayoutLM, MarkupLM, Splinter say nothing; their files know of no causal mask
    return all(said) if said else hasattr(sys.modules[type(module).__module__], "create_causal_mask")


def _stacks(new: Plan, found: dict[str, nn.Module], own: dict[nn.Module, AttentionDeclaration]) -> list[Stack]:
    """One stack; two where an encoder sees all keys and a decoder those that precede."""
    model = new.anatomy.model
    causal = {path: is_causal(module, own.get(module)) for path, module in found.items()}
    if len({*causal.values()}) == 1:
        root = getattr(model, f"get_{new.anatomy.stack}")() if new.anatomy.stack else model.base_model
        path = next((p for p, m in model.named_modules() if m is root), "")
        chosen = {p: m for p, m in found.items() if _is_chosen(new, p)}
        return [Stack(path, root, chosen, causal.popitem()[1])]
    stacks = []
    for value in (False, True):
        of_stack = {p: m for p, m in found.items() if causal[p] == value}
        path = re.split(r"\.\w+\.\d+\.", next(iter(of_stack)), maxsplit=1)[0]  # up to the list of layers
        stacks.append(Stack(path, model.get_submodule(path), of_stack, value))
    return stacks


def _is_chosen(new: Plan, path: str) -> bool:
    if new.layers is None:
        return True
    layers = new.anatomy.layers()[0]
    return any(path.startswith(f"{layers}.{index}.") for index in new.layers)


def install_attention(new: Plan, scheme: Scheme) -> None:
    """Attach what the scheme puts inside attention to every attention module, and route attention there."""
    model, sites = new.anatomy.model, scheme.sites_in_attention(new.anatomy.sites)
    site = find_attention(new, scheme)
    modules = [module for stack in site.stacks for module in stack.attentions.values()]
    for config in {id(c): c for c in (getattr(m, "config", new.anatomy.config) for m in modules)}.values():
        attention.check_backend(config._attn_implementation, scheme.name, modules)
    if scheme.stacks and site.own and new.anatomy.bias is not None:
        raise PosSwapError(f"{scheme.name} joins what a model has, and {kind(model)} adds its own bias out of reach")
    length = trained_length(new)
    rotation = rotation_of(new, scheme, site, length) if ROTARY in sites else None
    text = _count_text(new)
    for stack in site.stacks:
        change = scheme.bias(BiasGeometry(site.heads, length, stack.causal)) if BIAS in sites else None
        _attach(new, stack, change, rotation, text)
        if change is not None and change.absolute and not site.own:
            _tell_positions(new, stack, scheme)
    for module in modules:
        if module in site.own:
            _reroute(new, module, site.own[module])
    if not scheme.stacks:
        new.edits += [edit for table in new.anatomy.tables for edit in _unlimited(new, table)]
    own = f"{attention.PREFIX}{attention.DENSE}{new.anatomy.config._attn_implementation}" if site.own else None
    new.edits.append(attention.Route(modules, site.stacks[0].path, own))
    for path, module in model.named_modules():
        if hasattr(module, "set_attn_implementation"):
            keep = partial(attention.set_implementation, module, scheme=scheme.name, rerouted=bool(site.own))
            new.edits.append(Replace(module, "set_attn_implementation", keep, path))
    new.guard()
    new.storage = PORTABLE
    native = new.anatomy.bias
    # a family that adds ALiBi in each layer has the paper's slopes; Falcon, which adds it for all, has its own
    new.effective = native is None or native.shared or native.name != scheme.name or bool(scheme.given())
    new.length = new.length or length


def _count_text(new: Plan) -> attention.Text | None:
    """What is told, before every forward, how many tokens stand before an image's; None where these count on."""
    page = new.anatomy.page
    if page is None or not page.restarts:
        return None
    table = new.anatomy.table
    text = attention.Text(table.reserved if table is not None and table.counted else 0)
    names = tuple(inspect.signature(page.reader.forward).parameters)
    new.edits.append(Hook(page.reader, partial(attention.count_text, names=names, text=text), kind(page.reader)))
    return text


def _attach(
    new: Plan, stack: Stack, change: BiasChange | None, rotation: Rotation | None, text: attention.Text | None
) -> None:
    """Edits that attach a change and a rotation to every attention module of a stack, and tell it their places."""
    joins = keeps_bias(new)
    common = attention.Attached(change, rotation, text, joins)
    if change is None or change.shared:
        new.edits.append(Replace(stack.module, "posswap", common, stack.path))
        new.edits.append(Hook(stack.module, partial(attention.remember, attached=common), stack.path))
        new.edits.append(Hook(stack.module, partial(attention.forget, attached=common), stack.path, after=True))
    for path, module in stack.attentions.items():
        attached = common
        if change is not None and not change.shared:
            attached = attention.Attached(change, rotation, text, joins)
            new.edits.append(Replace(module, "posswap", attached, path))
        attached.to(next(module.parameters()).device)
        names = tuple(inspect.signature(module.forward).parameters)
        new.edits.append(Replace(module, attention.ATTRIBUTE, (attached,), path))
        new.edits.append(Hook(module, partial(attention.hand_places, names=names, attached=attached), path))


def _tell_positions(new: Plan, stack: Stack, scheme: Scheme) -> None:
    names = tuple(inspect.signature(stack.module.forward).parameters)
    if "position_ids" not in names:
        model = kind(new.anatomy.model)
        raise PosSwapError(f"{scheme.name} depends on a token's position, and {model} takes no position_ids")
    new.edits.append(Hook(stack.module, partial(parts.positions_from_mask, names=names), kind(stack.module)))


def _reroute(new: Plan, module: nn.Module, declaration: AttentionDeclaration) -> None:
    """Edits that give an attention module a forward which calls transformers' attention interface."""
    names = tuple(inspect.signature(module.forward).parameters)
    forward = partial(attention.reroute, module, declaration=declaration, names=names)
    new.replace(module, "forward", forward)
    new.replace(module, "is_causal", declaration.causal(module))
    new.replace(module, "num_key_value_groups", declaration.groups(module) if declaration.groups else 1)
    if not hasattr(module, "config"):
        new.replace(module, "config", new.text)
    stack = new.anatomy.model.base_model
    for name, value in declaration.off.items():
        new.replace(stack, name, value)


def keeps_bias(new: Plan) -> bool:
    """Whether a bias that the model hands to its attention stays: one on the page, or one in tokens that is kept."""
    anatomy = new.anatomy
    return bool(anatomy.page and anatomy.page.spatial) or anatomy.biases.get(RELATIVE) == KEEP


def _unlimited(new: Plan, table: TableSite) -> list[Hook | Replace]:
    """A silenced table holds nobody back: what is installed inside attention has no last position."""
    reader, caller = getattr(table.owner, table.attribute), new.anatomy.caller(table)
    names = tuple(inspect.signature(caller.forward).parameters)
    silent = Replace(reader, "forward", partial(parts.no_vectors, reader), table.path)
    if "position_ids" not in table.buffers:
        return [silent]
    if caller is not table.owner:  # it reads the table and the buffer by itself, and needs the numbers elsewhere too
        return [silent, Hook(caller, partial(parts.number_tokens, names=names), kind(caller))]
    where = table.path.rpartition(".")[0]
    return [Hook(caller, partial(parts.without_positions, names=names, argument="position_ids"), where)]


def trained_length(new: Plan) -> int:
    """Tokens that the model was trained on, as far as its table or config tells; 0 where neither does."""
    if new.anatomy.table is not None:
        return new.anatomy.table.length
    config = new.anatomy.config
    return next((n for n in (getattr(config, key, None) for key in LENGTHS) if isinstance(n, int)), 0)


def rotation_of(new: Plan, scheme: Scheme, site: AttentionSite, length: int) -> Rotation:
    """The rotation a rotary scheme asks for, its frequencies from transformers' own rotary module."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from .rotary import unscaled

    rotary, dim = new.anatomy.rotary, site.head_dim
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    if rotary is not None and not rotary.layer_types:
        parameters, length = unscaled(rotary.parameters(rotary.config, None), rotary.config)
        dim = 2 * next(iter(rotary.modules.values())).get_buffer("inv_freq").shape[-1]
        parameters = {"rope_type": "default", "rope_theta": parameters["rope_theta"]}
    if dim % 2:
        raise PosSwapError(f"{scheme.name}: head_dim={dim} is odd; pairs of dimensions cannot be turned")
    change = scheme.rotary(RotaryGeometry(parameters, length, site.head_dim, dim, None))
    if change.rope_parameters["rope_type"] in VARYING:
        raise PosSwapError(
            f"{scheme.name}: its frequencies follow the longest position of a call, which {kind(new.anatomy.model)} "
            "does not tell its attention; 'yarn' and 'ntk' do not need it"
        )
    if change.decay is not None and not site.causal:
        raise PosSwapError(f"{scheme.name}: keys that follow would grow with distance; it is for causal models")
    stand_in = LlamaConfig(
        hidden_size=dim,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=dim,
        max_position_embeddings=change.config_length,
        rope_parameters=change.rope_parameters,
    )
    built = LlamaRotaryEmbedding(stand_in)
    new.length = change.length
    return Rotation(built.inv_freq, built.attention_scaling, change.pairing == "interleaved", change.decay, length // 2)
