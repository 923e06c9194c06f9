"""`probe` measures the live model, and catches the faults people make; each is planted here."""

from __future__ import annotations

import copy

import pytest
import torch

from hf_posswap import describe, patch_model, probe

from .conftest import by_id
from .families import FAMILIES, tokens
from .rows import ROWS, Row, logits, moved

# fire divides distances by the place of the query, and logn's temperature is that place's: both know where they are
RELATIVE = [r for r in ROWS if r.scheme not in ("nope", "sinusoidal", "learned", "fire", "logn")]
ABSOLUTE = [r for r in ROWS if r.scheme in ("sinusoidal", "learned") and not r.anatomy.vision]


@by_id(ROWS)
def test_probe_leaves_the_model_as_it_was(row: Row):
    model = row.patched().train()
    before = {name: tensor.clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    hooks = [list(m._forward_hooks) for m in model.modules()]
    probe(model)
    assert all(module.training for module in model.modules())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert torch.equal(tensor, before[name]), name
    assert [list(m._forward_hooks) for m in model.modules()] == hooks


@by_id(ROWS)
def test_no_fault_is_found_where_there_is_none(row: Row):
    assert probe(row.source()).faults == ()
    assert probe(row.patched()).faults == ()


@by_id(RELATIVE)
def test_relative_schemes_ignore_a_common_shift(row: Row):
    found = probe(moved(row.patched()))  # a table of zeros knows no order yet
    assert found.knows_order
    assert found.knows_absolute is (row.anatomy.anchored if row.anatomy.positions else None)


@by_id(ABSOLUTE)
def test_absolute_schemes_do_not(row: Row):
    found = probe(moved(row.patched()))  # a concatenated position begins with no part in the output
    assert found.knows_order
    assert found.knows_absolute is (True if row.anatomy.positions else None)


@by_id([r for r in ROWS if r.scheme == "nope" and r.layers is None])
def test_nope_knows_nothing(row: Row):
    assert probe(row.source()).knows_order
    assert not probe(row.patched()).knows_order


@pytest.mark.parametrize(
    ("family", "longest"), [("llama", None), ("bert", 32), ("roberta", 32), ("opt", 32), ("vit", 16)]
)
def test_longest(family, longest):
    assert probe(FAMILIES[family].build()).longest == longest


def test_distance_shows_a_sliding_window():
    found = dict(probe(FAMILIES["gemma3"].build(layers=1)).distance)
    assert min(found.values()) > 0
    assert list(found) == [1, 2, 4]


def test_distance_shows_what_a_causal_bias_would():
    """A rotary model weighs a token by its distance, one without positions does not."""
    model = FAMILIES["llama"].build(layers=1)
    near, *_, far = (change for _, change in probe(model).distance)
    assert abs(near - far) > 1e-3 * near
    with pytest.warns(UserWarning, match="recalibrate"):
        patch_model(model, "nope")
    near, *_, far = (change for _, change in probe(model).distance)
    assert near == pytest.approx(far, rel=1e-4)


# --- planted faults


def config_changed_after_load(model):
    model.config.rope_parameters = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0} | {
        "original_max_position_embeddings": 32
    }
    return "model.rotary_emb.inv_freq: differs from what config.rope_parameters says"


def theta_lost_after_load(model):
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": 5e5}
    return "model.rotary_emb.inv_freq: differs from what config.rope_parameters says"


def stale_original_frequencies(model):
    patched = patch_model(copy.deepcopy(model), "yarn", factor=4)
    model.config.rope_parameters = patched.config.rope_parameters
    model.config.max_position_embeddings = 128
    model.model.rotary_emb.inv_freq = patched.model.rotary_emb.inv_freq
    model.model.rotary_emb.attention_scaling = patched.model.rotary_emb.attention_scaling
    model.model.rotary_emb.rope_type = "yarn"
    return "model.rotary_emb.original_inv_freq: differs"


def attention_scaling_forgotten(model):
    patch_model(model, "yarn", factor=4)
    model.model.rotary_emb.attention_scaling = 1.0
    return "model.rotary_emb.attention_scaling: is 1.0 and the config says 1.138"


