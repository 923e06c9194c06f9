"""Planning at the attention site: biases, temperatures, and rotations that the model's own modules cannot carry."""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from .. import attention, parts
from ..anatomy import STACKS, AttentionDeclaration, TableSite, kind, mixing, own_attention, sinusoids, text_config
from ..edits import Hook, Replace
from ..errors import PosSwapError
from ..record import PORTABLE
from ..rotation import Rotation
from ..scheme import Scheme
from ..sites import BIAS, KEEP, RELATIVE, ROTARY, SILENCE, BiasGeometry, RotaryGeometry
from .images import is_image, trained_grid, watch_images
from .picture import GRID
from .plan import trained_length

if TYPE_CHECKING:
    from .plan import Plan

# What models call a module that attends to another sequence; it has no distances.
CROSS = frozenset({"crossattention", "cross_attn", "cross_attention", "encoder_attn", "EncDecAttention"})
# rope types whose frequencies change with the longest position of a call
VARYING = frozenset({"dynamic", "longrope"})
WHOLE = "original_full"  # what BigBird calls an attention of all tokens to all


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

    `own`: declarations of those that do not call transformers' attention interface by themselves. `first`: that of the
    first layer, whether it is chosen or not.
    """

    stacks: list[Stack]
    own: dict[nn.Module, AttentionDeclaration]
    first: nn.Module
    heads: int
    head_dim: int

    @property
    def causal(self) -> bool:
        return all(stack.causal for stack in self.stacks)


def find_attention(new: Plan, scheme: Scheme) -> AttentionSite:
    """Raises PosSwapError where a scheme cannot be put inside this model's attention."""
    model = new.anatomy.model
    config = text_config(model)
    _refuse_sparse(new, scheme)
    own = own_attention(model)
    found = {
        path: module
        for path, module in new.anatomy.text_modules()
        if (module in own or _calls_interface(module))
        and getattr(module, "config", config).__class__ is config.__class__
        and not CROSS & {*path.split(".")}
    }
    how = mixing(model)
    if how is not None:
        raise PosSwapError(
            f"{scheme.name} works on the logit of a query and a key, and {kind(model)} has none: its tokens {how}"
        )
    if not found:
        raise PosSwapError(
            f"{scheme.name} works inside attention, and {kind(model)} has an attention of its own that does not go "
            "through transformers' attention interface"
        )
    refuse_other_keys(scheme, found)
    _refuse_half(new, scheme, found)
    first = next(iter(found.values()))
    if first not in own and "kwargs" not in inspect.signature(first.forward).parameters and not is_image(new.anatomy):
        raise PosSwapError(f"{scheme.name}: the attention of {kind(model)} takes no further keywords")
    heads = getattr(first, "num_attention_heads", config.num_attention_heads)  # ConvBERT's config counts others too
    groups = getattr(config, "num_key_value_heads", None) or 1
    if heads % groups:
        raise PosSwapError(
            f"{scheme.name}: num_attention_heads={heads} of {kind(model)} is not a multiple of its "
            f"num_key_value_heads={groups}"
        )
    widths = (
        getattr(first, "attention_head_size", None),
        *(getattr(config, key, None) for key in ("head_dim", "d_kv")),
    )
    head_dim = next((width for width in widths if width), config.hidden_size // heads)
    return AttentionSite(_stacks(new, found, own), own, first, heads, head_dim)


def refuse_other_keys(scheme: Scheme, found: dict[str, nn.Module]) -> None:
    """Raise where the keys of a layer are not its own tokens': shared between layers, or several tokens in one."""
    for path, module in found.items():
        if getattr(module, "is_kv_shared_layer", False):
            raise PosSwapError(f"{scheme.name}: {path} reads the keys of another layer, whose places it is not told")
        if isinstance(getattr(module, "compressor", None), nn.Module):
            raise PosSwapError(f"{scheme.name}: {path} compresses several tokens into one key, which has no place")


def _refuse_half(new: Plan, scheme: Scheme, found: dict[str, nn.Module]) -> None:
    """Raise where one stack of two has attention within reach, and the other's would get nothing."""
    model, reached = new.anatomy.model, {id(module) for module in found.values()}
    if model.config.is_encoder_decoder and new.anatomy.stack is None:
        for stack in STACKS:
            if not reached & {id(module) for module in getattr(model, f"get_{stack}")().modules()}:
                raise PosSwapError(
                    f"{scheme.name} works inside attention, and that of the {stack} of {kind(model)} does not go "
                    "through transformers' attention interface"
                )


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
        chosen = {p: m for p, m in found.items() if new.anatomy.is_in(p, new.layers)}
        return [Stack(path, root, chosen, causal.popitem()[1])]
    stacks = []
    for value in (False, True):
        of_stack = {p: m for p, m in found.items() if causal[p] == value}
        path = re.split(r"\.\w+\.\d+\.", next(iter(of_stack)), maxsplit=1)[0]  # up to the list of layers
        stacks.append(Stack(path, model.get_submodule(path), of_stack, value))
    return stacks


def install_attention(new: Plan, scheme: Scheme) -> None:
    """Attach what the scheme puts inside attention to every attention module, and route attention there."""
    model, sites = new.anatomy.model, scheme.sites_in_attention(new.anatomy.sites)
    site = find_attention(new, scheme)
    modules = [module for stack in site.stacks for module in stack.attentions.values()]
    for config in {id(c): c for c in (getattr(m, "config", new.anatomy.config) for m in modules)}.values():
        attention.check_backend(config._attn_implementation, scheme.name, modules)
    if scheme.stacks and (site.own or is_image(new.anatomy)) and new.anatomy.bias is not None:
        raise PosSwapError(f"{scheme.name} joins what a model has, and {kind(model)} adds its own bias out of reach")
    if scheme.stacks and new.anatomy.turned is not None:
        raise PosSwapError(f"{scheme.name} joins what a model has, and {kind(model)} turns q and k out of reach")
    if new.anatomy.biases.get(RELATIVE) == KEEP and any(own.bias is None for own in site.own.values()):
        raise PosSwapError(
            f"relative_bias={KEEP!r}: attention of {kind(model)} that carries {scheme.name} has no room for its own "
            f"distances; the nearest valid choice is {SILENCE!r}"
        )
    grid = tuple(new.measured.get(GRID) or trained_grid(new.anatomy)) if is_image(new.anatomy) else None
    length = trained_length(new) if grid is None or new.anatomy.tables else math.prod(grid)
    rotation = rotation_of(new, scheme, site, length) if ROTARY in sites else None
    text = _count_text(new)
    for stack in site.stacks:
        sight = watch_images(new, scheme, stack.module, site.first) if grid is not None else None
        tokens = length if sight is None else length + sight.before + sight.after
        change = scheme.bias(BiasGeometry(site.heads, tokens, stack.causal, grid)) if BIAS in sites else None
        _attach(new, stack, partial(attention.Attached, change, rotation, sight, text, keeps_bias(new)))
        if change is not None and change.absolute and not site.own and sight is None:
            _tell_positions(new, stack, scheme)
    for module in modules:
        if module in site.own:
            _reroute(new, module, site.own[module])
    if not scheme.stacks:
        new.edits += [edit for table in new.anatomy.tables if table.grid is None for edit in _unlimited(new, table)]
    if new.anatomy.turned is not None:
        unread = sinusoids(model).items()
        new.edits += [Replace(module, "forward", partial(parts.no_vectors, module), path) for path, module in unread]
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
    same = native is not None and native.name == scheme.name and not (native.shared or native.tables)
    new.effective = not same or bool(scheme.given())
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


def _refuse_sparse(new: Plan, scheme: Scheme) -> None:
    """Raise where BigBird and kin exchange attention modules: for sparse ones, or, at a short text, back."""
    for _, module in new.anatomy.text_modules():
        if hasattr(module, "set_attention_type") and {module.attention_type, new.text.attention_type} != {WHOLE}:
            raise PosSwapError(
                f"{scheme.name}: attention_type={new.text.attention_type!r}: sparse attention of "
                f"{kind(new.anatomy.model)} has logits of some blocks only; load it with attention_type={WHOLE!r}"
            )


def _attach(new: Plan, stack: Stack, attach: Callable[[], attention.Attached]) -> None:
    """Edits that attach a change and a rotation to every attention module of a stack, and tell it their places."""
    common = attach()
    if common.shared:
        new.edits.append(Replace(stack.module, "posswap", common, stack.path))
        new.edits.append(Hook(stack.module, partial(attention.remember, attached=common), stack.path))
        new.edits.append(Hook(stack.module, partial(attention.forget, attached=common), stack.path, after=True))
    for path, module in stack.attentions.items():
        attached = common
        if not common.shared:
            attached = attach()
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
    new.edits += [edit for edit in reroute_edits(module, declaration, new.text) if not edit.is_idle]
    stack = new.anatomy.model.base_model
    for name, value in declaration.off.items():
        new.replace(stack, name, value)


def reroute_edits(module: nn.Module, declaration: AttentionDeclaration, config: Any) -> Iterator[Replace]:
    """What has it call the interface; config: where it finds the implementation, if it has none of its own."""
    names = tuple(inspect.signature(module.forward).parameters)
    forward = partial(attention.reroute, module, declaration=declaration, names=names)
    yield Replace(module, "forward", forward)
    yield Replace(module, "is_causal", declaration.causal(module))
    yield Replace(module, "num_key_value_groups", declaration.groups(module) if declaration.groups else 1)
    if not hasattr(module, "config"):
        yield Replace(module, "config", config)
    if declaration.cache is not None:
        yield Replace(module, "layer_idx", getattr(module, declaration.layer))


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


def rotation_of(new: Plan, scheme: Scheme, site: AttentionSite, length: int) -> Rotation:
    """The rotation a rotary scheme asks for, its frequencies from transformers' own rotary module."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from .rotary import unscaled

    if scheme.ndim == 2:
        geometry = RotaryGeometry({}, length, site.head_dim, site.head_dim, None, heads=site.heads)
        change = scheme.rotary(geometry)
        interleaved = change.pairing == "interleaved"
        return Rotation(change.frequencies, 1.0, interleaved, learned=change.learned, of_image=change.of_image)
    rotary, dim = new.anatomy.rotary, site.head_dim
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    if rotary is not None and not rotary.layer_types:
        parameters, length = unscaled(rotary.parameters(rotary.config, None), rotary.config)
        dim = 2 * next(iter(rotary.modules.values())).get_buffer("inv_freq").shape[-1]
        parameters = {"rope_type": "default", "rope_theta": parameters["rope_theta"]}
    turned = new.anatomy.turned is not None
    dim = new.anatomy.turned if turned else dim
    if dim % 2:
        raise PosSwapError(f"{scheme.name}: head_dim={dim} is odd; pairs of dimensions cannot be turned")
    change = scheme.rotary(RotaryGeometry(parameters, length, site.head_dim, dim, "interleaved" if turned else None))
    pairing = change.pairing or ("interleaved" if turned else "halves")
    if turned and (change.rope_parameters, change.decay, pairing) == (parameters, None, "interleaved"):
        raise PosSwapError(f"{scheme} would change nothing on this {kind(new.anatomy.model)}")
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
    new.length = change.length if new.picture is None else new.length  # of the picture it reads from now on
    return Rotation(built.inv_freq[None], built.attention_scaling, pairing == "interleaved", change.decay, length // 2)
