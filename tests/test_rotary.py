"""The rotary catalogue beyond the table of laws: longer grids, the length that switches, models already scaled, latent
attention, and what transformers itself gets wrong."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hf_posswap import PosSwapError, from_pretrained, patch_model, unpatch_model
from hf_posswap.anatomy import examine
from hf_posswap.planning.rotary import build

from . import oracles
from .families import FAMILIES, LENGTH, tokens
from .rows import LONGROPE, LONGROPE_PER_TYPE, STEPS, logits
from .test_oracles import GRID, llama


def rotary_of(model):
    return next(m for m in model.modules() if hasattr(m, "original_inv_freq") or hasattr(m, "layer_types"))


# --- numbers


@pytest.mark.parametrize(("dim", "theta", "length", "factor"), [g for g in GRID if g[2] == 2048])
def test_frozen_dynamic_is_dynamic_at_that_length(dim, theta, length, factor):
    frozen = patch_model(llama(dim, theta, length), "dynamic", factor=factor, freeze_at=5000)
    expected, _ = oracles.dynamic(dim, theta, factor=factor, length=length, seen=5000)
    np.testing.assert_allclose(frozen.model.rotary_emb.inv_freq.double().numpy(), expected, rtol=1e-6)
    assert frozen.config.rope_parameters.keys() == {"rope_type", "rope_theta"}
    assert frozen.config.max_position_embeddings == 5000


# --- longrope: two lists of factors


@pytest.mark.parametrize(("seen", "long"), [(31, False), (32, False), (33, True), (64, True)])
def test_longrope_switches_strictly_above_the_trained_length(seen, long):
    model = patch_model(FAMILIES["llama"].build(), "longrope", **LONGROPE, short_factor=[1.0] * 8)
    model.model.rotary_emb(torch.zeros(1, 1, 1), torch.arange(seen)[None])
    expected, _ = oracles.longrope(16, 1e4, factor=4, length=LENGTH, factors=STEPS if long else [1.0] * 8)
    np.testing.assert_allclose(model.model.rotary_emb.inv_freq.double().numpy(), expected, rtol=1e-6)


def greedy(model, ids, count: int, use_cache: bool) -> torch.Tensor:
    model.generation_config.eos_token_id = None
    return model.generate(ids, max_new_tokens=count, do_sample=False, use_cache=use_cache)


# 5.17: Phi-3 keeps the cache that it should drop, and a longrope of one layer type fails (refused here)
RIGHT_SINCE_523 = pytest.mark.skipif(not LONGROPE_PER_TYPE, reason="faults of older transformers")


@pytest.mark.parametrize(
    ("family", "params"),
    [
        ("llama", LONGROPE),
        pytest.param("gemma3", LONGROPE, marks=RIGHT_SINCE_523),
        pytest.param("phi3", LONGROPE | {"short_factor": [1.0] * 8, "factor": 3}, marks=RIGHT_SINCE_523),
    ],
)
def test_longrope_generates_across_the_trained_length_as_without_a_cache(family, params):
    model, ids = patch_model(FAMILIES[family].build(), "longrope", **params), tokens(1, LENGTH - 4)
    assert torch.equal(greedy(model, ids, 12, use_cache=True), greedy(model, ids, 12, use_cache=False))


def test_trained_length_is_written_where_every_reader_looks_and_taken_back(tmp_path):
    model = FAMILIES["llama"].build()
    model.save_pretrained(tmp_path)  # which itself adds to the config
    before = model.config.to_dict()
    patch_model(model, "longrope", **LONGROPE).save_pretrained(tmp_path)
    config = model.config
    assert (
        config.original_max_position_embeddings == config.rope_parameters["original_max_position_embeddings"] == LENGTH
    )
    assert config.max_position_embeddings == 4 * LENGTH
    loaded = from_pretrained(tmp_path)
    patch_model(loaded, "linear", factor=2)
    assert not hasattr(loaded.config, "original_max_position_embeddings")
    for patched in (model, loaded):
        assert unpatch_model(patched).config.to_dict().keys() == before.keys()
    assert model.config.to_dict() == before


def test_longrope_replaces_the_long_frequencies_of_a_native_one():
    """transformers keeps the long frequencies it once computed on the module: a second longrope must not see them."""
    model, ids, params = FAMILIES["phi3"].build(), tokens(1, 48), LONGROPE | {"long_factor": STEPS[::2] + (4.0,) * 4}
    before = logits(model, input_ids=ids)
    expected = logits(patch_model(FAMILIES["phi3"].build(), "longrope", **params), input_ids=ids)
    patch_model(model, "longrope", **params)
    assert torch.equal(logits(model, input_ids=ids), expected)
    assert torch.equal(logits(unpatch_model(model), input_ids=ids), before)


# --- models that carry a scaling from their makers

SCALED = ["llama_linear", "llama_dynamic", "llama31", "llama_yarn", "llama_longrope"]
CALLS = [
    ("linear", {"factor": 2}),
    ("ntk", {"factor": 2}),
    ("dynamic", {"factor": 2}),
    ("yarn", {"factor": 2}),
    ("ntk-by-parts", {"factor": 2}),
    ("llama3", {"factor": 2}),
    ("longrope", LONGROPE | {"factor": 2}),
    ("proportional", {"partial_rotary_factor": 0.5}),
    ("rope", {"rope_theta": 1e4}),
]


@pytest.mark.filterwarnings("ignore::hf_posswap.RecalibrationWarning")
@pytest.mark.parametrize("family", SCALED)
@pytest.mark.parametrize(("scheme", "params"), CALLS, ids=[c[0] for c in CALLS])
def test_a_scaled_model_is_patched_as_its_unscaled_original(family, scheme, params):
    if (family, scheme) == ("llama_linear", "linear"):
        params = {"factor": 3}
    try:
        plain = patch_model(FAMILIES["llama"].build(), scheme, **params)
    except PosSwapError:  # rope with the model's own theta: nothing to change on the un-scaled one
        plain = FAMILIES["llama"].build()
    scaled = patch_model(FAMILIES[family].build(), scheme, **params)
    assert scaled.config.rope_parameters == plain.config.rope_parameters
    assert scaled.config.max_position_embeddings == plain.config.max_position_embeddings
    ids = tokens(2, 60)
    assert torch.equal(logits(scaled, input_ids=ids), logits(plain, input_ids=ids))


# --- multi-head latent attention: cos and sin reach a part of each head, a second factor the softmax


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "deepseek_v3_yarn"])
@pytest.mark.parametrize(
    ("params", "of_rotation", "of_softmax"),
    [
        ({}, 1.0, 0.1 * math.log(8) + 1),
        ({"mscale": 0.7, "mscale_all_dim": 1.0}, None, 0.1 * math.log(8) + 1),
        ({"attention_factor": 1.0}, 1.0, 1.0),
    ],
)
def test_yarn_on_latent_attention_sets_both_factors(family, params, of_rotation, of_softmax):
    """YaRN eq. 15: the whole logit is multiplied by (0.1 ln s + 1)^2, not the rotated part of it alone."""
    model = patch_model(FAMILIES[family].build(), "yarn", factor=8, **params)
    of_rotation = of_rotation or (0.07 * math.log(8) + 1) / of_softmax
    assert rotary_of(model).attention_scaling == pytest.approx(of_rotation)
    for layer in model.model.layers:
        assert layer.self_attn.scaling == pytest.approx(32**-0.5 * of_softmax**2)
    expected, _ = oracles.ntk_by_parts(16, 1e4, factor=8, length=LENGTH)
    np.testing.assert_allclose(rotary_of(model).inv_freq.double().numpy(), expected, rtol=1e-6)


# --- pairing: an exact permutation of the weights


def permuted(model, to: str):
    """The model with the rows of its q and k (and their norms) in the order of the other pairing, one row at a time."""
    for layer in examine(model).layers()[1]:
        attention = layer.self_attn
        dim = attention.head_dim
        turned = int(dim * getattr(attention, "rotary_ndims", dim) / dim)
        for name in ("q_proj", "k_proj", "q_norm", "k_norm"):
            for parameter in getattr(attention, name, torch.nn.Identity()).parameters():
                old, rows = parameter.data.clone(), parameter.shape[0]
                for head in range(0, rows, dim):
                    for i in range(turned // 2):
                        for apart, side in ((head + i, 0), (head + i + turned // 2, 1)):
                            beside = head + 2 * i + side
                            new, source = (beside, apart) if to == "interleaved" else (apart, beside)
                            parameter.data[new] = old[source]
    return model


@pytest.mark.filterwarnings("ignore::hf_posswap.RecalibrationWarning")
@pytest.mark.parametrize(
    ("family", "pairing"),
    [
        ("llama", "interleaved"),
        ("qwen3", "interleaved"),
        ("phi", "interleaved"),
        ("qwen2_vl", "interleaved"),
        ("cohere", "halves"),
        ("llama4", "halves"),
    ],
)
def test_weights_of_the_other_pairing_give_the_same_logits(family, pairing):
    """Weights stored for the other pairing, on a model that turns its own: the patch makes them right, the identity."""
    ids = tokens(2, 24)
    expected = logits(FAMILIES[family].build(), input_ids=ids)
    foreign = permuted(FAMILIES[family].build(), pairing)
    assert (logits(foreign, input_ids=ids) - expected).abs().max() > 1e-3
    weights = [parameter.clone() for parameter in FAMILIES[family].build().parameters()]
    patch_model(foreign, "rope", pairing=pairing)
    assert torch.equal(logits(foreign, input_ids=ids), expected)
    assert all(torch.equal(a, b) for a, b in zip(foreign.parameters(), weights, strict=True))


# --- parameters per layer type


@pytest.mark.parametrize("family", ["gemma3", "olmo3", "modernbert"])
def test_only_full_attention_is_scaled_unless_asked(family):
    before = rotary_of(FAMILIES[family].build()).sliding_attention_inv_freq
    some = rotary_of(patch_model(FAMILIES[family].build(), "yarn", factor=4))
    both = rotary_of(
        patch_model(FAMILIES[family].build(), "yarn", factor=4, layer_types=["sliding_attention", "full_attention"])
    )
    assert torch.equal(some.sliding_attention_inv_freq, before)
    assert not torch.equal(both.sliding_attention_inv_freq, before)
    assert torch.equal(some.full_attention_inv_freq, both.full_attention_inv_freq)


# --- faults of transformers


def test_longrope_per_layer_type_is_refused_where_transformers_fails_at_it():
    model = FAMILIES["olmo3"].build()
    if LONGROPE_PER_TYPE:
        patch_model(model, "longrope", **LONGROPE)
        for _ in range(2):
            assert torch.isfinite(logits(model, input_ids=tokens(1, 48))).all()
    else:
        with pytest.raises(PosSwapError, match="fails at the second long input"):
            patch_model(model, "longrope", **LONGROPE)


def test_truncate_per_layer_type_is_refused_while_transformers_ignores_it():
    """5.23 looks for `truncate` beside the layer types. Where it reads it, the refusal falls and this number counts."""
    model = FAMILIES["gemma3"].build(max_position_embeddings=2048)
    theta = model.config.rope_parameters["full_attention"]["rope_theta"]
    config = patch_model(FAMILIES["gemma3"].build(max_position_embeddings=2048), "yarn", factor=4).config
    truncated = build(type(rotary_of(model)), config).full_attention_inv_freq
    config.rope_parameters["full_attention"]["truncate"] = False
    ignored = torch.equal(build(type(rotary_of(model)), config).full_attention_inv_freq, truncated)
    if ignored:
        with pytest.raises(PosSwapError, match="truncate=False"):
            patch_model(model, "yarn", factor=4, truncate=False)
        return
    expected, _ = oracles.yarn(16, theta, factor=4, length=2048, truncate=False)
    patched = patch_model(model, "yarn", factor=4, truncate=False)
    np.testing.assert_allclose(rotary_of(patched).full_attention_inv_freq.double().numpy(), expected, rtol=1e-6)


def test_dynamic_remembers_a_long_input_and_frozen_does_not():
    """transformers grows the frequencies at a long call and keeps them for the next, unless it is shorter than the
    trained length. Ours is theirs, so that a reload is equal; `freeze_at` has no memory."""

    def moved(model) -> float:
        rotary, x = model.model.rotary_emb, torch.zeros(1, 1, 1)
        first = rotary(x, torch.arange(LENGTH)[None])[0][0, 5]
        rotary(x, torch.arange(4 * LENGTH)[None])
        return (rotary(x, torch.arange(LENGTH)[None])[0][0, 5] - first).abs().max().item()

    assert moved(patch_model(FAMILIES["llama"].build(), "dynamic", factor=4)) > 0.1
    assert moved(patch_model(FAMILIES["llama"].build(), "dynamic", factor=4, freeze_at=4 * LENGTH)) == 0.0
