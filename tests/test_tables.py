"""The absolute catalogue beyond the table of laws: rows that are drawn, and how near a fitted sinusoid starts."""

from __future__ import annotations

import pytest
import torch

from hf_posswap import patch_model

from .families import FAMILIES, LENGTH, tokens
from .rows import logits


def table(model) -> torch.Tensor:
    return model.bert.embeddings.position_embeddings.weight.detach()


def test_drawn_rows_scatter_as_the_old_ones_and_follow_the_seed():
    old = table(FAMILIES["bert"].build())
    first, again, other = (
        table(patch_model(FAMILIES["bert"].build(), "learned", max_positions=2048, init="random", init_seed=seed))
        for seed in (1, 1, 2)
    )
    assert torch.equal(first[:LENGTH], old)
    assert torch.equal(first, again)
    assert not torch.equal(first[LENGTH:], other[LENGTH:])
    drawn = first[LENGTH:]
    torch.testing.assert_close(drawn.mean(0), old.mean(0), atol=0.01, rtol=0)
    torch.testing.assert_close(drawn.std(0), old.std(0, correction=0), atol=0, rtol=0.1)


@pytest.mark.filterwarnings("ignore::hf_posswap.RecalibrationWarning")
def test_a_fitted_sinusoid_starts_nearer_than_an_exact_one():
    """On a table made of waves, as trained ones mostly are, and a fifth of noise."""
    torch.manual_seed(0)
    model, ids = FAMILIES["bert"].build(), tokens(2, 24)
    waves = torch.sin(torch.arange(LENGTH)[:, None] * torch.rand(64) + 6.3 * torch.rand(64))
    model.bert.embeddings.position_embeddings.weight.data = 0.1 * (waves + 0.2 * torch.randn(LENGTH, 64))
    before, moved = logits(model, input_ids=ids), {}
    for init in ("exact", "fit"):
        patch_model(model, "sinusoidal", max_positions=4 * LENGTH, init=init)
        moved[init] = (logits(model, input_ids=ids) - before).square().mean().sqrt()
    assert moved["fit"] < 0.5 * moved["exact"]
