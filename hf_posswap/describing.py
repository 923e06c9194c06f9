"""Describing: what a model had and has."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from .anatomies.vit import pair
from .anatomy import STACKS, Anatomy, TableSite, examine, kind, reads_pictures
from .patching import record_of
from .pictures import CONFIG_KEYS
from .planning.images import is_image, trained_grid
from .planning.plan import config_path
from .planning.table import had_key, held_by
from .profile import Fit
from .record import FIT, FOREIGN_ROPE_TYPE, NATIVE, PORTABLE, Record
from .scheme import Scheme, name_of, scheme_of, silenced_by
from .serving import Served, serving
from .sites import BIAS, EMBED, KEEP, RELATIVE, ROTARY, ROTARY_2D, SILENCE, SPATIAL

NOTHING = "none"
PAGE = "page"  # of a document model: no site of an order of words, and shown beside those


@dataclass(frozen=True)
class SiteDescription:
    """One site: the scheme it had when the model was trained, the one it has, and the numbers of the latter."""

    site: str
    had: str
    has: str
    detail: str


@dataclass(frozen=True)
class Description:
    """What `describe` found. `length_had` and `length` are in tokens (patches); `storage` is None un-patched.

    `fit`: how well its parameters did what the positions before did, when it was swapped in, where text chose them.
    `serving`: what inference servers make of the model once it is saved; read from their sources, not run.
    """

    model: str
    model_type: str
    sites: tuple[SiteDescription, ...]
    length_had: int
    length: int
    scheme: str | None
    storage: str | None
    fit: Fit | None = None
    serving: tuple[Served, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.model} ({self.model_type})"]
        for site in self.sites:
            change = site.has if site.had == site.has else f"{site.had} -> {site.has}"
            lines.append(f"  {site.site:8} {change:22} {site.detail}".rstrip())
        length = f"{self.length}" if self.length == self.length_had else f"{self.length_had} -> {self.length}"
        lines.append(f"  length   {length}")
        meaning = {
            None: "not patched",
            NATIVE: "native: stock transformers loads it, without this package",
            PORTABLE: "portable: hf_posswap.from_pretrained loads it, or an Auto class with trust_remote_code=True",
        }
        lines.append(f"  storage  {meaning[self.storage]}")
        if self.fit is not None:
            lines.append(f"  fit      {self.fit}")
        lines += [f"  {'' if index else 'serving':8} {served}" for index, served in enumerate(self.serving)]
        return "\n".join(lines)


def describe(model: nn.Module) -> Description:
    """What the model had, what it has, at which sites, native or portable. Nothing is run and nothing changed.

    Raises:
        PosSwapError: not a transformers model, or one without a recognised site.
    """
    anatomy, record = examine(model), record_of(model)
    sites = [
        site
        for present, describe_site in (
            (anatomy.rotary is not None, _describe_rotary),
            (anatomy.tables, _describe_tables),
            (anatomy.fixed, _describe_fixed),
            (anatomy.turning, _describe_turning),
            (anatomy.bias is not None, _describe_bias),
            (anatomy.page is not None, _describe_page),
            (anatomy.turned is not None, _describe_turned),
        )
        if present
        for site in describe_site(anatomy, record)
    ]
    sites += _describe_added(anatomy, record)
    length = _trained_length(anatomy) if record is None else record.length
    return Description(
        model=kind(model),
        model_type=model.config.model_type,
        sites=tuple(sites),
        length_had=_original_length(anatomy, record),
        length=length,
        scheme=None if record is None else name_of(record),
        storage=None if record is None else record.storage,
        fit=Fit(**record.measured[FIT]) if record is not None and FIT in record.measured else None,
        serving=() if record is None or reads_pictures(model) else serving(anatomy.config.to_dict(), record, "FOLDER"),
    )


def _original(anatomy: Anatomy, record: Record | None, key: str) -> Any:
    """A text config's value before the swap."""
    path = config_path(anatomy.model.config, anatomy.config) + key
    if record is not None and path in record.original:
        return record.original[path]
    return getattr(anatomy.config, key, None)


def _trained_length(anatomy: Anatomy) -> int:
    if anatomy.table is not None:
        return anatomy.table.length
    if is_image(anatomy):
        return math.prod(trained_grid(anatomy))
    return getattr(anatomy.config, "max_position_embeddings", 0)


def _original_length(anatomy: Anatomy, record: Record | None) -> int:
    table = anatomy.table
    if table is None and is_image(anatomy):
        framed = record is not None and record.picture is not None
        return math.prod(_original_grid(anatomy, record) if framed else trained_grid(anatomy))
    if table is None:
        return _original(anatomy, record, "max_position_embeddings") or 0
    if table.grid is not None:
        return math.prod(_original_grid(anatomy, record))
    return _original(anatomy, record, "max_position_embeddings") - (table.reserved if table.counted else 0)


