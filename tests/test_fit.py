"""Fit: parameters chosen from what the old positions did, against naive loops in float64; and what it must never do."""

from __future__ import annotations

import copy
import inspect
import math
import sysconfig
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from hf_posswap import PosSwapError, describe, from_pretrained, list_schemes, patch_model, unpatch_model
from hf_posswap.grid import Grid
from hf_posswap.profile import Pairs, Tally, diagonal_sums
from hf_posswap.scheme import registry

from . import oracles, oracles_grid
from .families import FAMILIES, LENGTH, PAD, VOCAB, pixels, tokens, with_page
from .rows import DOCUMENTS, logits
from .small import byte_tokenizer, llama
from .test_documents import build as page_model
from .test_image_attention import TOWERS, built, states

pytestmark = pytest.mark.filterwarnings("ignore::hf_posswap.RecalibrationWarning")

HEADS = 4
# a bucket of its own for each of the distances that are looked at, so that the oracle needs no buckets
EXACT = {"num_buckets": 2 * LENGTH, "max_distance": 2 * LENGTH}
FITTED = {
    "t5": {"per_layer": True},
    "t5 shared": {},
    "kerple": {},
    "kerple power": {"kernel": "power"},
    "fire": {"per_layer": True},
    "alibi": {"learnable": True, "per_layer": True},
    "alibi shared": {"learnable": True},
}
ROW_BY_ROW = {
    "t5": {"per_layer": True, "ndim": 1},
    "kerple": {"ndim": 1},
    "kerple power": {"kernel": "power", "ndim": 1},
    "alibi": {"learnable": True, "ndim": 1},
}
ON_IMAGES = ROW_BY_ROW | {"bias2d": {}, "bias2d shared": {"per_layer": False}}
TEXT = [tokens(3, 20), tokens(2, 24, seed=1), tokens(1, 9, seed=2)[0]]
IMAGES = [pixels(32), {"pixel_values": pixels(32, seed=1), "labels": torch.zeros(2)}, pixels(32, seed=2)[0]]


def added(model) -> dict[str, torch.Tensor]:
    """The parameters that a swap added; of one that adds none, and writes into weights, all that are trained."""
    trained = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    return {name: p for name, p in trained.items() if ".posswap." in name} or trained


def reads_images(model) -> bool:
    return model.main_input_name == "pixel_values"


def given(model, name: str) -> dict:
    """The parameters of a swap, and what makes it possible."""
    return (ON_IMAGES if reads_images(model) else FITTED).get(name, {})


def calibration(model) -> list:
    """Batches of every form that a model takes."""
    if reads_images(model):
        return IMAGES
    return [with_page(model, {"input_ids": rows}) for rows in TEXT[:2]] + TEXT[2:] * ("bbox" not in forward_of(model))


def forward_of(model) -> set[str]:
    return {*inspect.signature(model.forward).parameters}


def inputs_of(model, length: int = 20) -> dict[str, torch.Tensor]:
    if reads_images(model):
        return {"pixel_values": pixels(32)}
    ids = {"input_ids": tokens(2, length)}
    return ids | ({"decoder_input_ids": ids["input_ids"]} if model.config.is_encoder_decoder else {})


def fitted(family, name: str, text=None, **more):
    model = FAMILIES[family].build() if isinstance(family, str) else family
    return patch_model(
        model, name.split()[0], **given(model, name) | more, fit=calibration(model) if text is None else text
    )


