"""T5 whole: its encoder sees both ways, its decoder what precedes, and cross-attention has no distances."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from hf_posswap import PosSwapError, describe, from_pretrained, patch_model, probe, unpatch_model

from . import oracles_bias
from .families import HEADS, LENGTH, PAD, VOCAB, WIDTH, tokens
from .test_laws import close

pytestmark = pytest.mark.filterwarnings("ignore::hf_posswap.RecalibrationWarning")

SCHEMES = [
    ("nope", {}),
    ("alibi", {}),
    ("alibi", {"learnable": True}),
    ("t5", {}),
    ("t5", {"num_buckets": 16, "per_layer": True}),
    ("kerple", {}),
    ("sandwich", {"dim": 32}),
    ("rope", {}),
    ("yarn", {"factor": 4}),
]
every_scheme = pytest.mark.parametrize(("scheme", "params"), SCHEMES, ids=str)


def build(layers: int = 2, **overrides) -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "d_model": WIDTH, "d_kv": 16, "d_ff": 96, "num_heads": HEADS, "num_layers": layers}
    special = {"pad_token_id": PAD, "decoder_start_token_id": 0, "eos_token_id": None} | overrides
    model = T5ForConditionalGeneration(T5Config(**sizes, **special, dropout_rate=0.0, n_positions=LENGTH)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(2.0)
    return model


def run(model, source=None, target=None, **inputs) -> torch.Tensor:
    source, target = tokens(2, 20) if source is None else source, tokens(2, 14, seed=1) if target is None else target
    with torch.no_grad():
        return model(input_ids=source, decoder_input_ids=target, **inputs).logits


@every_scheme
def test_effect_backends_and_undo(scheme, params):
    model = build()
    before, config = run(model), model.config.to_dict()
    after = run(patch_model(model, scheme, **params))
    assert (after - before).abs().max() > 1e-3
    assert probe(model).ok
    model.set_attn_implementation("eager")
    close(run(model), after)
    model.set_attn_implementation("sdpa")
    assert torch.equal(run(unpatch_model(model)), before)
    assert model.config.to_dict() == config


@every_scheme
def test_decode_with_cache_equals_forward(scheme, params):
    model, target = patch_model(build(), scheme, **params), tokens(2, 14, seed=1)
    full, cache, steps = run(model), None, []
    with torch.no_grad():
        encoded = model.encoder(tokens(2, 20))
        for sizes in ([1] * 14, [5, 1, 4, 3, 1]):
            cache, steps = None, []
            for chunk in target.split(sizes, dim=1):
                out = model(encoder_outputs=encoded, decoder_input_ids=chunk, past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                steps.append(out.logits)
            close(torch.cat(steps, 1), full)


@pytest.mark.parametrize("beams", [1, 3])
def test_generation_does_not_depend_on_the_cache(beams):
    model = patch_model(build(), "t5")
    found = [model.generate(tokens(2, 20), max_new_tokens=8, num_beams=beams, use_cache=c) for c in (True, False)]
    assert torch.equal(*found)


@every_scheme
def test_padded_source_equals_source_alone(scheme, params):
    model, source, target = patch_model(build(), scheme, **params), tokens(1, 12), tokens(1, 9, seed=1)
    alone = run(model, source, target)
    for padding in ((5, 0), (0, 5)):
        padded = torch.nn.functional.pad(source, padding, value=PAD)
        mask = torch.nn.functional.pad(torch.ones_like(source), padding)
        close(run(model, padded, target, attention_mask=mask), alone)


@pytest.mark.parametrize(
    ("scheme", "params"), [("alibi", {}), ("t5", {}), ("t5", {"num_buckets": 16, "max_distance": 20}), ("kerple", {})]
)
def test_each_stack_has_its_own_direction(scheme, params):
    """With queries of zero a layer's attention is the softmax of its bias: both ways above, one way below."""
    model = build(layers=1, attn_implementation="eager")
    for name, parameter in model.named_parameters():
        if name.endswith("Attention.q.weight"):
            parameter.data.zero_()
    patch_model(model, scheme, **params)
    for name, parameter in model.named_parameters():
        if ".posswap." in name:
            parameter.data.add_(0.3 * torch.rand(parameter.shape, generator=torch.Generator().manual_seed(1)))
    seen = {}  # transformers 5.17 returns no weights of T5
    for stack in (model.encoder, model.decoder):
        attention = stack.block[0].layer[0].SelfAttention
        attention.register_forward_hook(lambda _m, _a, out, stack=stack: seen.update({stack: out[-1]}))
    run(model, tokens(1, 30), tokens(1, 30, seed=1))
    for stack, causal in ((model.encoder, False), (model.decoder, True)):
        named = {n.rpartition(".")[2]: p for n, p in stack.named_parameters() if ".posswap" in f".{n}"}
        state = {name: p.detach().double().numpy() for name, p in named.items()}
        bias = getattr(oracles_bias, scheme)(HEADS, 30, state=state, causal=causal, **params)
        expected = oracles_bias.softmax(bias, causal)
        np.testing.assert_allclose(seen[stack][0].double().numpy(), expected, atol=2e-6)


def test_cross_attention_keeps_no_order():
    """Under nope the encoder cannot tell order, and neither can a decoder that looks at it."""
    model, source = patch_model(build(), "nope"), tokens(2, 20)
    close(run(model, source.flip(1)), run(model, source))
    patch_model(model, "alibi")
    assert (run(model, source.roll(7, 1)) - run(model, source)).abs().max() > 1e-3  # symmetric: a flip stays unseen


@pytest.mark.parametrize(("scheme", "params"), [("t5", {}), ("kerple", {}), ("yarn", {"factor": 4})])
def test_round_trip(scheme, params, tmp_path):
    model = patch_model(build(), scheme, **params)
    for name, parameter in model.named_parameters():
        if ".posswap." in name:
            parameter.data.add_(0.1)
    model.save_pretrained(tmp_path)
    again = from_pretrained(tmp_path)
    assert torch.equal(run(again), run(model))
    assert str(describe(again)) == str(describe(model))


@pytest.mark.parametrize(
    ("scheme", "params", "message"),
    [
        ("fire", {}, r"fire: it divides by how far a causal query can look, and this model is not causal"),
        ("xpos", {}, r"xpos: keys that follow would grow with distance"),
        ("logn", {}, r"logn: the tokens that a query sees are counted"),
        ("alibi", {"layers": [0]}, r"share one bias"),
        ("alibi", {"slopes": (1.0, 0.5)}, r"slopes holds 2 numbers and this model has 4 heads"),
    ],
)
def test_refusals(scheme, params, message):
    model = build()
    before = run(model)
    with pytest.raises(PosSwapError, match=message):
        patch_model(model, scheme, **params)
    assert torch.equal(run(model), before)


def test_gradients_reach_both_stacks():
    model = patch_model(build(), "t5").train()
    model(input_ids=tokens(2, 20), labels=tokens(2, 14, seed=1)).loss.backward()
    for stack in (model.encoder, model.decoder):
        assert stack.posswap.buckets.grad.abs().max() > 0