def _original_grid(anatomy: Anatomy, record: Record | None) -> list[int]:
    """Patches along each axis that the config said before the swap."""
    said = {key: _original(anatomy, record, key) for key in CONFIG_KEYS}
    if anatomy.table is not None and len(anatomy.table.grid) == 3:
        sizes, sides = (said["num_frames"], *pair(said["image_size"])), said["tubelet_size"]
    else:
        sizes, sides = pair(said["image_size"]), pair(said["patch_size"])
    return [size // side for size, side in zip(sizes, sides, strict=True)]


def _rotary_name(parameters: dict[str, Any]) -> str:
    rope_type = parameters.get("rope_type", "default")
    if rope_type == FOREIGN_ROPE_TYPE or (
        rope_type == "proportional" and not parameters.get("partial_rotary_factor", 1)
    ):
        return NOTHING
    return {"default": "rope", "proportional": "rope"}.get(rope_type, rope_type)


def _describe_rotary(anatomy: Anatomy, record: Record | None) -> Iterator[SiteDescription]:
    site, names, details = anatomy.rotary, [], []
    before = _original(anatomy, record, "rope_parameters")
    for layer_type in site.layer_types or (None,):
        old, new = (p[layer_type] if layer_type else p for p in (before, site.config.rope_parameters))
        swapped = record is not None and ROTARY in scheme_of(record).sites and old != new
        names.append((_rotary_name(old), record.scheme if swapped else _rotary_name(new)))
        shown = {k: v for k, v in new.items() if k != "rope_type" and v is not None}
        label = f"{layer_type}: " if layer_type else ""
        if names[-1][1] != NOTHING:
            details.append(label + ", ".join(f"{k}={_number(v)}" for k, v in sorted(shown.items())))
    had, has = (" / ".join(dict.fromkeys(n[side] for n in names)) for side in (0, 1))
    if record is not None and record.layers is not None and not scheme_of(record).stacks:
        has = _in_layers(record, had, record.scheme if ROTARY in scheme_of(record).sites else NOTHING)
    if silenced_here(anatomy, record):
        has, details = record.scheme if ROTARY in scheme_of(record).sites else NOTHING, []
    if record is not None and "pairing" in record.original:
        details.append(f"pairing={record.params['pairing']}")
    yield SiteDescription(ROTARY, had, has, "; ".join(details))


def silenced_here(anatomy: Anatomy, record: Record | None) -> bool:
    """Whether this package, and no key of the config, keeps the rotation of a model from turning."""
    if record is None or record.storage != PORTABLE or record.layers is not None:
        return False
    return ROTARY in scheme_of(record).silences(anatomy.sites)


def _of_stack(anatomy: Anatomy, record: Record | None, module: nn.Module) -> tuple[str, Record | None]:
    """(words that tell the stack of an encoder-decoder model, the record if the swap was in that stack)."""
    if not anatomy.model.config.is_encoder_decoder:
        return "", record
    inside = {name: set(map(id, getattr(anatomy.model, f"get_{name}")().modules())) for name in STACKS}
    stack = next(name for name, modules in inside.items() if id(module) in modules)
    elsewhere = record is not None and record.stack not in (None, stack)
    return f"{stack}: ", None if elsewhere else record


def _describe_tables(anatomy: Anatomy, record: Record | None) -> Iterator[SiteDescription]:
    for table in anatomy.tables:
        words, mine = _of_stack(anatomy, record, table.owner)
        found = _describe_table(anatomy, table, mine)
        yield replace(found, detail=words + found.detail)


def _describe_fixed(anatomy: Anatomy, record: Record | None) -> Iterator[SiteDescription]:
    for module in anatomy.fixed.values():
        words, mine = _of_stack(anatomy, record, module)
        has = NOTHING if silenced(anatomy, mine, EMBED) else "sinusoidal"
        yield SiteDescription(EMBED, "sinusoidal", has, f"{words}computed")


def _describe_turning(anatomy: Anatomy, record: Record | None) -> Iterator[SiteDescription]:
    gone = silenced(anatomy, record, ROTARY_2D)
    has = "rope2d" if not gone else record.scheme if ROTARY in scheme_of(record).sites else NOTHING
    for module in anatomy.turning.values():
        parameters = getattr(anatomy.config, "rope_parameters", None) or vars(anatomy.config)
        theta = parameters.get("rope_theta")
        base = "" if theta is None else f"rope_theta={_number(float(theta))}, "
        own = f"{base}{module.inv_freq.shape[-1]} frequencies"
        inside = "inside attention" if has != NOTHING else ""
        yield SiteDescription(ROTARY_2D, "rope2d", has, inside if gone else own)


def _describe_table(anatomy: Anatomy, table: TableSite, record: Record | None) -> SiteDescription:
    replaced = record is not None and EMBED in scheme_of(record).sites
    has = NOTHING if silenced(anatomy, record, EMBED) else record.scheme if replaced else "learned"
    state = "trainable" if table.weight.requires_grad else "frozen"
    size = f"{' x '.join(map(str, table.grid))} patches" if table.grid else f"{table.length} positions"
    joined = ", concatenated and projected" if replaced and _concatenated(scheme_of(record)) else ""
    had = _table_was(anatomy, table, record)
    return SiteDescription(
        EMBED,
        had,
        had if has == "learned" and not replaced else has,
        f"{size}, width {table.rows.shape[-1]}, {state}{joined}",
    )


def _table_was(anatomy: Anatomy, table: TableSite, record: Record | None) -> str:
    """What a table held before a swap; of one that was swapped the record remembers."""
    if record is None:
        return held_by(table)
    return record.measured.get(had_key(anatomy.within(record.stack), table), "learned")


def _describe_bias(anatomy: Anatomy, record: Record | None) -> Iterator[SiteDescription]:
    """One line, or one for each stack whose layers have biases."""
    seen: set[str] = set()
    for table in anatomy.bias.tables.values() or (None,):
        words, mine = ("", record) if table is None else _of_stack(anatomy, record, table.owner)
        if words in seen:
            continue
        seen.add(words)
        had, replaced = anatomy.bias.name, mine is not None and BIAS in scheme_of(mine).sites
        left = mine.scheme if replaced else NOTHING if silenced(anatomy, mine, BIAS) else had
        if replaced and mine.biases.get(RELATIVE) == KEEP:
            left = f"{had} + {mine.scheme}"
        what = "distances" if had == "bias2d" else "buckets"
        own = "" if table is None else f"{table.count} {what}"
        yield SiteDescription(BIAS, had, _in_layers(mine, had, left), words + ("inside attention" if replaced else own))


def _describe_page(anatomy: Anatomy, record: Record | None) -> Iterator[SiteDescription]:
    """What a document model knows of the page: all of it is kept, but for what was asked to be silent."""
    page = anatomy.page
    had = "boxes, bias" if page.spatial else "boxes"
    silent = record is not None and record.biases.get(SPATIAL) == SILENCE
    biases = f", their bias {'silenced' if silent else 'kept'}" if page.spatial else ""
    yield SiteDescription(PAGE, had, "boxes" if silent else had, f"coordinates 0 to {page.largest:g} kept{biases}")


def _describe_turned(anatomy: Anatomy, record: Record | None) -> Iterator[SiteDescription]:
    scheme = None if record is None else scheme_of(record)
    has = "rope" if scheme is None or scheme.stacks else scheme.name if ROTARY in scheme.sites else NOTHING
    detail = f"{anatomy.turned} dimensions of each head" if record is None else "inside attention"
    yield SiteDescription(ROTARY, "rope", _in_layers(record, "rope", has), detail)


def _in_layers(record: Record | None, had: str, has: str) -> str:
    """What a site has, where only some layers took a swap."""
    if record is None or record.layers is None or had == has:
        return has
    return f"{had}, {has} in layers {', '.join(map(str, record.layers))}"


def _describe_added(anatomy: Anatomy, record: Record | None) -> Iterator[SiteDescription]:
    """What a swap put where the model had nothing."""
    if record is None:
        return
    scheme = scheme_of(record)
    if scheme.adds_nothing(anatomy.sites, record.picture is not None):
        return
    there = anatomy.known | ({ROTARY} if anatomy.turning else set())
    for site in (EMBED, ROTARY, BIAS):
        if site in scheme.sites - there:
            where = "before the first layer" if site == EMBED else "inside attention"
            if site == EMBED:
                where = f"concatenated {where}, and projected" if _concatenated(scheme) else f"added {where}"
            yield SiteDescription(site, NOTHING, _in_layers(record, NOTHING, record.scheme), where)


def _concatenated(scheme: Scheme) -> bool:
    return getattr(scheme, "combine", "add") == "concat"


def silenced(anatomy: Anatomy, record: Record | None, site: str) -> bool:
    """Whether one of the model's own sites was silenced by a swap that put nothing like it there."""
    if record is None:
        return False
    return site in silenced_by(record, anatomy.sites) - scheme_of(record).sites


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
