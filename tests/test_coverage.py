"""The coverage table: a fair sample of it is made again here, all of it by `make coverage`."""

from __future__ import annotations

import importlib.util
import json
import sys
import warnings

import pytest
import torch
import transformers

from hf_posswap import PosSwapError, describe, patch_model, unpatch_model

from . import coverage, zoo

REPORT = json.loads(coverage.COMMITTED.read_text(encoding="utf-8"))
EVERY = 29  # types of which one is in the sample: a prime, so that no order of names is favoured
SAMPLE = coverage.every()[::EVERY]
GOALS = {"causal-lm": 150, "masked-lm": 30, "seq2seq-lm": 20, "document": 5}
PLANTED = "planted"


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    """The records of the sample, checkpoints reloaded in fresh processes."""
    records = coverage.batch(SAMPLE, tmp_path_factory.mktemp("coverage"))
    return {f"{record['task']}/{record['type']}": record for record in records}


@pytest.mark.parametrize("name", [f"{task}/{model_type}" for task, model_type in SAMPLE])
def test_every_scheme_works_or_is_refused(name: str, found: dict):
    assert coverage.verdict(found[name]) != coverage.WRONG, found[name]["cells"]


def test_nothing_that_worked_is_lost(found: dict):
    if transformers.__version__ != REPORT["transformers"]:
        pytest.skip(f"the table is of transformers {REPORT['transformers']}")
    assert coverage.lost(REPORT["types"], found) == []


def test_a_lost_type_is_named():
    name = next(name for name, record in REPORT["types"].items() if coverage.verdict(record) == coverage.WORKS)
    record = REPORT["types"][name]
    refused = record | {"cells": record["cells"] | {"nope": "refused: for a test"}}
    assert coverage.lost({name: record}, {name: refused}) == [f"{name} nope: refused: for a test"]
    assert coverage.lost({name: record}, {name: {"not built": "for a test"}})
    assert coverage.lost({name: record}, {}) == []


def test_the_table_is_whole_and_has_no_third_outcome():
    assert not [name for name, record in REPORT["types"].items() if coverage.verdict(record) == coverage.WRONG]
    for task, count in REPORT["summary"].items():
        assert sum(count.values()) == sum(name.startswith(f"{task}/") for name in REPORT["types"])
        assert count[coverage.WORKS] >= GOALS[task]
    if transformers.__version__ == REPORT["transformers"]:
        assert list(REPORT["types"]) == [f"{task}/{model_type}" for task, model_type in coverage.every()]


def test_the_page_is_of_the_table():
    assert coverage.COMMITTED.with_suffix(".md").read_text(encoding="utf-8") == coverage.page(REPORT)


@pytest.mark.parametrize("model_type", ["mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"])
def test_recurrent_models_are_refused_by_name(model_type: str):
    model = zoo.build(model_type, "causal-lm")
    before = zoo.forward(model)
    with pytest.raises(PosSwapError, match=r"no positions to swap: it knows order by recurrence"):
        patch_model(model, "nope")
    assert torch.equal(zoo.forward(model), before)


# --- a type that nobody has seen


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """LLaMA's modeling code under other names: a new type that follows the common structure."""
    source = importlib.util.find_spec("transformers.models.llama.modeling_llama").origin
    spec = importlib.util.spec_from_loader("transformers.models.llama.modeling_planted", loader=None)
    module = importlib.util.module_from_spec(spec)
    module.__file__, module.__package__ = source, "transformers.models.llama"
    sys.modules[spec.name] = module
    with open(source, encoding="utf-8") as file:
        text = file.read()
    for old, new in (("LlamaConfig", "Config_"), ("Llama", "Planted"), ("Config_", "LlamaConfig")):
        text = text.replace(old, new)
    exec(compile(text, source, "exec"), vars(module))

    class PlantedConfig(transformers.LlamaConfig):
        model_type = PLANTED

    for cls in vars(module).values():
        if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel) and cls.__module__ == spec.name:
            cls.config_class = PlantedConfig
    config = zoo.tiny_config(transformers.LlamaConfig).to_dict() | {"model_type": PLANTED}
    torch.manual_seed(0)
    model = module.PlantedForCausalLM(PlantedConfig(**config)).eval()
    model.save_pretrained(tmp_path_factory.mktemp(PLANTED))  # a save writes its class and dtype into the config
    yield model
    del sys.modules[spec.name]


@pytest.mark.parametrize("scheme", [scheme for scheme in coverage.SCHEMES if scheme != "learned"])
def test_a_planted_type_is_patched_with_no_new_code(planted, scheme: str, tmp_path):
    assert type(planted).__name__ == "PlantedForCausalLM"
    logits, before = zoo.forward(planted), coverage.state(planted)
    assert coverage.broken(coverage.measure(planted, list(coverage.LAWS))) == {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        name, params = coverage.try_patch(planted, scheme, logits, before)
    assert (name, scheme in str(describe(planted)) or scheme == "nope") == (scheme, True), params
    patched = zoo.forward(planted)
    assert coverage.apart(patched, logits) > 1e-3
    assert coverage.broken(coverage.measure(planted, list(coverage.LAWS))) == {}
    if describe(planted).storage == "native":
        planted.save_pretrained(tmp_path)
        again = type(planted).from_pretrained(tmp_path).eval()
        assert torch.equal(zoo.forward(again), patched)
    else:
        with pytest.raises(PosSwapError, match="no model class of transformers"):
            planted.save_pretrained(tmp_path)
    coverage.unchanged(unpatch_model(planted), logits, before, "patch and undo")
