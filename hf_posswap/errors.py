"""What the package raises and warns with."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PosSwapError(ValueError):
    """A swap, a load or a script argument that cannot be honoured; the model and the files are as they were."""


class RecalibrationWarning(UserWarning):
    """The swap worked, and the model must be fine-tuned before it is useful again."""


def nearest(value: object, choices: Iterable[str]) -> str:
    """`did you mean 'x'?` for the closest of `choices` (strings), or the list of them where none is close."""
    choices = sorted(choices)
    close = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"choose one of: {', '.join(choices)}"
