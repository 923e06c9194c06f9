"""Planning: from a model and a scheme to a validated list of edits. Pure: the model is read, never touched."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from . import parts
from .anatomy import (
    Anatomy,
    RotarySite,
    TableSite,
    examine,
    find_pairing,
    follows_rotary_contract,
    kind,
    refuse_foreign_rotary,
)
from .edits import ABSENT, Hook, Replace, same
from .errors import PosSwapError
from .positions import root_mean_square
from .record import FOREIGN_ROPE_TYPE, KEY, NATIVE, PORTABLE, Record, config_values, owner_of
from .scheme import Scheme
from .sites import BIAS, EMBED, ROTARY, EmbedChange, EmbedGeometry, RotaryChange, RotaryGeometry

# rope_parameters that belong to a context scaling; what is left is the un-scaled original
SCALING_KEYS = frozenset(
    {"rope_type", "type", "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"}
    | {"mscale", "mscale_all_dim", "truncate", "short_factor", "long_factor", "low_freq_factor", "high_freq_factor"}
)
# rope_type -> whether the trained length is in the parameters (else it is the config's max_position_embeddings)
SCALED_TYPES = {"linear": False, "dynamic": False, "yarn": True, "llama3": True, "longrope": True}
UNSCALED_TYPES = ("default", "proportional")


@dataclass
class Plan:
    """What a patch would do: print it. `edits` are in order; `config` is the model's own new config."""

    anatomy: Anatomy
    scheme: Scheme
    config: Any
    edits: list[Replace | Hook] = field(default_factory=list)
    original: dict[str, Any] = field(default_factory=dict)
    measured: dict[str, float] = field(default_factory=dict)
    source: str = ""
    storage: str = NATIVE
    length: int = 0
    notes: list[str] = field(default_factory=list)
    configs: dict[int, Any] = field(default_factory=dict)
    effective: bool = False
    recalibrate: bool = False

    @property
    def text(self) -> Any:
        """The new config of the text stack."""
        return self.config.get_text_config()

    def set_config(self, key: str, value: Any) -> None:
        """Write a key of the new text config, and remember what was there."""
        prefix = config_path(self.config, self.text)
        old = getattr(self.anatomy.config, key, ABSENT)
        if old != value:
            self.original[f"{prefix}{key}"] = copy.deepcopy(old)
            setattr(self.text, key, value)

    def replace(self, owner: Any, name: str, value: Any, where: str = "") -> None:
        """Plan an exchange; one that would change nothing is dropped."""
        edit = Replace(owner, name, value, where)
        if not same(edit.current, value):
            self.edits.append(edit)

    def record(self) -> Record:
        return Record(
            scheme=self.scheme.name,
            params=self.scheme.given(),
            storage=self.storage,
            length=self.length,
            original=self.original,
            measured=self.measured,
            source=self.source,
        )

    def __str__(self) -> str:
        lines = [f"{kind(self.anatomy.model)} -> {self.scheme} ({self.storage}, {len(self.edits)} edits)"]
        lines += [f"  config.{path}: {old!r} -> {self._new(path)!r}" for path, old in config_values(self.original)]
        lines += [f"  {edit}" for edit in self.edits if not (isinstance(edit, Replace) and edit.is_idle)]
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])

    def _new(self, path: str) -> Any:
        holder, name = owner_of(self.config, path)
        return getattr(holder, name)


