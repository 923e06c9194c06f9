"""The command lines as a user meets them: real processes, real folders, one clear line for a mistake."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from hf_posswap import from_pretrained, patch_model

from .families import FAMILIES, tokens
from .rows import logits
from .small import ROOT, call

SCRIPTS = sorted(path.name for path in (ROOT / "scripts").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_is_instant_and_needs_no_torch(script: str):
    code = f"import sys, runpy; sys.argv = ['{script}', '--help']\n"
    code += f"try: runpy.run_path({str(ROOT / 'scripts' / script)!r}, run_name='__main__')\nexcept SystemExit: pass\n"
    code += "sys.exit('torch' in sys.modules)"
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout
    assert time.perf_counter() - start < 30  # a hang, not a slow machine


@pytest.mark.parametrize("script", SCRIPTS)
def test_unknown_flag_is_fatal(script: str):
    done = call(script, "--no_such_flag", "1")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_nearest_flag_is_offered(checkpoint: Path):
    done = call("patch.py", "--model", checkpoint, "--scheme", "yarn", "--factr", 4)
    assert done.returncode == 2
    assert "unknown argument '--factr'; did you mean '--factor'?" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--scheme", "yarm", "--factor", 4], "scheme='yarm' is unknown; did you mean 'yarn'?"),
        (["--scheme", "yarn", "--factor", 0.5], "factor=0.5 is too small"),
        (["--factor", 4], "--factor was given without --scheme"),
        (["--scheme", "learned", "--max_positions", 128], "no table of position vectors to resize"),
    ],
)
def test_patch_mistakes_are_one_line_and_write_nothing(arguments, says, checkpoint: Path, tmp_path: Path):
    out = tmp_path / "out"
    done = call("patch.py", "--model", checkpoint, "--output_dir", out, *arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in done.stderr
    assert not out.exists()


def test_patch_then_push_dry_run(checkpoint: Path, tmp_path: Path):
    out = tmp_path / "yarn"
    dry = call("patch.py", "--model", checkpoint, "--scheme", "yarn", "--factor", 4, "--dry_run")
    assert dry.returncode == 0, dry.stderr
    assert "config.max_position_embeddings: 64 -> 256" in dry.stdout
    assert not out.exists()

    done = call("patch.py", "--model", checkpoint, "--scheme", "yarn", "--factor", 4, "--output_dir", out)
    assert done.returncode == 0, done.stderr
    assert "rope -> yarn" in done.stdout
    expected = patch_model(from_pretrained(checkpoint), "yarn", factor=4)
    assert torch.equal(logits(from_pretrained(out), input_ids=tokens(1, 50)), logits(expected, input_ids=tokens(1, 50)))
    assert json.loads((out / "tokenizer_config.json").read_text())["model_max_length"] == 256

    again = call("patch.py", "--model", checkpoint, "--scheme", "yarn", "--factor", 4, "--output_dir", out)
    assert again.returncode == 2
    assert "is not empty" in again.stderr

    before = {path.name: path.read_bytes() for path in out.iterdir()}
    push = call("push.py", "--folder", out, "--repo_id", "me/yarn", "--dry_run", env={"HF_TOKEN": "hf_secret"})
    assert push.returncode == 0, push.stderr
    for part in ("would push to me/yarn (private", "model.safetensors", "config.json", "tokenizer.json", "# yarn"):
        assert part in push.stdout
    assert "hf_secret" not in push.stdout + push.stderr
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


@pytest.mark.filterwarnings("ignore::hf_posswap.RecalibrationWarning")
def test_patch_fits_a_scheme_to_a_text(checkpoint: Path, tmp_path: Path):
    (tmp_path / "text.txt").write_text("a text that says where its words are, " * 20)
    flags = ("--model", checkpoint, "--scheme", "t5", "--output_dir", tmp_path / "t5", "--fit")
    done = call("patch.py", *flags, tmp_path / "text.txt")
    assert done.returncode == 0, done.stderr
    assert "explains" in done.stdout
    text = (tmp_path / "text.txt").read_text()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    same = patch_model(from_pretrained(checkpoint), "t5", fit=[text], tokenizer=tokenizer)
    assert torch.equal(*(logits(model, input_ids=tokens(2, 24)) for model in (from_pretrained(tmp_path / "t5"), same)))
    missing = call("patch.py", *flags[:-2], tmp_path / "other", "--fit", tmp_path / "none.txt")
    assert missing.returncode == 2
    assert "cannot be read" in missing.stderr


def test_patch_writes_the_keys_of_transformers_4(checkpoint: Path, tmp_path: Path):
    flags = ("--model", checkpoint, "--transformers_4", "--scheme")
    done = call("patch.py", *flags, "yarn", "--factor", 4, "--output_dir", tmp_path / "yarn")
    assert done.returncode == 0, done.stderr
    config = json.loads((tmp_path / "yarn" / "config.json").read_text())
    assert config["rope_scaling"] == config["rope_parameters"]
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    done = call("patch.py", *flags, "nope", "--output_dir", tmp_path / "nope")
    assert done.returncode == 2
    assert "is not known to transformers 4" in done.stderr
    assert not (tmp_path / "nope").exists()


def test_push_refuses_a_folder_without_a_patched_model(checkpoint: Path, tmp_path: Path):
    assert (
        "holds no patched checkpoint" in call("push.py", "--folder", checkpoint, "--repo_id", "a/b", "--dry_run").stderr
    )
    assert "holds no config.json" in call("push.py", "--folder", tmp_path, "--repo_id", "a/b", "--dry_run").stderr


def test_demo_runs_the_whole_road(tmp_path: Path):
    """The demo itself, small: it trains, swaps, measures, fine-tunes, reloads to the bit, and writes its files."""
    sizes = {"length": 32, "factor": 2, "steps": 6, "tune_steps": 2, "targets": 64, "width": 32}
    flags = [part for name, value in sizes.items() for part in (f"--{name}", value)]
    done = call("demo.py", "--output_dir", tmp_path, *flags)
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["reloaded_to_the_bit"] == dict.fromkeys(("yarn", "linear", "ntk", "dynamic"), True)
    stages = [(one["name"], one["stage"]) for one in results["series"]]
    assert stages[0] == ("base", None)
    assert stages[1:] == [(s, stage) for s in results["reloaded_to_the_bit"] for stage in ("before", "after")]
    for one in results["series"]:
        for point in one["points"]:
            assert f"{point['perplexity']:.3f}" in done.stdout
    assert (tmp_path / "results.png").stat().st_size > 10_000
    assert "| 32 (trained) |" in (tmp_path / "yarn" / "README.md").read_text()
    assert "step/s" in done.stderr  # the progress bar


def test_readme_shows_what_the_code_prints():
    import readme

    page = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = {match[1]: match[0] for match in readme.BLOCK.finditer(page)}
    for name in ("use", "schemes", "families", "demo"):
        assert getattr(readme, name)().strip() in blocks[name], f"{name}: run make readme"
    assert readme.generate(page) == page


def test_built_wheel_is_complete(tmp_path: Path):
    """The wheel, unpacked and alone on the path: every scheme is found and a patch works."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    checks = ["detectron", "families", "rows", "conftest", "deprecations", "oracles", "test_oracles"]
    tests = tmp_path / "tests"
    tests.mkdir()
    for name in (*checks, "__init__"):
        (tests / f"{name}.py").write_text((ROOT / "tests" / f"{name}.py").read_text(encoding="utf-8"), encoding="utf-8")
    code = "import hf_posswap, sys; print(hf_posswap.__file__); print(hf_posswap.list_schemes())"
    environment = {"PYTHONPATH": str(tmp_path / "site"), "PATH": "", "HOME": str(tmp_path)}
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert str(tmp_path / "site") in shown.stdout
    assert "yarn" in shown.stdout
    laws = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-k",
        "attention_of_the_whole_model or tables",
        "tests/test_oracles.py",
    ]
    done = subprocess.run(laws, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:]


def test_two_processes_shard_a_patched_model_from_the_meta_device(tmp_path: Path):
    patch_model(FAMILIES["llama"].build(), "yarn", factor=4).save_pretrained(tmp_path)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run([*command, ROOT / "tests" / "shard.py", tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "rank 0 of 2: equal" in done.stdout
    assert "rank 1 of 2: equal" in done.stdout
