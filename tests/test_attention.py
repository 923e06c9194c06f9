"""What is particular to the attention site: oracles of its schemes, and law 13, that every backend carries them."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
import transformers

from hf_posswap import PosSwapError, patch_model, probe, unpatch_model
from hf_posswap.relative import alibi_slopes, exact_parts, spread

from . import oracles, oracles_bias
from .conftest import by_id
from .families import FAMILIES, LENGTH, tokens
from .rows import ATTENTION_ROWS, IMAGE_ROWS, Row, logits, moved
from .test_laws import close

pytestmark = pytest.mark.filterwarnings("ignore::hf_posswap.RecalibrationWarning")


def state_of(model) -> dict[str, np.ndarray]:
    """The learned numbers of a swap, of the first layer where each has its own."""
    named = {n.rpartition(".")[2]: p for n, p in reversed(list(model.named_parameters())) if ".posswap." in n}
    return {name: p.detach().double().numpy() for name, p in named.items()}


def attentions(model, ids) -> np.ndarray:
    with torch.no_grad():
        return model(ids, output_attentions=True).attentions[0][0].double().numpy()


# --- 3 oracle


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8, 12, 14, 16, 20, 32, 40, 48, 71, 112])
def test_slopes_of_the_paper_for_any_number_of_heads(heads):
    np.testing.assert_allclose(alibi_slopes(heads), oracles_bias.alibi_slopes(heads), rtol=1e-12)


BIASES = [
    ("alibi", {}),
    ("alibi", {"slopes": (0.5, 0.0, 1.0, 0.25)}),
    ("alibi", {"learnable": True}),
    ("t5", {}),
    ("t5", {"num_buckets": 16, "max_distance": 20, "per_layer": True}),
    ("kerple", {}),
    ("kerple", {"kernel": "power", "per_layer": False}),
    ("sandwich", {}),
    ("sandwich", {"dim": 16}),
    ("fire", {}),
    ("fire", {"init_L": 8, "mlp_width": 5}),
]


BIASES_OF = [("llama", *bias) for bias in BIASES] + [("bert", *bias) for bias in BIASES if bias[0] != "fire"]


@pytest.mark.parametrize(("family", "scheme", "params"), BIASES_OF, ids=str)
def test_bias_is_all_that_a_silent_query_sees(family, scheme, params):
    """With queries of zero the attention is the softmax of the bias alone."""
    model = FAMILIES[family].build(layers=1, attn_implementation="eager")
    for name, parameter in model.named_parameters():
        if "q_proj" in name or "query" in name:
            parameter.data.zero_()
    patch_model(model, scheme, **params)
    for name, parameter in model.named_parameters():
        if ".posswap." in name:  # away from where it starts
            parameter.data.add_(0.3 * torch.rand(parameter.shape, generator=torch.Generator().manual_seed(1)))
    causal = FAMILIES[family].causal
    reference = getattr(oracles_bias, scheme)
    if scheme == "alibi" and params.get("learnable"):
        params = {"slopes": state_of(model)["slopes"].tolist()}
    expected = oracles_bias.softmax(reference(4, 30, state=state_of(model), causal=causal, **params), causal)
    np.testing.assert_allclose(attentions(model, tokens(1, 30)), expected, atol=2e-6)


def heads_of(hidden: np.ndarray, weight: torch.Tensor, bias, dim: int) -> np.ndarray:
    projected = hidden @ weight.detach().double().numpy().T + (0 if bias is None else bias.detach().double().numpy())
    return projected.reshape(len(hidden), -1, dim).transpose(1, 0, 2)


@pytest.mark.parametrize(
    ("scheme", "params", "oracle", "pairing"),
    [
        ("rope", {}, oracles.rope, "halves"),
        ("rope", {"pairing": "interleaved"}, oracles.rope, "interleaved"),
        ("rope", {"rope_theta": 500.0}, lambda dim, _theta, **_: oracles.rope(dim, 500.0), "halves"),
        (
            "rope",
            {"partial_rotary_factor": 0.5},
            lambda *a, **_: oracles.partial(*a, partial_rotary_factor=0.5),
            "halves",
        ),
        ("linear", {"factor": 4}, oracles.linear, "halves"),
        ("ntk", {"factor": 4}, oracles.ntk, "halves"),
        ("yarn", {"factor": 4}, oracles.yarn, "halves"),
        ("llama3", {"factor": 4}, oracles.llama3, "halves"),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_rotation_on_a_model_that_had_none(scheme, params, oracle, pairing):
    """BERT's attention from its embeddings up, without its table, against complex arithmetic."""
    model, ids = FAMILIES["bert"].build(layers=1, attn_implementation="eager"), tokens(1, 20)
    patch_model(model, scheme, **params)
    attention = model.bert.encoder.layer[0].attention.self
    with torch.no_grad():
        hidden = model.bert.embeddings(ids)[0].double().numpy()
    q, k = (heads_of(hidden, m.weight, m.bias, 16) for m in (attention.query, attention.key))
    frequencies, scale = oracle(16, 1e4, factor=4, length=LENGTH)
    expected = [oracles_bias.softmax(oracles.scores(q[h], k[h], frequencies, scale, pairing), False) for h in range(4)]
    np.testing.assert_allclose(attentions(model, ids), expected, atol=2e-6)