def plan(
    model: nn.Module,
    scheme: Scheme,
    tokenizer: Any = None,
    processor: Any = None,
    recalled: Record | None = None,
) -> Plan:
    """Everything `patch_model` would do, checked, in order. Raises PosSwapError if any of it cannot be done.

    `recalled` is the record of a checkpoint: its numbers are used instead of measuring the model again.
    """
    anatomy = examine(model)
    if anatomy.rotary is not None:
        refuse_foreign_rotary(model, anatomy.rotary)
        if getattr(anatomy.config, "max_position_embeddings", None) is None:
            raise PosSwapError(f"{scheme}: the config of {kind(model)} does not say the trained length")
    configs: dict[int, Any] = {}
    new = Plan(anatomy, scheme, copy.deepcopy(model.config, configs), configs=configs)
    new.source = model.config.name_or_path
    if recalled is not None:
        new.measured, new.source = dict(recalled.measured), recalled.source

    with torch.device("cpu"):  # a caller may be building on the meta device, where there are no numbers to plan with
        _plan_sites(new, scheme)
    if not new.effective:
        raise PosSwapError(f"{scheme} would change nothing on this {kind(model)}")
    _refuse_invalid(new)
    continues = (
        scheme.keeps_function and (scheme.stacks or scheme.sites & anatomy.sites) and "pairing" not in new.original
    )
    new.recalibrate = not continues
    if new.recalibrate:
        new.notes.append(
            f"{scheme.name} replaces the positions this model was trained with: fine-tune it before use (recalibrate)"
        )
    new.edits += limit_edits(model, new.text, new.length, tokenizer, processor)
    setattr(new.config, KEY, new.record().to_dict())
    return new


def _plan_sites(new: Plan, scheme: Scheme) -> None:
    """Silence and install, site by site."""
    native = new.anatomy.sites
    in_attention = scheme.sites & {BIAS}
    if ROTARY in scheme.sites and (scheme.in_attention or ROTARY not in native):
        in_attention |= {ROTARY}
    replaced = (scheme.sites & native) - in_attention
    silenced = frozenset() if replaced or scheme.stacks else native  # like for like leaves a model's other sites alone
    if ROTARY in replaced:
        _install_rotary(new, scheme)
    if ROTARY in silenced:
        _silence_rotary(new, must_be_portable=bool(scheme.sites))
    if EMBED in replaced:
        _install_table(new, scheme)
    if EMBED in silenced:
        _silence_table(new)
    if BIAS in silenced:
        _silence_bias(new)
    if EMBED in scheme.sites - native:
        _install_addition(new, scheme)
    if in_attention:
        from .planning_attention import install_attention  # imports transformers' modeling code, seconds of it

        install_attention(new, scheme, in_attention)


def _refuse_invalid(new: Plan) -> None:
    """Raise where transformers' own check of a config, made at every save, does not let the new one pass."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        getattr(new.text, "validate", bool)()  # configs of remote code may have none
    except StrictDataclassError as error:
        reason = str(error.__cause__ or error).strip()
        raise PosSwapError(
            f"{new.scheme}: the config of a {kind(new.anatomy.model)} cannot hold it ({reason}): it could not be saved"
        ) from error


def config_path(config: Any, inner: Any) -> str:
    """`` or `text_config.`: where a text stack's config lies in the model's."""
    if inner is config:
        return ""
    for name in config.sub_configs:
        child = getattr(config, name, None)
        if child is inner:
            return f"{name}."
        if child is not None and child.sub_configs and (deeper := config_path(child, inner)):
            return f"{name}.{deeper}"
    return ""


# --- rotary


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
    kept = {k: v for k, v in parameters.items() if k not in SCALING_KEYS}
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


def _install_rotary(new: Plan, scheme: Scheme) -> None:
    site = new.anatomy.rotary
    asks_pairing = getattr(scheme, "pairing", None) is not None
    layer_types = scaled_layer_types(site, scheme)
    _spell_out_head_dim(new)
    parameters, change, geometry = copy.deepcopy(site.config.rope_parameters), None, None
    for layer_type in layer_types:
        geometry = rotary_geometry(new.anatomy, layer_type, pairing=asks_pairing)
        _refuse_odd(geometry, scheme)
        change = scheme.rotary(geometry)
        if layer_type is None:
            parameters = change.rope_parameters
        else:
            _refuse_forgetful(site, new.text, change.rope_parameters, layer_type, scheme)
            _refuse_unread(site, geometry, change.rope_parameters, layer_type, scheme)
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


def _refuse_odd(geometry: RotaryGeometry, scheme: Scheme) -> None:
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


def _refuse_unread(
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


def _refuse_forgetful(
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
        new.effective |= not _same_rotation(site, type(module), config)
        # also what is equal now: a long input changes it (dynamic, longrope), and an undo must find its old side
        for name, value in twin._buffers.items():
            new.edits.append(Replace(module, name, value.to(module.get_buffer(name).device), path))
        for name, value in plain_state(twin).items():
            new.edits.append(Replace(module, name, value, path))
        for name in site.buffers():  # what transformers keeps of a longrope once a long input has come
            new.edits.append(Replace(module, name.replace("inv_freq", "long_inv_freq"), ABSENT, path))
        new.replace(module, "_apply", partial(parts.move_without_cast, module), path)
    _derived_edits(new, site.config, config)


def build(cls: type[nn.Module], config: Any) -> nn.Module:
    """A fresh module of transformers' own class, on the CPU. PosSwapError where transformers cannot build it."""
    try:
        with torch.device("cpu"):
            return cls(config)
    except Exception as error:
        raise PosSwapError(
            f"{config.rope_parameters} cannot be built by this model's own {cls.__name__}: "
            f"{type(error).__name__}: {error}"
        ) from error


