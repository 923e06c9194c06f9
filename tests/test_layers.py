"""A scheme in some layers only: the chosen ones compute as the wholly swapped model's, the others as the source's."""

from __future__ import annotations

import copy
import re
from dataclasses import replace

import pytest
import torch

from hf_posswap import PosSwapError, describe, patch_model, probe, unpatch_model
from hf_posswap.anatomy import examine

from .conftest import by_id
from .families import FAMILIES, tokens
from .rows import LAYER_ROWS, Row, logits
from .test_laws import close

pytestmark = pytest.mark.filterwarnings("ignore::hf_posswap.RecalibrationWarning")


def mute(model, layers) -> torch.nn.Module:
    """These layers hand on what they are given, so that nothing of theirs reaches the output."""

    def hand_on(module, args, kwargs, output):
        entered = args[0] if args else kwargs["hidden_states"]
        return entered if isinstance(output, torch.Tensor) else (entered, *output[1:])

    for index in layers:
        examine(model).layers()[1][index].register_forward_hook(hand_on, with_kwargs=True)
    return model


@by_id(LAYER_ROWS)
def test_the_chosen_layers_change_and_the_others_do_not(row: Row):
    source, swapped = row.source(), replace(row, layers=None).patched()
    hybrid = row.patched()
    others = {0, 1} - {*row.layers}
    for silent, twin in ((row.layers, source), (others, swapped)):
        expected = logits(mute(copy.deepcopy(twin), silent), **row.inputs())
        close(logits(mute(copy.deepcopy(hybrid), silent), **row.inputs()), expected)
    assert (logits(source, **row.inputs()) - logits(swapped, **row.inputs())).abs().max() > 1e-4


def test_a_sliding_layer_scales_its_own_parameters():
    """Chosen by index, a layer takes the scheme whatever its type; whole models scale full attention alone."""
    ids = tokens(2, 24)
    hybrid = patch_model(FAMILIES["gemma3"].build(), "yarn", factor=4, layers=[0])
    whole = patch_model(FAMILIES["gemma3"].build(), "yarn", factor=4, layer_types=("sliding_attention",))
    close(logits(hybrid, input_ids=ids), logits(whole, input_ids=ids))


def test_nope_in_every_fourth_layer():
    model, ids = FAMILIES["llama"].build(layers=8), tokens(2, 20)
    before = logits(model, input_ids=ids)
    patch_model(model, "nope", layers=[3, 7])
    found = describe(model)
    assert "rope, none in layers 3, 7" in str(found)
    assert found.scheme == "nope() in layers 3, 7"
    assert model.config.posswap["layers"] == [3, 7]
    assert probe(model).ok
    assert (logits(model, input_ids=ids) - before).abs().max() > 1e-3
    patch_model(model, "nope", layers=[7, 3])  # the same
    patch_model(model, "alibi", layers=range(4, 8))  # in its place
    assert "none, alibi in layers 4, 5, 6, 7" in str(describe(model))
    assert torch.equal(logits(unpatch_model(model), input_ids=ids), before)


def test_all_layers_are_no_choice():
    model = patch_model(FAMILIES["llama"].build(), "yarn", factor=4, layers=[0, 1])
    assert model.config.posswap["layers"] is None
    assert describe(model).storage == "native"


def test_probe_sees_a_second_rotation_that_is_not_the_recorded_one():
    model = patch_model(FAMILIES["llama"].build(), "yarn", factor=4, layers=[1])
    assert probe(model).ok
    model.model.posswap_rotary.inv_freq.mul_(2)
    assert "posswap_rotary.inv_freq: differs" in probe(model).faults[0]


@pytest.mark.parametrize(
    "layers", [[], [2], [-1], [0, 0], [0.0], [True], ["1"], 1, "01", {0}, (0, None)], ids=lambda value: repr(value)
)
def test_refuses_what_is_no_choice_of_layers(layers):
    model, ids = FAMILIES["llama"].build(), tokens(1, 20)
    before = logits(model, input_ids=ids)
    message = re.escape(f"layers={layers!r} is not a list of different integers from 0 to 1")
    with pytest.raises(PosSwapError, match=message):
        patch_model(model, "nope", layers=layers)
    assert torch.equal(logits(model, input_ids=ids), before)
    assert "posswap" not in model.config.to_dict()


REFUSED = [
    ("gpt2", "nope", {}, r"layers=\[1\]: every layer reads what GPT2LMHeadModel adds positions before its first layer"),
    ("bert", "alibi", {}, r"layers=\[1\]: every layer reads what BertForMaskedLM adds positions"),
    ("bert", "learned", {"max_positions": 64}, r"layers=\[1\]: every layer reads"),
    ("vit", "nope", {}, r"layers=\[1\]: every layer reads"),
    ("llama", "sinusoidal", {}, r"layers=\[1\]: every layer reads what LlamaForCausalLM would get sinusoidal there"),
    ("t5_encoder", "alibi", {}, r"the layers of T5ForTokenClassification share one bias"),
    ("falcon_alibi", "nope", {}, r"the layers of FalconForCausalLM share one bias"),
    ("llama", "rope", {"pairing": "interleaved"}, r"rope: pairing cannot be chosen together with layers=\[1\]"),
    ("gemma3", "yarn", {"factor": 4, "layer_types": ("full_attention",)}, r"layer_types cannot be chosen together"),
    ("llama", "linear", {"factor": 1}, r"would change nothing on this Llama"),
    ("bloom", "alibi", {}, r"would change nothing on this Bloom"),
    ("modernbert", "yarn", {"factor": 4}, r"the layers of ModernBertForMaskedLM are not handed position_ids"),
    ("qwen2_vl", "yarn", {"factor": 4}, r"the layers of Qwen2VLForConditionalGeneration are not told where a token is"),
    ("deepseek_v3", "yarn", {"factor": 4}, r"DeepseekV3ForCausalLM has a factor for all its layers"),
]


@pytest.mark.parametrize(("family", "scheme", "params", "message"), REFUSED, ids=str)
def test_refuses_where_positions_are_not_of_single_layers(family, scheme, params, message):
    model = FAMILIES[family].build()
    config, modules = model.config.to_dict(), [name for name, _ in model.named_modules()]
    with pytest.raises(PosSwapError, match=message):
        patch_model(model, scheme, layers=[1], **params)
    assert model.config.to_dict() == config
    assert [name for name, _ in model.named_modules()] == modules
