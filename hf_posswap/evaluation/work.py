"""The work of an evaluation: lists of tasks, shared among processes, remembered on disk as they finish, with an ETA.

What a task gives depends on the task alone, and sums are made from all of them in their order: one process and several
give the same numbers, and so do a run that was interrupted and one that was not.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..errors import PosSwapError

Task = TypeVar("Task")

AT_ONCE = 8  # tasks of each process between two lines of the journal


class Work:
    """Runs lists of tasks.

    path: the journal, a JSON object per line, which a later run with the same tasks goes on from; None keeps none.
    progress: a bar with the time that is left, on the main process. label: what stands before the bar. shared: among
    the processes that there are; not for work inside a task, which one of them does.

    Raises PosSwapError where the journal holds what `map` cannot have written; a last line cut off in the middle is
    left out, and said.
    """

    def __init__(self, path: str | os.PathLike | None = None, *, progress: bool = False, shared: bool = True) -> None:
        self.path, self.progress, self.label = None if path is None else Path(path), progress, ""
        self.main, self.index, self.processes = True, 0, 1
        if shared and torch.distributed.is_available() and torch.distributed.is_initialized():
            self.index, self.processes = torch.distributed.get_rank(), torch.distributed.get_world_size()
            self.main = self.index == 0
        finished = [_read(self.path) if self.main and self.path is not None else {}]
        if self.processes > 1:
            torch.distributed.broadcast_object_list(finished)
        self.finished: dict[str, dict[int, Any]] = finished[0]

    def map(self, key: dict[str, Any], tasks: Sequence[Task], compute: Callable[[Task], Any]) -> list[Any]:
        """What `compute` gives for each task, in their order; numbers, or lists and dicts of them, ready for JSON.

        key: everything that the results depend on besides their place in the list, ready for JSON.
        """
        from tqdm import tqdm

        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
        known = self.finished.setdefault(name, {})
        left = [i for i in range(len(tasks)) if i not in known]
        total, done = len(tasks), len(tasks) - len(left)
        quiet = not (self.main and self.progress)
        with tqdm(total=total, initial=done, desc=self.label or name, disable=quiet) as bar:
            for start in range(0, len(left), AT_ONCE * self.processes):
                now = left[start : start + AT_ONCE * self.processes]
                found = []
                for i in now[self.index :: self.processes]:
                    found.append((i, compute(tasks[i])))
                    bar.update(min(self.processes, total - bar.n))
                if self.processes > 1:
                    of_each: list[Any] = [None] * self.processes
                    torch.distributed.all_gather_object(of_each, found)
                    found = [result for one in of_each for result in one]
                known.update(found)
                self._write(name, sorted(found))
        return [known[i] for i in range(len(tasks))]

    def forget(self) -> None:
        """Remove the journal: a report holds what it held."""
        if self.main and self.path is not None:
            self.path.unlink(missing_ok=True)

    def _write(self, name: str, found: list[tuple[int, Any]]) -> None:
        if not self.main or self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": name, "results": found}) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _read(path: Path) -> dict[str, dict[int, Any]]:
    """The finished tasks of a journal, by key and place; a half-written last line is cut off."""
    finished: dict[str, dict[int, Any]] = {}
    if not path.exists():
        return finished
    *lines, rest = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            finished.setdefault(entry["key"], {}).update({int(i): value for i, value in entry["results"]})
        except (ValueError, KeyError, TypeError):
            raise PosSwapError(
                f"{path}: line {number} is not a line of results; remove it, or the file to begin anew"
            ) from None
    count = sum(map(len, finished.values()))
    if rest:
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        print(f"{path}: its last line is half-written and is computed again; {count} results are kept", file=sys.stderr)
    elif count:
        print(f"{path}: {count} results of an earlier run are kept", file=sys.stderr)
    return finished