def plain_state(module: nn.Module) -> dict[str, Any]:
    """Numbers, strings and containers of them that a module computed from its config when it was built."""
    internal = vars(nn.Module())
    return {
        name: value
        for name, value in vars(module).items()
        if name not in internal and isinstance(value, (int, float, str, tuple, list, dict)) and name != "training"
    }


def _same_rotation(site: RotarySite, cls: type[nn.Module], config: Any) -> bool:
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
        except Exception as error:
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
    if [p.name for p in parameters[:2]] != ["config", "layer_idx"] or set(required) - {"config", "layer_idx"}:
        return {}
    with torch.device("meta"):
        old, new = (dict(cls(config, index).named_modules()) for config in (old_config, new_config))
    found = {}
    for path, module in new.items():
        if not follows_rotary_contract(module):
            before = plain_state(old[path])
            found[path] = {k: v for k, v in plain_state(module).items() if not same(before.get(k), v)}
    return {path: changes for path, changes in found.items() if changes}


def _install_pairing(new: Plan, geometry: RotaryGeometry, pairing: str, layer_types: tuple[str | None, ...]) -> None:
    """Turn other pairs of dimensions: the rows of q and k are permuted, the model's own rotation stays."""
    if geometry.pairing is None:
        raise PosSwapError(f"pairing={pairing!r}: how {kind(new.anatomy.model)} pairs its dimensions is not known")
    _refuse_quantised(new.anatomy.model, "rope(pairing=...)")
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


def _silence_rotary(new: Plan, must_be_portable: bool) -> None:
    """No dimension turns. Native where transformers' `proportional` type with share 0 fits; else portable."""
    site = new.anatomy.rotary
    silent = {"rope_type": "proportional", "partial_rotary_factor": 0.0}
    if has_second_factor(new.anatomy):  # transformers 5.17 reads the factor of any type there
        silent["factor"] = 1.0
    if not must_be_portable and _silent_natively(site, silent):
        new.set_config("rope_parameters", _each(site, lambda p: unscaled(p, site.config)[0] | silent))
        rotary_edits(new, site, new.text)
    else:
        new.storage = PORTABLE
        new.set_config("rope_parameters", _each(site, lambda p: dict(p) | {"rope_type": FOREIGN_ROPE_TYPE}))
        zero_rotary_edits(new, site)
    new.effective |= any(b.is_meta or bool(b.any()) for m in site.modules.values() for b in m._buffers.values())
    new.length = site.config.max_position_embeddings


def _each(site: RotarySite, change: Callable[[dict], dict]) -> dict[str, Any]:
    """rope_parameters with `change` applied to the flat dict, or to each layer type's."""
    old = copy.deepcopy(site.config.rope_parameters)
    return old | {t: change(old[t]) for t in site.layer_types} if site.layer_types else change(old)


