"""A rotation fitted to a table of positions: what it turns, what it keeps, and what it cannot be fitted to."""

from __future__ import annotations

import copy
import math
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from hf_posswap import PosSwapError, describe, fitting_rotation, patch_model
from hf_posswap.anatomy import examine
from hf_posswap.patching import carries
from hf_posswap.profile import Profile
from hf_posswap.schemes.rope import Rope

from .families import FAMILIES, LENGTH, VOCAB, pixels, tokens, with_page
from .rows import logits
from .small import gpt2
from .test_fit import loss, train

pytestmark = pytest.mark.filterwarnings("ignore::hf_posswap.RecalibrationWarning")

TEXT = [tokens(3, LENGTH), tokens(2, 24, seed=1)]
HEAD, HEADS, PAIRS = 16, 4, 3
PARAMS = {"partial_rotary_factor": 2 * PAIRS / HEAD, "rope_theta": 500.0}
FREQUENCIES = np.array([500.0 ** (-2 * i / HEAD) for i in range(PAIRS)])


def multi_query() -> torch.nn.Module:
    """One key for all heads, in one layer with queries and values."""
    torch.manual_seed(0)
    config = transformers.GPTBigCodeConfig(
        vocab_size=VOCAB, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=HEADS, multi_query=True, pad_token_id=1
    )
    return transformers.GPTBigCodeForCausalLM(config).eval()


SOURCES = {name: FAMILIES[name].build for name in ("bert", "distilbert", "roberta", "xlm", "gpt2", "opt")}
SOURCES["gpt_bigcode"] = multi_query


@torch.no_grad()
def attention(model) -> torch.Tensor:
    """What the first layer's heads look at, (B, H, S, S)."""
    model.set_attn_implementation("eager")
    return model(tokens(2, LENGTH, seed=5), output_attentions=True).attentions[0]


QUERIES = ("query", "q_lin", "q_proj", "c_attn")


