"""The laws of the design, each over every row that has the capability. The oracle law is in test_oracles.py,
the round trip in test_round_trip.py."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
import transformers
from transformers import StaticCache

from hf_posswap import RecalibrationWarning, patch_model, unpatch_model

from .conftest import by_id, first_of_each
from .families import PAD, VOCAB, tokens
from .rows import (
    ADDED_ROWS,
    CAUSAL_ROWS,
    CONCAT_ROWS,
    ROTARY_ROWS,
    ROWS,
    SILENT_ROWS,
    TABLES,
    TEXT_ROWS,
    UNPATCHED,
    Row,
    logits,
)

EXACT = [row for row in CAUSAL_ROWS if row.exact_cache]


def outcome(model, inputs):
    """Logits, or the fact that the model refuses such an input."""
    try:
        return logits(model, **inputs)
    except (ValueError, IndexError, RuntimeError):
        return None


def close(a, b, tolerance=2e-5):
    assert a.shape == b.shape
    assert (a - b).abs().max() <= tolerance * max(1.0, b.abs().max().item())


# --- 1 effect


@by_id([row for row in ROWS if row.starts_as != UNPATCHED])
def test_effect(row: Row):
    model, inputs = row.source(), row.inputs()
    before = outcome(model, inputs)
    assert row.patch(model) is model
    after = outcome(model, inputs)
    assert after is not None
    assert before is None or (before - after).abs().max() > 1e-4


@by_id([row for row in ROWS if row.starts_as])
def test_starts_as_it_says_and_leaves_as_it_is_trained(row: Row):
    """What a patch that preserves a function preserves; and that a changed parameter of it changes the output."""
    model, reference, inputs = row.source(), row.source(), row.inputs()
    if row.starts_as != UNPATCHED:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RecalibrationWarning)
            patch_model(reference, row.starts_as[0], **row.starts_as[1])
    before = logits(row.patch(model), **inputs)
    close(before, logits(reference, **inputs))
    added = [parameter for name, parameter in model.named_parameters() if ".posswap." in name]
    assert added
    for parameter in added:
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
        after = logits(model, **inputs)
        assert (after - before).abs().max() > 1e-3
        before = after


@by_id(ROWS)
def test_says_what_must_be_recalibrated(row: Row):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch_model(row.source(), row.scheme, **row.params, layers=row.layers)
    assert any(issubclass(w.category, RecalibrationWarning) for w in caught) == row.recalibrate


# --- 2 silence


@by_id([row for row in SILENT_ROWS if row.anatomy.causal])
def test_silence_causal(row: Row):
    model = row.source(layers=1)
    ids = tokens(2, 8)  # within Gemma's sliding window, whose mask tells near from far
    permuted = torch.cat([ids[:, :-1].flip(1), ids[:, -1:]], 1)
    knows = logits(model, input_ids=ids)[:, -1] - logits(model, input_ids=permuted)[:, -1]
    assert knows.abs().max() > 1e-4
    row.patch(model)
    close(logits(model, input_ids=permuted)[:, -1], logits(model, input_ids=ids)[:, -1])


@by_id([row for row in SILENT_ROWS if not row.anatomy.causal and not row.anatomy.vision])
def test_silence_encoder(row: Row):
    model, ids = row.source(), tokens(2, 16)
    assert (logits(model, input_ids=ids.flip(1)).flip(1) - logits(model, input_ids=ids)).abs().max() > 1e-3
    row.patch(model)
    close(logits(model, input_ids=ids.flip(1)).flip(1), logits(model, input_ids=ids))


@by_id([row for row in SILENT_ROWS if row.anatomy.vision])
def test_silence_image(row: Row):
    model, image = row.source(), row.inputs()["pixel_values"]
    swapped = torch.cat([image[..., 16:, :], image[..., :16, :]], dim=2)  # rows of patches 2, 3, 0, 1
    assert (logits(model, pixel_values=swapped) - logits(model, pixel_values=image)).abs().max() > 1e-3
    row.patch(model)
    close(logits(model, pixel_values=swapped), logits(model, pixel_values=image))


# --- 4 cache


@by_id(EXACT)
def test_decode_equals_forward(row: Row):
    model, ids = row.patched(), tokens(2, row.length)
    full, cache, steps = logits(model, input_ids=ids), None, []
    with torch.no_grad():
        for i in range(ids.shape[1]):
            out = model(ids[:, i : i + 1], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            steps.append(out.logits)
    close(torch.cat(steps, 1), full)


@by_id(EXACT)
def test_chunked_prefill_equals_forward(row: Row):
    model, ids = row.patched(), tokens(2, row.length)
    cache, chunks = None, []
    with torch.no_grad():
        for chunk in ids.split(5, dim=1):
            out = model(chunk, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            chunks.append(out.logits)
    close(torch.cat(chunks, 1), logits(model, input_ids=ids))


@by_id([row for row in EXACT if row.static_cache])
def test_static_cache_equals_forward(row: Row):
    model, ids = row.patched(), tokens(2, row.length)
    cache = StaticCache(config=model.config.get_text_config(), max_cache_len=row.length)
    with torch.no_grad():
        first = model(ids[:, :10], past_key_values=cache, use_cache=True).logits
        rest = [model(ids[:, i : i + 1], past_key_values=cache, use_cache=True).logits for i in range(10, row.length)]
    close(torch.cat([first, *rest], 1), logits(model, input_ids=ids))


@by_id(EXACT)
@pytest.mark.parametrize("beams", [1, 3])
def test_generation_does_not_depend_on_the_cache(row: Row, beams: int):
    model, ids = row.patched(), tokens(2, 8)
    model.generation_config.eos_token_id = None
    runs = [
        model.generate(ids, max_new_tokens=8, num_beams=beams, do_sample=False, use_cache=use_cache)
        for use_cache in (True, False)
    ]
    assert torch.equal(*runs)


# --- 5 padding


@pytest.mark.parametrize(
    ("row", "side"),
    [pytest.param(row, side, id=f"{row.id}-{side}") for row in TEXT_ROWS if row.static for side in row.anatomy.pads],
)
def test_padded_row_equals_row_alone(row: Row, side: str):
    model, ids, pad, length = row.patched(), tokens(1, 12), 5, 17
    alone = logits(model, input_ids=ids, attention_mask=torch.ones_like(ids))
    real = slice(pad, None) if side == "left" else slice(0, -pad)
    padded, mask = torch.full((2, length), PAD), torch.zeros(2, length, dtype=torch.long)
    padded[0, real], mask[0, real] = ids[0], 1
    padded[1], mask[1] = tokens(1, length, seed=9)[0], 1
    positions = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0) + row.anatomy.first} if row.anatomy.positions else {}
    together = logits(model, input_ids=padded, attention_mask=mask, **positions)
    close(together[0, real], alone[0])


@by_id([row for row in ADDED_ROWS + CONCAT_ROWS if row.family not in TABLES])
def test_added_positions_follow_the_mask_without_position_ids(row: Row):
    model, ids = row.patched(), tokens(1, 12)
    padded = torch.cat([torch.full((1, 5), PAD), ids], 1)
    mask = (torch.arange(17) >= 5).long()[None]
    close(logits(model, input_ids=padded, attention_mask=mask)[:, 5:], logits(model, input_ids=ids))


# --- 6 packing


@by_id([row for row in CAUSAL_ROWS if row.anatomy.packs and row.static])
def test_packed_documents_equal_documents_apart(row: Row):
    model, first, second = row.patched(), tokens(1, 9), tokens(1, 14, seed=1)
    positions = torch.cat([torch.arange(9), torch.arange(14)])[None]
    packed = logits(model, input_ids=torch.cat([first, second], 1), position_ids=positions, use_cache=False)
    close(packed[:, :9], logits(model, input_ids=first))
    close(packed[:, 9:], logits(model, input_ids=second))


# --- 8 undo


@by_id(ROWS)
def test_undo_is_exact(row: Row):
    model, inputs = row.source(), row.plain_inputs()
    before, keys, config = logits(model, **inputs), list(model.state_dict()), model.config.to_dict()
    modules = [name for name, _ in model.named_modules()]
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    trained = [parameter.requires_grad for parameter in model.parameters()]
    row.patch(model)
    logits(model, **row.inputs())  # dynamic and longrope keep state between calls
    unpatch_model(model)
    assert torch.equal(logits(model, **inputs), before)
    assert list(model.state_dict()) == keys
    assert model.config.to_dict() == config
    assert [name for name, _ in model.named_modules()] == modules
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert [parameter.requires_grad for parameter in model.parameters()] == trained


@by_id(ROWS)
def test_twice_is_once_and_another_replaces_it(row: Row):
    model = row.source()
    places = "rope2d" if row.anatomy.vision else "sinusoidal" if row.anatomy.positions else "kerple"
    other = "nope" if row.scheme != "nope" else places
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecalibrationWarning)
        patch_model(model, other)
    row.patch(row.patch(model))
    assert torch.equal(logits(model, **row.inputs()), logits(row.patched(), **row.inputs()))
    assert model.config.to_dict() == row.patched().config.to_dict()


# --- 9 isolation


@by_id(ROWS)
def test_other_models_never_notice(row: Row):
    model = row.source()
    sharing = type(model)(model.config).eval()
    stranger, inputs = row.source(seed=1), row.plain_inputs()
    before = [(logits(m, **inputs), m.config.to_dict()) for m in (sharing, stranger)]
    row.patch(model)
    for other, (values, config) in zip((sharing, stranger), before, strict=True):
        assert torch.equal(logits(other, **inputs), values)
        assert other.config.to_dict() == config
    assert "posswap" not in row.source().config.to_dict()


# --- 10 precision


NOT_OF_TEXT = {"visual", "bbox_sinusoid_emb"}  # of images, and of boxes, which no swap touches


# Falcon builds a rotary module also where it has ALiBi, and reads it never
@by_id([row for row in ROTARY_ROWS + SILENT_ROWS if row.family != "falcon_alibi"])
@pytest.mark.parametrize("cast", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.bfloat16().float()])
def test_frequencies_stay_float32(row: Row, cast):
    model = row.patched()
    before = {
        n: b.clone() for n, b in model.named_buffers() if "inv_freq" in n and not {*NOT_OF_TEXT} & {*n.split(".")}
    }
    cast(model)
    for name, value in before.items():
        buffer = model.get_buffer(name)
        assert buffer.dtype == torch.float32
        assert torch.equal(buffer, value)


@by_id(ROWS)
def test_new_tensors_have_the_neighbours_dtype(row: Row):
    model = row.patch(row.source().to(torch.bfloat16))
    added = {name: p.dtype for name, p in model.named_parameters() if ".posswap." in name}  # stays float32, law 10
    assert {p.dtype for name, p in model.named_parameters() if name not in added} == {torch.bfloat16}
    assert set(added.values()) <= {torch.float32}
    inputs = {k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in row.inputs().items()}
    assert torch.isfinite(logits(model, **inputs)).all()


# --- copies


@by_id(ROWS)
@pytest.mark.parametrize("copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_are_patched_and_apart(row: Row, copier):
    model = row.patched()
    twin, inputs = copier(model), row.inputs()
    expected = logits(model, **inputs)
    assert torch.equal(logits(twin, **inputs), expected)
    unpatch_model(twin)
    assert torch.equal(logits(model, **inputs), expected)


# --- 14 compile


@first_of_each("scheme")([row for row in ROWS if row.static and row.compiles])
def test_compiles_to_one_graph_for_any_length(row: Row):
    torch._dynamo.reset()
    model = row.patched()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
    inputs = row.inputs()
    close(logits(compiled, **inputs), logits(model, **inputs))
    if row.anatomy.vision:
        return
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for length in (18, 15, 21):
        logits(compiled, input_ids=tokens(2, length))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


# --- 15 training


# by the loss of these inputs, patched or not; `pos_proj`, of DeBERTa's distances, where those are silent
UNREACHED = ("pooler", "mask_token", "visual", "experts", "post_layernorm", "vision_model.head", "pos_proj")
UNREACHED += ("rel_pos_", "layout_")


def loss_of(model, row: Row):
    inputs = row.inputs()
    labels = torch.zeros(2, dtype=torch.long) if row.anatomy.vision else inputs["input_ids"].clamp(max=VOCAB - 1)
    return model(**inputs, labels=labels).loss


@by_id(ROWS)
def test_gradients_reach_what_is_trainable_and_nothing_else(row: Row):
    model = row.patched().train()
    loss_of(model, row).backward()
    for name, parameter in model.named_parameters():
        frozen_here = parameter.grad is None
        assert frozen_here == (not parameter.requires_grad) or any(k in name for k in UNREACHED), name
    names = {"position_embeddings", "box_position_embeddings", "wpe", "embed_positions"}
    tables = [p for n, p in model.named_parameters() if names & {*n.split(".")}]
    for table in tables:
        assert table.requires_grad == (row.scheme in ("learned", "learned2d") or row.keeps_table)


@by_id([row for row in ROWS if getattr(transformers, row.anatomy.model).supports_gradient_checkpointing])
def test_gradient_checkpointing_gives_the_same_gradients(row: Row):
    grads = []
    for checkpointing in (False, True):
        model = row.patched().train()
        if checkpointing:
            # renamed in transformers 5.18
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        loss_of(model, row).backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        close(grads[1][name], grad, 1e-5)
