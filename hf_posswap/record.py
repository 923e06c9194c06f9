"""Record: what a patched model's config says of the swap, under the one extra key `posswap`."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from .errors import PosSwapError, nearest
from .sites import KEEP, RELATIVE, SILENCE, SPATIAL

KEY = "posswap"
VERSION = 1  # hf_posswap 0.N is the first to write version N
DIGEST = "digest"
FIT = "fit"  # in `measured`: how well parameters fit that were chosen on text, see `profile.Fit`
NATIVE, PORTABLE = "native", "portable"
SPARED = frozenset({"stack", "biases", "ndim", "picture"})  # not written where they say nothing, as in older records

# Stands where a rope_type would in a portable checkpoint: stock transformers stops at it instead of loading a
# model whose rotation this package had silenced.
FOREIGN_ROPE_TYPE = "hf_posswap"

# The same where the rotation stays: in a saved config transformers reads this key as the attention backend to use.
ATTENTION_KEY, FOREIGN_ATTENTION = "attn_implementation", "hf_posswap"

DECISIONS = frozenset((bias, decision) for bias in (RELATIVE, SPATIAL) for decision in (KEEP, SILENCE))


@dataclass(frozen=True)
class Record:
    """scheme, params: the swap. storage: `native` (any reader of the config) or `portable` (this package).

    length: the longest sequence, in tokens (patches), the result is meant for. original: config values before the
    swap, by dotted path (`pairing`, the one that no config holds, beside them). measured: numbers read off the
    model at the swap, needed again at a reload, or told by `describe` (FIT). source: the un-patched model's name.
    layers: indices of the layers that take the scheme, None for all. stack: `encoder` or `decoder` where one takes it,
    None (not written) for all there is. biases: what was decided of the model's own, RELATIVE and SPATIAL, where it was
    (not written where nothing was). ndim: 1 where the patches of an image are numbered row by row, else None (not
    written). picture: what an image model reads from now on, as `pictures.Picture` has it, None (not written) for what
    it read before. Written with a digest: a record that was damaged, or edited by hand, describes another model than
    the one it lies with.
    """

    scheme: str
    params: dict[str, Any]
    storage: str
    length: int
    original: dict[str, Any] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    layers: list[int] | None = None
    stack: str | None = None
    biases: dict[str, str] = field(default_factory=dict)
    ndim: int | None = None
    picture: dict[str, Any] | None = None
    version: int = VERSION

    def to_dict(self) -> dict[str, Any]:
        data = {key: value for key, value in asdict(self).items() if key not in SPARED or value not in (None, {})}
        return data | {DIGEST: digest(data)}

    @staticmethod
    def from_dict(data: Any) -> Record:
        """Read a config's record. Raises PosSwapError for anything that `to_dict` cannot have written."""
        if not isinstance(data, dict):
            raise PosSwapError(f"{KEY}={data!r} in the config is not a record")
        version = data.get("version")
        if isinstance(version, int) and version > VERSION:
            raise PosSwapError(
                f"{KEY}.version={version} was written by a newer hf_posswap; "
                f"install 'hf_posswap>=0.{version}' to read it"
            )
        known = {f.name for f in fields(Record)} | {DIGEST}
        for key in data:
            if key not in known:
                raise PosSwapError(f"{KEY}.{key} in the config is unknown; {nearest(key, known)}")
        missing = known - data.keys() - SPARED
        if missing:
            raise PosSwapError(f"{KEY} in the config lacks {sorted(missing)}")
        types = {"scheme": str, "params": dict, "storage": str, "length": int, "version": int, "source": str}
        for key, expected in (types | {"original": dict, "measured": dict, "biases": dict}).items():
            if key in SPARED and key not in data:
                continue
            if not isinstance(data[key], expected) or isinstance(data[key], bool):
                raise PosSwapError(f"{KEY}.{key}={data[key]!r} in the config is not a {expected.__name__}")
        layers = data["layers"]
        if layers is not None and (not isinstance(layers, list) or not all(type(i) is int for i in layers)):
            raise PosSwapError(f"{KEY}.layers={layers!r} in the config is not a list of integers")
        if data.get("stack") not in (None, "encoder", "decoder"):
            raise PosSwapError(f"{KEY}.stack={data['stack']!r}; {nearest(data['stack'], ('encoder', 'decoder'))}")
        if any((key, value) not in DECISIONS for key, value in data.get("biases", {}).items()):
            raise PosSwapError(f"{KEY}.biases={data['biases']!r} in the config is not understood")
        if data.get("ndim") not in (None, 1) or isinstance(data.get("ndim"), bool):
            raise PosSwapError(f"{KEY}.ndim={data['ndim']!r} in the config is not 1")
        if not isinstance(data.get("picture"), (dict, type(None))):
            raise PosSwapError(f"{KEY}.picture={data['picture']!r} in the config is not a dict")
        if data["storage"] not in (NATIVE, PORTABLE):
            raise PosSwapError(f"{KEY}.storage={data['storage']!r}; {nearest(data['storage'], (NATIVE, PORTABLE))}")
        given = data[DIGEST]
        if version != VERSION:
            raise PosSwapError(f"{KEY}.version={version!r} is unknown; this hf_posswap reads {VERSION}")
        data = {key: value for key, value in data.items() if key != DIGEST}
        if given != digest(data):
            raise PosSwapError(
                f"{KEY} in the config was changed after it was written; swap the model again to change it"
            )
        return Record(**data)


def digest(data: dict[str, Any]) -> str:
    """16 hex digits of the sha256 of a record's content, whatever the order of its keys, and 4.0 or 4."""
    return hashlib.sha256(json.dumps(_plain(data), sort_keys=True).encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def published(name: str) -> str:
    """A name on the hub as it is, a local path by its last part: the rest tells of a machine, not of a model."""
    return Path(name).name if Path(name).is_absolute() or Path(name).exists() else name


def owner_of(holder: Any, path: str) -> tuple[Any, str]:
    """(config that holds it, its name there) for a dotted path, in a config object or in its dict."""
    *parents, name = path.split(".")
    for part in parents:
        holder = holder[part] if isinstance(holder, dict) else getattr(holder, part)
    return holder, name


def config_values(original: dict[str, Any]) -> list[tuple[str, Any]]:
    """The (path, value) pairs of a record's `original` that are the config's own."""
    return [(path, value) for path, value in original.items() if path != "pairing"]
