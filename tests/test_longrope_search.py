"""The search for LongRoPE's factors: never worse than its starts, the same for a seed, and going on where it was."""

from __future__ import annotations

import json

import pytest
import torch

from hf_posswap import PosSwapError, patch_model
from hf_posswap.longrope_search import Evolution, search_factors

from .families import FAMILIES, LENGTH, tokens

SMALL = Evolution(population=6, parents=3, mutations=3, crossovers=2, generations=3)
TEXT = tokens(2, 4 * LENGTH)


def search(model=None, tokens=TEXT, **options):
    return search_factors(model or FAMILIES["llama"].build(), tokens, **{"factor": 4, "settings": SMALL} | options)


def test_found_is_no_worse_than_linear_ntk_and_yarn_and_monotone():
    model = FAMILIES["llama"].build()
    before = {name: value.clone() for name, value in model.state_dict().items()}, model.config.to_dict()
    found = search(model)
    assert found.loss <= min(found.starts.values())
    assert found.starts.keys() == {"linear", "ntk", "yarn"}
    assert found.factors == sorted(found.factors)
    assert min(found.factors) >= 1
    assert max(found.factors) <= 4 * SMALL.widest
    assert found.history == sorted(found.history, reverse=True)
    assert all(torch.equal(value, before[0][name]) for name, value in model.state_dict().items())
    assert model.config.to_dict() == before[1]
    patch_model(model, "longrope", factor=found.factor, long_factor=found.factors)
    with torch.no_grad():
        losses = [model(input_ids=t[None], labels=t[None]).loss.item() for t in TEXT]
    assert sum(losses) / 2 == pytest.approx(found.loss, rel=1e-6)


def test_linear_ntk_and_yarn_are_found_as_factors():
    from hf_posswap.longrope_search import _factors_of

    model = FAMILIES["llama"].build()
    assert _factors_of(model, "linear", 4.0) == (4.0,) * 8
    ntk = _factors_of(model, "ntk", 4.0)
    assert ntk[0] == 1.0
    assert ntk[-1] == pytest.approx(4.0, rel=1e-3)


def test_the_seed_decides(tmp_path):
    assert search() == search()
    assert search() != search(settings=Evolution(**vars(SMALL) | {"seed": 1}))


def test_a_stopped_search_goes_on_to_the_same_end(tmp_path):
    def stop_after_one(generations):
        yield from list(generations)[:1]

    state = tmp_path / "state.json"
    search(state_file=state, progress=stop_after_one)
    assert len(json.loads(state.read_text())["history"]) == 1
    assert search(state_file=state) == search()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tokens": tokens(2, 100)}, r"a search for 128 tokens needs text of \(samples, 128\)"),
        ({"factor": None}, r"give factor .* or target_length"),
        ({"factor": 1}, r"factor=1 extends nothing"),
        ({"model": FAMILIES["bert"].build()}, r"BertForMaskedLM has no rotary site"),
        ({"model": FAMILIES["deepseek_v3"].build()}, r"attention_factor=None would reach only"),
    ],
)
def test_what_cannot_be_searched(options, says):
    with pytest.raises(PosSwapError, match=says):
        search(**options)


def test_a_patched_model_and_a_foreign_state_are_refused(tmp_path):
    with pytest.raises(PosSwapError, match="model is patched"):
        search(patch_model(FAMILIES["llama"].build(), "yarn", factor=4))
    state = tmp_path / "state.json"
    search(state_file=state)
    with pytest.raises(PosSwapError, match="is of a search with another model, text"):
        search(tokens=tokens(2, 128, seed=5), state_file=state)
    state.write_text("{}")
    with pytest.raises(PosSwapError, match="is not the state of a search"):
        search(state_file=state)


@pytest.mark.parametrize("setting", [{"population": 2}, {"parents": 0}, {"mutation_rate": 0}, {"widest": 0.5}])
def test_settings_that_make_no_search(setting):
    with pytest.raises(PosSwapError, match=f"{next(iter(setting))}="):
        Evolution(**setting)
