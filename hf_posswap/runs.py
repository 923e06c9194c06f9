"""What a run says of itself, and how it writes it: files are either the old one or the new one, never half of it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import __version__
from .errors import PosSwapError

if TYPE_CHECKING:
    import torch


def command() -> str:
    """The command line of this process, ready to be pasted."""
    return shlex.join([Path(sys.executable).name, *sys.argv])


def versions(*packages: str) -> dict[str, str]:
    """Versions of hf_posswap, Python, torch, transformers and `packages`."""
    found = {name: importlib.metadata.version(name) for name in ("torch", "transformers", *packages)}
    return {"hf_posswap": __version__, "python": platform.python_version(), **found}


def hardware(device: torch.device | str) -> dict[str, Any]:
    """The device that computed, by name where it has one, and the CPU side of the machine."""
    import torch

    device = torch.device(device)
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def check_processes(count: int) -> None:
    """Raise PosSwapError where more processes were asked for than the `count` that work together here: what
    `accelerate launch` does on a CPU where it is not told otherwise."""
    alone = count == 1
    apart = alone and int(os.environ.get("WORLD_SIZE", 1)) > 1
    single = alone and "WORLD_SIZE" not in os.environ and {"MASTER_ADDR", "ACCELERATE_USE_CPU"} <= os.environ.keys()
    if apart or single:
        raise PosSwapError(
            "num_processes: several processes were asked for, and "
            + ("each of them works alone" if apart else "`accelerate launch --cpu` starts one")
            + "; on CPUs set ACCELERATE_USE_CPU=true and use `accelerate launch --multi_gpu --num_processes N`"
        )


@contextmanager
def replacing(path: str | os.PathLike) -> Iterator[Path]:
    """A temporary file to write to; it takes the place of `path` when the block ends without an error."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