def same_parameters(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# --- what is measured


def heard(model, modules, text) -> list[list[np.ndarray]]:
    """Outputs (S, E) of modules, in float64, for every row of the text: a list per module."""
    outputs: list[list[np.ndarray]] = [[] for _ in modules]
    handles = [
        module.register_forward_hook(lambda _m, _a, out, kept=kept: kept.append(out[0].double().numpy()))
        for module, kept in zip(modules, outputs, strict=True)
    ]
    for batch in text:
        for row in batch.reshape(-1, batch.shape[-1]):
            logits(model, input_ids=row[None])
    for handle in handles:
        handle.remove()
    return outputs


def heads_of(rows: np.ndarray, dim: int) -> np.ndarray:
    return rows.reshape(len(rows), -1, dim).transpose(1, 0, 2)


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


class NaiveMeans:
    """The mean at each distance, pair by pair."""

    def __init__(self) -> None:
        self.sums: dict[tuple[int, int], float] = {}
        self.mass: dict[tuple[int, int], float] = {}

    def add(self, head: int, difference: np.ndarray, plain: np.ndarray, causal: bool) -> None:
        for i in range(len(plain)):
            keys = range(i + 1 if causal else len(plain))
            weights = softmax(plain[i, list(keys)])
            for j in keys:
                at = (head, j - i)
                self.sums[at] = self.sums.get(at, 0.0) + weights[j] * difference[i, j]
                self.mass[at] = self.mass.get(at, 0.0) + weights[j]

    def check(self, buckets: torch.Tensor, causal: bool) -> None:
        """Against a table (buckets, H) with a bucket for each distance."""
        assert self.sums
        for (head, distance), total in self.sums.items():
            bucket = abs(distance) + (0 if causal or distance <= 0 else EXACT["num_buckets"])
            expected = total / self.mass[head, distance]
            assert buckets[bucket, head].item() == pytest.approx(expected, rel=1e-4, abs=1e-4)


def naive_rotary(model, layers) -> list[NaiveMeans]:
    """One per layer of a LLaMA, from its own hidden states, by complex arithmetic."""
    frequencies = oracles.rope(16, 1e4)[0]
    found = []
    hidden = heard(model, [layer.input_layernorm for layer in layers], TEXT)
    for layer, rows in zip(layers, hidden, strict=True):
        means = NaiveMeans()
        for row in rows:
            q, k = (
                heads_of(row @ m.weight.detach().double().numpy().T, 16)
                for m in (layer.self_attn.q_proj, layer.self_attn.k_proj)
            )
            for h in range(HEADS):
                plain = q[h] @ k[h // 2].T / 4
                turned = oracles.scores(q[h], k[h // 2], frequencies, 1.0, "halves")
                means.add(h, turned - plain, plain, causal=True)
        found.append(means)
    return found


def test_profile_of_a_rotation_is_that_of_a_naive_loop():
    """Grouped-query heads; rows of several lengths."""
    model = FAMILIES["llama"].build()
    expected = naive_rotary(model, model.model.layers)
    patch_model(model, "t5", **EXACT, per_layer=True, fit=TEXT)
    for layer, means in zip(model.model.layers, expected, strict=True):
        means.check(layer.self_attn.posswap.buckets, causal=True)


def test_layers_that_share_a_bias_share_the_mean_over_both():
    model = FAMILIES["llama"].build()
    first, second = naive_rotary(model, model.model.layers)
    for at, total in second.sums.items():
        first.sums[at] += total
        first.mass[at] += second.mass[at]
    patch_model(model, "t5", **EXACT, fit=TEXT)
    first.check(model.model.posswap.buckets, causal=True)


TABLES = {
    "bert": lambda layer: (layer.attention.self.query, layer.attention.self.key),
    "electra": lambda layer: (layer.attention.self.query, layer.attention.self.key),
    "roberta": lambda layer: (layer.attention.self.query, layer.attention.self.key),
    "opt": lambda layer: (layer.self_attn.q_proj, layer.self_attn.k_proj),
}


@pytest.mark.parametrize("family", TABLES)
def test_profile_of_a_table_is_that_of_a_naive_loop(family):
    model = FAMILIES[family].build()
    causal = FAMILIES[family].causal
    parts = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
    read = [TABLES[family](layer) for layer in parts]
    heads = heard(model, [part for pair in read for part in pair], TEXT)
    expected = []
    for q, k in zip(heads[0::2], heads[1::2], strict=True):
        mean_q, mean_k = (
            [np.mean([row[i] for row in rows if len(row) > i], axis=0) for i in range(24)] for rows in (q, k)
        )
        mean_q, mean_k = (heads_of(np.stack(mean), 16) for mean in (mean_q, mean_k))
        means = NaiveMeans()
        for length in map(len, q):
            for h in range(HEADS):
                scores = mean_q[h, :length] @ mean_k[h, :length].T / 4
                means.add(h, scores, np.zeros_like(scores), causal)
        expected.append(means)
    more = EXACT if causal else {name: 2 * value for name, value in EXACT.items()}
    patch_model(model, "t5", **more, per_layer=True, fit=TEXT)
    for buckets, means in zip(added(model).values(), expected, strict=True):
        means.check(buckets, causal)


def projections(model) -> list[torch.nn.Module]:
    """Of queries and keys, layer by layer."""
    named = (("q_proj", "query"), ("k_proj", "key"))
    attention = [m for m in model.modules() if any(hasattr(m, name) for name in named[0])]
    return [next(getattr(m, name) for name in names if hasattr(m, name)) for m in attention for names in named]


PICTURES = [pixels(32), pixels(32, seed=1)]


@pytest.mark.parametrize("tower", ["vit", "dinov2_with_registers", "siglip", "beit_bias"])
@pytest.mark.parametrize("scheme", ["bias2d", "t5"])
def test_profile_on_images_is_that_of_a_naive_loop(tower, scheme):
    """A table: mean logits of two places, less those of two tokens anywhere; and BEiT's bias, with its own class token.

    Row by row, less what a patch gives the tokens that are none: a bias of distances is 0 there.
    """
    model = built(tower, 2)
    tokens_ = oracles_grid.tokens_of(4, 4, *TOWERS[tower][3:])
    patches = [token is not None for token in tokens_]
    rows = heard(model, projections(model), [])
    handles = [
        module.register_forward_hook(lambda _m, _a, out, kept=kept: kept.extend(out.double().detach().numpy()))
        for module, kept in zip(projections(model), rows, strict=True)
    ]
    for picture in PICTURES:
        states(model, picture)
    for handle in handles:
        handle.remove()
    flat = {"num_buckets": 64, "max_distance": 64, "per_layer": True, "ndim": 1}
    own = [m.relative_position_bias_table.detach().double().numpy() for m in model.modules() if is_beits(m)]
    patch_model(model, scheme, **flat if scheme == "t5" else {}, fit=PICTURES)
    layers = [m.posswap for m in model.modules() if hasattr(m, "posswap")]
    assert len(layers) == 2
    for layer, one in enumerate(layers):
        q, k = (np.stack([heads_of(row, 16) for row in kept]) for kept in rows[2 * layer : 2 * layer + 2])
        means = NaivePairs()
        if own:
            table = own[layer].T[:, :-3].reshape(HEADS, 7, 7)[:, ::-1, ::-1]  # BEiT's runs from key to query
            bias = oracles_grid.bias2d(tokens_, table, own[layer].T[:, -3:])
            for q_, k_ in zip(q, k, strict=True):
                means.add(tokens_, bias, q_ @ k_.transpose(0, 2, 1) / 4, scheme == "t5")
        else:
            q, k = q.mean(0), k.mean(0)
            plain_q, plain_k = q.copy(), k.copy()
            for whole, plain in ((q, plain_q), (k, plain_k)):
                plain[:, patches] = whole[:, patches].mean(1, keepdims=True)
            plain = plain_q @ plain_k.transpose(0, 2, 1) / 4
            means.add(tokens_, q @ k.transpose(0, 2, 1) / 4 - plain, plain, scheme == "t5")
        means.check(one)


class NaivePairs:
    """The mean at each difference of places, or of numbers, pair by pair."""

    def __init__(self) -> None:
        self.sums: dict[tuple, np.ndarray] = {}
        self.mass: dict[tuple, np.ndarray] = {}

    def add(self, tokens_, added, plain, flat: bool) -> None:
        beside = [i for i, token in enumerate(tokens_) if token is None]
        for i, query in enumerate(tokens_):
            for j, key in enumerate(tokens_):
                if flat and (query is None or key is None):
                    continue
                if query is None or key is None:
                    at = ("beside", 2 if query is key else 0 if query is None else 1)
                elif flat:
                    at = ("row", 4 * (key[0] - query[0]) + key[1] - query[1])
                else:
                    at = ("table", 3 + key[0] - query[0], 3 + key[1] - query[1])
                value = added[:, i, j] - (added[:, i, beside].mean(1) if flat and beside else 0)
                weight = np.array([softmax(plain[h, i])[j] for h in range(HEADS)])
                self.sums[at] = self.sums.get(at, 0) + weight * value
                self.mass[at] = self.mass.get(at, 0) + weight

    def check(self, one) -> None:
        assert self.sums
        for (what, *at), total in self.sums.items():
            row = what == "row"
            found = one.buckets[abs(at[0]) + 32 * (at[0] > 0)] if row else getattr(one, what)[(slice(None), *at)]
            expected = total / self.mass[(what, *at)]
            np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-4, atol=1e-5)


def is_beits(module) -> bool:
    return "relative_position_bias_table" in module._parameters


def test_diagonals_are_summed():
    values = torch.randn(2, 5, 7, dtype=torch.float64)
    found = diagonal_sums(values)
    for c in range(11):
        expected = sum(values[:, i, j] for i in range(5) for j in range(7) if j - i == c - 4)
        torch.testing.assert_close(found[:, c], expected)


AROUND = [(0, 0), (1, 0), (2, 1)]  # tokens before and behind the patches


@pytest.mark.parametrize("around", AROUND, ids=str)
def test_pairs_of_an_image_are_counted_by_rows_and_columns_or_in_a_row(around):
    whole, tokens_ = Grid(2, 3, *around), oracles_grid.tokens_of(2, 3, *around)
    numbers = oracles_grid.bias2d(tokens_, np.arange(15.0).reshape(1, 3, 5), np.array([[15.0, 16.0, 17.0]]))
    np.testing.assert_array_equal(Pairs.between(whole).kind, numbers[0])
    flat = Pairs.in_row(whole)
    steps = np.arange(6) - np.arange(6)[:, None]
    np.testing.assert_array_equal(
        torch.where(flat.kind < 0, 0, flat.distance[flat.kind]), oracles_grid.on_flat_grid(steps[None], tokens_)[0]
    )
    np.testing.assert_array_equal(flat.kind < 0, [[None in (q, k) for k in tokens_] for q in tokens_])


@pytest.mark.parametrize("rows", [1, 3, 16])
def test_a_tally_does_not_depend_on_how_rows_are_cut(rows):
    shape = (2, 3, 16, 16)
    added_, without, attention = torch.rand(3, *shape, generator=torch.Generator().manual_seed(0)).tril()
    whole, parts = Tally(3), Tally(3)
    whole.add(added_, without, attention, 0)
    for first in range(0, 16, rows):
        chosen = slice(first, first + rows)
        parts.add(added_[:, :, chosen], without[:, :, chosen], attention[:, :, chosen], first)
    for name in ("mass", "sums", "heed", "squares"):
        torch.testing.assert_close(getattr(whole, name), getattr(parts, name), rtol=1e-5, atol=1e-5)


def test_explained_share_is_that_of_the_variance():
    """Against numpy's weighted moments, and 1 for the very bias."""
    generator = torch.Generator().manual_seed(0)
    added_, without = torch.rand(2, 2, 3, 9, 9, generator=generator).tril()
    curve = torch.rand(3, 17, generator=generator)
    tally = Tally(3)
    tally.add(added_, without, without, 0)
    of_pairs = np.stack([[[curve[h, j - i + 8] for j in range(9)] for i in range(9)] for h in range(3)])
    for h in range(3):
        w = without[:, h].double().numpy()
        left = added_[:, h].double().numpy() - of_pairs[h]
        variances = [np.average((v - np.average(v, weights=w)) ** 2, weights=w) for v in (left, added_[:, h].numpy())]
        assert tally.explained(curve)[h].item() == pytest.approx(1 - variances[0] / variances[1], abs=1e-5)
    same = Tally(3)
    same.add(torch.from_numpy(of_pairs)[None].expand(2, -1, -1, -1), without, without, 0)
    torch.testing.assert_close(same.explained(curve), torch.ones(3, dtype=torch.float64))


# --- laws of the fit


def silent(model, *tables: str):
    """Queries that say nothing, and no vectors of positions: all order is in a bias, which is of a size to be seen."""
    for name, parameter in model.named_parameters():
        if any(part in name for part in (*tables, "query.", ".q.", "q_proj", "q_bias", "query_proj")):
            parameter.data.zero_()
        elif "qkv_linear" in name:
            parameter.data[: len(parameter) // 3].zero_()
        elif "rel_pos" in name or "relative_" in name:
            parameter.data.normal_(generator=torch.Generator().manual_seed(0))
    return model


def read_twice() -> torch.nn.Module:
    """An encoder-decoder with T5's biases in both stacks."""
    sizes = {"vocab_size": VOCAB, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_heads": HEADS, "num_layers": 2}
    torch.manual_seed(0)
    config = transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=PAD)
    return transformers.T5ForConditionalGeneration(config).eval()


OF_TEXT = (".position_embeddings",)
REFITTED = {
    "t5_encoder": (lambda: silent(FAMILIES["t5_encoder"].build(relative_attention_num_buckets=32)), "t5", {}),
    "t5": (lambda: silent(read_twice()), "t5", {}),
    "t5 decoder": (lambda: silent(read_twice()), "t5", {"stack": "decoder"}),
    "udop": (lambda: silent(page_model("udop")), "t5", {}),
    "mpnet": (lambda: silent(FAMILIES["mpnet"].build(), *OF_TEXT), "t5", {}),
    "layoutlmv2": (lambda: silent(FAMILIES["layoutlmv2"].build(), *OF_TEXT), "t5", {}),
    "layoutlmv3": (lambda: silent(FAMILIES["layoutlmv3"].build(), *OF_TEXT), "t5", {}),
    "beit_bias": (lambda: silent(FAMILIES["beit_bias"].build()), "bias2d", {}),
    "beit_shared": (lambda: silent(FAMILIES["beit_shared"].build(), *OF_TEXT), "bias2d", {"per_layer": False}),
}


@pytest.mark.parametrize("family", REFITTED)
def test_a_bias_refitted_into_its_own_form_is_the_model_itself(family):
    """Of documents the one of distances in tokens: that of the page stays, and is none of the scheme's business."""
    build, scheme, params = REFITTED[family]
    model, other = build(), patch_model(build(), "nope", **{k: v for k, v in params.items() if k == "stack"})
    inputs = inputs_of(model)
    before = logits(model, **inputs)
    assert (logits(other, **inputs) - before).abs().max() > 1e-2 * before.abs().max()
    text = [with_page(model, {"input_ids": tokens(2, LENGTH)})]
    patch_model(model, scheme, **params, fit=PICTURES if reads_images(model) else text)
    torch.testing.assert_close(logits(model, **inputs), before, rtol=1e-4, atol=1e-4)
    assert {share for heads in describe(model).fit.explained.values() for share in heads} == {1.0}


FAMILY_SCHEMES = [
    *[(family, name) for family in ("llama", "gpt2") for name in FITTED],
    *[(family, "t5") for family in ("qwen3", "gemma3", "gpt_neox", "cohere", "phi", "deepseek_v2", "qwen2_vl")],
    *[(family, name) for family in ("bert", "modernbert") for name in FITTED if name != "fire"],
    *[(family, "t5") for family in ("roberta", "electra", "distilbert", "opt", "mpnet", "t5_encoder", *DOCUMENTS)],
    *[(family, name) for family in ("vit", "beit_bias") for name in ON_IMAGES],
    *[(family, "bias2d") for family in ("dinov2_registers", "clip", "siglip", "beit", "beit_shared")],
    *[("t5_encoder", name) for name in ("kerple", "alibi")],
    *[(family, "rope") for family in ("bert", "gpt2", "opt", "mpnet", "xlm", "layoutlm", "layoutlmv3")],
]


@pytest.mark.parametrize(("family", "name"), FAMILY_SCHEMES, ids=str)
def test_fit_is_deterministic_and_is_no_default(family, name):
    model = fitted(family, name)
    values = added(model)
    assert same_parameters(values, added(fitted(family, name)))
    source = FAMILIES[family].build()
    default = added(patch_model(source, name.split()[0], **given(source, name)))
    assert values.keys() == default.keys()
    assert not same_parameters(values, default)
    assert all(p.dtype == torch.float32 and torch.isfinite(p).all() for p in values.values())
    assert all(p.requires_grad for n, p in model.named_parameters() if n in values)
    assert torch.isfinite(logits(model, **inputs_of(model, LENGTH))).all()


@pytest.mark.parametrize(
    ("family", "name"), [*[(f, "t5") for f in ("llama", "gemma3", "bert", "gpt2", "opt")], ("bert", "rope")]
)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_count(family, name, side):
    ids = tokens(2, 12)
    pads = torch.full((2, 5), PAD)
    ones, zeros = torch.ones(2, 12, dtype=torch.long), torch.zeros(2, 5, dtype=torch.long)
    order = (lambda pad, real: [pad, real]) if side == "left" else (lambda pad, real: [real, pad])
    padded = {"input_ids": torch.cat(order(pads, ids), 1), "attention_mask": torch.cat(order(zeros, ones), 1)}
    assert same_parameters(added(fitted(family, name, [padded])), added(fitted(family, name, [ids])))


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_fit_in_bfloat16_is_near_that_in_float32(family):
    full = added(fitted(family, "t5"))
    half = added(fitted(FAMILIES[family].build().to(torch.bfloat16), "t5"))
    for name, value in full.items():
        assert half[name].dtype == torch.float32
        assert (half[name] - value).abs().mean() < 0.05 * value.abs().mean()


@pytest.mark.parametrize("implementation", ["eager", "flex_attention"])
def test_fit_is_the_same_on_every_backend(implementation):
    here, there = (FAMILIES["gemma3"].build(attn_implementation=one) for one in ("sdpa", implementation))
    expected = added(fitted(here, "t5"))
    for name, value in added(fitted(there, "t5")).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-4)
    assert there.config._attn_implementation == f"posswap_{implementation}"


def test_a_sliding_window_is_all_that_a_layer_tells():
    """Gemma's local layer sees 8 keys: its buckets behind have the value of the last one met."""
    model = fitted("gemma3", "t5", num_buckets=64, max_distance=64)
    local, whole = (layer.self_attn.posswap.buckets for layer in model.model.layers)
    assert len(local[7:].unique(dim=0)) == 1 < len(whole[7:24].unique(dim=0))


def test_memory_does_not_grow_with_the_batches():
    """No batch is alive two batches later, and what is kept has the size of the longest."""
    alive: list[weakref.ref] = []

    def batches():
        for seed in range(12):
            batch = tokens(2, 16, seed)
            alive.append(weakref.ref(batch))
            yield batch
            del batch
            assert sum(one() is not None for one in alive) <= 2

    fitted("llama", "t5", batches())
    assert len(alive) == 12


def test_layers_fit_only_those_that_are_chosen():
    model = FAMILIES["llama"].build()
    patch_model(model, "t5", per_layer=True, layers=(1,), fit=TEXT)
    assert list(describe(model).fit.explained) == ["model.layers.1.self_attn"]
    whole = added(fitted("llama", "t5"))
    (name, value), *none = added(model).items()
    assert not none
    assert torch.equal(value, whole[name])


def test_a_fit_again_is_of_the_original_and_of_the_new_text():
    model, other = fitted("llama", "t5"), [tokens(4, 30, seed=7)]
    before = added(model)
    patch_model(model, "t5", per_layer=True)  # nothing new is asked for
    assert same_parameters(added(model), before)
    patch_model(model, "t5", per_layer=True, fit=other)
    assert same_parameters(added(model), added(fitted("llama", "t5", other)))
    assert not same_parameters(added(model), before)


SAVED = [*[("llama", name) for name in FITTED], ("gpt2", "t5"), ("vit", "bias2d"), ("layoutlmv3", "t5")]
SAVED += [("bert", "rope"), ("gpt2", "rope")]


@pytest.mark.parametrize(("family", "name"), SAVED, ids=str)
def test_saved_and_reloaded_it_is_the_same_and_it_is_undone(family, name, tmp_path: Path):
    source = FAMILIES[family].build()
    inputs = inputs_of(source)
    before = logits(source, **inputs)
    model = fitted(source, name)
    model.save_pretrained(tmp_path)
    again = from_pretrained(tmp_path).eval()
    assert same_parameters(added(again), added(model))
    assert torch.equal(logits(again, **inputs), logits(model, **inputs))
    assert describe(again).fit == describe(model).fit
    assert "explains" in str(describe(again))
    unpatch_model(model)
    assert torch.equal(logits(model, **inputs), before)
    assert "posswap" not in model.config.to_dict()


def test_a_plan_says_how_well_it_fits_and_changes_nothing():
    model = FAMILIES["llama"].build()
    before = copy.deepcopy(model.state_dict())
    plan = patch_model(model, "t5", fit=TEXT, dry_run=True)
    assert "fitted: explains" in str(plan)
    assert same_parameters(dict(model.state_dict()), dict(before))


def test_texts_are_cut_into_rows_of_the_trained_length():
    tokenizer, text = byte_tokenizer(eos_token="<eos>"), "positions are where tokens are; " * 4
    ids = torch.tensor(tokenizer(text)["input_ids"])
    assert len(ids) % 32 == 0
    expected = added(patch_model(llama(), "t5", fit=[ids.reshape(-1, 32)]))
    for given in ([text], [[text]], iter([[text]])):
        assert same_parameters(added(patch_model(llama(), "t5", fit=given, tokenizer=tokenizer)), expected)


# --- it is better than the defaults


def train(model, text: torch.Tensor, steps: int, length: int) -> None:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 4e-3 * math.cos(math.pi / 2 * step / steps)
        begins = torch.randint(0, len(text) - length, (16,), generator=generator)
        rows = torch.stack([text[begin : begin + length] for begin in begins.tolist()])
        model(rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


@pytest.fixture(scope="module")
def trained():
    """(a LLaMA of bytes, text of its training, text held out); its loss is far below that of unknown order."""
    library = Path(sysconfig.get_paths()["stdlib"])
    source = b"".join((library / name).read_bytes() for name in ("argparse.py", "inspect.py", "typing.py"))
    text = torch.tensor(list(source))
    model = llama(
        hidden_size=64, intermediate_size=128, num_attention_heads=4, max_position_embeddings=64, initializer_range=0.02
    )
    train(model, text[:-30_000], 250, 64)
    return model, text[:64_000].reshape(-1, 64)[::20], text[-16_384:].reshape(-1, 64)


def loss(model, rows) -> float:
    with torch.no_grad():
        return model(rows, labels=rows).loss.item()


@pytest.mark.parametrize("name", FITTED)
def test_fit_is_better_than_the_defaults_before_any_step(trained, name):
    model, text, held_out = trained
    assert loss(model, held_out) < loss(patch_model(copy.deepcopy(model), "nope"), held_out) - 0.2
    cold = patch_model(copy.deepcopy(model), name.split()[0], **FITTED[name])
    fit = fitted(copy.deepcopy(model), name, text.split(8))
    assert loss(fit, held_out) < loss(cold, held_out)
    shares = [share for heads in describe(fit).fit.explained.values() for share in heads]
    assert min(shares) > -1
    assert max(shares) < 1


# --- refusals: one clear error, and the model as it was


class Interrupted(RuntimeError):
    pass


BAD_TEXT = [
    ([], "holds no tokens"),
    (iter(()), "holds no tokens"),
    (["some words"], "is text; give tokenizer="),
    ([["some", "words"]], "is text; give tokenizer="),
    ([tokens(1, LENGTH + 1)], f"a sequence of {LENGTH + 1} tokens is longer than the {LENGTH}"),
    ([tokens(1, 8), tokens(1, LENGTH + 1)], "is longer than"),
    (tokens(2, 8), "is not an iterable of batches; put it into a list"),
    ("text", "is not an iterable of batches"),
    ({"input_ids": tokens(2, 8)}, "is not an iterable of batches"),
    (True, "is not an iterable of batches"),
    ([torch.rand(2, 8)], "holds no token ids"),
    ([torch.full((2, 8), VOCAB)], f"ids that are not among this model's {VOCAB}"),
    ([[[1, -1]]], "ids that are not among"),
    ([{"pixel_values": torch.rand(2, 8)}], "holds no token ids"),
    ([[[1, 2], [3]]], "no rectangle of token ids"),
    ([{"input_ids": tokens(1, 8), "position_ids": torch.arange(8)[None]}], "'position_ids' among the inputs"),
]


BAD_IMAGES = [
    ([], "holds no images"),
    (pixels(32), "is not an iterable of batches"),
    (["a picture.png"], "holds no pixel_values"),
    ([pixels(32).long()], "holds no pixel_values"),
    ([tokens(2, 8)], "holds no pixel_values"),
    ([pixels(32), pixels((32, 40))], r"shape \(2, 3, 32, 40\), and this model was trained on images of \(3, 32, 32\)"),
    ([pixels(32, channels=1)], r"shape \(2, 1, 32, 32\), and .* \(3, 32, 32\) \(channels, height, width\); resize"),
    ([{"pixel_values": pixels(32), "bool_masked_pos": torch.zeros(2, 16)}], "'bool_masked_pos' among the inputs"),
]
BAD = [
    *[(family, "t5", *row) for family in ("llama", "bert", "t5_encoder") for row in BAD_TEXT],
    *[(family, "bias2d", *row) for family in ("vit", "beit_bias") for row in BAD_IMAGES],
    ("layoutlmv3", "t5", [{"input_ids": tokens(1, 8), "bbox": torch.full((1, 8, 4), 2000)}], "is not on the page"),
]


@pytest.mark.parametrize(
    ("family", "name", "text", "says"), BAD, ids=lambda value: value if isinstance(value, str) else ""
)
def test_bad_text_is_refused_and_the_model_is_as_it_was(family, name, text, says):
    model = FAMILIES[family].build().train()
    before = state_of(model)
    if isinstance(text, type(iter(()))):
        text = iter(())
    with pytest.raises(PosSwapError, match=says):
        patch_model(model, name, fit=text)
    assert_untouched(model, before)


def interrupted(batches):
    yield batches[0]
    raise Interrupted


@pytest.mark.parametrize("family", ["llama", "bert", "gemma3", "t5_encoder", "layoutlmv2", "vit", "beit_bias"])
def test_an_error_of_the_callers_text_leaves_the_model_as_it_was(family):
    model = FAMILIES[family].build().train()
    before = state_of(model)
    with pytest.raises(Interrupted):
        fitted(model, "t5", interrupted(calibration(model)))
    assert_untouched(model, before)


def test_a_failed_fit_of_a_patched_model_leaves_the_patch():
    model, ids = patch_model(FAMILIES["llama"].build(), "kerple"), tokens(2, 20)
    before = logits(model, input_ids=ids)
    with pytest.raises(Interrupted):
        patch_model(model, "t5", fit=interrupted(TEXT))
    assert torch.equal(logits(model, input_ids=ids), before)
    assert describe(model).scheme.startswith("kerple")


def state_of(model) -> tuple[torch.Tensor, dict, str]:
    return logits(model, **inputs_of(model)), model.config.to_dict(), model.config._attn_implementation


def assert_untouched(model, before) -> None:
    assert all(module.training for module in model.modules())
    (outputs, *config), (outputs_before, *config_before) = state_of(model), before
    assert torch.equal(outputs, outputs_before)
    assert config == config_before
    for module in model.modules():
        assert not {**module._forward_pre_hooks, **module._forward_hooks}
        assert not any("posswap" in name for name in vars(module))


SUITED = {"learned": {"factor": 2}, "longrope": {"factor": 2, "long_factor": (1.0,) * 8}, "proportional": {}}
SCALED = {"linear", "ntk", "dynamic", "yarn", "llama3", "ntk-by-parts"}


@pytest.mark.parametrize("name", [name for name in list_schemes() if not registry()[name].fits])
def test_a_scheme_without_free_parameters_refuses_text_by_name(name):
    family = "gpt2" if name == "learned" else "llama"
    params = {"factor": 2} if name in SCALED else SUITED.get(name, {})
    params |= {"partial_rotary_factor": 0.5} if name == "proportional" else {}
    model, ids = FAMILIES[family].build(), tokens(1, 20)
    before = logits(model, input_ids=ids)
    with pytest.raises(
        PosSwapError, match=rf"^{name}\(.*fit= was given, and {name} has no parameters.*(choose|mean|init)"
    ):
        patch_model(model, name, **params, fit=TEXT)
    assert torch.equal(logits(model, input_ids=ids), before)


@pytest.mark.parametrize(
    ("family", "scheme", "params", "says"),
    [
        ("llama", "alibi", {}, "learnable=True"),
        ("t5_encoder", "t5", {"relative_bias": "keep"}, "relative_bias='keep' leaves all that"),
        ("bloom", "t5", {}, "has a bias of another kind, alibi"),
        ("mpt", "t5", {}, "has a bias of another kind, alibi"),
        ("falcon_alibi", "t5", {}, "has a bias of another kind, alibi"),
        ("falcon", "t5", {}, "does not call"),
        ("gptj", "t5", {}, "does not call"),
        ("deberta", "t5", {}, "has a bias of another kind, disentangled"),
        ("vit", "t5", {}, "grid"),
    ],
)
def test_what_cannot_be_measured_is_refused(family, scheme, params, says):
    model = FAMILIES[family].build()
    with pytest.raises(PosSwapError, match=says):
        patch_model(model, scheme, **params, fit=TEXT)
    assert "posswap" not in model.config.to_dict()


def test_weights_without_values_are_refused():
    with torch.device("meta"):
        model = FAMILIES["llama"].build()
    with pytest.raises(PosSwapError, match="meta device"):
        patch_model(model, "t5", fit=TEXT)
