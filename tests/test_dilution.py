"""Attention dilution: against plain sums over the weights, where all keys are alike, and with a temperature."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hf_posswap import PosSwapError, patch_model
from hf_posswap.evaluation.dilution import NEIGHBOURS, dilution

from .families import FAMILIES, LENGTH, tokens

LENGTHS = [4, 16, LENGTH, 2 * LENGTH]
IDS = tokens(2, 2 * LENGTH)


def entropies(points) -> list[float]:
    return [point["entropy"] for point in points]


@pytest.mark.parametrize(("scheme", "params"), [(None, {}), ("yarn", {"factor": 2}), ("logn", {}), ("alibi", {})])
@pytest.mark.filterwarnings("ignore::hf_posswap.RecalibrationWarning")
def test_means_over_layers_heads_queries_and_texts(scheme, params):
    model = FAMILIES["llama"].build()
    if scheme is not None:
        patch_model(model, scheme, **params)
    points = dilution(model, IDS, LENGTHS)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = [layer.double().numpy() for layer in model(IDS, output_attentions=True).attentions]
    for point, n in zip(points, LENGTHS, strict=True):
        entropy, best = [], []
        for layer in weights:
            for text in layer:
                for head in text:
                    for i in range(max(LENGTHS[0], n - n // NEIGHBOURS) - 1, n):
                        seen = head[i, : i + 1]
                        entropy.append(-np.sum(seen * np.log(seen)))
                        best.append(seen[-LENGTHS[0] :].max())
        assert point["length"] == n
        assert point["entropy"] == pytest.approx(np.mean(entropy), rel=1e-4)
        assert point["weight"] == pytest.approx(np.mean(best), rel=1e-4)


def test_keys_that_are_all_alike_share_the_weight():
    model = FAMILIES["llama"].build()
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data.zero_()
    for point in dilution(model, IDS, LENGTHS):
        numbers = range(max(LENGTHS[0], point["length"] - point["length"] // NEIGHBOURS), point["length"] + 1)
        assert point["entropy"] == pytest.approx(np.mean([math.log(n) for n in numbers]), rel=1e-5)
        assert point["weight"] == pytest.approx(np.mean([1 / n for n in numbers]), rel=1e-5)


def test_logn_sharpens_beyond_the_trained_length_only():
    before = entropies(dilution(FAMILIES["llama"].build(layers=1), IDS, LENGTHS))
    after = entropies(dilution(patch_model(FAMILIES["llama"].build(layers=1), "logn"), IDS, LENGTHS))
    assert after[:3] == before[:3]
    assert after[3] < before[3] - 1e-3


def test_the_model_is_left_as_it_was():
    model = FAMILIES["llama"].build().train()
    dilution(model, IDS, LENGTHS)
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("family", "ids", "lengths", "says"),
    [
        ("llama", IDS, [128], r"ids=\(2, 64\), lengths=\[128\]"),
        ("llama", IDS, [1], r"2 <= length <= S"),
        ("bert", tokens(1, LENGTH), [LENGTH], r"BertForMaskedLM sees what follows"),
        ("mpnet", tokens(1, LENGTH), [LENGTH], r"MPNetForMaskedLM sees what follows"),
    ],
)
def test_what_cannot_be_measured(family, ids, lengths, says):
    with pytest.raises(PosSwapError, match=says):
        dilution(FAMILIES[family].build(), ids, lengths)
