"""Planning for some layers only: the chosen ones take the scheme, the others keep the positions that they have.

A stack computes one rotation and hands it to every layer, so a chosen layer exchanges what it is handed: for no
rotation (cos 1, sin 0), or for that of a second rotary module, built by transformers from the scaled parameters.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

from .. import parts
from ..anatomy import Anatomy, kind
from ..edits import Hook, Replace
from ..errors import PosSwapError
from ..record import PORTABLE
from ..scheme import Scheme
from ..sites import BIAS, EMBED, ROTARY
from .plan import Plan
from .rotary import build, keep_dtype, refuse_forgetful, refuse_odd, refuse_unread, rotary_geometry, same_rotation
from .table import silence_bias

SECOND = "posswap_rotary"  # on the stack: the rotary module that the chosen layers read


def chosen_layers(anatomy: Anatomy, layers: Sequence[int] | None) -> tuple[int, ...] | None:
    """The indices in order, None for all. Raises PosSwapError for anything but different layers of this model."""
    if layers is None:
        return None
    indices = list(layers) if isinstance(layers, (list, tuple, range)) else []
    count = len(anatomy.layers()[1])
    if not indices or any(type(i) is not int or not 0 <= i < count for i in indices) or len({*indices}) < len(indices):
        raise PosSwapError(f"layers={layers!r} is not a list of different integers from 0 to {count - 1}")
    return None if len(indices) == count else tuple(sorted(indices))


def plan_layers(new: Plan, scheme: Scheme) -> None:
    """Silence and install in `new.layers`. Raises PosSwapError where positions are not a matter of single layers."""
    native = new.anatomy.sites
    if new.anatomy.biases:
        raise PosSwapError(f"layers={list(new.layers)}: what becomes of a bias is decided for all layers; leave it out")
    silenced = frozenset() if scheme.stacks else native
    where = f"layers={list(new.layers)}"
    if EMBED in silenced | scheme.sites:
        reason = "adds positions before its first layer" if EMBED in native else f"would get {scheme.name} there"
        raise PosSwapError(f"{where}: every layer reads what {kind(new.anatomy.model)} {reason}; leave layers out")
    if BIAS in silenced and new.anatomy.bias.shared:
        raise PosSwapError(f"{where}: the layers of {kind(new.anatomy.model)} share one bias; leave layers out")
    if ROTARY in scheme.sites & native and not scheme.in_attention:
        _exchange(new, _second_rotary(new, scheme), scheme)
        return
    if ROTARY in silenced:
        _exchange(new, None, scheme)
    tables = BIAS in silenced and bool(new.anatomy.bias.tables)
    if tables:
        silence_bias(new, scheme)
    if scheme.sites or (BIAS in silenced and not tables):
        from .attention import install_attention  # imports transformers' modeling code, seconds of it

        install_attention(new, scheme)


def _exchange(new: Plan, rotary: nn.Module | None, scheme: Scheme) -> None:
    """Hooks that hand every chosen layer another rotation than its stack does."""
    path, layers = new.anatomy.layers()
    where = f"{scheme.name}: layers={list(new.layers)}"
    if rotary is not None and "mrope_section" in new.anatomy.config.rope_parameters:
        raise PosSwapError(f"{where}: the layers of {kind(new.anatomy.model)} are not told where a token is")
    needed = {"position_embeddings"} if rotary is None else {"position_embeddings", "position_ids"}
    missing = needed - inspect.signature(layers[0].forward).parameters.keys()
    if missing:
        raise PosSwapError(f"{where}: the layers of {kind(new.anatomy.model)} are not handed {', '.join(missing)}")
    for index in new.layers:
        names = tuple(inspect.signature(layers[index].forward).parameters)
        layer_type = _layer_type(new.anatomy, index)
        exchange = partial(parts.exchange_rotation, names=names, rotary=rotary, layer_type=layer_type)
        new.edits.append(Hook(layers[index], exchange, f"{path}.{index}"))
    new.guard()
    new.storage = PORTABLE
    new.effective = True
    new.length = new.anatomy.config.max_position_embeddings


def _layer_type(anatomy: Anatomy, index: int) -> str | None:
    """The key of a layer's rotary parameters, where there are several."""
    return anatomy.config.layer_types[index] if anatomy.rotary.layer_types else None


def _second_rotary(new: Plan, scheme: Scheme) -> nn.Module:
    """A rotary module beside the model's own, with the scheme's parameters for the types of the chosen layers."""
    site = new.anatomy.rotary
    config = second_config(new.anatomy, scheme, new.layers)
    first, module = next(iter(site.modules.items()))
    if same_rotation(site, type(module), config):
        raise PosSwapError(f"{scheme} would change nothing on this {kind(new.anatomy.model)}")
    second = build(type(module), config)
    second.to(module.get_buffer(next(site.buffers())).device)
    keep_dtype(second).swap()
    stack = first.rpartition(".")[0]
    new.edits.append(Replace(new.anatomy.model.get_submodule(stack), SECOND, second, stack))
    return second


def second_config(anatomy: Anatomy, scheme: Scheme, layers: Sequence[int]) -> Any:
    """The text config that the rotary module of the chosen layers is built from."""
    site, model = anatomy.rotary, kind(anatomy.model)
    for name in ("pairing", "layer_types"):
        if getattr(scheme, name, None) is not None:
            raise PosSwapError(f"{scheme.name}: {name} cannot be chosen together with layers={list(layers)}")
    config = copy.deepcopy(site.config)
    for layer_type in dict.fromkeys(_layer_type(anatomy, index) for index in layers):
        geometry = rotary_geometry(anatomy, layer_type)
        if geometry.second_factor:
            raise PosSwapError(f"{scheme.name}: layers={list(layers)}: {model} has a factor for all its layers")
        refuse_odd(geometry, scheme)
        change = scheme.rotary(geometry)
        if layer_type is None:
            config.rope_parameters = change.rope_parameters
        else:
            refuse_forgetful(site, config, change.rope_parameters, layer_type, scheme)
            refuse_unread(site, geometry, change.rope_parameters, layer_type, scheme)
            config.rope_parameters[layer_type] = change.rope_parameters
        config.max_position_embeddings = change.config_length
        if change.config_original is not None:
            config.original_max_position_embeddings = change.config_original
    return config
