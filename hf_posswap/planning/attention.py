"""Planning at the attention site: biases, temperatures, and rotations that the model's own modules cannot carry."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from .. import attention, parts
from ..anatomy import TableSite, kind, text_config
from ..edits import Hook, Replace
from ..errors import PosSwapError
from ..record import PORTABLE
from ..rotation import Rotation
from ..scheme import Scheme
from ..sites import BIAS, ROTARY, BiasGeometry, RotaryGeometry

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .plan import Plan

# What models call a module that attends to another sequence; it has no distances.
CROSS = frozenset({"crossattention", "cross_attn", "cross_attention", "encoder_attn", "EncDecAttention"})
# rope types whose frequencies change with the longest position of a call
VARYING = frozenset({"dynamic", "longrope"})


@dataclass(frozen=True)
class AttentionSite:
    """Every self-attention module of the text stacks that calls transformers' attention interface (path -> module)."""

    modules: dict[str, nn.Module]
    stack: tuple[str, nn.Module]
    heads: int
    head_dim: int
    causal: bool


def find_attention(model: PreTrainedModel, scheme: Scheme) -> AttentionSite:
    """Raises PosSwapError where a scheme cannot be put inside this model's attention."""
    config = text_config(model)
    if model.main_input_name == "pixel_values":
        raise PosSwapError(
            f"{scheme.name}: the positions of {kind(model)} are a grid, and {scheme.name} has one dimension"
        )
    found = {
        path: module
        for path, module in model.named_modules()
        if _calls_interface(module)
        and getattr(module, "config", None).__class__ is config.__class__
        and path.rpartition(".")[2] not in CROSS
    }
    if not found:
        raise PosSwapError(
            f"{scheme.name} works inside attention, and {kind(model)} has an attention of its own that does not go "
            "through transformers' attention interface"
        )
    first = next(iter(found.values()))
    if "kwargs" not in inspect.signature(first.forward).parameters:
        raise PosSwapError(f"{scheme.name}: the attention of {kind(model)} takes no further keywords")
    causal = {bool(getattr(m, "is_causal", True) and getattr(m.config, "is_causal", True)) for m in found.values()}
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or getattr(config, "d_kv", None) or config.hidden_size // heads
    stack = model.base_model
    path = next((p for p, m in model.named_modules() if m is stack), "")
    return AttentionSite(found, (path, stack), heads, head_dim, causal == {True})


def _calls_interface(module: nn.Module) -> bool:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "get_interface" in code.co_names and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def install_attention(new: Plan, scheme: Scheme) -> None:
    """Attach what the scheme puts inside attention to every attention module, and route attention there."""
    model, sites = new.anatomy.model, scheme.sites_in_attention(new.anatomy.sites)
    site = find_attention(model, scheme)
    for config in {id(m.config): m.config for m in site.modules.values()}.values():
        attention.check_backend(config._attn_implementation, scheme.name)
    length = trained_length(new)
    change = scheme.bias(BiasGeometry(site.heads, length, site.causal)) if BIAS in sites else None
    rotation = rotation_of(new, scheme, site, length) if ROTARY in sites else None
    common = attention.Attached(change, rotation, site.causal)
    if change is None or change.shared:
        new.edits.append(Replace(site.stack[1], "posswap", common, site.stack[0]))
    for path, module in site.modules.items():
        attached = common
        if change is not None and not change.shared:
            attached = attention.Attached(change, rotation, site.causal)
            new.edits.append(Replace(module, "posswap", attached, path))
        attached.to(next(module.parameters()).device)
        names = tuple(inspect.signature(module.forward).parameters)
        new.edits.append(Replace(module, attention.ATTRIBUTE, (attached,), path))
        new.edits.append(Hook(module, partial(attention.hand_places, names=names, attached=attached), path))
    if change is not None and (change.temperature or change.placed):
        names = tuple(inspect.signature(site.stack[1].forward).parameters)
        if "position_ids" not in names:
            raise PosSwapError(f"{scheme.name} depends on a token's position, and {kind(model)} takes no position_ids")
        new.edits.append(Hook(site.stack[1], partial(parts.positions_from_mask, names=names), kind(site.stack[1])))
    if new.anatomy.table is not None and not scheme.stacks:
        new.edits.append(_unlimited(new.anatomy.table))
    new.edits.append(attention.Route(list(site.modules.values()), site.stack[0]))
    for path, module in model.named_modules():
        if hasattr(module, "set_attn_implementation"):
            keep = partial(attention.set_implementation, module, scheme=scheme.name)
            new.edits.append(Replace(module, "set_attn_implementation", keep, path))
    new.guard()
    new.storage = PORTABLE
    new.effective = True
    new.length = new.length or length


def _unlimited(table: TableSite) -> Hook:
    """A silenced table holds nobody back: what is installed inside attention has no last position."""
    where = table.path.rpartition(".")[0]
    reader = table.owner if "position_ids" in table.buffers else getattr(table.owner, table.attribute)
    names = tuple(inspect.signature(reader.forward).parameters)
    argument = "position_ids" if "position_ids" in names else names[0]
    return Hook(reader, partial(parts.without_positions, names=names, argument=argument), where)


def trained_length(new: Plan) -> int:
    """Tokens that the model was trained on, as far as its table or config tells; 0 where neither does."""
    if new.anatomy.table is not None:
        return new.anatomy.table.length
    return getattr(new.anatomy.config, "max_position_embeddings", None) or 0


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
