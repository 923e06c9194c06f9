"""Scheme: a named, validated set of parameters that says what belongs at each site; and the registry of them."""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from .errors import PosSwapError, nearest
from .sites import (
    BIAS,
    EMBED,
    KEEP,
    RELATIVE,
    ROTARY,
    BiasChange,
    BiasGeometry,
    EmbedChange,
    EmbedGeometry,
    RotaryChange,
    RotaryGeometry,
)

if TYPE_CHECKING:
    from .record import Record


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """Base of every scheme. The fields are the schema: a parameter that is not a field is refused by name.

    `name` is what users type, `sites` where the scheme puts something, `paper` its source. `keeps_function` is
    true of a scheme made to continue what a model trained with the same site already does; after any other swap
    the model must be recalibrated. `trainable`: what it puts into a model's own table takes gradients; of any
    other scheme it is frozen. `stacks`: it joins what the model has; nothing is silenced. `in_attention`: a rotary
    scheme that the models' own rotary modules cannot carry. `learns`: the parameters it adds to a model, in words.
    `fits`: text can choose them (`fit=`); `fits_with`: what to give instead, or beside it, where it cannot. `ndim`: of
    the places that it speaks of inside attention, 1 (tokens in a row) or 2 (rows and columns); 0: it speaks of none.
    """

    name: ClassVar[str]
    sites: ClassVar[frozenset[str]] = frozenset()
    paper: ClassVar[str] = ""
    keeps_function: ClassVar[bool] = False
    trainable: ClassVar[bool] = False
    stacks: ClassVar[bool] = False
    in_attention: ClassVar[bool] = False
    learns: ClassVar[str] = ""
    fits: ClassVar[bool] = False
    fits_with: ClassVar[str] = ""
    ndim: ClassVar[int] = 1

    def rotary(self, site: RotaryGeometry) -> RotaryChange:
        raise NotImplementedError(f"{self.name} puts nothing at the rotary site")

    def embed(self, site: EmbedGeometry) -> EmbedChange:
        raise NotImplementedError(f"{self.name} puts nothing at the embed site")

    def bias(self, site: BiasGeometry) -> BiasChange:
        raise NotImplementedError(f"{self.name} puts nothing at the bias site")

    def sites_in_attention(self, native: frozenset[str]) -> frozenset[str]:
        """Those of its sites that this package serves inside attention, on a model whose own sites are `native`."""
        turned = self.in_attention or ROTARY not in native
        return self.sites & ({BIAS, ROTARY} if turned else {BIAS})

    def silences(
        self, native: frozenset[str], relative_bias: str | None = None, reframed: bool = False
    ) -> frozenset[str]:
        """Those of a model's own sites that stop; like for like leaves the others alone.

        relative_bias: what was decided of its bias, KEEP or SILENCE. reframed: it reads another picture from now on.
        """
        replaced = (self.sites & native) - self.sites_in_attention(native)
        silent = frozenset() if replaced or self.stacks or self.adds_nothing(native, reframed) else native
        if relative_bias is None:
            return silent
        return silent - {BIAS} if relative_bias == KEEP else silent | {BIAS}

    def adds_nothing(self, native: frozenset[str], reframed: bool) -> bool:
        """Whether it is a table's scheme for a model without one, that was given to have it read another picture."""
        return reframed and self.trainable and EMBED not in native

    @property
    def recomputable(self) -> bool:
        """Whether what it puts into a model's own table follows from its parameters, without the old table."""
        return not self.trainable

    def given(self) -> dict[str, Any]:
        """The parameters that differ from their defaults, ready for JSON."""
        defaults = {f.name: f.default for f in fields(self)}
        return {k: v for k, v in asdict(self).items() if v != defaults[k]}

    def __str__(self) -> str:
        given = ", ".join(f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in self.given().items())
        return f"{self.name}({given})"

    # --- what the schemes use to check their own fields

    def refuse(self, argument: str, reason: str) -> PosSwapError:
        """The error for a parameter of this scheme: argument, value, reason."""
        return PosSwapError(f"{self.name}: {argument}={getattr(self, argument)!r} {reason}")

    def check_number(self, argument: str, *, at_least: float | None = None, above: float | None = None) -> None:
        """Raise unless the field is None or a finite number within its bounds."""
        value = getattr(self, argument)
        if value is None:
            return
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.refuse(argument, "is not a finite number")
        if at_least is not None and value < at_least:
            raise self.refuse(argument, f"is too small; the least value is {at_least:g}")
        if above is not None and value <= above:
            raise self.refuse(argument, f"must be greater than {above:g}")

    def check_count(self, argument: str) -> None:
        """Raise unless the field is None or a positive integer."""
        value = getattr(self, argument)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise self.refuse(argument, "is not a positive integer")

    def check_names(self, argument: str) -> None:
        """Raise unless the field is None or a list of one name or more."""
        value = getattr(self, argument)
        if isinstance(value, list):
            value = tuple(value)
            object.__setattr__(self, argument, value)
        if value is None or (isinstance(value, tuple) and value and all(isinstance(name, str) for name in value)):
            return
        raise self.refuse(argument, "is not a list of names")

    def check_choice(self, argument: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, argument)
        if value not in choices:
            raise self.refuse(argument, f"is unknown; {nearest(value, choices)}")


