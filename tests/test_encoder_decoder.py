"""T5 and BART whole: the encoder sees both ways, the decoder what precedes, and cross-attention has no distances."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration, T5Config, T5ForConditionalGeneration

from hf_posswap import PosSwapError, describe, from_pretrained, patch_model, probe, unpatch_model

from . import oracles_bias
from .families import FAMILIES, HEADS, LENGTH, PAD, VOCAB, WIDTH, tokens
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


# --- one stack


def bart(**overrides) -> BartForConditionalGeneration:
    torch.manual_seed(0)
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96}
    heads = {"encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS}
    special = {"pad_token_id": PAD, "bos_token_id": 2, "eos_token_id": 2, "decoder_start_token_id": 2}
    sizes = {"vocab_size": VOCAB, "d_model": WIDTH, "max_position_embeddings": LENGTH, "init_std": 0.2}
    return BartForConditionalGeneration(BartConfig(**layers, **heads, **special, **sizes, dropout=0.0)).eval()


def states(model, source=None) -> tuple[torch.Tensor, torch.Tensor]:
    """What the encoder makes of a text, and the decoder of another beside fixed states of an encoder."""
    fixed = torch.randn(2, 20, WIDTH, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        encoded = model.get_encoder()(tokens(2, 20) if source is None else source).last_hidden_state
        target = tokens(2, 14, seed=1)
        decoded = model.get_decoder()(target, encoder_hidden_states=fixed).last_hidden_state
    return encoded, decoded


ONE_STACK = [
    (bart, "nope", {}),
    (bart, "alibi", {}),
    (bart, "rope", {}),
    (bart, "sinusoidal", {}),
    (build, "nope", {}),
    (build, "alibi", {}),
    (build, "t5", {}),
]


@pytest.mark.parametrize(("make", "scheme", "params"), ONE_STACK)
@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_one_stack_takes_it_and_the_other_keeps_what_it_has(make, scheme, params, stack, tmp_path):
    model = make()
    config, names, before = model.config.to_dict(), list(model.state_dict()), states(model)
    patch_model(model, scheme, stack=stack, **params)
    after, described = states(model), str(describe(model))
    touched, left = (0, 1) if stack == "encoder" else (1, 0)
    assert (after[touched] - before[touched]).abs().max() > 1e-3
    assert torch.equal(after[left], before[left])
    assert probe(model).ok
    assert str(describe(patch_model(model, scheme, stack=stack, **params))) == described
    model.save_pretrained(tmp_path)
    again = from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(states(again), after, strict=True))
    assert str(describe(again)) == described
    unpatch_model(model)
    assert all(torch.equal(a, b) for a, b in zip(states(model), before, strict=True))
    assert list(model.state_dict()) == names
    assert {k: v for k, v in model.config.to_dict().items() if k not in ("architectures", "dtype")} == {
        k: v for k, v in config.items() if k not in ("architectures", "dtype")
    }


def test_both_stacks_are_described_and_both_is_no_choice():
    model = bart()
    lines = [line for line in str(describe(model)).splitlines() if "embed" in line]
    assert [line.split(":")[0].split()[-1] for line in lines] == ["encoder", "decoder"]
    whole, named = patch_model(bart(), "nope"), patch_model(bart(), "nope", stack="both")
    assert all(torch.equal(a, b) for a, b in zip(states(whole), states(named), strict=True))
    assert "stack" not in named.config.posswap


def test_a_decoder_alone_takes_what_is_for_causal_models():
    model = bart()
    before = states(model)
    with pytest.raises(PosSwapError, match="for causal models"):
        patch_model(model, "xpos", scale_base=16)
    patch_model(model, "xpos", stack="decoder", scale_base=16)
    after = states(model)
    assert torch.equal(after[0], before[0])
    assert (after[1] - before[1]).abs().max() > 1e-4


def test_longer_tables_in_both_stacks():
    model = patch_model(bart(), "learned", max_positions=80)
    assert torch.isfinite(run(model, tokens(2, 70), tokens(2, 60, seed=1))).all()


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (bart, {"scheme": "nope", "stack": "both sides"}, r"stack='both sides' is unknown; did you mean 'both'"),
        (bart, {"scheme": "nope", "stack": "encode"}, r"did you mean 'encoder'"),
        (
            bart,
            {"scheme": "learned", "max_positions": 80, "stack": "encoder"},
            r"one config key says the length of both",
        ),
        (
            bart,
            {"scheme": "sinusoidal", "combine": "concat"},
            r"combine='concat' is for models of one table of positions",
        ),
        (
            FAMILIES["llama"].build,
            {"scheme": "nope", "stack": "decoder"},
            r"LlamaForCausalLM has one stack; leave it out",
        ),
    ],
)
def test_stacks_that_make_no_sense(make, arguments, message):
    model = make()
    before = model.config.to_dict()
    with pytest.raises(PosSwapError, match=message):
        patch_model(model, **arguments)
    assert model.config.to_dict() == before
