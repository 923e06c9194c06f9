"""Law 3: the installed numbers equal an independent float64 reference reached by another route."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hf_posswap import patch_model
from hf_posswap.anatomy import examine

from . import oracles
from .conftest import by_id
from .families import FAMILIES, LENGTH, WIDTH, pixels, tokens
from .rows import ADDED_ROWS, CONCAT_ROWS, ROTARY_ROWS, ROWS, STEPS, Row, logits

GRID = [
    (dim, theta, length, factor)
    for dim in (32, 64, 80, 96, 128)
    for theta in (1e4, 5e5, 1e6)
    for length in (2048, 8192)
    for factor in (2, 4, 8, 32)
]


def llama(dim: int, theta: float, length: int):
    parameters = {"rope_type": "default", "rope_theta": theta}
    return FAMILIES["llama"].build(
        layers=1, head_dim=dim, hidden_size=32, max_position_embeddings=length, rope_parameters=parameters
    )


def stretches(dim: int, factor: float) -> tuple[float, ...]:
    return tuple(np.geomspace(1.0, factor, dim // 2).tolist())


# scheme -> (its parameters beside the factor, of a head dimension; its oracle)
FREQUENCIES = {
    "rope": (lambda dim, factor: {"rope_theta": 3e4}, lambda dim, _, **known: oracles.rope(dim, 3e4)),
    "linear": (lambda *_: {}, oracles.linear),
    "ntk": (lambda *_: {}, oracles.ntk),
    "dynamic": (
        lambda *_: {},
        lambda dim, theta, length, factor: oracles.dynamic(dim, theta, factor=factor, length=length, seen=2 * length),
    ),
    "yarn": (lambda *_: {}, oracles.yarn),
    "ntk-by-parts": (lambda *_: {}, oracles.ntk_by_parts),
    "llama3": (lambda *_: {}, oracles.llama3),
    "longrope": (
        lambda dim, factor: {"long_factor": stretches(dim, factor)},
        lambda dim, theta, length, factor: oracles.longrope(
            dim, theta, factor=factor, length=length, factors=stretches(dim, factor)
        ),
    ),
    "proportional": (
        lambda *_: {"partial_rotary_factor": 0.5},
        lambda dim, theta, length, factor: oracles.proportional(dim, theta, factor=factor, share=0.5),
    ),
}
# transformers blends kept and divided frequencies in float32: where almost nothing is kept, a few units in the last
# place are lost. Ours is its number to the bit, so that every reader of the config computes the same.
BLENDED = {("llama3", 32): 3e-6}


@pytest.mark.filterwarnings("ignore::hf_posswap.RecalibrationWarning")
@pytest.mark.parametrize("scheme", FREQUENCIES)
@pytest.mark.parametrize(("dim", "theta", "length", "factor"), GRID)
def test_frequencies(scheme, dim, theta, length, factor):
    """Within 1e-6 of the paper's, and transformers' own to the bit."""
    params, oracle = FREQUENCIES[scheme]
    params = params(dim, factor) | ({} if scheme == "rope" else {"factor": factor})
    model = patch_model(llama(dim, theta, length), scheme, **params)
    rotary, native = model.model.rotary_emb, LlamaRotaryEmbedding(model.config)
    for module in (rotary, native):
        module(torch.zeros(1, 1, 1), torch.tensor([[0, 2 * length - 1]]))  # dynamic follows the longest position
    expected, scale = oracle(dim, theta, factor=factor, length=length)
    tolerance = BLENDED.get((scheme, factor), 1e-6)
    np.testing.assert_allclose(rotary.inv_freq.double().numpy(), expected, rtol=tolerance, atol=0)
    assert rotary.attention_scaling == pytest.approx(scale, rel=1e-12)
    assert torch.equal(rotary.inv_freq, native.inv_freq)
    assert rotary.attention_scaling == native.attention_scaling


def expected_frequencies(row: Row, dim: int, theta: float) -> np.ndarray:
    """What a rotary row's scheme turns by, from its parameters, before any long input."""
    given = dict(row.params)
    theta, length = given.pop("rope_theta", theta), LENGTH
    factor = given.pop("target_length", length) / length if "factor" not in given else given.pop("factor")
    share = given.pop("partial_rotary_factor", None)
    if row.scheme == "rope":
        return oracles.partial(dim, theta, partial_rotary_factor=1.0 if share is None else share)[0]
    if row.scheme == "dynamic":
        return oracles.dynamic(dim, theta, factor=factor, length=length, seen=given.get("freeze_at", length))[0]
    if row.scheme == "longrope":
        given["factors"] = given.get("short_factor", given["long_factor"])
    oracle = getattr(oracles, row.scheme.replace("-", "_"))
    return oracle(dim, theta, factor=factor, length=length, share=share, **given)[0]


