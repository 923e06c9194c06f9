"""Cards: every number on one is backed by a file, the hub can read it, and the committed ones are made anew exactly."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from hf_posswap import PosSwapError, describe, list_schemes, patch_model
from hf_posswap.card import card
from hf_posswap.record import Record
from hf_posswap.serving import SERVERS, serving

from .conftest import by_id
from .families import FAMILIES
from .rows import ROWS, Row

CARDS = Path(__file__).resolve().parent.parent / "model_cards"
DEMO, RECOVERED = CARDS / "demo-llama-yarn", CARDS / "demo-llama-t5"
FIRST_ROWS = [next(row for row in ROWS if row.scheme == scheme) for scheme in list_schemes()]
NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?![\w.]*\w)")


@pytest.mark.parametrize("folder", sorted(CARDS.iterdir()), ids=lambda folder: folder.name)
def test_committed_cards_are_what_their_files_make(folder: Path):
    assert (folder / "README.md").read_text(encoding="utf-8") == card(folder)


@by_id(FIRST_ROWS)
def test_hub_reads_the_card_of_every_scheme(row: Row, tmp_path: Path):
    row.patched().save_pretrained(tmp_path)
    text = card(tmp_path, base_model="someone/base", license="apache-2.0", repo_id="me/patched")
    data = ModelCard(text, ignore_metadata_errors=False).data
    assert (data.base_model, data.base_model_relation, data.license) == ("someone/base", "finetune", "apache-2.0")
    assert (data.library_name, data.tags) == ("transformers", ["hf_posswap", row.scheme])
    assert data.eval_results is None
    for part in ("## Training", "## Evaluation", "## Limits", "## Use", "Undo:", "me/patched", "not run"):
        assert part in text
    assert not NUMBER.search(text.split("## Evaluation")[1].split("## Limits")[0])


def test_numbers_are_the_files_numbers():
    text, report = (DEMO / "README.md").read_text(), json.loads((DEMO / "evaluation.json").read_text())
    data = ModelCard(text, ignore_metadata_errors=False).data
    points = report["series"][-1]["points"]
    assert [result.metric_value for result in data.eval_results] == [round(point["perplexity"], 3) for point in points]
    assert f"{report['short']['delta']:+.4f} nats per token" in text
    log = json.loads((DEMO / "train_log.json").read_text())
    for said in (f"| steps | {log['steps']} |", f"| tokens | {log['tokens']:,} |", f"`{log['command']}`"):
        assert said in text


def keys(data: Any, path: tuple = ()) -> list[tuple]:
    """Paths of every key in a JSON object; of a list the last element stands for all."""
    if isinstance(data, list):
        return keys(data[-1], (*path, -1)) if data else []
    if not isinstance(data, dict):
        return []
    return [found for key, value in data.items() for found in [(*path, key), *keys(value, (*path, key))]]


BACKING = [(DEMO, "train_log.json"), (DEMO, "evaluation.json"), (RECOVERED, "recovery.json")]


@pytest.mark.parametrize(("source", "file"), BACKING, ids=lambda value: getattr(value, "name", value))
def test_card_without_a_backing_number_is_refused_or_the_same(source: Path, file: str, tmp_path: Path):
    """Whatever is taken out of a file: the card does without it, or there is none."""
    shutil.copytree(source, tmp_path / source.name)
    folder, whole = tmp_path / source.name, json.loads((source / file).read_text())
    numbers = set(NUMBER.findall(card(folder)))
    refused = 0
    for path in keys(whole):
        data = json.loads(json.dumps(whole))
        inner = data
        for key in path[:-1]:
            inner = inner[key]
        del inner[path[-1]]
        (folder / file).write_text(json.dumps(data))
        try:
            assert set(NUMBER.findall(card(folder))) <= numbers | {"0"}, path
        except PosSwapError:
            refused += 1
    assert refused > 15


MIXED: dict[str, tuple[str, Callable[[dict], Any]]] = {
    "training of another swap": ("train_log.json", lambda data: data["scheme"].update(scheme="linear")),
    "training with another factor": ("train_log.json", lambda data: data["scheme"]["params"].update(factor=4)),
    "evaluation of another swap": (
        "evaluation.json",
        lambda data: data.update(models={"model": {"scheme": "linear(factor=8)"}}),
    ),
}


@pytest.mark.parametrize("mixed", MIXED)
def test_numbers_of_another_swap_are_refused(mixed: str, tmp_path: Path):
    shutil.copytree(DEMO, tmp_path, dirs_exist_ok=True)
    file, change = MIXED[mixed]
    data = json.loads((DEMO / file).read_text())
    change(data)
    (tmp_path / file).write_text(json.dumps(data))
    with pytest.raises(PosSwapError, match=f"{file} is of another swap"):
        card(tmp_path)


def test_cost_that_is_not_that_of_the_table_is_refused(tmp_path: Path):
    shutil.copytree(DEMO, tmp_path, dirs_exist_ok=True)
    report = json.loads((DEMO / "evaluation.json").read_text())
    report["short"]["delta"] /= 2
    (tmp_path / "evaluation.json").write_text(json.dumps(report))
    with pytest.raises(PosSwapError, match="not the difference of the losses"):
        card(tmp_path)


def test_broken_files_are_refused(tmp_path: Path):
    shutil.copytree(DEMO, tmp_path, dirs_exist_ok=True)
    for content, says in (("{half", "is not JSON"), ("[]", "holds no JSON object")):
        (tmp_path / "evaluation.json").write_text(content)
        with pytest.raises(PosSwapError, match=says):
            card(tmp_path)


def test_no_local_path_is_published(tmp_path: Path):
    """Neither the card nor the record that is pushed with it says where on this machine the base was."""
    FAMILIES["llama"].build().save_pretrained(tmp_path / "base")
    model = type(FAMILIES["llama"].build()).from_pretrained(tmp_path / "base")
    patch_model(model, "yarn", factor=4).save_pretrained(tmp_path / "out")
    text = card(tmp_path / "out")
    assert "Base model: a local checkpoint, `base`." in text
    assert "base_model:" not in text
    assert str(tmp_path) not in text + (tmp_path / "out" / "config.json").read_text()


# --- serving lines

READINGS = [
    # scheme, parameters, servers that read it
    ("yarn", {"factor": 4}, {"vLLM", "SGLang", "llama.cpp"}),
    ("yarn", {"factor": 4, "attention_factor": 1.2}, {"vLLM"}),
    ("yarn", {"factor": 4, "beta_fast": 16}, {"vLLM", "SGLang", "llama.cpp"}),
    ("yarn", {"factor": 4, "truncate": False}, {"vLLM", "SGLang"}),
    ("ntk-by-parts", {"factor": 4}, {"vLLM"}),
    ("linear", {"factor": 4}, {"vLLM", "SGLang", "llama.cpp"}),
    ("ntk", {"factor": 4}, {"vLLM", "SGLang", "llama.cpp"}),
    ("dynamic", {"factor": 4}, set()),
    ("dynamic", {"factor": 4, "freeze_at": 100}, {"vLLM", "SGLang", "llama.cpp"}),
    ("llama3", {"factor": 4}, {"vLLM", "SGLang"}),
    ("rope", {"rope_theta": 5e5}, {"vLLM", "SGLang", "llama.cpp"}),
    ("rope", {"partial_rotary_factor": 0.5}, {"vLLM"}),
    ("proportional", {"partial_rotary_factor": 0.5}, {"vLLM"}),
    ("nope", {}, set()),
    ("alibi", {}, set()),
]


@pytest.mark.parametrize(
    ("scheme", "params", "readers"), READINGS, ids=[f"{scheme}-{given}" for scheme, given, _ in READINGS]
)
@pytest.mark.filterwarnings("ignore::hf_posswap.RecalibrationWarning")
def test_who_reads_a_checkpoint(scheme: str, params: dict, readers: set[str]):
    """The table of `hf_posswap/serving.py`, as it comes out for LLaMA."""
    model = patch_model(FAMILIES["llama"].build(), scheme, **params)
    served = serving(model.config.to_dict(), Record.from_dict(model.config.posswap), "NAME")
    assert {one.server for one in served if one.native} == readers
    assert [one.server for one in served] == [server.name for server in SERVERS]
    length = str(model.config.posswap["length"])
    assert all("NAME" in one.command and length in one.command for one in served)
    assert all(one.reason for one in served if not one.native)
    for one in served:
        assert str(one) in str(describe(model)).replace("FOLDER", "NAME")
