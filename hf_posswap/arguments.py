"""Command lines: dataclasses in, dataclasses out; a user's mistake is one line and exit status 2.

Nothing here imports torch, so that `--help` is instant.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields, make_dataclass
from typing import Any, get_type_hints

from .errors import PosSwapError
from .scheme import Scheme, make_scheme, registry


@dataclass
class PictureArguments:
    """What an image model reads after the swap, as `patch_model` takes it."""

    image_size: list[int] | None = field(default=None, metadata={"help": "Of pictures: pixels, or height and width."})
    patch_size: list[int] | None = field(default=None, metadata={"help": "Of a patch: pixels, or height and width."})
    num_frames: int | None = field(default=None, metadata={"help": "Of a video."})
    num_channels: int | None = field(default=None, metadata={"help": "Of a pixel."})
    ndim: int | None = field(
        default=None, metadata={"help": "1 numbers patches row by row, for a scheme of one dimension."}
    )
    patch_form: str | None = field(default=None, metadata={"help": "How patches are embedded: linear, convolution."})

    def given(self) -> dict[str, Any]:
        """Arguments for `patch_model`."""
        given = {f.name: getattr(self, f.name) for f in fields(PictureArguments)}
        return {k: v[0] if isinstance(v, list) and len(v) == 1 else v for k, v in given.items() if v is not None}


def scheme_arguments(several: bool = False) -> type:
    """A dataclass with `scheme` and every parameter that any scheme takes, under its own name, all optional.

    several: `--scheme` may be given more than once.
    """
    takers: dict[str, list[str]] = {}
    types: dict[str, Any] = {}
    for name, cls in registry().items():
        hints = get_type_hints(cls)
        for parameter in fields(cls):
            takers.setdefault(parameter.name, []).append(name)
            types[parameter.name] = _flag_type(hints[parameter.name])
    metadata = {"help": f"{'Any' if several else 'One'} of: {', '.join(registry())}."}
    if several:
        metadata |= {"action": "extend", "nargs": "+"}
    hint = list[str] | None if several else str | None
    specification: list[tuple[str, Any, Field]] = [("scheme", hint, field(default=None, metadata=metadata))]
    for name in sorted(takers):
        help_text = f"Scheme parameter of {', '.join(takers[name])}."
        specification.append((name, types[name], field(default=None, metadata={"help": help_text})))
    return make_dataclass("SchemeArguments", specification)


def scheme_from(arguments: Any) -> Scheme | None:
    """The Scheme that a parsed `scheme_arguments()` object asks for; None where no `--scheme` was given."""
    given = {f.name: getattr(arguments, f.name) for f in fields(arguments) if getattr(arguments, f.name) is not None}
    name = given.pop("scheme", None)
    if name is None:
        if given:
            raise PosSwapError(f"--{next(iter(given))} was given without --scheme")
        return None
    return make_scheme(name, given)


def schemes_from(arguments: Any) -> list[Scheme]:
    """The Schemes that a parsed `scheme_arguments(several=True)` object asks for, each with those of the parameters
    that it takes. Raises PosSwapError for one that none of them takes.
    """
    given = {f.name: getattr(arguments, f.name) for f in fields(arguments) if getattr(arguments, f.name) is not None}
    names = given.pop("scheme", [])
    if given and not names:
        raise PosSwapError(f"--{next(iter(given))} was given without --scheme")
    taken = {name: {f.name for f in fields(registry()[name])} if name in registry() else set() for name in names}
    for parameter, value in given.items():
        if len(names) > 1 and not any(parameter in takes for takes in taken.values()):
            raise PosSwapError(f"--{parameter}={value!r} is a parameter of none of: {', '.join(names)}")
    if len(names) == 1:
        return [make_scheme(names[0], given)]
    return [make_scheme(name, {k: v for k, v in given.items() if k in taken[name]}) for name in names]


def parse(*dataclasses: type, description: str, arguments: list[str] | None = None) -> tuple:
    """One object per dataclass, from `sys.argv` (or `arguments`). An unknown flag is fatal, with the nearest one."""
    from transformers.hf_argparser import HfArgumentParser

    from .errors import nearest

    parser = HfArgumentParser(dataclasses, description=description, allow_abbrev=False)
    *parsed, rest = parser.parse_args_into_dataclasses(args=arguments, return_remaining_strings=True)
    if rest:
        flags = [option for action in parser._actions for option in action.option_strings]
        parser.error(f"unknown argument {rest[0]!r}; {nearest(rest[0], flags)}")
    return tuple(parsed)


def run(main: Callable[[], None]) -> None:
    """Call a script's `main`; a PosSwapError becomes one line on stderr and exit status 2."""
    try:
        main()
    except PosSwapError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _flag_type(hint: Any) -> Any:
    """The optional command-line type of a scheme field: tuples become lists, unions their widest member."""
    text = str(hint)
    if "tuple" in text:
        return list[int if "int" in text else float if "float" in text else str] | None
    for plain in (bool, float, int):
        if plain.__name__ in text:
            return plain | None
    return str | None