def _silent_natively(site: RotarySite, silent: dict[str, Any]) -> bool:
    config = copy.deepcopy(site.config)
    config.rope_parameters = _each(site, lambda p: unscaled(p, site.config)[0] | silent)
    for module in site.modules.values():
        twin = build(type(module), config)
        for name in site.buffers():
            fresh = twin.get_buffer(name)
            if fresh.shape != module.get_buffer(name).shape or fresh.any():
                return False
    return True


def zero_rotary_edits(new: Plan, site: RotarySite) -> None:
    """Zero frequencies through the rotary contract itself, so that a rebuild on transformers' side keeps them."""
    for path, module in site.modules.items():
        for name, buffer in module._buffers.items():
            new.replace(module, name, torch.zeros_like(buffer, dtype=torch.float32), path)
        size = next(iter(module._buffers.values())).shape[-1]
        new.replace(module, "compute_default_rope_parameters", partial(parts.zero_frequencies, size=size), path)
        new.replace(module, "rope_type", dict.fromkeys(site.layer_types, "default") or "default", path)
        for prefix in [f"{t}_" for t in site.layer_types] or [""]:
            new.replace(module, f"{prefix}attention_scaling", 1.0, path)
        new.replace(module, "_apply", partial(parts.move_without_cast, module), path)


# --- tables


def embed_geometry(new: Plan) -> EmbedGeometry:
    """What an embed scheme is told of the site: the table, or the token embeddings it would be added to."""
    table = new.anatomy.table
    if table is not None:
        rows = table.rows[table.reserved :].float()
        rms = partial(_measure, new, rows, "this model's table")
        return EmbedGeometry(rows.shape[-1], len(rows), rows, rms, table.grid, table.patch)
    embeddings, config = new.anatomy.model.get_input_embeddings(), new.anatomy.config

    def sample() -> Tensor:  # what the module returns, so that an embedding that scales its rows is measured right
        with torch.no_grad():
            return embeddings(torch.arange(min(1024, embeddings.weight.shape[0]), device=embeddings.weight.device))

    rms = partial(_measure, new, sample, "this model's token embedding")
    return EmbedGeometry(config.hidden_size, config.max_position_embeddings, None, rms)


def _measure(new: Plan, vectors: Tensor | Callable[[], Tensor], what: str) -> float:
    """Root mean square, remembered for the record; a reload uses the remembered number."""
    if "rms" not in new.measured:
        vectors = vectors() if callable(vectors) else vectors
        if vectors.is_meta:
            raise PosSwapError(f"scale='match': {what} is on the meta device and has no values; load it first")
        new.measured["rms"] = root_mean_square(vectors)
    return new.measured["rms"]


def _install_table(new: Plan, scheme: Scheme) -> None:
    table = new.anatomy.table
    change = scheme.embed(embed_geometry(new))
    positions = torch.arange(change.length, device=table.weight.device)
    vectors = change.vectors(positions)
    _write_table(new, table, torch.cat([table.rows[: table.reserved].to(vectors), vectors]), scheme.trainable)
    _resize_around(new, table, change)


def _silence_table(new: Plan) -> None:
    table = new.anatomy.table
    _write_table(new, table, torch.zeros_like(table.rows), trainable=False)
    new.length = table.length


def _write_table(new: Plan, table: TableSite, rows: Tensor, trainable: bool) -> None:
    """Exchange the Parameter: same dtype, device and form as the one it replaces."""
    _refuse_quantised(new.anatomy.model, str(new.scheme))
    holder, name = table.holder
    old = table.weight
    value = nn.Parameter(rows.to(old.device, old.dtype).reshape(*old.shape[:-2], *rows.shape), trainable)
    new.effective |= not same(old, value)
    new.edits.append(Replace(holder, name, value, table.path))
    if isinstance(holder, nn.Embedding):
        new.replace(holder, "num_embeddings", len(rows), table.path)


