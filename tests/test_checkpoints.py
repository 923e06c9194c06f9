"""What was saved once loads for ever: tests/checkpoints holds a checkpoint of every scheme, with its logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_posswap import from_pretrained, list_schemes, probe

from .make_checkpoints import FOLDER
from .rows import logits

KEPT = sorted(FOLDER.iterdir())


def test_every_scheme_has_a_checkpoint():
    assert [folder.name for folder in KEPT] == list_schemes()


@pytest.mark.parametrize("folder", KEPT, ids=lambda folder: folder.name)
def test_kept_checkpoint_gives_the_logits_it_gave(folder: Path):
    inputs = load_file(folder / "expected.safetensors")
    expected = inputs.pop("logits")
    model = from_pretrained(folder, dtype=torch.float32)
    assert probe(model).ok
    torch.testing.assert_close(logits(model, **inputs), expected, rtol=1e-4, atol=1e-5)


def test_they_stay_small():
    assert sum(path.stat().st_size for path in FOLDER.rglob("*")) < 650_000