def rotary_replaced_where_nobody_reads_it(model):
    module = model.model.rotary_emb
    model.model.layers[0].self_attn.rotary_emb = type(module)(model.config)
    return "model.layers.0.self_attn.rotary_emb: no forward pass reads this rotary module"


def rotary_reads_another_config(model):
    model.model.rotary_emb = type(model.model.rotary_emb)(copy.deepcopy(model.config))
    model.model.layers[0].self_attn.rotary_emb = type(model.model.rotary_emb)(model.config)
    return "model.rotary_emb: reads another config than the model's"


def frequencies_rounded(model):
    model.to(torch.bfloat16)
    return "model.rotary_emb.inv_freq: differs"


def length_changed_after_patch(model):
    patch_model(model, "yarn", factor=4)
    model.config.max_position_embeddings = 4096
    return "config.max_position_embeddings: is 4096 and the recorded yarn(factor=4) writes 128"


FAULTS = [
    config_changed_after_load,
    theta_lost_after_load,
    stale_original_frequencies,
    attention_scaling_forgotten,
    rotary_replaced_where_nobody_reads_it,
    rotary_reads_another_config,
    frequencies_rounded,
    length_changed_after_patch,
]


@pytest.mark.parametrize("plant", FAULTS, ids=lambda f: f.__name__)
def test_planted_rotary_fault_is_found(plant):
    model = FAMILIES["llama"].build()
    expected = plant(model)
    found = probe(model)
    assert not found.ok
    assert any(expected in fault for fault in found.faults), found.faults
    assert f"FAULT     {found.faults[0]}" in str(found)


@pytest.mark.filterwarnings("ignore::hf_posswap.RecalibrationWarning")
def test_planted_table_faults_are_found():
    model = patch_model(FAMILIES["bert"].build(), "sinusoidal")
    model.bert.embeddings.position_embeddings.weight.data[3, 3] += 0.1
    assert any("is not the sinusoidal() table" in fault for fault in probe(model).faults)
    model = patch_model(FAMILIES["bert"].build(), "nope")
    model.bert.embeddings.position_embeddings.weight.data[3, 3] += 0.1
    assert any("it is not zero" in fault for fault in probe(model).faults)
    model = patch_model(FAMILIES["bert"].build(), "learned", max_positions=64)
    model.bert.embeddings.token_type_ids = torch.zeros(1, 32, dtype=torch.long)
    assert any("token_type_ids: holds 32 positions and the table 64" in fault for fault in probe(model).faults)


@pytest.mark.filterwarnings("ignore::hf_posswap.RecalibrationWarning")
def test_planted_turning_of_a_silenced_rotary_is_found():
    model = patch_model(FAMILIES["gpt_neox"].build(), "nope")
    model.gpt_neox.rotary_emb.inv_freq = torch.ones_like(model.gpt_neox.rotary_emb.inv_freq)
    assert any("says it is silenced, and it turns" in fault for fault in probe(model).faults)


def test_dynamic_state_is_no_fault_and_is_not_disturbed():
    model, ids = patch_model(FAMILIES["llama"].build(), "dynamic", factor=4), tokens(1, 60)
    expected = logits(model, input_ids=ids)
    grown = model.model.rotary_emb.inv_freq.clone()
    assert probe(model).faults == ()
    assert torch.equal(model.model.rotary_emb.inv_freq, grown)
    assert torch.equal(logits(model, input_ids=ids), expected)


def test_describe_prints_what_it_had_and_has():
    model = patch_model(FAMILIES["llama"].build(), "yarn", factor=4)
    assert str(describe(model)).splitlines() == [
        "LlamaForCausalLM (llama)",
        "  rotary   rope -> yarn           factor=4, original_max_position_embeddings=32, rope_theta=10000",
        "  length   32 -> 128",
        "  storage  native: stock transformers loads it, without this package",
        "  serving  vLLM: yes: vllm serve FOLDER --max-model-len 128",
        "           SGLang: yes: python -m sglang.launch_server --model-path FOLDER --context-length 128",
        "           llama.cpp: yes: python convert_hf_to_gguf.py FOLDER --outfile model.gguf "
        "&& llama-server -m model.gguf -c 128",
    ]