def _resize_around(new: Plan, table: TableSite, change: EmbedChange) -> None:
    """Everything that has the table's length: index buffers, the config, the patch grid, the length check."""
    new.length = change.length
    rows = change.length + table.reserved
    owner_path = table.path.rpartition(".")[0]
    if table.grid is not None:
        _resize_image(new, table, change.grid)
        return
    for name in table.buffers:
        old = table.owner.get_buffer(name)
        counts = torch.arange(rows) if name == "position_ids" else torch.zeros(rows)
        value = counts.to(old.device, old.dtype).expand(*old.shape[:-1], -1)
        new.replace(table.owner, name, value, owner_path)
    new.set_config("max_position_embeddings", rows if table.counted else change.length)
    names = tuple(inspect.signature(table.owner.forward).parameters)
    check = partial(parts.refuse_longer, names=names, limit=change.length)
    new.edits.append(Hook(table.owner, check, owner_path))


def _resize_image(new: Plan, table: TableSite, grid: tuple[int, int]) -> None:
    height, width = (side * table.patch for side in grid)
    new.set_config("image_size", height if height == width else [height, width])
    owner_path = table.path.rpartition(".")[0]
    with torch.device("meta"):
        twin = type(table.owner)(new.text)
    for live, fresh, path in (
        (table.owner, twin, owner_path),
        (table.owner.patch_embeddings, twin.patch_embeddings, f"{owner_path}.patch_embeddings"),
    ):
        for name, value in plain_state(fresh).items():
            new.replace(live, name, value, path)


def _silence_bias(new: Plan) -> None:
    _refuse_quantised(new.anatomy.model, str(new.scheme))
    for path, table in new.anatomy.bias.tables.items():
        zeros = nn.Parameter(torch.zeros_like(table.weight), requires_grad=False)
        new.edits.append(Replace(table, "weight", zeros, path))
    new.effective = True


def _install_addition(new: Plan, scheme: Scheme) -> None:
    """Position vectors added to what enters the first layer, on a model that has no table."""
    path, layer, stack = new.anatomy.first_layer()
    geometry = embed_geometry(new)
    change = scheme.embed(geometry)
    if getattr(scheme, "max_positions", None) is not None:
        raise PosSwapError(
            f"{scheme.name}: max_positions={scheme.max_positions} sizes a table, and this model gets none: "
            "every position is computed; leave it out"
        )
    stack_names, names = (tuple(inspect.signature(m.forward).parameters) for m in (stack, layer))
    new.edits.append(Hook(stack, partial(parts.positions_from_mask, names=stack_names), kind(stack)))
    new.edits.append(Hook(layer, partial(parts.add_positions, names=names, vectors=change.vectors), path))
    new.storage = PORTABLE
    new.effective = True
    new.length = geometry.length


def _refuse_quantised(model: nn.Module, what: str) -> None:
    if getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None) is not None:
        raise PosSwapError(
            f"{what} changes weights, and this {kind(model)} is quantised; patch it in full precision, then quantise"
        )


# --- tokenizer and processor


def limit_edits(model: Any, config: Any, length: int, tokenizer: Any, processor: Any) -> list[Replace]:
    """Edits of the length limits that live outside the model: of a text (tokens), of an image (pixels)."""
    edits = []
    if tokenizer is not None:
        check_tokenizer(tokenizer, model)
        edits.append(Replace(tokenizer, "model_max_length", length, "tokenizer"))
    if processor is not None:
        size = getattr(config, "image_size", None)
        if size is None:
            raise PosSwapError(f"processor={kind(processor)} was given for a model without images; give tokenizer=")
        if not hasattr(processor, "size"):
            raise PosSwapError(f"processor={kind(processor)} has no size to update")
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        edits.append(Replace(processor, "size", type(processor.size)(height=height, width=width), "processor"))
    return [edit for edit in edits if not same(edit.current, edit.value)]


def check_tokenizer(tokenizer: Any, model: Any) -> None:
    """Raise PosSwapError for a tokenizer that is none, or that makes ids the model has no row for."""
    if not hasattr(tokenizer, "model_max_length"):
        raise PosSwapError(f"tokenizer={kind(tokenizer)} is not a tokenizer: it has no model_max_length")
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise PosSwapError(f"tokenizer has {len(tokenizer)} tokens and this {kind(model)} has {rows}: it does not fit")