@by_id(ROTARY_ROWS)
def test_frequencies_of_every_layout(row: Row):
    """Complex tables, latent attention, coordinates of images, a part of each head, parameters per layer type."""
    source, model = row.source(), row.patched()
    site, before = examine(model).rotary, examine(source).rotary
    full = ("full_attention",) if site.layer_types else (None,)
    for layer_type in site.layer_types or (None,):
        scaled = layer_type in row.params.get("layer_types", full)
        name = f"{layer_type}_inv_freq" if layer_type else "inv_freq"
        theta = before.parameters(before.config, layer_type)["rope_theta"]
        for path, module in site.modules.items():
            found, old = module.get_buffer(name).double().numpy(), before.modules[path].get_buffer(name).numpy()
            expected = expected_frequencies(row, 2 * len(found), theta) if scaled else old
            np.testing.assert_allclose(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("options", [{"beta_fast": 16, "beta_slow": 2}, {"truncate": False}, {"attention_factor": 1.5}])
@pytest.mark.parametrize("dim", [32, 80, 128])
def test_yarn_options(dim, options):
    rotary = patch_model(llama(dim, 1e4, 2048), "yarn", factor=8, **options).model.rotary_emb
    expected, scale = oracles.yarn(dim, 1e4, factor=8, length=2048, **options)
    np.testing.assert_allclose(rotary.inv_freq.double().numpy(), expected, rtol=1e-6)
    assert rotary.attention_scaling == pytest.approx(scale, rel=1e-12)


@pytest.mark.parametrize("seen", [100, 2048, 2049, 5000, 8192])
def test_dynamic_follows_the_longest_position(seen):
    rotary = patch_model(llama(64, 1e4, 2048), "dynamic", factor=4).model.rotary_emb
    rotary(torch.zeros(1, 1, 1), torch.arange(seen)[None])
    expected, _ = oracles.dynamic(64, 1e4, factor=4, length=2048, seen=seen)
    np.testing.assert_allclose(rotary.inv_freq.double().numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("position", [1, 1000, 131071])
def test_cos_and_sin_at_far_positions(position):
    rotary = patch_model(llama(64, 5e5, 32768), "yarn", factor=4).model.rotary_emb
    cos, sin = rotary(torch.zeros(1, 1, 1), torch.tensor([[position]]))
    frequencies, scale = oracles.yarn(64, 5e5, factor=4, length=32768)
    turned = np.exp(1j * position * np.tile(frequencies, 2)) * scale
    # the angle is a float32 product: half a unit in the last place of position, in radians
    tolerance = position * 2.0**-23 + 1e-6
    np.testing.assert_allclose(cos[0, 0].double().numpy(), turned.real, atol=tolerance)
    np.testing.assert_allclose(sin[0, 0].double().numpy(), turned.imag, atol=tolerance)


SCORE_ROWS = [
    ("linear", {"factor": 4}, oracles.linear, "halves"),
    ("ntk", {"factor": 4}, oracles.ntk, "halves"),
    ("yarn", {"factor": 4}, oracles.yarn, "halves"),
    ("llama3", {"factor": 4}, oracles.llama3, "halves"),
    ("ntk-by-parts", {"factor": 4}, oracles.ntk_by_parts, "halves"),
    (
        "longrope",
        {"factor": 4, "long_factor": STEPS},
        lambda *a, **k: oracles.longrope(*a, factors=STEPS, **k),
        "halves",
    ),
    (
        "proportional",
        {"factor": 4, "partial_rotary_factor": 0.5},
        lambda *a, **k: oracles.proportional(*a, share=0.5, **k),
        "halves",
    ),
    ("rope", {"rope_theta": 5e5}, lambda dim, _theta, **_: oracles.rope(dim, 5e5), "halves"),
    ("rope", {"partial_rotary_factor": 0.5}, lambda *a, **_: oracles.partial(*a, partial_rotary_factor=0.5), "halves"),
    ("rope", {"pairing": "interleaved"}, oracles.rope, "interleaved"),
    ("nope", {}, oracles.nope, "halves"),
]


@pytest.mark.parametrize(
    ("scheme", "params", "oracle", "pairing"), SCORE_ROWS, ids=[f"{r[0]}-{r[1]}" for r in SCORE_ROWS]
)
@pytest.mark.filterwarnings("ignore::hf_posswap.RecalibrationWarning")
def test_attention_of_the_whole_model(scheme, params, oracle, pairing):
    """The attention a patched LLaMA computes, from its embeddings up, against complex arithmetic on the weights
    that it had before the patch."""
    model = FAMILIES["llama"].build(layers=1, attn_implementation="eager")
    layer, ids = model.model.layers[0], tokens(1, 20)
    with torch.no_grad():
        hidden = layer.input_layernorm(model.model.embed_tokens(ids))[0].double().numpy()
    w_q, w_k = (w.weight.detach().double().numpy() for w in (layer.self_attn.q_proj, layer.self_attn.k_proj))
    patch_model(model, scheme, **params)
    with torch.no_grad():
        attention = model(ids, output_attentions=True).attentions[0][0].double().numpy()

    dim = layer.self_attn.head_dim
    frequencies, scale = oracle(dim, 1e4, factor=4, length=LENGTH)
    q, k = (hidden @ w.T for w in (w_q, w_k))
    for head in range(4):
        of_kv = head // 2
        s = oracles.scores(
            q[:, head * dim : (head + 1) * dim], k[:, of_kv * dim : (of_kv + 1) * dim], frequencies, scale, pairing
        )
        s[np.triu_indices(len(s), 1)] = -np.inf
        weights = np.exp(s - s.max(1, keepdims=True))
        np.testing.assert_allclose(attention[head], weights / weights.sum(1, keepdims=True), atol=2e-6)


def table_of(model) -> torch.Tensor:
    """The position table of a text model, found by its name in the state dict."""
    names = [
        n
        for n in model.state_dict()
        if n.endswith((".position_embeddings.weight", ".wpe.weight", ".embed_positions.weight"))
    ]
    (name,) = names
    return model.state_dict()[name].double()


@by_id([r for r in ROWS if r.scheme in ("sinusoidal", "learned") and r.native and not r.anatomy.vision])
def test_tables(row: Row):
    model = row.source()
    old = table_of(model).numpy()
    reserved = {"opt": 2}.get(row.family, row.anatomy.first)
    rows, length = old[reserved:], row.params.get("max_positions", row.params.get("target_length", 3 * LENGTH))
    row.patch(model)
    new = table_of(model).numpy()
    if row.params.get("init") == "random":
        expected = np.concatenate([rows, new[reserved + len(rows) :]])  # the drawn rows are tested in test_tables.py
    elif row.scheme == "learned":
        expected = getattr(oracles, row.params.get("init", "interpolate"))(rows, length)
    else:
        length = row.params.get("max_positions", LENGTH)
        matched = row.params.get("scale", "match") == "match"
        scale = np.sqrt((rows**2).mean() / 0.5) if matched else 1.0
        layout = row.params.get("layout", "interleaved")
        expected = oracles.sinusoid(length, rows.shape[1], layout, scale)
        if row.params.get("init") == "fit":
            expected = oracles.fitted_sinusoid(rows, length, layout)
    assert len(new) == reserved + length
    np.testing.assert_array_equal(new[:reserved], old[:reserved])
    np.testing.assert_allclose(new[reserved:], expected, rtol=1e-5, atol=2e-6)
    if row.scheme == "learned" and row.params.get("init", "interpolate") != "interpolate":
        np.testing.assert_array_equal(new[: len(old)], old)


def _enters_first_layer(row: Row) -> bool:
    """Else the vectors go to the token embeddings, before a norm or a scale."""
    return hasattr(row.source(layers=1).get_decoder(), "layers")


@by_id([row for row in ADDED_ROWS if _enters_first_layer(row)])
def test_added_vectors(row: Row):
    """What enters the second reader of the first layer is the embedding plus the sinusoid."""
    model, ids = row.source(layers=1), tokens(1, 12)
    seen = {}
    stack = model.get_decoder()
    first = stack.layers[0]

    def keep(name):
        return lambda module, args, kwargs: seen.__setitem__(
            name, (args[0] if args else kwargs["hidden_states"]).detach()
        )

    handle = first.register_forward_pre_hook(keep("before"), with_kwargs=True)
    logits(model, input_ids=ids)
    handle.remove()
    row.patch(model)
    first.register_forward_pre_hook(keep("after"), with_kwargs=True)
    logits(model, input_ids=ids)
    added = (seen["after"] - seen["before"])[0].double().numpy()
    embedding = model.get_input_embeddings()
    with torch.no_grad():
        rms = embedding(torch.arange(embedding.weight.shape[0])).double().square().mean().sqrt().item()
    expected = oracles.sinusoid(12, WIDTH, row.params["layout"], rms / np.sqrt(0.5))
    np.testing.assert_allclose(added, expected, atol=2e-6 * max(1.0, np.abs(seen["after"].numpy()).max()))


@pytest.mark.filterwarnings("ignore::hf_posswap.RecalibrationWarning")
@by_id([row for row in ADDED_ROWS if not _enters_first_layer(row)])
def test_vectors_added_to_token_embeddings(row: Row):
    """The model without positions, on token embeddings that have the sinusoid in them, computes what the swap does."""
    ids, model, silent = tokens(1, 12), row.patched(), row.source()
    embedding = silent.get_input_embeddings().weight.detach().double().numpy()
    patch_model(silent, "nope")
    waves = oracles.sinusoid(12, WIDTH, row.params.get("layout", "interleaved"), np.sqrt((embedding**2).mean() / 0.5))
    moved = torch.from_numpy(embedding[ids[0]] + waves)[None].float()
    found, expected, without = (
        logits(m, **call)
        for m, call in ((model, {"input_ids": ids}), (silent, {"inputs_embeds": moved}), (silent, {"input_ids": ids}))
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
    assert (without - expected).abs().max() > 0.1 * expected.abs().max()


@by_id([row for row in CONCAT_ROWS if row.anatomy.causal])
def test_concatenated_vectors(row: Row):
    """What enters the first layer is W [x | p]: token embedding and position side by side, by one matrix."""
    model, ids = row.source(layers=1), tokens(1, 12)
    embedding = model.get_input_embeddings()
    with torch.no_grad():
        x = embedding(ids)[0].double().numpy()
        every = embedding(torch.arange(embedding.weight.shape[0])).double()
    table, seen = getattr(examine(model).table, "rows", None), []
    rms = (every if table is None else table[-LENGTH:].double()).square().mean().sqrt().item()
    row.patch(model)
    added = {name.rpartition(".")[2]: p for name, p in model.named_parameters() if ".posswap." in name}
    added["projection"].data += 0.1 * torch.randn(WIDTH, 2 * WIDTH, generator=torch.Generator().manual_seed(0))
    if row.scheme == "sinusoidal":
        scale = 1.0 if row.params.get("init") == "fit" else rms / np.sqrt(0.5)
        p = oracles.sinusoid(12, WIDTH, row.params.get("layout", "interleaved"), scale)
    else:
        p = (table[-LENGTH:] if table is not None else added["table"].detach())[:12].double().numpy()
    first = examine(model).layers()[1][0]
    first.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    # hooks run in order: the one that adds the positions was there first
    logits(model, input_ids=ids)
    expected = np.concatenate([x, p], axis=1) @ added["projection"].detach().double().numpy().T
    np.testing.assert_allclose(seen[0][0].double().numpy(), expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("size", [16, 48, 64, 72])
def test_image_table_equals_transformers_own_interpolation(size):
    """transformers resamples ViT's table on the fly, square to square, when asked; the patched model always does."""
    model, image = FAMILIES["vit"].build(), pixels(size)
    with torch.no_grad():
        expected = model(image, interpolate_pos_encoding=True).logits
    patch_model(model, "learned", image_size=size)
    assert torch.equal(logits(model, pixel_values=image), expected)


def test_image_table_tiles_over_rows_and_columns():
    model = FAMILIES["vit"].build()
    old = model.vit.embeddings.position_embeddings.detach()[0].numpy()
    patch_model(model, "learned", image_size=(48, 64), init="tile")
    new = model.vit.embeddings.position_embeddings.detach()[0].numpy()
    np.testing.assert_array_equal(new[0], old[0])
    for r in range(6):
        for c in range(8):
            np.testing.assert_array_equal(new[1 + r * 8 + c], old[1 + (r % 4) * 4 + c % 4])


OBLONG = [(48, 64), (64, 16)]


@pytest.mark.parametrize("convention", ["mae", "moco", "big_vision"])
@pytest.mark.parametrize("size", [None, *OBLONG])
@pytest.mark.filterwarnings("ignore::hf_posswap.RecalibrationWarning")
def test_sincos2d_table(convention, size):
    model = FAMILIES["vit"].build()
    old = model.vit.embeddings.position_embeddings.detach().double().numpy()[0]
    patch_model(model, "sincos2d", convention=convention, image_size=size)
    waves = oracles.sincos2d(*(n // 8 for n in size or (32, 32)), WIDTH, convention)
    found = model.vit.embeddings.position_embeddings.detach().double().numpy()[0]
    np.testing.assert_array_equal(found[0], old[0])
    np.testing.assert_allclose(found[1:], waves * np.sqrt((old[1:] ** 2).mean() / 0.5), atol=2e-6)


@pytest.mark.filterwarnings("ignore::hf_posswap.RecalibrationWarning")
def test_fitted_sincos2d_is_the_ridge_regression_of_the_resized_table():
    """By numpy's lstsq on the rows and, below them, the ridge: 0.1 for each row of the table."""
    model, resized = FAMILIES["vit"].build(), FAMILIES["vit"].build()
    patch_model(model, "sincos2d", init="fit", image_size=(48, 64))
    patch_model(resized, "learned2d", image_size=(48, 64))
    found, target = (m.vit.embeddings.position_embeddings.detach().double().numpy()[0, 1:] for m in (model, resized))
    waves = oracles.sincos2d(6, 8, WIDTH, "mae")
    below = np.sqrt(0.1 * len(waves)) * np.eye(WIDTH)
    matrix, *_ = np.linalg.lstsq(np.concatenate([waves, below]), np.concatenate([target, 0 * below]), rcond=None)
    np.testing.assert_allclose(found, waves @ matrix, atol=1e-5)


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("resize", ["bicubic", "bilinear"])
@pytest.mark.parametrize("size", OBLONG)
def test_learned2d_table(resize, antialias, size):
    model = FAMILIES["vit"].build()
    old = model.vit.embeddings.position_embeddings.detach().double().numpy()[0, 1:].reshape(4, 4, -1)
    patch_model(model, "learned2d", image_size=size, resize=resize, antialias=antialias)
    rows = oracles.resampled(old, size[0] // 8, resize, antialias)
    expected = oracles.resampled(rows.swapaxes(0, 1), size[1] // 8, resize, antialias).swapaxes(0, 1)
    found = model.vit.embeddings.position_embeddings.detach().double().numpy()[0, 1:]
    np.testing.assert_allclose(found, expected.reshape(found.shape), atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "roberta", "mpnet", "opt"])
@pytest.mark.parametrize("init", ["tile", "hierarchical", "fit", "random"])
def test_routes_that_only_extend_leave_short_inputs_alone(family, init):
    model, ids = FAMILIES[family].build(), tokens(2, 30)
    before = logits(model, input_ids=ids)
    patch_model(model, "learned", factor=4, init=init)
    assert torch.equal(logits(model, input_ids=ids), before)
