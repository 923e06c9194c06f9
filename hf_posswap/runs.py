"""What a run says of itself, and how it writes it: what is there is the old one or the new one, never half of it."""

from __future__ import annotations

import ctypes
import errno
import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
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


def peak_memory(device: torch.device | str) -> float:
    """The most memory, in GiB, that this process has held: on its accelerator, else in RAM."""
    import torch

    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource  # not on every platform

    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return held / (2**30 if sys.platform == "darwin" else 2**20)


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


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Replace a file by `value` as JSON. Raises ValueError where a number in it is none."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def kept(path: str | os.PathLike, compute: Callable[[], Any]) -> Any:
    """What an earlier run left in a JSON file; where there is none, what `compute` gives, left there for the next."""
    if not Path(path).exists():
        write_json(path, compute())
    return json.loads(Path(path).read_text(encoding="utf-8"))


def can_replace(folder: str | os.PathLike) -> bool:
    """Whether another folder can take its place: nothing is mounted on it, nobody works in it, its parent is ours."""
    folder = Path(folder).resolve()
    return not (folder.is_mount() or Path.cwd().is_relative_to(folder)) and os.access(folder.parent, os.W_OK)


@contextmanager
def replacing_folder(path: str | os.PathLike, keep: Callable[[str], bool] = lambda name: False) -> Iterator[Path]:
    """A new folder to write to; it takes the place of `path`, whole, when the block ends without an error.

    `keep`: whether a file or folder of that name in `path`, which the block did not write, goes with it.
    """
    path = Path(path).resolve()
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        if path.exists():

            def dropped(folder: str, names: list[str]) -> list[str]:
                return [name for name in names if not keep(name)] if Path(folder) == path else []

            shutil.copytree(path, temporary, symlinks=True, ignore=dropped, copy_function=_link, dirs_exist_ok=True)
            trade_names(temporary, path)
        else:
            os.rename(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # the old one by now


def _link(source: str, target: str) -> None:
    if os.path.lexists(target):
        return
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copy2(source, target)


def trade_names(new: Path, old: Path) -> None:
    """Two folders take each other's name: at once on Linux, elsewhere with a moment in which `old` is not there."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, TypeError):  # not Linux
        rename = None
    here, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of renameat2(2)
    if rename is not None:
        if rename(here, os.fsencode(new), here, os.fsencode(old), exchange) == 0:
            return
        code = ctypes.get_errno()
        if code not in (errno.EINVAL, errno.ENOSYS):  # a file system, or a kernel, that cannot exchange
            raise OSError(code, os.strerror(code), str(old))
    aside = old.with_name(f"{new.name}.old")
    os.rename(old, aside)
    os.rename(new, old)
    os.rename(aside, new)
