"""The absolute catalogue beyond the table of laws: rows that are drawn, and how near a fitted sinusoid starts."""

from __future__ import annotations

import pytest
import torch

from hf_posswap import describe, patch_model

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


@pytest.mark.filterwarnings("ignore::hf_posswap.RecalibrationWarning")
@pytest.mark.parametrize(
    ("family", "says"), [("llama", "concatenated before the first layer"), ("bert", "concatenated")]
)
def test_a_concatenated_position_preserves_the_function_under_autocast_too(family, says):
    """The identity of the projection is not rounded to bf16: nothing but the silenced positions is missing."""
    ids, found = tokens(2, 20), []
    for scheme, params in (("nope", {}), ("sinusoidal", {"combine": "concat"})):
        model = patch_model(FAMILIES[family].build(), scheme, **params)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found.append(logits(model, input_ids=ids))
    assert torch.equal(*found)
    assert says in str(describe(model))
    assert torch.equal(logits(model, inputs_embeds=model.get_input_embeddings()(ids)), logits(model, input_ids=ids))


def test_training_a_concatenation_moves_the_projection_and_the_table():
    model = patch_model(FAMILIES["gpt2"].build(), "learned", combine="concat")
    ids, optimizer = tokens(4, 20), torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    names = ("transformer.posswap.projection", "transformer.wpe.weight")
    start, losses = {name: model.get_parameter(name).detach().clone() for name in names}, []
    for _ in range(8):
        loss = model(ids, labels=ids).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.8 * losses[0]
    for name, value in start.items():
        assert (model.get_parameter(name) - value).abs().max() > 1e-3
