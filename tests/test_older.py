"""Checkpoints with the keys of transformers 4: it loads them to the same logits, transformers 5 as it did without.

`TRANSFORMERS_4_PYTHON` names the interpreter of an environment that has transformers 4.57; skipped without it.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_posswap import PosSwapError, from_pretrained
from hf_posswap.older import for_transformers_4

from .conftest import by_id
from .rows import ROWS, Row, logits

PYTHON_4 = os.environ.get("TRANSFORMERS_4_PYTHON")
FAMILIES_4 = ("llama", "qwen3", "gpt_neox", "cohere", "bert", "gpt2")
NATIVE = [row for row in ROWS if row.native and row.family in FAMILIES_4]
TABLES = ("bert", "gpt2")
# a rotation that leaves dimensions still, some or all, is a rotary type that transformers 4 does not know
STILL = [
    row
    for row in NATIVE
    if row.family not in TABLES and (row.scheme == "nope" or "partial_rotary_factor" in row.params)
]
READ = [row for row in NATIVE if row not in STILL]
LOAD = """
import sys, torch, transformers
from pathlib import Path
from safetensors.torch import load_file, save_file
assert transformers.__version__.startswith("4.57"), transformers.__version__
torch.set_num_threads(1)
for folder in map(Path, sys.argv[1:]):
    name = transformers.AutoConfig.from_pretrained(folder).architectures[0]
    model = getattr(transformers, name).from_pretrained(folder).eval()
    with torch.no_grad():
        save_file({"logits": model(**load_file(folder / "inputs.st")).logits.contiguous()}, folder / "found.st")
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, Path]:
    """Every row saved with the twins, its inputs and its logits; by the row's id."""
    folders = {row.id: tmp_path_factory.mktemp("saved") for row in READ}
    for row in READ:
        model, inputs = row.patched(), row.inputs()
        model.save_pretrained(folders[row.id])
        for_transformers_4(folders[row.id])
        save_file(inputs, folders[row.id] / "inputs.st")
        save_file({"logits": logits(model, **inputs).contiguous()}, folders[row.id] / "expected.st")
    return folders


@pytest.fixture(scope="module")
def read_by_4(saved: dict[str, Path]) -> dict[str, Path]:
    if PYTHON_4 is None:
        pytest.skip("TRANSFORMERS_4_PYTHON names no interpreter with transformers 4.57")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([PYTHON_4, "-c", LOAD, *map(str, saved.values())], check=True, env=environment)
    return saved


@by_id(READ)
def test_transformers_4_gives_the_same_logits(row: Row, read_by_4: dict[str, Path]):
    found, expected = (load_file(read_by_4[row.id] / name)["logits"] for name in ("found.st", "expected.st"))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@by_id(READ)
def test_this_transformers_reads_the_twins_as_it_reads_the_file_without(
    row: Row, saved: dict[str, Path], tmp_path: Path
):
    folder = saved[row.id]
    expected = load_file(folder / "expected.st")["logits"]
    ours = from_pretrained(folder)
    stock = type(ours).from_pretrained(folder)
    for model in (ours, stock):
        assert torch.equal(logits(model, **row.inputs()), expected)
    row.patched().save_pretrained(tmp_path / "without")
    ours.save_pretrained(tmp_path / "again")
    first, again = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("without", "again"))
    assert again == first


@by_id(STILL)
def test_what_transformers_4_cannot_make_is_refused(row: Row, tmp_path: Path):
    row.patched().save_pretrained(tmp_path)
    before = (tmp_path / "config.json").read_bytes()
    with pytest.raises(PosSwapError, match="not known to transformers 4"):
        for_transformers_4(tmp_path)
    assert (tmp_path / "config.json").read_bytes() == before


def test_portable_and_unpatched_folders_are_refused(tmp_path: Path):
    row = Row("alibi", "llama", native=False)
    row.patched().save_pretrained(tmp_path / "portable")
    row.source().save_pretrained(tmp_path / "plain")
    for folder, says in (
        ("portable", "stored portable"),
        ("plain", "no patched checkpoint"),
        ("none", "no config.json"),
    ):
        with pytest.raises(PosSwapError, match=says):
            for_transformers_4(tmp_path / folder)
