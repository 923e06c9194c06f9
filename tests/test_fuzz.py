"""Records that were damaged or edited by hand: a PosSwapError, or the same model; never another one, never a crash."""

from __future__ import annotations

import copy
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_posswap import PosSwapError, from_pretrained, list_schemes

from .conftest import by_id
from .rows import ROWS, Row, logits

MUTATIONS = 40
SWAPS = [
    next(row for row in ROWS if (row.scheme, row.family) == pair)
    for pair in (
        ("yarn", "llama"),
        ("yarn", "gemma3"),
        ("nope", "llama"),
        ("nope", "gpt_neox"),
        ("sinusoidal", "llama"),
        ("learned", "bert"),
        ("nope", "bert"),
        ("alibi", "llama"),
        ("t5", "gpt2"),
        ("rope", "bert"),
        ("logn", "llama"),
    )
]
VALUES = [None, True, -1, 0, 3, 10**30, 1.5, float("nan"), "", "x", "../../x", "/etc/passwd", [], [1], {}, {"a": 1}]
NAMES = ["x", "", "../../x", "..", "__class__", "__dict__.x", "a.b.c", "text_config.x", "model_type", "posswap.scheme"]
NAMES += ["auto_map", "vocab_size", "architectures", "rope_parameters.factor", "_attn_implementation"]


def places(data: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of every value inside."""
    for key, value in list(data.items() if isinstance(data, dict) else enumerate(data)):
        yield data, key
        if isinstance(value, (dict, list)):
            yield from places(value)


def mutate(record: dict[str, Any], dice: random.Random) -> str:
    """Change one thing, in place; returns what."""
    container, key = dice.choice(list(places(record)))
    kind = dice.choice(["drop", "value", "value", "name", "add", "swap", "scheme", "version", "string"])
    if kind == "drop":
        del container[key]
    elif kind == "value":
        container[key] = copy.deepcopy(dice.choice(VALUES))
    elif kind == "string":
        container[key] = str(container[key])
    elif kind == "name" and isinstance(container, dict):
        container[dice.choice(NAMES)] = container.pop(key)
    elif kind == "add" and isinstance(container, dict):
        container[dice.choice(NAMES)] = copy.deepcopy(dice.choice(VALUES))
    elif kind == "swap":
        other, place = dice.choice(list(places(record)))
        container[key], other[place] = other[place], copy.deepcopy(container[key])
    elif kind == "scheme":
        record["scheme"] = dice.choice(list_schemes())
    elif kind == "version":
        record["version"] = dice.choice([0, -1, 2, 99, "1", None, 1.0])
    return f"{kind} {key}"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, Path]:
    """A checkpoint of each swap, by the row's id."""
    folders = {row.id: tmp_path_factory.mktemp("saved") for row in SWAPS}
    for row in SWAPS:
        row.patched().save_pretrained(folders[row.id])
    return folders


@by_id(SWAPS)
@pytest.mark.parametrize("seed", range(MUTATIONS))
def test_mutated_record_is_refused_or_harmless(row: Row, seed: int, saved, tmp_path: Path):
    config = json.loads((saved[row.id] / "config.json").read_text())
    before = copy.deepcopy(config["posswap"])
    what = mutate(config["posswap"], random.Random(f"{row.id} {seed}"))
    shutil.copytree(saved[row.id], tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(config))
    if json.dumps(config["posswap"]) != json.dumps(before):
        with pytest.raises(PosSwapError, match=r"posswap|scheme|is unknown"):
            from_pretrained(tmp_path)
    else:
        assert torch.equal(logits(from_pretrained(tmp_path), **row.inputs()), logits(row.patched(), **row.inputs())), (
            what
        )


@by_id(SWAPS)
def test_other_tools_may_write_the_config_again(row: Row, saved, tmp_path: Path):
    """Keys in another order, 10000 where 10000.0 stood: the same record."""

    def whole(text: str) -> float:
        return int(float(text)) if float(text).is_integer() else float(text)

    shutil.copytree(saved[row.id], tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    record = json.loads(json.dumps(config["posswap"]), parse_float=whole)
    config["posswap"] = dict(reversed(record.items()))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert torch.equal(logits(from_pretrained(tmp_path), **row.inputs()), logits(row.patched(), **row.inputs()))


KILLED = """
import os, signal, sys
from hf_posswap.runs import replacing
events = 0
def stop(event, arguments):
    global events
    if event in ("open", "os.rename", "os.remove") and sys.argv[1] in str(arguments):
        events += 1
        if events == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(stop)
with replacing(sys.argv[1] + "/file.json") as path:
    with path.open("w") as file:
        file.write("new " * 100_000)
        file.flush()
        os.stat(file.fileno())
    open(path).close()
print(events)
"""


def test_file_of_ours_is_the_old_one_or_the_new_one_whenever_the_process_is_killed(tmp_path: Path):
    """Killed at every opening and renaming of a file on the way (README, evaluation, training log, CSV)."""
    old, new = "old", "new " * 100_000
    code = [sys.executable, "-c", KILLED, tmp_path]
    for step in range(1, 10):
        (tmp_path / "file.json").write_text(old)
        done = subprocess.run([*code, str(step)], capture_output=True, text=True)
        found = (tmp_path / "file.json").read_text()
        if done.returncode == 0:
            assert (found, int(done.stdout)) == (new, step - 1)
            break
        assert done.returncode == -9
        assert found in (old, new)
    assert step > 2
