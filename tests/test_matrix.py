"""Scheme x way of saving and loading x fresh process with and without this package: the same logits, to the bit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from transformers import Trainer, TrainingArguments

from .rows import TEXT_ROWS, Row, logits

# PEFT asks a model by the name that transformers deprecates
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")

FRESH = Path(__file__).with_name("reload.py")
SCHEMES = list({row.scheme: row for row in reversed(TEXT_ROWS)}.values())  # the first row of each


def plain(model, folder: Path, inputs):
    model.save_pretrained(folder)
    return model


def sharded(model, folder: Path, inputs):
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    return model


def bf16(model, folder: Path, inputs):
    """Cast as a loader does: `model.to` would also round the frequencies of a rotary module that no swap touched."""
    for name, parameter in model.named_parameters():
        if "posswap" not in name.split("."):
            parameter.data = parameter.data.to(torch.bfloat16)
    return plain(model, folder, inputs)


def placed(model, folder: Path, inputs):
    """Loaded with device_map="auto"."""
    plain(model, folder, inputs)
    (folder / "how.json").write_text(json.dumps({"device_map": "auto"}))
    return model


def trainer(model, folder: Path, inputs):
    """A checkpoint as Trainer writes it, after one step."""
    rows = [{"input_ids": row, "labels": row} for row in inputs["input_ids"]]
    arguments = TrainingArguments(
        folder, max_steps=1, save_steps=1, report_to=[], disable_tqdm=True, use_cpu=True, seed=0
    )
    Trainer(model, arguments, train_dataset=rows).train()
    (checkpoint,) = folder.glob("checkpoint-*")
    for file in checkpoint.iterdir():
        file.rename(folder / file.name)
    checkpoint.rmdir()
    return model.eval()


def accelerated(model, folder: Path, inputs):
    """As accelerate's documentation saves a model that it prepared."""
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(model)
    accelerator.unwrap_model(prepared).save_pretrained(
        folder,
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(prepared),
    )
    return model


def merged(model, folder: Path, inputs):
    """LoRA on the patched model, its adapter moved, merged and saved."""
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return plain(adapted.merge_and_unload(), folder, inputs)


WAYS = {way.__name__: way for way in (plain, sharded, bf16, placed, trainer, accelerated, merged)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("matrix")
    for row in SCHEMES:
        for name, way in WAYS.items():
            folder, inputs = root / f"{row.scheme}-{name}", row.inputs()
            folder.mkdir()
            model = way(row.patched(), folder, inputs)
            save_file(inputs, folder / "inputs.st")
            save_file({"logits": logits(model, **inputs).contiguous()}, folder / "memory.st")
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path_factory.mktemp("modules"))}
    for mode in ("stock", "travel", "package"):
        subprocess.run([sys.executable, FRESH, mode, root], check=True, env=environment)
    return root


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("row", SCHEMES, ids=lambda row: row.scheme)
@pytest.mark.parametrize("installed", [True, False], ids=("package", "alone"))
def test_fresh_process_gives_the_same_logits(row: Row, way: str, installed: bool, saved: Path):
    folder = saved / f"{row.scheme}-{way}"
    mode = "package" if installed else "stock" if row.native else "travel"
    error = folder / f"{mode}.error"
    assert not error.exists(), error.read_text()
    assert torch.equal(load_file(folder / f"{mode}.st")["logits"], load_file(folder / "memory.st")["logits"])


@pytest.mark.long
def test_environment_where_this_package_was_never_installed_gives_the_same_logits(saved: Path, tmp_path: Path):
    """The whole matrix again, in a virtual environment of torch, transformers and accelerate alone."""
    venv.create(tmp_path / "clean", with_pip=True)
    python = tmp_path / "clean" / "bin" / "python"
    packages = [f"{name}=={version(name)}" for name in ("torch", "transformers", "accelerate")]
    subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    copy = shutil.copytree(saved, tmp_path / "checkpoints", ignore=shutil.ignore_patterns("stock.*", "travel.*"))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["HF_MODULES_CACHE"] = str(tmp_path / "modules")
    alone = shutil.copy(FRESH, tmp_path)  # Python looks for packages beside a script
    for mode in ("stock", "travel"):
        subprocess.run([python, alone, mode, copy], check=True, env=environment, cwd=tmp_path)
    for row in SCHEMES:
        for way in WAYS:
            folder = copy / f"{row.scheme}-{way}"
            found = folder / ("stock.st" if row.native else "travel.st")
            assert torch.equal(load_file(found)["logits"], load_file(folder / "memory.st")["logits"]), folder.name
