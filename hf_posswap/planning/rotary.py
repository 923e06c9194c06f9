"""Planning at the rotary site: the model's own rotary modules get other parameters, or stop turning."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from .. import parts
from ..anatomy import Anatomy, RotarySite, find_pairing, follows_rotary_contract, kind
from ..edits import ABSENT, Replace, same
from ..errors import PosSwapError
from ..record import FOREIGN_ROPE_TYPE, PORTABLE
from ..scheme import Scheme
from ..sites import RotaryChange, RotaryGeometry
from .plan import Plan, invalid, plain_state, refuse_quantised

# rope_parameters that belong to a context scaling; what is left is the un-scaled original
SCALING_KEYS = frozenset(
    {"rope_type", "type", "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"}
    | {"mscale", "mscale_all_dim", "truncate", "short_factor", "long_factor", "low_freq_factor", "high_freq_factor"}
)
# rope_type -> whether the trained length is in the parameters (else it is the config's max_position_embeddings)
SCALED_TYPES = {"linear": False, "dynamic": False, "yarn": True, "llama3": True, "longrope": True}
UNSCALED_TYPES = ("default", "proportional")
# what a model does besides rotating, with a key of rope_parameters and the trained length beside it (Ministral 3)
READS_LENGTH = frozenset({"llama_4_scaling_beta"})


def unscaled(parameters: dict[str, Any], config: Any) -> tuple[dict[str, Any], int]:
    """(rope_parameters without scaling, trained length in tokens) of a possibly scaled model."""
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if rope_type in UNSCALED_TYPES:
        kept = {k: v for k, v in parameters.items() if k != "factor"}
        return kept | {"rope_type": rope_type}, config.max_position_embeddings
    if rope_type not in SCALED_TYPES:
        raise PosSwapError(f"rope_type={rope_type!r} of this model has no known un-scaled original")
    length = config.max_position_embeddings
    if SCALED_TYPES[rope_type]:
        length = getattr(config, "original_max_position_embeddings", None) or parameters.get(
            "original_max_position_embeddings", length
        )
    dropped = SCALING_KEYS - ({"original_max_position_embeddings"} if READS_LENGTH & parameters.keys() else set())
    kept = {k: v for k, v in parameters.items() if k not in dropped}
    return kept | {"rope_type": "default"}, length


def scaled_layer_types(site: RotarySite, scheme: Scheme) -> tuple[str | None, ...]:
    """The layer types a rotary scheme applies to; (None,) on a model with one rotary for all."""
    asked = getattr(scheme, "layer_types", None)
    if not site.layer_types:
        if asked:
            raise PosSwapError(f"layer_types={asked!r}: this model has one rotary for all layers; leave it out")
        return (None,)
    if asked is None:
        if "full_attention" not in site.layer_types:
            raise PosSwapError(f"give layer_types: this model's are {', '.join(site.layer_types)}")
        return ("full_attention",)
    for layer_type in asked:
        if layer_type not in site.layer_types:
            raise PosSwapError(
                f"layer_types: {layer_type!r} is unknown; this model's are {', '.join(site.layer_types)}"
            )
    return tuple(asked)


def rotary_geometry(anatomy: Anatomy, layer_type: str | None, pairing: bool = False) -> RotaryGeometry:
    """What a rotary scheme is told of one rotary site."""
    site = anatomy.rotary
    parameters, length = unscaled(site.parameters(site.config, layer_type), site.config)
    prefix = f"{layer_type}_" if layer_type else ""
    rotary_dim = 2 * next(iter(site.modules.values())).get_buffer(f"{prefix}inv_freq").shape[-1]
    config = site.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return RotaryGeometry(
        parameters,
        length,
        head_dim,
        rotary_dim,
        find_pairing(site, anatomy.model) if pairing else None,
        has_second_factor(anatomy),
    )


def has_second_factor(anatomy: Anatomy) -> bool:
    """Whether attention multiplies its softmax by a factor of YaRN that it derives itself: it is built and asked."""
    site = anatomy.rotary
    if site.layer_types:
        return False
    plain, scaled = copy.deepcopy(site.config), copy.deepcopy(site.config)
    plain.rope_parameters = unscaled(site.config.rope_parameters, site.config)[0]
    scaled.rope_parameters = plain.rope_parameters | {
        "rope_type": "yarn",
        "factor": 2.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": site.config.max_position_embeddings,
    }
    layer = anatomy.layers()[1][0]
    try:
        return any("scaling" in changes for changes in _derived(type(layer), 0, plain, scaled).values())
    except (AttributeError, KeyError, TypeError):  # a layer that cannot be built for yarn has no factor of it
        return False


def install_rotary(new: Plan, scheme: Scheme) -> None:
    site = new.anatomy.rotary
    asks_pairing = getattr(scheme, "pairing", None) is not None
    layer_types = scaled_layer_types(site, scheme)
    _spell_out_head_dim(new)
    parameters, change, geometry = copy.deepcopy(site.config.rope_parameters), None, None
    for layer_type in layer_types:
        geometry = rotary_geometry(new.anatomy, layer_type, pairing=asks_pairing)
        refuse_odd(geometry, scheme)
        change = scheme.rotary(geometry)
        if layer_type is None:
            parameters = change.rope_parameters
        else:
            refuse_forgetful(site, new.text, change.rope_parameters, layer_type, scheme)
            refuse_unread(site, geometry, change.rope_parameters, layer_type, scheme)
            parameters[layer_type] = change.rope_parameters
    _write_rotary(new, parameters, change)
    rotary_edits(new, site, new.text)
    if change.pairing is not None and change.pairing != geometry.pairing:
        _install_pairing(new, geometry, change.pairing, layer_types)
    new.length = change.length


def _spell_out_head_dim(new: Plan) -> None:
    """Some configs leave `head_dim` None (Mixtral), which transformers' scaling functions cannot multiply with."""
    site, config = new.anatomy.rotary, new.anatomy.config
    if "head_dim" in vars(config) and config.head_dim is None:
        head_dim = config.hidden_size // config.num_attention_heads
        live = next(iter(site.modules.values())).get_buffer(next(site.buffers()))
        if 2 * live.shape[-1] == head_dim:
            new.set_config("head_dim", head_dim)


