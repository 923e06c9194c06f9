"""Fit: parameters chosen from what the old positions did, against naive loops in float64; and what it must never do."""

from __future__ import annotations

import copy
import math
import sysconfig
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from hf_posswap import PosSwapError, describe, from_pretrained, list_schemes, patch_model, unpatch_model
from hf_posswap.grid import Grid
from hf_posswap.profile import Pairs, Tally, diagonal_sums
from hf_posswap.scheme import registry

from . import oracles, oracles_grid
from .families import FAMILIES, LENGTH, PAD, VOCAB, tokens
from .rows import logits
from .small import byte_tokenizer, llama

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
TEXT = [tokens(3, 20), tokens(2, 24, seed=1), tokens(1, 9, seed=2)[0]]


def added(model) -> dict[str, torch.Tensor]:
    """The parameters that a swap added."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if ".posswap." in name}


def fitted(family: str, name: str, text=TEXT, **more):
    model = FAMILIES[family].build() if isinstance(family, str) else family
    return patch_model(model, name.split()[0], **(FITTED.get(name, {}) | more), fit=text)


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


FAMILY_SCHEMES = [
    *[(family, name) for family in ("llama", "gpt2") for name in FITTED],
    *[(family, "t5") for family in ("qwen3", "gemma3", "gpt_neox", "cohere", "phi", "deepseek_v2", "qwen2_vl")],
    *[(family, name) for family in ("bert", "modernbert") for name in FITTED if name != "fire"],
    *[(family, "t5") for family in ("roberta", "electra", "distilbert", "opt")],
]


@pytest.mark.parametrize(("family", "name"), FAMILY_SCHEMES, ids=str)
def test_fit_is_deterministic_and_is_no_default(family, name):
    model = fitted(family, name)
    values = added(model)
    assert same_parameters(values, added(fitted(family, name)))
    default = added(patch_model(FAMILIES[family].build(), name.split()[0], **FITTED[name]))
    assert values.keys() == default.keys()
    assert not same_parameters(values, default)
    assert all(p.dtype == torch.float32 and torch.isfinite(p).all() for p in values.values())
    assert all(p.requires_grad for n, p in model.named_parameters() if n in values)
    assert torch.isfinite(logits(model, input_ids=tokens(2, LENGTH))).all()


@pytest.mark.parametrize("family", ["llama", "gemma3", "bert", "gpt2", "opt"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_count(family, side):
    ids = tokens(2, 12)
    pads = torch.full((2, 5), PAD)
    ones, zeros = torch.ones(2, 12, dtype=torch.long), torch.zeros(2, 5, dtype=torch.long)
    order = (lambda pad, real: [pad, real]) if side == "left" else (lambda pad, real: [real, pad])
    padded = {"input_ids": torch.cat(order(pads, ids), 1), "attention_mask": torch.cat(order(zeros, ones), 1)}
    assert same_parameters(added(fitted(family, "t5", [padded])), added(fitted(family, "t5", [ids])))


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


@pytest.mark.parametrize(("family", "name"), [("llama", name) for name in FITTED] + [("gpt2", "t5")], ids=str)
def test_saved_and_reloaded_it_is_the_same_and_it_is_undone(family, name, tmp_path: Path):
    source = FAMILIES[family].build()
    ids = tokens(2, 20)
    before = logits(source, input_ids=ids)
    model = fitted(source, name)
    model.save_pretrained(tmp_path)
    again = from_pretrained(tmp_path).eval()
    assert same_parameters(added(again), added(model))
    assert torch.equal(logits(again, input_ids=ids), logits(model, input_ids=ids))
    assert describe(again).fit == describe(model).fit
    assert "explains" in str(describe(again))
    unpatch_model(model)
    assert torch.equal(logits(model, input_ids=ids), before)
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


def interrupted():
    yield tokens(2, 16)
    raise Interrupted


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


@pytest.mark.parametrize(("text", "says"), BAD_TEXT, ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_bad_text_is_refused_and_the_model_is_as_it_was(family, text, says):
    model = FAMILIES[family].build().train()
    ids = tokens(2, 20)
    before, config = logits(model, input_ids=ids), model.config.to_dict()
    if isinstance(text, type(iter(()))):
        text = iter(())
    with pytest.raises(PosSwapError, match=says):
        patch_model(model, "t5", fit=text)
    assert_untouched(model, ids, before, config)


@pytest.mark.parametrize("family", ["llama", "bert", "gemma3"])
def test_an_error_of_the_callers_text_leaves_the_model_as_it_was(family):
    model = FAMILIES[family].build().train()
    ids = tokens(2, 20)
    before, config = logits(model, input_ids=ids), model.config.to_dict()
    with pytest.raises(Interrupted):
        patch_model(model, "t5", fit=interrupted())
    assert_untouched(model, ids, before, config)


def test_a_failed_fit_of_a_patched_model_leaves_the_patch():
    model, ids = patch_model(FAMILIES["llama"].build(), "kerple"), tokens(2, 20)
    before = logits(model, input_ids=ids)
    with pytest.raises(Interrupted):
        patch_model(model, "t5", fit=interrupted())
    assert torch.equal(logits(model, input_ids=ids), before)
    assert describe(model).scheme.startswith("kerple")


def assert_untouched(model, ids, before, config) -> None:
    assert all(module.training for module in model.modules())
    assert torch.equal(logits(model, input_ids=ids), before)
    assert model.config.to_dict() == config
    assert model.config._attn_implementation == "sdpa"
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
        ("t5_encoder", "kerple", {}, "has a bias"),
        ("bloom", "t5", {}, "has a bias"),
        ("mpnet", "t5", {}, "has a bias"),
        ("falcon", "t5", {}, "does not call"),
        ("vit", "t5", {}, "grid"),
        ("vit", "alibi", {"ndim": 1, "learnable": True}, "reads pictures"),
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