@cache
def registry() -> Mapping[str, type[Scheme]]:
    """Every scheme class in `hf_posswap/schemes`, by the name users type. A name taken twice is an error."""
    from . import schemes

    found: dict[str, type[Scheme]] = {}
    for file in pkgutil.iter_modules(schemes.__path__):
        if file.name.startswith("_"):
            continue
        module = importlib.import_module(f"{schemes.__name__}.{file.name}")
        for cls in vars(module).values():
            if not (isinstance(cls, type) and issubclass(cls, Scheme) and "name" in vars(cls)):
                continue
            if found.setdefault(cls.name, cls) is not cls:
                raise RuntimeError(f"two schemes are called {cls.name!r}: {found[cls.name]} and {cls}")
    return dict(sorted(found.items()))


def list_schemes() -> list[str]:
    """The names that `patch_model` accepts, sorted."""
    return list(registry())


def make_scheme(scheme: str | Scheme, params: Mapping[str, Any]) -> Scheme:
    """A validated Scheme from a name and parameters, or the Scheme object itself."""
    if isinstance(scheme, Scheme):
        if params:
            raise PosSwapError(f"parameters {sorted(params)} were given beside a Scheme object; put them into it")
        return scheme
    if not isinstance(scheme, str) or scheme not in registry():
        raise PosSwapError(f"scheme={scheme!r} is unknown; {nearest(scheme, registry())}")
    return from_params(registry()[scheme], params)


def from_params(cls: type[Scheme], params: Mapping[str, Any]) -> Scheme:
    """A validated Scheme of a class; a name that is no field of it is refused."""
    known = {f.name for f in fields(cls)}
    for argument, value in params.items():
        if argument not in known:
            hint = nearest(argument, known) if known else "it takes no parameters"
            raise PosSwapError(f"{cls.name}: {argument}={value!r} is not a parameter of this scheme; {hint}")
    required = [f.name for f in fields(cls) if f.default is f.default_factory and f.name not in params]
    if required:
        raise PosSwapError(f"{cls.name}: missing {', '.join(required)}")
    return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in params.items()})


def scheme_of(record: Record) -> Scheme:
    """The scheme that a record names, looked up in the registry and nowhere else."""
    return make_scheme(record.scheme, record.params)


def named(scheme: Scheme, layers: Sequence[int] | None, ndim: int | None = None, picture: Any = None) -> str:
    """A scheme with its parameters and, where it is not in all layers, which ones; how it numbers patches, and what the
    model reads.
    """
    rows = "" if ndim is None else ", row by row"
    where = "" if layers is None else f" in layers {', '.join(map(str, layers))}"
    return f"{scheme}{rows}{where}" + (f" at {picture}" if picture else "")


def silenced_by(record: Record, native: frozenset[str]) -> frozenset[str]:
    """Those of a model's own sites that a recorded swap had stop."""
    return scheme_of(record).silences(native, record.biases.get(RELATIVE), record.picture is not None)


def name_of(record: Record) -> str:
    """What a record says was swapped in, for people."""
    read = ", ".join(f"{key}={value}" for key, value in (record.picture or {}).items())
    return named(scheme_of(record), record.layers, record.ndim, read)