def refuse_odd(geometry: RotaryGeometry, scheme: Scheme) -> None:
    width = geometry.head_dim * geometry.rope_parameters.get("partial_rotary_factor", 1.0)
    if int(width) % 2:
        raise PosSwapError(
            f"{scheme.name}: head_dim={geometry.head_dim} rotates {int(width)} dimensions, an odd number"
        )


def _write_rotary(new: Plan, parameters: dict[str, Any], change: RotaryChange) -> None:
    new.set_config("rope_parameters", parameters)
    new.set_config("max_position_embeddings", change.config_length)
    # Phi-3 and others keep the trained length beside the parameters, and it wins over the one inside
    inside = change.rope_parameters.get("original_max_position_embeddings")
    beside = getattr(new.text, "original_max_position_embeddings", None)
    if change.config_original is not None or (inside is not None and beside is not None):
        new.set_config("original_max_position_embeddings", inside)


def refuse_unread(
    site: RotarySite, geometry: RotaryGeometry, parameters: dict[str, Any], layer_type: str, scheme: Scheme
) -> None:
    """Raise where transformers computes other frequencies from parameters of a layer type than from the same alone.

    So it does with `truncate`, which it looks for outside of the layer type (up to 5.23 at least).
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    compute = ROPE_INIT_FUNCTIONS.get(parameters["rope_type"])
    if compute is None:
        return
    nested = copy.deepcopy(site.config)
    nested.rope_parameters[layer_type] = dict(parameters)
    alone = SimpleNamespace(
        rope_parameters=parameters,
        head_dim=geometry.head_dim,
        hidden_size=geometry.head_dim,
        num_attention_heads=1,
        max_position_embeddings=nested.max_position_embeddings,
        standardize_rope_params=lambda: None,
    )
    (expected, scale), (read, read_scale) = compute(alone, "cpu"), compute(nested, "cpu", layer_type=layer_type)
    if expected.shape == read.shape and not (same(expected, read) and scale == read_scale):
        unread = "truncate=False: " if parameters.get("truncate") is False else ""
        raise PosSwapError(
            f"{scheme.name}: {unread}this transformers does not read it where parameters are kept per layer type, as "
            "this model's are; leave it out"
        )


def refuse_forgetful(
    site: RotarySite, config: Any, parameters: dict[str, Any], layer_type: str, scheme: Scheme
) -> None:
    """Raise where transformers fails at the second long input after a longrope of one layer type (5.17 does)."""
    if parameters["rope_type"] != "longrope":
        return
    config = copy.deepcopy(config)
    config.rope_parameters[layer_type] = dict(parameters)
    twin = build(type(next(iter(site.modules.values()))), config)
    beyond = torch.tensor([[parameters["original_max_position_embeddings"]]])
    try:
        for _ in range(2):
            twin(torch.zeros(1, 1, 1), beyond, layer_type)
    except UnboundLocalError as error:
        raise PosSwapError(
            f"{scheme.name}: this transformers fails at the second long input where parameters are kept per layer "
            "type, as this model's are; upgrade it, or use 'yarn'"
        ) from error


def rotary_edits(new: Plan, site: RotarySite, config: Any) -> None:
    """Give every rotary module the state that a fresh one, built from `config` by transformers, would have."""
    for path, module in site.modules.items():
        twin = build(type(module), config)
        for name in site.buffers():
            live, fresh = module.get_buffer(name), twin.get_buffer(name)
            if live.shape != fresh.shape:
                raise PosSwapError(
                    f"{new.scheme}: {path} would turn {2 * fresh.shape[-1]} dimensions where this model's attention "
                    f"was built for {2 * live.shape[-1]}"
                )
            new.effective |= not same(live.float(), fresh)
        new.effective |= not same_rotation(site, type(module), config)
        # also what is equal now: a long input changes it (dynamic, longrope), and an undo must find its old side
        for name, value in twin._buffers.items():
            new.edits.append(Replace(module, name, value.to(module.get_buffer(name).device), path))
        for name, value in plain_state(twin).items():
            new.edits.append(Replace(module, name, value, path))
        for name, value in vars(twin).items():  # a module that computes its frequencies in each call
            if inspect.isfunction(value):
                new.edits.append(Replace(module, name, value, path))
        for name in site.buffers():  # what transformers keeps of a longrope once a long input has come
            new.edits.append(Replace(module, name.replace("inv_freq", "long_inv_freq"), ABSENT, path))
        new.edits.append(keep_dtype(module, path))
    _derived_edits(new, site.config, config)


def keep_dtype(module: nn.Module, path: str = "") -> Replace:
    """The edit after which casting the model leaves the frequencies of a rotary module float32."""
    return Replace(module, "_apply", partial(parts.move_without_cast, module), path)


def build(cls: type[nn.Module], config: Any) -> nn.Module:
    """A fresh module of transformers' own class, on the CPU. PosSwapError where transformers cannot build it."""
    try:
        with torch.device("cpu"):
            return cls(config)
    except Exception as error:  # constructors of transformers raise anything at parameters they cannot take
        raise PosSwapError(
            f"{config.rope_parameters} cannot be built by this model's own {cls.__name__}: "
            f"{type(error).__name__}: {error}"
        ) from error


