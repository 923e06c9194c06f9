"""Records that were damaged or edited by hand: a PosSwapError, or the same model; never another one, never a crash."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_posswap import PosSwapError, from_pretrained, list_schemes, runs

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
import os, shutil, signal, sys
folder = sys.argv[1]
exec(sys.argv[2])
events, last = 0, 0
def stop(event, arguments):
    global events
    writes = event == "open" and (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR)
    changes = event in ("os.rename", "os.remove", "os.link", "os.mkdir", "os.rmdir")
    if (writes or changes) and folder in os.path.abspath(str(arguments[0])) or event == "ctypes.dlsym":
        events += 1
        if events == last:
            os.kill(os.getpid(), signal.SIGKILL)
status = -1
while status:
    last += 1
    shutil.copytree(folder, folder + str(last) + "/out")
    if not os.fork():
        sys.addaudithook(stop)
        write(folder + str(last) + "/out")
        os._exit(0)
    status = os.wait()[1]
    assert status in (0, signal.SIGKILL), status
"""

FILE = """
from hf_posswap.runs import replacing
def write(folder):
    with replacing(folder + "/file.json") as path:
        path.write_text("new " * 100_000)
        open(path).close()
"""

MODEL = """
import transformers
from hf_posswap import patch_model
from tests.families import FAMILIES
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
model = patch_model(FAMILIES["llama"].build(), {scheme!r}, **{params!r})
def write(folder):
    model.save_pretrained(folder, max_shard_size="40KB")
"""


def killed(work: str, folder: Path) -> list[Path]:
    """What is left of copies of the folder where `work` was killed at its first write, its second, ..., and not."""
    subprocess.run([sys.executable, "-c", KILLED, folder, work], check=True, stderr=subprocess.DEVNULL)
    return [folder.with_name(f"{folder.name}{step}") / "out" for step in range(1, len(os.listdir(folder.parent)))]


def test_file_of_ours_is_the_old_one_or_the_new_one_whenever_the_process_is_killed(tmp_path: Path):
    """README, evaluation, training log, CSV."""
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "file.json").write_text("old")
    *texts, last = [(left / "file.json").read_text() for left in killed(FILE, tmp_path / "files")]
    assert len(texts) > 1
    assert set(texts) <= {"old", "new " * 100_000}
    assert last == "new " * 100_000


@pytest.mark.parametrize(
    "new", [Row("yarn", "llama", {"factor": 4}), Row("t5", "llama", native=False)], ids=lambda row: row.scheme
)
def test_checkpoint_is_the_old_one_or_the_new_one_whenever_the_process_is_killed(new: Row, tmp_path: Path):
    """Another swap over a swap, sharded over unsharded; what lies beside it stays."""
    row, folder = Row("alibi", "llama", native=False), tmp_path / "saved"
    old = row.patched()
    (folder / "training_state").mkdir(parents=True)
    (folder / "training_state" / "optimizer.bin").write_text("state")
    (folder / "tokenizer.json").write_text("{}")
    old.save_pretrained(folder)
    before, after = (logits(model, **row.inputs()) for model in (old, new.patched()))
    *interrupted, last = killed(MODEL.format(scheme=new.scheme, params=new.params), folder)
    assert len(interrupted) > 5
    for left in [*interrupted, last]:
        found = logits(from_pretrained(left), **row.inputs())
        assert torch.equal(found, after) or (torch.equal(found, before) and left != last)
        assert (left / "training_state" / "optimizer.bin").read_text() == "state"
        assert (left / "tokenizer.json").read_text() == "{}"
    assert os.listdir(last.parent) == ["out"]
    assert not (last / "model.safetensors").exists()
    assert (last / "modeling_posswap.py").exists() != new.native


def test_save_that_fails_leaves_the_folder_as_it_was(tmp_path: Path):
    folder = tmp_path / "out"
    Row("alibi", "llama", native=False).patched().save_pretrained(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(TypeError):
        Row("yarn", "llama", {"factor": 4}).patched().save_pretrained(folder, max_shard_size=[])
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert os.listdir(tmp_path) == ["out"]


def test_save_where_one_works_is_made_in_place(tmp_path: Path, monkeypatch):
    """A process whose working folder is exchanged would be left in the old one."""
    row = Row("yarn", "llama", {"factor": 4})
    monkeypatch.chdir(tmp_path)
    for model in (Row("alibi", "llama", native=False).patched(), row.patched()):
        model.save_pretrained(".")
    assert os.path.exists("config.json")
    assert torch.equal(logits(from_pretrained("."), **row.inputs()), logits(row.patched(), **row.inputs()))


def test_folder_is_replaced_where_the_system_cannot_exchange_two(tmp_path: Path, monkeypatch):
    """As on macOS, whose C library has no renameat2."""
    monkeypatch.setattr(runs.ctypes, "CDLL", lambda *args, **kwargs: object())
    row = Row("yarn", "llama", {"factor": 4})
    for model in (Row("alibi", "llama", native=False).patched(), row.patched()):
        model.save_pretrained(tmp_path / "out")
    assert torch.equal(logits(from_pretrained(tmp_path / "out"), **row.inputs()), logits(row.patched(), **row.inputs()))
    assert os.listdir(tmp_path) == ["out"]