@pytest.mark.parametrize("params", [{}, {"scale_base": 8}], ids=str)
def test_xpos(params):
    model, ids = FAMILIES["llama"].build(layers=1, attn_implementation="eager"), tokens(1, 20)
    patch_model(model, "xpos", **params)
    layer = model.model.layers[0]
    with torch.no_grad():
        hidden = layer.input_layernorm(model.model.embed_tokens(ids))[0].double().numpy()
    q, k = (heads_of(hidden, m.weight, None, 16) for m in (layer.self_attn.q_proj, layer.self_attn.k_proj))
    frequencies, base = oracles.rope(16, 1e4)[0], params.get("scale_base", 512)
    expected = [
        oracles_bias.softmax(oracles_bias.xpos_scores(q[h], k[h // 2], frequencies, base), True) for h in range(4)
    ]
    np.testing.assert_allclose(attentions(model, ids), expected, atol=2e-6)


@pytest.mark.parametrize("params", [{}, {"clip": False}, {"original_max_position_embeddings": 8}], ids=str)
def test_logn(params):
    """Every row of the logits (log-weights, up to a constant) is the model's own times log n / log L."""
    model, ids = FAMILIES["llama"].build(layers=1, attn_implementation="eager"), tokens(1, 48)
    before = np.log(np.maximum(attentions(model, ids), 1e-300))
    patch_model(model, "logn", **params)
    after = np.log(np.maximum(attentions(model, ids), 1e-300))
    length = params.get("original_max_position_embeddings", LENGTH)
    for i in range(48):
        growth = np.log(max(i + 1, 2)) / np.log(length)
        growth = growth if params.get("clip") is False else max(growth, 1.0)
        old, new = (x[:, i, : i + 1] - x[:, i, :1] for x in (before, after))
        np.testing.assert_allclose(new, old * growth, atol=2e-4)


# --- families with an attention of their own


REMADE = [
    ("bloom", {"learnable": True}),
    ("mpt", {"learnable": True}),
    ("falcon_alibi", {"slopes": tuple(s / 4 for s in oracles_bias.alibi_slopes(4))}),  # Falcon's, over sqrt(D)
]


@pytest.mark.parametrize(("family", "params"), REMADE, ids=str)
def test_native_alibi_made_again_is_the_unpatched_model(family, params):
    """The strongest oracle there is: transformers' own forward, padded, cached and on both backends."""
    model, ids = FAMILIES[family].build(), tokens(2, 20)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    real, batches = mask.bool(), [{"input_ids": ids}, {"input_ids": ids, "attention_mask": mask}]
    before = [logits(model, **batch) for batch in batches]
    patch_model(model, "alibi", **params)
    for backend in ("eager", "sdpa"):
        model.set_attn_implementation(backend)
        whole, padded = (logits(model, **batch) for batch in batches)
        close(whole, before[0])
        close(padded[real], before[1][real])


@pytest.mark.parametrize("family", ["bloom", "mpt"])
def test_native_alibi_of_six_heads(family):
    sizes = {"bloom": {"n_head": 6, "hidden_size": 96}, "mpt": {"n_heads": 6, "d_model": 96}}[family]
    model, ids = FAMILIES[family].build(**sizes), tokens(2, 20)
    before = logits(model, input_ids=ids)
    close(logits(patch_model(model, "alibi", learnable=True), input_ids=ids), before)


@pytest.mark.parametrize(
    "architecture", [{"new_decoder_architecture": True}, {"multi_query": True}, {"num_kv_heads": 4}], ids=str
)
def test_falcon_rotates_as_before_on_its_new_way(architecture):
    """logn changes nothing within the trained length: what is left is the way."""
    shapes = {"new_decoder_architecture": False, "multi_query": False} | architecture
    model, ids = FAMILIES["falcon"].build(**shapes), tokens(2, 20)
    before = logits(model, input_ids=ids)
    close(logits(patch_model(model, "logn"), input_ids=ids), before)


# --- computed once


@pytest.mark.parametrize("scheme", ["t5", "fire", "rope"])
def test_what_layers_share_is_computed_once_in_a_forward(scheme, monkeypatch):
    """Four layers, one computation; the next forward starts anew, and nothing is kept between the two."""
    from hf_posswap.attention import Attached
    from hf_posswap.rotation import Rotation

    model, ids = FAMILIES["gpt2"].build(layers=4), tokens(2, 20)
    counts = []
    for owner, name in ((Attached, "dense"), (Rotation, "tables")):
        plain = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, plain=plain, **k: counts.append(1) or plain(*a, **k))
    patch_model(model, scheme)
    for calls in (1, 2):
        logits(model, input_ids=ids)
        assert len(counts) == calls
    assert model.transformer.posswap.memo is None


# --- 13 backends


@by_id([row for row in ATTENTION_ROWS + IMAGE_ROWS if row.anatomy.fused])
def test_eager_equals_sdpa(row: Row):
    model, inputs = row.patched(), row.inputs()
    model.set_attn_implementation("sdpa")  # the families with an attention of their own start out on eager
    fused = logits(model, **inputs)
    model.set_attn_implementation("eager")
    close(logits(model, **inputs), fused)
    assert probe(model).ok
    model.set_attn_implementation("sdpa")
    assert torch.equal(logits(model, **inputs), fused)
    built_eager = row.patched(attn_implementation="eager")
    close(logits(built_eager, **inputs), fused)


FLEX = [row for row in ATTENTION_ROWS if row.flex]


@pytest.mark.parametrize(
    "row", [FLEX[0], *[pytest.param(row, marks=pytest.mark.long) for row in FLEX[1:]]], ids=lambda row: row.id
)
def test_flex_equals_sdpa(row: Row):
    """On 64 tokens: at some other lengths torch's FlexAttention is wrong on CPU, patched or not (NaN at 24)."""
    torch._dynamo.reset()
    model, ids = row.patched(), tokens(2, 64)
    expected = logits(model, input_ids=ids)
    model.set_attn_implementation("flex_attention")
    close(logits(model, input_ids=ids), expected)


@by_id([row for row in ATTENTION_ROWS if row.family == "llama"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_eager_pads_as_sdpa_does(row: Row, side: str):
    model, ids = row.patched(), tokens(2, 20)
    mask = (torch.arange(20) >= 6).long().repeat(2, 1)
    mask[1] = 1
    mask = mask if side == "left" else mask.flip(1)
    fused = logits(model, input_ids=ids, attention_mask=mask)
    model.set_attn_implementation("eager")
    eager = logits(model, input_ids=ids, attention_mask=mask)
    close(eager[mask.bool()], fused[mask.bool()])


@by_id([row for row in ATTENTION_ROWS if row.anatomy.causal])
def test_sliding_and_static_caches_in_chunks(row: Row):
    from transformers import StaticCache

    model, ids = row.patched(), tokens(2, row.length)
    full = logits(model, input_ids=ids)
    for sizes in ([7, 1, 1, 6, 1, 8], [20, 1, 3]):
        cache, chunks = StaticCache(config=model.config.get_text_config(), max_cache_len=row.length + 8), []
        with torch.no_grad():
            for chunk in ids[:, : sum(sizes)].split(sizes, dim=1):
                chunks.append(model(chunk, past_key_values=cache, use_cache=True).logits)
        close(torch.cat(chunks, 1), full[:, : sum(sizes)])


@pytest.mark.parametrize("implementation", ["flash_attention_2", "paged|eager", "nonsense", None])
def test_backend_that_cannot_carry_a_scheme_is_refused_later(implementation):
    model, ids = patch_model(FAMILIES["llama"].build(), "alibi"), tokens(1, 20)
    before = logits(model, input_ids=ids)
    for part in (model, model.model):
        with pytest.raises(PosSwapError, match=re.escape(f"attn_implementation={implementation!r} cannot carry alibi")):
            part.set_attn_implementation(implementation)
    assert torch.equal(logits(model, input_ids=ids), before)


def test_backend_that_cannot_carry_a_scheme_is_refused_at_once():
    model = FAMILIES["llama"].build()
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(PosSwapError, match=r"attn_implementation='flash_attention_2' cannot carry alibi; .*eager"):
        patch_model(model, "alibi")
    assert model.config._attn_implementation == "flash_attention_2"


def test_gpt2_that_computes_eager_attention_by_itself_is_refused_there():
    model = FAMILIES["gpt2"].build(attn_implementation="eager", reorder_and_upcast_attn=True)
    message = r"reorder_and_upcast_attn=True: on eager this model .* without alibi"
    with pytest.raises(PosSwapError, match=message):
        patch_model(model, "alibi")
    model.set_attn_implementation("sdpa")
    patch_model(model, "alibi")
    with pytest.raises(PosSwapError, match=message):
        model.set_attn_implementation("eager")


@pytest.fixture
def process_group():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("family", "scheme"), [("llama", "alibi"), ("llama", "t5"), ("gpt2", "rope"), ("bert", "alibi")]
)
def test_context_parallelism_is_refused_at_the_next_forward(family, scheme, process_group):
    """torch's own context manager, which accelerate opens around every step of a run with cp_size > 1."""
    from torch.distributed.tensor.experimental import context_parallel

    model, ids = patch_model(FAMILIES[family].build(), scheme), tokens(1, 20)
    before = logits(model, input_ids=ids)
    refused = pytest.raises(PosSwapError, match=r"context parallelism .* needs cp_size=1")
    with context_parallel(process_group, buffers=[ids], buffer_seq_dims=[1]), refused:
        logits(model, input_ids=ids)
    assert torch.equal(logits(model, input_ids=ids), before)


def test_weights_of_attention_are_not_asked_of_a_fused_backend():
    model = patch_model(FAMILIES["llama"].build(), "alibi")
    with pytest.raises(ValueError, match="output_attentions"):
        model.config.output_attentions = True


@pytest.mark.parametrize("family", ["llama", "bert", "bloom", "mpnet", "t5_encoder"])
def test_slopes_for_another_number_of_heads_are_refused(family):
    with pytest.raises(PosSwapError, match=r"slopes holds 3 numbers and this model has 4 heads"):
        patch_model(FAMILIES[family].build(), "alibi", slopes=(1.0, 0.5, 0.25))


@pytest.mark.parametrize("scheme", ["alibi", "t5", "fire"])
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_a_share_of_the_heads_is_refused(scheme, backend):
    """What tensor parallel leaves on one of two processes: half of the heads of every projection."""
    model, ids = patch_model(FAMILIES["llama"].build(attn_implementation=backend), scheme), tokens(1, 20)
    for layer in model.model.layers:
        attention = layer.self_attn
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj):
            linear.weight.data = linear.weight.data.chunk(2)[0]
        attention.o_proj.weight.data = attention.o_proj.weight.data.chunk(2, dim=1)[0]
    with pytest.raises(PosSwapError, match=r"bias is of 4 heads, and 2 are computed here"):
        logits(model, input_ids=ids)


@pytest.mark.parametrize("family", ["bloom", "mpt", "falcon", "falcon_alibi", "mpnet"])
def test_flex_attention_is_refused_where_the_mask_is_numbers(family):
    model, ids = patch_model(FAMILIES[family].build(), "t5"), tokens(1, 20)
    before = logits(model, input_ids=ids)
    with pytest.raises(PosSwapError, match=r"='flex_attention': .* computes a mask of numbers .* eager, sdpa"):
        model.set_attn_implementation("flex_attention")
    assert torch.equal(logits(model, input_ids=ids), before)


# --- 4 caches of other kinds


def decoded(model, ids, cache) -> torch.Tensor:
    with torch.no_grad():
        parts = [model(part, past_key_values=cache, use_cache=True).logits for part in ids.split([9, 1, 4, 6], 1)]
    return torch.cat(parts, 1)


@pytest.mark.parametrize("scheme", ["alibi", "t5", "xpos", "fire"])
@pytest.mark.parametrize("kind", ["DynamicCache", "StaticCache"])
@pytest.mark.skipif(not torch.cuda.is_available(), reason="transformers moves an offloaded cache on CUDA streams")
def test_offloaded_cache(scheme, kind):
    model, ids = patch_model(FAMILIES["llama"].build(), scheme).cuda(), tokens(2, 20).cuda()
    length = {"max_cache_len": 24} if kind == "StaticCache" else {}
    cache = getattr(transformers, kind)(config=model.config, offloading=True, **length)
    close(decoded(model, ids, cache), logits(model, input_ids=ids))


@pytest.mark.parametrize("scheme", ["alibi", "t5", "xpos", "fire"])
@pytest.mark.parametrize(("backend", "module", "bits"), [("quanto", "optimum.quanto", 4), ("hqq", "hqq", 8)])
def test_quantised_cache(scheme, backend, module, bits):
    """Keys are rounded: a swapped model's decode strays from its full forward no further than an un-patched one's."""
    pytest.importorskip(module, reason=f"{module} is not installed")
    strayed, ids = [], tokens(2, 20)
    for model in (FAMILIES["llama"].build(), moved(patch_model(FAMILIES["llama"].build(), scheme))):
        cache = transformers.QuantizedCache(
            backend, config=model.config, nbits=bits, q_group_size=16, residual_length=4
        )
        strayed.append((decoded(model, ids, cache) - logits(model, input_ids=ids)).abs().max())
    assert 0 < strayed[1] < 1.5 * strayed[0]


@pytest.mark.parametrize("scheme", ["alibi", "t5", "xpos", "fire"])
def test_cache_that_stores_keys_rounded_and_moved(scheme):
    """Layers as the quantised and the offloaded cache have them: what is read is not the tensor that was written."""

    class Stored(transformers.cache_utils.DynamicLayer):
        def update(self, key, value, *args, **kwargs):
            whole = super().update(key, value, *args, **kwargs)
            self.keys, self.values = (t.bfloat16() for t in whole)
            return tuple(t.float() for t in whole)

        def lazy_initialization(self, *args, **kwargs):
            super().lazy_initialization(*args, **kwargs)
            self.keys, self.values = self.keys.bfloat16(), self.values.bfloat16()

    model, ids = patch_model(FAMILIES["llama"].build(), scheme), tokens(2, 20)
    cache = transformers.Cache(layer_class_to_replicate=Stored)
    full, silent = logits(model, input_ids=ids), patch_model(FAMILIES["llama"].build(), "nope")
    assert (decoded(model, ids, cache) - full).abs().max() < 0.1 * (full - logits(silent, input_ids=ids)).abs().max()


@by_id([row for row in ATTENTION_ROWS if row.family in ("llama", "bloom", "gpt2")])
def test_left_padded_generation_equals_generation_alone(row: Row):
    model, ids = row.patched(), tokens(1, 9)
    model.generation_config.eos_token_id = None
    alone = model.generate(ids, max_new_tokens=6, do_sample=False)[:, 9:]
    padded = torch.cat([torch.cat([torch.full((1, 5), 1), ids], 1), tokens(1, 14, seed=3)])
    mask = torch.ones_like(padded)
    mask[0, :5] = 0
    together = model.generate(padded, attention_mask=mask, max_new_tokens=6, do_sample=False)[:1, 14:]
    assert torch.equal(together, alone)


def test_config_written_past_the_model_stops_the_next_forward():
    model, ids = patch_model(FAMILIES["llama"].build(), "alibi"), tokens(1, 20)
    model.config._attn_implementation = "sdpa"
    with pytest.raises(
        PosSwapError, match=r"config\._attn_implementation='sdpa' .* use model\.set_attn_implementation"
    ):
        logits(model, input_ids=ids)
    assert not probe_faults_empty(model)


def probe_faults_empty(model) -> bool:
    from hf_posswap.probing import _attention_faults

    return not list(_attention_faults(model))


def test_choice_of_backend_survives_an_undo():
    model, ids = FAMILIES["llama"].build(), tokens(1, 20)
    model.set_attn_implementation("eager")
    before = logits(model, input_ids=ids)
    model.set_attn_implementation("sdpa")
    patch_model(model, "alibi").set_attn_implementation("eager")
    unpatch_model(model)
    assert model.config._attn_implementation == "eager"
    assert torch.equal(logits(model, input_ids=ids), before)


# --- 10 precision


@by_id([row for row in ATTENTION_ROWS if row.family in ("llama", "bert")])
@pytest.mark.parametrize("cast", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.bfloat16().float()])
def test_what_is_attached_stays_float32(row: Row, cast):
    model = row.patched()

    def numbers(model):
        for module in model.modules():
            if type(module).__name__ == "Attached":
                yield from (*module.parameters(), *module.constants.values())
                if module.rotation is not None:
                    yield module.rotation.frequencies

    before = [t.clone() for t in numbers(model)]
    cast(model)
    for old, new in zip(before, numbers(model), strict=True):
        assert new.dtype == torch.float32
        assert torch.equal(old, new)


def test_exact_parts_add_up():
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 100
    for dtype, count in ((torch.float32, 1), (torch.bfloat16, 3)):
        parts = exact_parts(values, dtype, count)
        assert all(p.dtype == dtype for p in parts)
        assert torch.equal(sum(p.double() for p in parts).float(), values)
    places = torch.arange(32768).float()[:, None]
    assert torch.equal(sum(p.double() for p in exact_parts(places, torch.bfloat16, 2)), places.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_bias_of_far_keys_is_exact_in_extra_dimensions(dtype):
    """The products of the dimensions alone, for 100000 keys: beyond float16's range and two parts of bfloat16."""
    from hf_posswap.attention import Attached
    from hf_posswap.schemes.alibi import Alibi
    from hf_posswap.sites import BiasGeometry

    count = 100_000
    query, key = torch.zeros(1, 6, 1, 8, dtype=dtype), torch.zeros(1, 1, count, 8, dtype=dtype)
    columns, rows, _ = Attached(Alibi().bias(BiasGeometry(6, count, True))).extended(query, key, key, 8**-0.5)
    bias = (columns[0, :, 0].double() @ rows[0, 0].double().T) * 8**-0.5
    expected = torch.tensor(oracles_bias.alibi_slopes(6), dtype=torch.float64)[:, None] * torch.arange(count)
    torch.testing.assert_close(bias, expected, rtol=2e-7, atol=0)


@pytest.mark.parametrize("family", ["llama", "bloom", "bert", "mpnet"])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_row_of_padding_alone_stays_finite(family, backend, dtype):
    model = patch_model(FAMILIES[family].build(), "alibi", slopes=(8.0, 4.0, 2.0, 1.0)).to(dtype)
    model.set_attn_implementation(backend)
    ids, mask = tokens(2, 20), torch.ones(2, 20, dtype=torch.long)
    mask[0] = 0
    assert torch.isfinite(logits(model, input_ids=ids, attention_mask=mask)).all()


def test_spread():
    assert spread(torch.arange(6)[None], 3, 4).tolist() == [[[2, 3, 4, 5], [1, 2, 3, 4], [0, 1, 2, 3]]]


@pytest.mark.parametrize("length", [300, 1500])
def test_fast_path_in_bf16_is_exact_to_the_rounding_of_the_scores(length):
    """Attention in bf16 with the bias in extra dimensions, against float64 with the dense bias on the same q, k, v."""
    from hf_posswap.attention import Attached
    from hf_posswap.schemes.alibi import Alibi
    from hf_posswap.sites import BiasGeometry

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4, length, 32, generator=generator).bfloat16() for _ in range(3))
    attached = Attached(Alibi().bias(BiasGeometry(4, length, True)))
    scale = 32**-0.5
    run = torch.nn.functional.scaled_dot_product_attention
    fast = run(*attached.extended(q, k, v, scale), scale=scale, is_causal=True)[..., :32]
    bias = torch.tensor(oracles_bias.alibi(4, length))
    bias = bias.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    expected = run(q.double(), k.double(), v.double(), attn_mask=bias, scale=scale)
    plain = run(q, k, v, scale=scale, is_causal=True)
    rounding = (plain.double() - run(q.double(), k.double(), v.double(), scale=scale, is_causal=True)).abs().max()
    assert (fast.double() - expected).abs().max() <= 2 * rounding
