"""Rows: documents kept whole, a curriculum of lengths, and positions spread apart."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import BloomConfig, BloomForCausalLM

from hf_posswap import PosSwapError, patch_model
from hf_posswap.training.checks import check_positions_spread
from hf_posswap.training.data import IGNORED, Batches, read_documents, tokenize
from hf_posswap.training.loop import finetune
from hf_posswap.training.packing import PADDING, Blocks, WholeDocuments, spread_positions

from .small import BLOCK, VOCABULARY, bert, gpt2, llama, losses

pytestmark = pytest.mark.filterwarnings("ignore::hf_posswap.RecalibrationWarning")


def documents_of(lengths: list[int]) -> datasets.Dataset:
    """Documents whose tokens are all different."""
    edges = np.cumsum([0, *lengths])
    return datasets.Dataset.from_dict({"input_ids": [list(range(a, b)) for a, b in pairwise(edges)]})


@pytest.mark.parametrize("seed", range(20))
def test_whole_documents_lose_and_cut_nothing_that_fits(seed):
    """Over random lengths: every document stands once, in one run, and no row could have taken another's."""
    rng, size = random.Random(seed), 32
    lengths = [rng.choice([2, 3, 7, 16, 20, 31, 32, 33, 70]) for _ in range(rng.randint(1, 60))]
    rows = WholeDocuments(documents_of(lengths), size, pad=9999)
    runs, free = [], []
    for row in range(len(rows)):
        ids, positions = rows[row]
        assert ids.shape == positions.shape == (size,)
        assert ((ids == 9999) == (positions == PADDING)).all()
        free.append(int((positions == PADDING).sum()))
        for run in np.split(ids[positions != PADDING], np.flatnonzero(positions[positions != PADDING] == 0)[1:]):
            assert (np.diff(run) == 1).all()
            runs.append((int(run[0]), len(run)))
    edges = np.cumsum([0, *lengths])
    expected = [
        (int(begin + cut), min(size, length - cut))
        for begin, length in zip(edges[:-1], lengths, strict=True)
        for cut in range(0, length, size)
        if length - cut > 1
    ]
    assert sorted(runs) == sorted(expected)
    assert rows.longest_document() == max(length for _, length in runs)
    # best fit decreasing needs at most 11/9 of the fewest rows, and one more
    assert len(rows) <= 11 / 9 * np.ceil(sum(length for _, length in expected) / size) + 4
    assert sum(free) == len(rows) * size - sum(length for _, length in expected)


def batches_of(arguments, tokenizer, objective: str = "causal", size: int = 4) -> Batches:
    documents = tokenize(read_documents(arguments), tokenizer)
    rows = WholeDocuments(documents, BLOCK, 0) if arguments.packing == "whole" else Blocks(documents, BLOCK)
    return Batches(rows, tokenizer, arguments, objective, size)