def same_rotation(site: RotarySite, cls: type[nn.Module], config: Any) -> bool:
    """Whether modules fresh from the old and the new config turn near and far positions alike: they are run."""
    old, new = build(cls, site.config), build(cls, config)
    far = 4 * max(site.config.max_position_embeddings, 2)
    positions = torch.tensor([[0, 1, far]])
    if "mrope_section" in site.config.rope_parameters:
        positions = positions.expand(3, -1, -1)  # time, row and column of a patch; of text, three times the same
    for layer_type in site.layer_types or (None,):
        arguments = (torch.zeros(1, 1, 1), positions, *(() if layer_type is None else (layer_type,)))
        try:
            a = old(*arguments)
        except (RuntimeError, IndexError, TypeError):
            return True  # coordinates of another form (M-RoPE); the buffers were compared already
        try:
            b = new(*arguments)
        except Exception as error:  # as above
            raise PosSwapError(
                f"{config.rope_parameters} does not run in this model's own {cls.__name__}: "
                f"{type(error).__name__}: {error}"
            ) from error
        pairs = zip(a, b, strict=True) if isinstance(a, tuple) else [(a, b)]
        if not all(same(x, y) for x, y in pairs):
            return False
    return True


def _derived_edits(new: Plan, old_config: Any, new_config: Any) -> None:
    """Numbers that layers derived from the rotary parameters when they were built (MLA's second factor, say).

    Each kind of layer is built twice on the meta device, from the old and the new config; what differs between the
    two is what a reload would compute, and is set in every live layer of that kind.
    """
    path, layers = new.anatomy.layers()
    layer_types = getattr(new_config, "layer_types", None) or ()
    stale: dict[tuple, dict[str, dict[str, Any]]] = {}
    for index, layer in enumerate(layers):
        key = (type(layer), layer_types[index] if index < len(layer_types) else None)
        if key not in stale:
            stale[key] = _derived(type(layer), index, old_config, new_config)
        for inner, changes in stale[key].items():
            for name, value in changes.items():
                new.replace(layer.get_submodule(inner), name, value, f"{path}.{index}.{inner}".rstrip("."))


