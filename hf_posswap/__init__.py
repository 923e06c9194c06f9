"""hf_posswap: swap the way a Hugging Face model knows where a token is."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .checkpoint import from_pretrained
    from .describing import describe
    from .errors import PosSwapError, RecalibrationWarning
    from .patching import patch_model, unpatch_model
    from .probing import probe
    from .scheme import Scheme, list_schemes

__version__ = "0.1.0"

# Loaded on first use: importing the package costs what importing torch and transformers costs, and no more.
_HOME = {
    "patch_model": "patching",
    "unpatch_model": "patching",
    "describe": "describing",
    "probe": "probing",
    "from_pretrained": "checkpoint",
    "list_schemes": "scheme",
    "Scheme": "scheme",
    "PosSwapError": "errors",
    "RecalibrationWarning": "errors",
}
__all__ = [
    "PosSwapError",
    "RecalibrationWarning",
    "Scheme",
    "describe",
    "from_pretrained",
    "list_schemes",
    "patch_model",
    "probe",
    "unpatch_model",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
