"""The zoo builds what it says it builds."""

import json

import pytest
import torch

from hf_posswap.anatomy import text_config

from . import zoo

LEAST = {"causal-lm": 170, "masked-lm": 45, "seq2seq-lm": 30, "document": 6, "image": 85}
OF_TEXT = [task for task in zoo.TASKS if task != "image"]
SAMPLE = [(task, model_type) for task in OF_TEXT for model_type in zoo.model_types(task)[::8]]


@pytest.mark.parametrize(("task", "model_type"), SAMPLE, ids=lambda value: value)
def test_a_type_is_built_tiny_and_runs(task, model_type):
    model = tiny(model_type, task)
    assert zoo.forward(model).shape[1] == 16


@pytest.mark.parametrize("model_type", zoo.model_types("image")[::10])
def test_a_type_of_images_is_built_tiny_and_reads_its_size(model_type):
    model = tiny(model_type, "image")
    inputs = zoo.inputs(model)
    assert next(iter(inputs.values())).shape[-2:] == zoo.size_of(text_config(model))


def tiny(model_type, task):
    """A model, or a skip; it is small, runs and has something in every parameter."""
    try:
        model = zoo.build(model_type, task)
    except zoo.CannotBuild as error:
        pytest.skip(str(error))
    assert zoo.forward(model).isfinite().all()
    assert not model.training
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert sum(p.numel() for p in model.parameters()) < 6e6
    assert all(p.any() for p in model.parameters() if p.numel())
    return model


def test_two_builds_are_the_same_and_leave_the_random_state_alone():
    before = torch.get_rng_state()
    first, second = (zoo.forward(zoo.build("llama", "causal-lm")) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(before, torch.get_rng_state())


def test_one_layer_of_each_kind_is_kept():
    config = zoo.build("exaone_moe", "causal-lm").config
    assert config.layer_types == ["sliding_attention", "sliding_attention", "full_attention"]
    assert config.mlp_layer_types == ["dense", "sparse", "sparse"]


def test_special_tokens_are_in_the_vocabulary():
    config = zoo.build("cwm", "causal-lm").config
    assert all(token < zoo.VOCAB for token in config.eos_token_id)


def test_what_cannot_be_built_says_why():
    with pytest.raises(zoo.CannotBuild, match="drafts for"):
        zoo.build("gemma4_assistant", "causal-lm")


@pytest.mark.parametrize(
    ("model_type", "found"),
    [
        ("llama", {"model.rotary_emb": "flat"}),
        ("gemma3_text", {"model.rotary_emb": "nested"}),
        ("gpt2", {}),
    ],
)
def test_rotary_modules(model_type, found):
    assert zoo.rotary_modules(zoo.build(model_type, "causal-lm")) == found


@pytest.mark.long
def test_census(tmp_path):
    output = tmp_path / "census.json"
    zoo.main(["--output", str(output)])
    records = json.loads(output.read_text())["types"]
    for task, least in LEAST.items():
        assert sum(record["built"] for record in records if record["task"] == task) >= least
    assert all(record["finite"] for record in records if record["built"])
    assert all(record["reason"] for record in records if not record["built"])