def test_padding_is_no_target_and_seen_by_nobody(arguments, tokenizer, tmp_path):
    folder = tmp_path / "short"
    folder.mkdir()
    for i, length in enumerate([3, 9, 17, 30, 5, 12, 28, 2]):
        (folder / f"{i}.py").write_text("abcdefgh"[i] * length)
    asked = replace(arguments, train_dir=str(folder), packing="whole")
    batches = batches_of(asked, tokenizer, size=2)
    model = llama().eval()
    seen = 0
    for step in range(len(batches.blocks) // 2):
        for batch in batches.of_process(step, 0, 1):
            inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
            together = model(**inputs, use_cache=False).logits
            for row in range(len(batch["input_ids"])):
                ids, positions = batches.blocks[int(batches.rows(step)[1][row])]
                assert (batch["labels"][row][positions <= 0] == IGNORED).all()
                real = positions != PADDING
                assert batch["labels"][row].ne(IGNORED).sum() == (positions > 0).sum()
                cuts = np.flatnonzero(positions[real] == 0)[1:]
                begin = 0
                for part in np.split(ids[real], cuts):
                    alone = model(input_ids=torch.from_numpy(part)[None]).logits[0]
                    torch.testing.assert_close(together[row, begin : begin + len(part)], alone, rtol=1e-4, atol=1e-5)
                    begin += len(part)
                    seen += 1
    assert seen >= 4


def test_a_run_on_whole_documents_trains_on_each_of_them(arguments, tokenizer):
    log = finetune(llama(), tokenizer, replace(arguments, packing="whole", save_steps=0))
    assert log.longest_document == BLOCK
    assert len(losses(log)) == 4


# --- curriculum


@pytest.mark.parametrize("packing", ["concat", "documents"])
def test_a_curriculum_takes_the_same_tokens_in_shorter_rows(packing, arguments, tokenizer):
    asked = replace(arguments, packing=packing)
    staged = replace(asked, curriculum=[8, 16], curriculum_steps=2)
    plain, short = batches_of(asked, tokenizer), batches_of(staged, tokenizer)
    for step, length in enumerate([8, 8, 16, 16, BLOCK, BLOCK]):
        assert short.length(step) == length
        (long,), (cut,) = plain.of_process(step, 0, 1), short.of_process(step, 0, 1)
        assert cut["input_ids"].shape == (4 * BLOCK // length, length)
        assert torch.equal(cut["input_ids"].flatten(), long["input_ids"].flatten())
        if packing == "documents":
            assert (cut["position_ids"] <= torch.arange(length)).all()
            begins = cut["position_ids"] == 0
            assert begins[:, 0].all()
            assert (cut["labels"][begins] == IGNORED).all()
            # no other document begins than in the long row
            inside = begins.clone()
            inside[:, 0] = False
            assert (long["position_ids"].flatten()[inside.flatten()] == 0).all()


def test_a_curriculum_trains_and_resumes_in_its_stage(tmp_path, arguments, tokenizer):
    from hf_posswap.training.loop import load

    asked = replace(arguments, curriculum=[8, 16], curriculum_steps=1, save_steps=2)
    model = llama()
    lengths = []
    model.model.register_forward_hook(lambda *call: lengths.append(call[2].last_hidden_state.shape[1]))
    whole = finetune(model, tokenizer, asked)
    assert lengths[-4:] == [8, 16, BLOCK, BLOCK]
    assert whole.tokens == 4 * 4 * BLOCK
    again = replace(
        asked, output_dir=str(tmp_path / "2"), resume_from_checkpoint=arguments.output_dir + "/checkpoint-2"
    )
    assert losses(finetune(*load(again), again)) == losses(whole)


# --- positions spread apart


@pytest.mark.parametrize("seed", range(30))
def test_spread_positions_rise_in_runs_and_stay_below_the_length(seed):
    rng = np.random.default_rng(seed)
    tokens, chunks = int(rng.integers(8, 60)), int(rng.integers(2, 7))
    length = tokens + int(rng.integers(1, 500))
    draws = [spread_positions(rng, tokens, length, chunks) for _ in range(200)]
    for positions in draws:
        steps = np.diff(positions)
        assert positions.shape == (tokens,)
        assert positions[0] == 0
        assert positions[-1] < length
        assert (steps >= 1).all()
        assert (steps > 1).sum() < chunks
    ends = np.array([positions[-1] for positions in draws])
    assert ends.max() > tokens - 1 + 0.8 * (length - tokens)  # the whole length is reached for
    assert len({tuple(np.diff(positions) > 1) for positions in draws}) > 3  # and cut in many places


def test_a_run_at_spread_positions_teaches_distances_that_no_row_has(arguments, tokenizer):
    """The same rows; what the model gets are positions up to 8 times their length."""
    asked = replace(arguments, pose_length=8 * BLOCK, save_steps=0)
    model, seen = patch_model(llama(), "yarn", factor=8), []
    model.model.rotary_emb.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((args, kwargs)), with_kwargs=True
    )
    log = finetune(model, tokenizer, asked)
    positions = [(kwargs.get("position_ids") if "position_ids" in kwargs else args[1]) for args, kwargs in seen[-4:]]
    assert all(p.shape == (4, BLOCK) for p in positions)
    assert BLOCK < max(int(p.max()) for p in positions) < 8 * BLOCK
    batches = batches_of(asked, tokenizer)
    (batch,) = batches.of_process(0, 0, 1)
    logits = patch_model(llama(), "yarn", factor=8)(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], position_ids=batch["position_ids"]
    ).logits
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1).double(), batch["input_ids"][:, 1:].flatten()).item()
    assert losses(log)[0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "patched",
    [
        llama,
        bert,
        gpt2,
        lambda: patch_model(llama(), "yarn", factor=4),
        lambda: patch_model(llama(), "logn", clip=False),
    ],
    ids=["rope", "bert", "gpt2", "yarn", "logn"],
)
def test_models_that_read_position_ids_take_spread_positions(patched):
    check_positions_spread(patched(), 64)


@pytest.mark.parametrize("scheme", ["nope", "alibi", "t5", "kerple", "fire", "sandwich", "xpos"])
def test_schemes_that_count_places_are_refused_spread_positions(scheme, arguments, tokenizer):
    model = patch_model(llama(), scheme)
    with pytest.raises(PosSwapError, match="pose_length=64: LlamaForCausalLM does not take its distances"):
        finetune(model, tokenizer, replace(arguments, pose_length=64))
    assert "forward" not in vars(model)


def test_a_model_without_position_ids_is_refused_spread_positions():
    with pytest.raises(PosSwapError, match="BloomForCausalLM does not take its distances from position_ids"):
        check_positions_spread(
            BloomForCausalLM(BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=1, n_head=2)), 64
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pose_length": BLOCK}, "pose_length=32 is too small; it must be greater than 32"),
        ({"pose_length": 64, "pose_chunks": 1}, "pose_chunks=1 is too small; the least value is 2"),
        (
            {"pose_length": 64, "packing": "documents"},
            "pose_length=64 does not go with packing='documents'; use 'concat'",
        ),
        ({"pose_length": 64, "distil": 0.5}, "pose_length=64 does not go with distil=0.5; use 0"),
        ({"curriculum": [8]}, "curriculum_steps=0 is too small; the least value is 1"),
        ({"curriculum_steps": 5}, "curriculum_steps=5 is too great"),
        ({"curriculum": [12], "curriculum_steps": 1}, r"curriculum=\[12\]: 12 is not a divisor of block_size=32"),
        ({"curriculum": [16, 8], "curriculum_steps": 1}, "16 is not a divisor of block_size=32 from 8 to below 8"),
        ({"curriculum": [4], "curriculum_steps": 1}, "4 is not a divisor of block_size=32 from 8 to below 32"),
    ],
)
def test_arguments_of_rows(change, message, arguments):
    with pytest.raises(PosSwapError, match=message):
        replace(arguments, **change)


def test_spread_positions_end_at_a_models_table(arguments, tokenizer):
    with pytest.raises(PosSwapError, match="pose_length=48 is longer than the 40 positions of GPT2LMHeadModel"):
        finetune(gpt2(), tokenizer, replace(arguments, pose_length=48))
    finetune(gpt2(), tokenizer, replace(arguments, pose_length=40, max_steps=1))
    assert Path(arguments.output_dir, "train_log.json").exists()