def rows_of(model) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(weight, bias) of the queries and of the keys of the first layer: views, outputs first."""
    module = next(m for m in model.modules() if any(hasattr(m, name) for name in QUERIES))
    if hasattr(module, "c_attn"):
        layer = module.c_attn
        weight = layer.weight.T if isinstance(layer, transformers.pytorch_utils.Conv1D) else layer.weight
        keys = 64 if len(weight) == 192 else HEAD
        q, k = slice(0, 64), slice(64, 64 + keys)
        return weight[q], layer.bias[q], weight[k], layer.bias[k]
    q = next(getattr(module, name) for name in QUERIES if hasattr(module, name))
    k = next(getattr(module, name) for name in ("key", "k_lin", "k_proj") if hasattr(module, name))
    return q.weight, q.bias, k.weight, k.bias


@torch.no_grad()
@pytest.mark.parametrize("family", SOURCES)
def test_a_table_of_waves_is_fitted_to_the_model_itself(family, monkeypatch):
    """Where nothing is asked of them beyond the text.

    Vectors of positions (cos, sin, -cos, -sin) keep their norm and mean, so that a norm before attention scales them
    alike; queries and keys that read nothing else make the waves that a rotation makes. Attention is then as it was.
    """
    monkeypatch.setattr(fitting_rotation, "BEYOND", 0.0)
    model = SOURCES[family]()
    table = examine(model).table
    count = 2 * PAIRS
    place = torch.arange(len(table.weight))[:, None] * torch.tensor(FREQUENCIES)
    wave = torch.stack([place.cos(), place.sin()], -1).flatten(1).float()
    table.weight.zero_()
    table.weight[:, : 2 * count] = torch.cat([wave, -wave], 1)
    words = model.get_input_embeddings().weight
    words.zero_()
    words[:, 2 * count : -1 : 2] = torch.randn(words[:, 2 * count : -1 : 2].shape).sign()
    words[:, 2 * count + 1 :: 2] = -words[:, 2 * count : -1 : 2]
    for extra in (getattr(m, "token_type_embeddings", None) for m in model.modules()):
        if extra is not None:
            extra.weight.zero_()
    generator = torch.Generator().manual_seed(1)
    query_weight, query_bias, key_weight, key_bias = rows_of(model)
    for tensor in (query_weight, query_bias, key_weight, key_bias):
        tensor.zero_()
    for weight in (query_weight, key_weight):
        for head in weight.split(HEAD):
            for pair in range(
                PAIRS
            ):  # a rotation and a scale of the pair, which is a phase and an amplitude of the wave
                angle, size = torch.rand(2, generator=generator).tolist()
                c, s = (1 + size) * math.cos(6 * angle), (1 + size) * math.sin(6 * angle)
                turn = torch.tensor([[c, -s], [s, c]])
                head[2 * pair : 2 * pair + 2, 2 * pair : 2 * pair + 2] = turn
    before = attention(model)
    assert (before - attention(patch_model(SOURCES[family](), "nope"))).abs().max() > 0.1
    patch_model(model, "rope", **PARAMS, fit=TEXT)
    torch.testing.assert_close(attention(model), before, rtol=2e-3, atol=2e-4)
    first, *_ = describe(model).fit.explained.values()
    assert min(first) > 0.999


@pytest.mark.parametrize("causal", [True, False])
def test_waves_stay_level_where_no_text_was(causal, monkeypatch):
    """A bump of 6 near 0, by 12 waves: what they do from the longest distance to four times it, and before."""
    distance = torch.arange(-40, 1 if causal else 41)
    mean = 6 * torch.exp(-distance.abs() / 4.0).double()[None]
    even = torch.ones_like(mean)

    def fitted(beyond: float) -> tuple[float, float]:
        monkeypatch.setattr(fitting_rotation, "BEYOND", beyond)
        waves = fitting_rotation.Waves.fitted(Profile(distance, mean, even, even), 60.0 ** (-torch.arange(12) / 12))
        return waves.at(torch.arange(-160, -40)).std().item(), (waves.at(distance) - mean).std().item()

    (level, still_near), (free, near) = fitted(fitting_rotation.BEYOND), fitted(0.0)
    assert near < still_near < 0.5
    assert level < 0.8 < 1.2 < free


@torch.no_grad()
@pytest.mark.parametrize("family", SOURCES)
def test_contents_that_leave_room_are_kept_whole(family):
    """Queries and keys of fewer dimensions than stay, and hardly a position: attention is that without any.

    Of text whose rows repeat one token, the means at all positions are equal to rounding: there is no wave to fit.
    """
    model, other = (SOURCES[family]() for _ in range(2))
    for one in (model, other):
        examine(one).table.weight.mul_(1e-6)
        generator = torch.Generator().manual_seed(2)
        query_weight, query_bias, key_weight, key_bias = rows_of(one)
        room = HEAD - 2 * PAIRS
        for weight, bias in ((query_weight, query_bias), (key_weight, key_bias)):
            for rows, numbers in zip(weight.split(HEAD), bias.split(HEAD), strict=True):
                mix = torch.randn(HEAD, room, generator=generator)
                inner = torch.randn(room, rows.shape[1] + 1, generator=generator) / 4
                rows.copy_(mix @ inner[:, :-1])
                numbers.copy_(mix @ inner[:, -1])
    expected = attention(patch_model(other, "nope"))
    assert expected.std() > 1e-2
    before = rows_of(model)[0].clone()
    patch_model(model, "rope", **PARAMS, fit=[torch.arange(2, VOCAB)[:, None].expand(-1, LENGTH)])
    assert not torch.equal(rows_of(model)[0], before)
    torch.testing.assert_close(attention(model), expected, rtol=1e-3, atol=1e-4)


def test_what_is_not_given_is_chosen_and_recorded():
    model = patch_model(FAMILIES["bert"].build(), "rope", fit=TEXT)
    given = model.config.posswap["params"]
    assert given.keys() == {"partial_rotary_factor", "rope_theta"}
    assert 0 < given["partial_rotary_factor"] < 1
    half = patch_model(FAMILIES["bert"].build(), "rope", partial_rotary_factor=0.5, fit=TEXT)
    assert half.config.posswap["params"]["partial_rotary_factor"] == 0.5
    slow = patch_model(FAMILIES["bert"].build(), "rope", rope_theta=1e6, fit=TEXT)
    assert slow.config.posswap["params"]["rope_theta"] == 1e6


def test_the_same_swap_once_more_is_the_one_that_is_there():
    """Also of a checkpoint, which a run that is resumed with the same command finds."""
    model = patch_model(FAMILIES["bert"].build(), "rope", fit=TEXT)
    before = logits(model, input_ids=TEXT[0])
    assert carries(model, Rope(), None)
    assert not carries(model, Rope(rope_theta=3e4), None)
    assert torch.equal(logits(patch_model(model, "rope"), input_ids=TEXT[0]), before)
    assert not torch.equal(logits(patch_model(model, "rope", rope_theta=3e4), input_ids=TEXT[0]), before)


@pytest.mark.parametrize("pairing", ["halves", "interleaved"])
def test_either_pairing_says_the_same(pairing):
    model = patch_model(FAMILIES["gpt2"].build(), "rope", **PARAMS, pairing=pairing, fit=TEXT)
    other = patch_model(FAMILIES["gpt2"].build(), "rope", **PARAMS, fit=TEXT)
    ids = tokens(2, LENGTH)
    torch.testing.assert_close(logits(model, input_ids=ids), logits(other, input_ids=ids), rtol=1e-4, atol=1e-5)


def test_in_bfloat16_it_is_near_that_in_float32():
    full = patch_model(FAMILIES["bert"].build(), "rope", **PARAMS, fit=TEXT)
    half = patch_model(FAMILIES["bert"].build().to(torch.bfloat16), "rope", **PARAMS, fit=TEXT)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    for name, share in describe(full).fit.explained.items():
        assert describe(half).fit.explained[name] == pytest.approx(share, abs=0.02)


@pytest.mark.long
def test_it_is_better_than_cold_before_any_step():
    """On a GPT-2 that has learned what its table is for: it loses what it knows of order without it."""
    library = Path(sysconfig.get_paths()["stdlib"])
    text = torch.tensor(
        list(b"".join((library / name).read_bytes() for name in ("argparse.py", "typing.py", "inspect.py")))
    )
    model = gpt2(n_embd=64, n_head=4, n_layer=2, n_positions=64, initializer_range=64**-0.5)
    train(model, text[:-16_384], 900, 64)
    rows, held_out = text[:64_000].reshape(-1, 64)[::10], text[-16_384:].reshape(-1, 64)
    models = {
        name: patch_model(copy.deepcopy(model), scheme, **params)
        for name, scheme, params in (
            ("cold", "rope", {}),
            ("nope", "nope", {}),
            ("fit", "rope", {"fit": rows.split(8)}),
        )
    }
    losses, base = {name: loss(one, held_out) for name, one in models.items()}, loss(model, held_out)
    lost = min(losses["cold"], losses["nope"]) - base
    assert lost > 0.5
    assert losses["fit"] < base + lost / 2
    twice = held_out.reshape(-1, 128)
    assert loss(models["fit"], twice) < losses["fit"] + 0.1 < loss(models["cold"], twice)


@pytest.mark.parametrize("keys", [False, True])
def test_layers_that_are_one_are_refused(keys):
    """Queries of two layers, or queries and keys of one: the rows would have to hold two things."""
    model = FAMILIES["bert"].build()
    first, second = (layer.attention.self for layer in model.bert.encoder.layer)
    setattr(first, "key" if keys else "query", first.query if keys else second.query)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(PosSwapError, match="are not rows of a linear layer of their own"):
        patch_model(model, "rope", fit=TEXT)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


REFUSED = [
    ("bert", {"partial_rotary_factor": 1.0}, "these are all; give a smaller share, or none"),
    ("llama", {"rope_theta": 2e4}, "text chooses it where it takes the place of a table of positions"),
    ("squeezebert", {}, "those of SqueezeBertSelfAttention are not rows of a linear layer of their own"),
    ("layoutlmv2", {}, "into the bias of the layers that make queries and keys, and Linear has none"),
    ("t5_encoder", {}, "to a table of positions of text, and .* has none"),
    ("vit", {"ndim": 1}, "has images"),
]


@pytest.mark.parametrize(("family", "params", "says"), REFUSED)
def test_what_cannot_be_turned_is_refused_and_the_model_is_as_it_was(family, params, says):
    model = FAMILIES[family].build()
    before = copy.deepcopy(model.state_dict())
    text = [pixels(32)] if family == "vit" else [with_page(model, {"input_ids": tokens(2, 20)})]
    with pytest.raises(PosSwapError, match=says):
        patch_model(model, "rope", **params, fit=text)
    assert "posswap" not in model.config.to_dict()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
