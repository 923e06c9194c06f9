"""Pushing with the real client to a hub on the loopback, and loading back from it by name."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_posswap import patch_model
from hf_posswap.card import write_card

from .families import FAMILIES, tokens
from .hub import Hub
from .rows import logits

ROOT = Path(__file__).resolve().parent.parent
TOKEN = "hf_secretOfTheTest"
NAME = "me/yarn"
LOAD = """
import sys, torch
from safetensors.torch import load_file, save_file
import hf_posswap
torch.set_num_threads(1)
model = hf_posswap.from_pretrained(sys.argv[1]).eval()
with torch.no_grad():
    save_file({"logits": model(**load_file(sys.argv[2])).logits.contiguous()}, sys.argv[3])
"""
PUSH_TO_HUB = """
import sys, hf_posswap
hf_posswap.from_pretrained(sys.argv[1]).push_to_hub(sys.argv[2], private=True)
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub(TOKEN) as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A patched LLaMA in several shards, with its card."""
    folder = tmp_path / "yarn"
    patch_model(FAMILIES["llama"].build(), "yarn", factor=4).save_pretrained(folder, max_shard_size="60KB")
    write_card(folder, base_model="someone/llama", license="apache-2.0")
    (folder / "trainer_state.pt").write_bytes(b"stays at home")
    return folder


def client(hub: Hub, home: Path, *arguments: object, token: str | None = None) -> subprocess.CompletedProcess:
    """A process of a user of this hub. Nothing it says may hold a token."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=hub.environment(home, token)
        | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
    )
    for secret in (TOKEN, token or TOKEN):
        assert secret not in done.stdout + done.stderr
    return done


def push(hub: Hub, folder: Path, *more: object, token: str | None = None) -> subprocess.CompletedProcess:
    script = ROOT / "scripts" / "push.py"
    return client(hub, folder.parent / "home", script, "--folder", folder, "--repo_id", NAME, *more, token=token)


def in_folder(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".pt"}


def in_one_line(done: subprocess.CompletedProcess) -> str:
    """What a failed command says: one line."""
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    return line


def loads_by_name(hub: Hub, tmp_path: Path, name: str, token: str | None = None) -> torch.Tensor:
    """Logits of the model of that name, loaded by another process with nothing in its cache."""
    save_file({"input_ids": tokens(2, 40)}, tmp_path / "inputs.st")
    done = client(
        hub, tmp_path / "elsewhere", "-c", LOAD, name, tmp_path / "inputs.st", tmp_path / "out.st", token=token
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return load_file(tmp_path / "out.st")["logits"]


def expected() -> torch.Tensor:
    return logits(patch_model(FAMILIES["llama"].build(), "yarn", factor=4), input_ids=tokens(2, 40))


def test_what_arrives_is_the_folder_and_loads_by_name(hub: Hub, folder: Path, tmp_path: Path):
    done = push(hub, folder)
    assert done.returncode == 0, done.stderr
    assert f"{hub.url}/{NAME}" in done.stdout
    assert hub.repositories[NAME].private
    assert hub.repositories[NAME].files == in_folder(folder)
    assert torch.equal(loads_by_name(hub, tmp_path, NAME), expected())


def test_private_unless_told_otherwise(hub: Hub, folder: Path, tmp_path: Path):
    assert push(hub, folder, "--public").returncode == 0
    assert not hub.repositories[NAME].private


@pytest.mark.parametrize("flag", ["--dry_run", "--dry-run"])
def test_dry_run_says_what_a_push_sends(flag: str, hub: Hub, folder: Path):
    done = push(hub, folder, flag)
    assert done.returncode == 0, done.stderr
    listed = [line.split() for line in done.stdout.split("\nREADME.md:")[0].splitlines()[1:]]
    said = {name: int(size.replace(",", "")) for size, name in listed}
    assert said == {name: len(content) for name, content in in_folder(folder).items()}
    assert (folder / "README.md").read_text() in done.stdout
    assert not hub.repositories
    assert not hub.received


def test_interrupted_push_goes_on_where_it_stopped(folder: Path):
    shards = {hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.safetensors")}
    assert len(shards) > 2
    with Hub(TOKEN, dies_after=1) as dying:
        assert "the push failed, repeat it" in in_one_line(push(dying, folder))
    assert len(dying.received) == 1
    assert not dying.repositories[NAME].files
    with Hub(TOKEN, dying.repositories, dying.stored) as back:
        assert push(back, folder).returncode == 0
        assert back.repositories[NAME].files == in_folder(folder)
        assert sorted(back.received) == sorted(shards - set(dying.received))
        again = push(back, folder)
        assert again.returncode == 0, again.stderr
        assert len(back.received) == len(shards) - 1
        assert len(back.repositories[NAME].commits) == 2  # the empty first one, and the push


def test_wrong_token_is_one_line_without_it(hub: Hub, folder: Path):
    assert "401" in in_one_line(push(hub, folder, token="hf_ofSomebodyElse"))
    assert not hub.repositories


FAULTS = {
    "holds no config.json": lambda folder: (folder / "config.json").unlink(),
    "holds no patched checkpoint": lambda folder: FAMILIES["llama"].build().save_pretrained(folder),
    "holds no .safetensors weights": lambda folder: [path.unlink() for path in folder.glob("*.safetensors")],
    "has no card; write it: scripts/card.py": lambda folder: (folder / "README.md").unlink(),
}


@pytest.mark.parametrize("says", FAULTS)
def test_folder_that_is_no_checkpoint_with_a_card_is_refused(says: str, hub: Hub, folder: Path):
    FAULTS[says](folder)
    assert says in in_one_line(push(hub, folder))
    assert not hub.repositories


def test_push_to_hub_of_the_model(hub: Hub, folder: Path, tmp_path: Path):
    done = client(hub, tmp_path / "home", "-c", PUSH_TO_HUB, folder, "me/other")
    assert done.returncode == 0, done.stderr[-2000:]
    assert hub.repositories["me/other"].private
    assert torch.equal(loads_by_name(hub, tmp_path, "me/other"), expected())