def _derived(cls: type[nn.Module], index: int, old_config: Any, new_config: Any) -> dict[str, dict[str, Any]]:
    """Path inside a layer -> what its plain state becomes under the new config. Rotary modules are not among it."""
    _, *parameters = inspect.signature(cls.__init__).parameters.values()
    required = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    if len(parameters) < 2 or parameters[0].name != "config" or set(required) - {"config", parameters[1].name}:
        return {}
    if parameters[1].name not in ("layer_idx", "layer_number", "layer_id"):
        return {}
    with torch.device("meta"):
        old, new = (dict(cls(as_loaded(c), index).named_modules()) for c in (old_config, new_config))
    found = {}
    for path, module in new.items():
        if not follows_rotary_contract(module):
            before = plain_state(old[path])
            found[path] = {k: v for k, v in plain_state(module).items() if not same(before.get(k), v)}
    return {path: changes for path, changes in found.items() if changes}


def as_loaded(config: Any) -> Any:
    """The config with its dtype as a loader has it; once a model was saved, it is the name of one."""
    if not isinstance(getattr(config, "dtype", None), str):
        return config
    config = copy.copy(config)
    config.dtype = getattr(torch, config.dtype)
    return config


def _install_pairing(new: Plan, geometry: RotaryGeometry, pairing: str, layer_types: tuple[str | None, ...]) -> None:
    """Turn other pairs of dimensions: the rows of q and k are permuted, the model's own rotation stays."""
    if geometry.pairing is None:
        raise PosSwapError(f"pairing={pairing!r}: how {kind(new.anatomy.model)} pairs its dimensions is not known")
    refuse_quantised(new.anatomy.model, "rope(pairing=...)")
    new.original["pairing"] = geometry.pairing
    pairing_edits(new, geometry, pairing, layer_types)
    new.effective = True


def pairing_edits(new: Plan, geometry: RotaryGeometry, pairing: str, layer_types: tuple[str | None, ...]) -> None:
    """Edits that make layers which rotate `geometry.pairing` behave as if they rotated `pairing`."""
    of_layer = new.anatomy.config.layer_types if layer_types != (None,) else None
    half = geometry.rotary_dim // 2
    interleaved_to_halves = torch.arange(geometry.rotary_dim).reshape(half, 2).T.flatten()
    order = interleaved_to_halves if pairing == "interleaved" else interleaved_to_halves.argsort()
    order = torch.cat([order, torch.arange(geometry.rotary_dim, geometry.head_dim)])
    found = False
    for path, module in new.anatomy.model.named_modules():
        if not (hasattr(module, "q_proj") and hasattr(module, "k_proj")):
            continue
        if of_layer is not None and of_layer[module.layer_idx] not in layer_types:
            continue
        found = True
        for child in ("q_proj", "k_proj", "q_norm", "k_norm"):
            for name, parameter in getattr(module, child, nn.Identity()).named_parameters(recurse=False):
                rows = parameter.shape[0]
                if rows % geometry.head_dim:
                    raise PosSwapError(f"pairing={pairing!r}: {path}.{child}.{name} has {rows} rows, not whole heads")
                index = (torch.arange(0, rows, geometry.head_dim)[:, None] + order).flatten()
                permuted = parameter.detach()[index.to(parameter.device)]
                new.replace(
                    getattr(module, child),
                    name,
                    nn.Parameter(permuted, parameter.requires_grad),
                    f"{path}.{child}",
                )
    if not found:
        raise PosSwapError(f"pairing={pairing!r}: no q_proj and k_proj were found in {kind(new.anatomy.model)}")


