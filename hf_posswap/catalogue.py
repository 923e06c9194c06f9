"""The table of schemes, in Markdown, read off the schemes themselves: `python -m hf_posswap.catalogue` prints it."""

from __future__ import annotations

import sys
from dataclasses import MISSING, fields

from .scheme import Scheme, registry
from .sites import BIAS, EMBED, ROTARY

STORED = {
    frozenset(): "native where transformers has a switch for it, else portable",
    frozenset({ROTARY}): "native on a rotary model, else portable",
    frozenset({EMBED}): "native on a model with a table, else and with combine='concat' portable",
    frozenset({BIAS}): "portable",
}
HEAD = ("scheme", "paper", "site", "parameters", "stored", "trained with the model", "recalibrate")


def scheme_table() -> str:
    """One row per scheme: what it is called, where it comes from, what it takes, what it leaves behind.

    `recalibrate` says whether a model that has the scheme's site must be fine-tuned after the swap; a model of
    another kind always must.
    """
    rows = [HEAD, ["---"] * len(HEAD), *(_row(cls) for cls in registry().values())]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def paper_of(cls: type[Scheme]) -> tuple[str, str]:
    """(title, link) of the first line of a scheme's file: `name - title, link`."""
    first = sys.modules[cls.__module__].__doc__.splitlines()[0]
    title, _, link = first.partition(" - ")[2].rpartition(", ")
    return title, link


def _row(cls: type[Scheme]) -> list[str]:
    title, link = paper_of(cls)
    return [
        f"`{cls.name}`",
        f"[{title}]({link})",
        " + ".join(sorted(cls.sites)) or "none",
        ", ".join(_parameter(field) for field in fields(cls)) or "none",
        "portable" if cls.in_attention else STORED.get(cls.sites, "portable"),
        _trained(cls),
        "no" if cls.keeps_function else "yes",
    ]


def _trained(cls: type[Scheme]) -> str:
    """What optimisers move: the model's own table, or what a scheme adds to every model."""
    return cls.learns or "nothing"


def _parameter(field) -> str:
    if field.default is MISSING:
        return f"`{field.name}` (required)"
    return f"`{field.name}`" if field.default is None else f"`{field.name}={field.default!r}`"


if __name__ == "__main__":
    print(scheme_table())