def _silent(anatomy: Anatomy) -> dict[str, Any]:
    """The rope_parameters that turn nothing: transformers' `proportional` type with share 0."""
    silent = {"rope_type": "proportional", "partial_rotary_factor": 0.0}
    if has_second_factor(anatomy):  # transformers 5.17 reads the factor of any type there
        silent["factor"] = 1.0
    return silent


def is_silent_natively(anatomy: Anatomy) -> bool:
    """Whether this model's own rotary modules, built by transformers, can be told to turn nothing."""
    site, silent = anatomy.rotary, _silent(anatomy)
    config = copy.deepcopy(site.config)
    config.rope_parameters = _each(site, lambda p: unscaled(p, site.config)[0] | silent)
    if invalid(config) is not None:
        return False
    for module in site.modules.values():
        twin = build(type(module), config)
        for name in site.buffers():
            fresh = twin.get_buffer(name)
            if fresh.shape != module.get_buffer(name).shape or fresh.any():
                return False
        try:
            same_rotation(site, type(module), config)
        except PosSwapError:  # it reads keys of the scaling that the model came with
            return False
    plain = copy.deepcopy(site.config)
    plain.rope_parameters = _each(site, lambda p: unscaled(p, site.config)[0])
    return not any(_derived(type(layer), 0, plain, config) for layer in anatomy.layers()[1][:1])


def silence_rotary_natively(new: Plan, scheme: Scheme) -> None:
    """No dimension turns, and any reader of the config rebuilds it so."""
    site, silent = new.anatomy.rotary, _silent(new.anatomy)
    new.set_config("rope_parameters", _each(site, lambda p: unscaled(p, site.config)[0] | silent))
    _note_silence(new)
    rotary_edits(new, site, new.text)


def silence_rotary(new: Plan, scheme: Scheme) -> None:
    """No dimension turns, and stock transformers stops at the config, whatever types of rotation it allows."""
    site = new.anatomy.rotary
    new.storage = PORTABLE
    foreign = _each(site, lambda p: dict(p) | {"rope_type": FOREIGN_ROPE_TYPE})
    trial = copy.deepcopy(new.text)
    trial.rope_parameters = foreign
    if invalid(trial) is None:
        new.set_config("rope_parameters", foreign)
    else:
        new.guard()
    _note_silence(new)
    zero_rotary_edits(new, site)


def _note_silence(new: Plan) -> None:
    site = new.anatomy.rotary
    new.effective |= any(b.is_meta or bool(b.any()) for m in site.modules.values() for b in m._buffers.values())
    new.length = site.config.max_position_embeddings


def _each(site: RotarySite, change: Callable[[dict], dict]) -> dict[str, Any]:
    """rope_parameters with `change` applied to the flat dict, or to each layer type's."""
    old = copy.deepcopy(site.config.rope_parameters)
    return old | {t: change(old[t]) for t in site.layer_types} if site.layer_types else change(old)


def zero_rotary_edits(new: Plan, site: RotarySite) -> None:
    """Zero frequencies through the rotary contract itself, so that a rebuild on transformers' side keeps them."""
    for path, module in site.modules.items():
        for name, buffer in module._buffers.items():
            new.replace(module, name, torch.zeros_like(buffer, dtype=torch.float32), path)
        size = next(iter(module._buffers.values())).shape[-1]
        silent = partial(parts.zero_frequencies, size=size)
        for name in ("compute_default_rope_parameters", *(n for n, v in vars(module).items() if inspect.isfunction(v))):
            new.replace(module, name, silent, path)
        new.replace(module, "rope_type", dict.fromkeys(site.layer_types, "default") or "default", path)
        for prefix in [f"{t}_" for t in site.layer_types] or [""]:
            new.replace(module, f"{prefix}attention_scaling", 1.0, path)
        new.edits.append(keep_dtype(module, path))
