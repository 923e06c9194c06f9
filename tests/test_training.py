"""Training: data, losses, resume and processes, each against something computed in another way."""

from __future__ import annotations

import copy
import json
import math
import random
import runpy
import shutil
import signal
import sys
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate import ParallelismConfig
from accelerate.utils import DistributedType
from safetensors.torch import load_file
from transformers import (
    BertModel,
    BloomConfig,
    BloomForCausalLM,
    PreTrainedTokenizerFast,
)

from hf_posswap import PosSwapError, from_pretrained, patch_model
from hf_posswap.scheme import make_scheme
from hf_posswap.training import loss
from hf_posswap.training.arguments import FinetuneArguments
from hf_posswap.training.checkpoints import STATE
from hf_posswap.training.checks import check_documents_apart, check_parallelism
from hf_posswap.training.data import IGNORED, Batches, read_documents, tokenize
from hf_posswap.training.distil import load_teacher
from hf_posswap.training.flops import peak_tflops
from hf_posswap.training.log import TrainingLog
from hf_posswap.training.loop import finetune, load
from hf_posswap.training.loss import chunk_loss
from hf_posswap.training.packing import Blocks

from .small import BLOCK, SCRIPT, VOCABULARY, bart, bert, flags, gemma2, gpt2, launch, llama, losses, run

# --- data


def test_blocks_are_the_concatenated_documents(texts, tokenizer, arguments):
    documents = tokenize(read_documents(arguments), tokenizer)
    assert len(documents) == 6  # the blank file is no document
    several = datasets.concatenate_datasets([documents.select([i]) for i in range(6)])  # one chunk of memory each
    expected_ids, expected_positions = [], []
    for file in sorted(texts.glob("*.py")):
        if file.name != "blank.py":
            ids = [*tokenizer(file.read_text())["input_ids"], tokenizer.eos_token_id]
            expected_ids += ids
            expected_positions += range(len(ids))
    assert len(expected_ids) > 1000
    for source in (documents, several):
        blocks = Blocks(source, BLOCK)
        assert blocks.tokens == len(expected_ids)
        assert len(blocks) == len(expected_ids) // BLOCK
        for row in range(len(blocks)):
            begin = row * BLOCK
            ids, positions = blocks[row]
            assert ids.tolist() == expected_ids[begin : begin + BLOCK]
            # a document's part in a row counts from the row's edge, or from the document's own beginning
            assert positions.tolist() == [min(i, p) for i, p in enumerate(expected_positions[begin : begin + BLOCK])]


def test_longest_document_is_the_longest_run_inside_a_row(tokenizer):
    lengths = [5, 3, 30, 2, 2, 9]
    documents = datasets.Dataset.from_dict({"input_ids": [list(range(n)) for n in lengths]})
    blocks = Blocks(documents, 16)  # runs: 5 3 8 | 16 | 6 2 2 6 | a tail of 3
    assert len(blocks) == 3
    assert blocks.longest_document() == max(blocks[row][1].max() + 1 for row in range(3)) == 16
    assert Blocks(documents.select([0, 1, 5]), 16).longest_document() == 8  # runs: 5 3 8


@pytest.mark.parametrize("objective", ["causal", "masked"])
def test_global_batch_is_the_same_for_any_number_of_processes(objective, arguments, tokenizer, bert_tokenizer):
    tokenizer = tokenizer if objective == "causal" else bert_tokenizer
    blocks = Blocks(tokenize(read_documents(arguments), tokenizer), BLOCK)

    def global_batch(step: int, rows: int, processes: int) -> list[list[int]]:
        shared = replace(arguments, per_device_train_batch_size=rows)
        batches = Batches(blocks, tokenizer, shared, objective, 8)
        parts = [batches.of_process(step, process, processes) for process in range(processes)]
        assert {len(part) for part in parts} == {8 // rows // processes}
        return sorted(
            ids + labels
            for part in parts
            for batch in part
            for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True)
        )

    per_epoch = len(blocks) // 8
    seen = {}
    for step in (0, 1, per_epoch - 1, per_epoch, 5 * per_epoch + 3):
        seen[step] = global_batch(step, 8, 1)
        for rows, processes in ((4, 2), (2, 1), (1, 2), (2, 4)):
            assert global_batch(step, rows, processes) == seen[step]
    assert seen[0] != seen[1] != seen[per_epoch]


def test_an_epoch_takes_every_row_once_and_the_next_in_another_order(arguments, tokenizer):
    batches = Batches(range(50), tokenizer, arguments, "causal", 8)
    epochs = [[row for step in range(6 * e, 6 * e + 6) for row in batches.rows(step)[1]] for e in range(2)]
    assert all(len(set(epoch)) == 48 for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert batches.rows(5)[0] == 0
    assert batches.rows(6)[0] == 1


def test_masking_has_the_shares_of_the_recipe(arguments, bert_tokenizer):
    rng = np.random.default_rng(0)
    blocks = [(np.concatenate([[257], rng.integers(0, 256, 998), [258]]), None) for _ in range(40)]
    batches = Batches(blocks, bert_tokenizer, replace(arguments, mlm_probability=0.3), "masked", 40)
    batch = batches._collate(0, np.arange(40), 1000)
    original = torch.from_numpy(np.stack([ids for ids, _ in blocks]))
    chosen = batch["labels"] != IGNORED
    assert not chosen[:, [0, -1]].any()  # the special tokens
    assert torch.equal(batch["labels"][chosen], original[chosen])
    assert torch.equal(batch["input_ids"][~chosen], original[~chosen])
    assert chosen.float().mean() == pytest.approx(0.3, abs=0.01)
    inputs, was = batch["input_ids"][chosen], original[chosen]
    assert (inputs == bert_tokenizer.mask_token_id).float().mean() == pytest.approx(0.8, abs=0.02)
    assert (inputs == was).float().mean() == pytest.approx(0.1, abs=0.02)
    # a row too short for the share still has something to predict
    sparse = Batches(
        [(np.array([257, 65, 66, 258]), None)], bert_tokenizer, replace(arguments, mlm_probability=1e-9), "masked", 1
    )
    assert sparse.targets(sparse._collate(0, np.array([0]), 4)) == 1


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_files_of_rows_are_read_by_column(suffix, tmp_path, arguments):
    rows = datasets.Dataset.from_dict({"body": ["one", "two"], "other": [1, 2]})
    file = str(tmp_path / f"rows.{suffix}")
    {"jsonl": rows.to_json, "csv": rows.to_csv, "parquet": rows.to_parquet}[suffix](file)
    asked = replace(arguments, train_dir=None, train_file=[file], text_column="body")
    assert read_documents(asked)["body"][:] == ["one", "two"]
    with pytest.raises(PosSwapError, match=r"text_column='bodi' is not a column.*'body'"):
        read_documents(replace(asked, text_column="bodi"))


def test_a_folder_in_the_datasets_format_is_read_as_dataset_name(tmp_path, arguments):
    datasets.Dataset.from_dict({"text": list("abcdef")}).to_parquet(str(tmp_path / "data" / "train.parquet"))
    asked = replace(arguments, train_dir=None, dataset_name=str(tmp_path / "data"), dataset_split="train[2:4]")
    assert read_documents(asked)["text"][:] == ["c", "d"]


# --- losses


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chunk", [7, 1000])
def test_chunked_loss_and_its_gradients_equal_the_models_own(chunk, tied):
    own, ours = llama(tie_word_embeddings=tied), llama(tie_word_embeddings=tied)
    ids = torch.randint(VOCABULARY, (3, 20), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[1, 5:] = IGNORED
    assert chunk_loss(ours, chunk)
    results = [model(input_ids=ids, labels=labels, use_cache=False) for model in (own, ours)]
    assert "logits" not in results[1]
    for result in results:
        result.loss.backward()
    torch.testing.assert_close(results[1].loss, results[0].loss, rtol=1e-6, atol=0)
    for (name, one), other in zip(own.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-5, atol=1e-7, msg=name)


def test_chunked_loss_holds_one_chunk_of_logits_at_a_time(monkeypatch):
    model, widths = llama(), []
    assert chunk_loss(model, 10)
    linear = torch.nn.Linear.forward

    def count(self, hidden):
        if self is model.lm_head:
            widths.append(hidden.shape[0])
        return linear(self, hidden)

    monkeypatch.setattr(torch.nn.Linear, "forward", count)
    ids = torch.arange(64)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    assert max(widths) == 10
    assert sum(widths) == 2 * 63  # once in the forward, once again in the backward


def test_a_model_with_capped_logits_keeps_its_own_loss(arguments, tokenizer):
    model = gemma2()
    assert not chunk_loss(model)
    assert "forward" not in vars(model)
    with torch.no_grad():
        expected = reference_losses(model, tokenizer, replace(arguments, max_steps=1))
    log = finetune(model, tokenizer, replace(arguments, max_steps=1))
    assert not log.chunked_loss
    assert losses(log) == pytest.approx(expected, rel=1e-6)


def reference_losses(model, tokenizer, arguments: FinetuneArguments) -> list[float]:
    """The first loss, by hand: the rows of the first batch, each document of a row run by itself."""
    blocks = Blocks(tokenize(read_documents(arguments), tokenizer), BLOCK)
    size = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
    batches = Batches(blocks, tokenizer, arguments, "causal", size)
    total, count = 0.0, 0
    for row in batches.rows(0)[1]:
        ids, positions = blocks[row]
        cuts = np.flatnonzero(positions == 0)[1:] if arguments.packing == "documents" else []
        for part in np.split(ids, cuts):
            part = torch.from_numpy(part)
            logits = model(input_ids=part[None]).logits[0, :-1]
            total += F.cross_entropy(logits.double(), part[1:], reduction="sum").item()
            count += len(part) - 1
    return [total / count]


@pytest.fixture
def short_documents(tmp_path) -> str:
    """Documents of very different lengths, so that rows hold different numbers of targets."""
    rng = random.Random(0)
    folder = tmp_path / "short"
    folder.mkdir()
    for i in range(60):
        (folder / f"{i:02}.py").write_text("".join(rng.choices("abcdefgh", k=rng.choice([1, 2, 3, 40]))))
    return str(folder)


@pytest.mark.parametrize("packing", ["concat", "documents"])
@pytest.mark.parametrize("make", [llama, gemma2], ids=["chunked", "own"])
def test_loss_is_the_mean_over_tokens_not_over_forwards(make, packing, arguments, tokenizer, short_documents):
    asked = replace(arguments, train_dir=short_documents, packing=packing, max_steps=1)
    logs = []
    for rows, accumulation in ((4, 1), (1, 4)):
        shape = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulation}
        asked = replace(asked, output_dir=f"{arguments.output_dir}-{rows}", **shape)
        expected = reference_losses(make().eval(), tokenizer, asked)
        logs.append(finetune(make(), tokenizer, asked))
        assert losses(logs[-1]) == pytest.approx(expected, rel=1e-5)
    assert logs[0].entries[0]["grad_norm"] == pytest.approx(logs[1].entries[0]["grad_norm"], rel=1e-5)


def test_packed_documents_equal_documents_apart():
    model = llama(tie_word_embeddings=True).eval()
    check_documents_apart(model)
    ids = torch.randint(VOCABULARY, (1, 30), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(12), torch.arange(18)])[None]
    together = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    apart = torch.cat([model(input_ids=part).logits for part in ids.split([12, 18], dim=1)], dim=1)
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-5)


def test_a_model_whose_documents_see_each_other_is_refused():
    leaking = llama().eval()
    mask = torch.ones(1, 24, dtype=torch.long)
    # with a padding mask transformers no longer looks at position_ids
    leaking.register_forward_pre_hook(
        lambda module, args, kwargs: (args, kwargs | {"attention_mask": mask[:, : kwargs["input_ids"].shape[1]]}),
        with_kwargs=True,
    )
    bloom = BloomForCausalLM(BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=1, n_head=2))
    for model in (leaking, bloom):
        with pytest.raises(PosSwapError, match=r"packing: .* not keep .* apart; use packing='concat'"):
            check_documents_apart(model)


# --- the loop


def test_training_learns_and_leaves_an_ordinary_model_and_a_log(arguments, tokenizer):
    model = llama()
    log = finetune(model, tokenizer, replace(arguments, max_steps=30, logging_steps=10, save_steps=0))
    assert [entry["step"] for entry in log.entries] == [10, 20, 30]
    assert log.entries[-1]["loss"] < log.entries[0]["loss"] - 0.3
    assert log.steps == 30
    assert log.tokens == 30 * 4 * BLOCK
    assert log.chunked_loss
    assert model.training
    assert "forward" not in vars(model)
    written = json.loads((Path(arguments.output_dir) / "train_log.json").read_text())
    assert TrainingLog.read(arguments.output_dir) == log
    assert written["versions"].keys() >= {"hf_posswap", "torch", "transformers", "accelerate", "datasets", "python"}
    assert written["hardware"]["processes"] == 1
    assert written["wall_seconds"] > 0
    assert all(e.keys() == {"step", "loss", "learning_rate", "grad_norm", "tokens_per_second"} for e in log.entries)

    reloaded = from_pretrained(arguments.output_dir)
    ids = torch.arange(20)[None]
    assert torch.equal(reloaded(ids).logits, model.eval()(ids).logits)
    saved = PreTrainedTokenizerFast.from_pretrained(arguments.output_dir)
    assert saved("a b")["input_ids"] == tokenizer("a b")["input_ids"]


def test_learning_rate_follows_the_schedule(arguments, tokenizer):
    log = finetune(llama(), tokenizer, replace(arguments, max_steps=6, learning_rate=0.6, max_grad_norm=0))
    rates = [entry["learning_rate"] for entry in log.entries]
    assert rates == pytest.approx([0.0, 0.3, 0.6, 0.45, 0.3, 0.15])
    wsd = {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": '{"num_decay_steps": 2}'}
    again = replace(arguments, output_dir=arguments.output_dir + "-wsd", max_steps=6, **wsd)
    rates = [entry["learning_rate"] for entry in finetune(llama(), tokenizer, again).entries]
    assert rates[2:5] == pytest.approx([1e-2] * 3)
    assert rates[5] < 1e-2


def test_gradient_checkpointing_changes_no_number(arguments, tokenizer):
    plain = finetune(llama(), tokenizer, arguments)
    model, calls = llama(), []
    model.model.layers[0].self_attn.register_forward_hook(lambda *call: calls.append(torch.is_grad_enabled()))
    other = replace(arguments, output_dir=arguments.output_dir + "-2", gradient_checkpointing=True)
    assert losses(finetune(model, tokenizer, other)) == losses(plain)
    assert sum(calls) == 2 * 4  # each step's forward, and once more in its backward
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    assert not model.get_input_embeddings()._forward_hooks


def test_mixed_precision_trains_float32_weights_near_the_plain_run(arguments, tokenizer):
    plain = finetune(llama(), tokenizer, arguments)
    model = llama()
    mixed = replace(arguments, output_dir=arguments.output_dir + "-2", mixed_precision="bf16")
    log = finetune(model, tokenizer, mixed)
    assert losses(log) != losses(plain)
    assert losses(log) == pytest.approx(losses(plain), rel=2e-2)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not {"forward", "_original_forward"} & vars(model).keys()
    # and this process can go back to full precision
    third = finetune(llama(), tokenizer, replace(arguments, output_dir=arguments.output_dir + "-3"))
    assert losses(third) == losses(plain)


def test_mfu_is_the_operations_of_a_step_against_the_peak_that_was_given(arguments, tokenizer):
    """By hand: 2 for each weight of a linear layer and a token, 4 S E for attention, and twice that in the backward."""
    model = llama(attn_implementation="eager")
    log = finetune(model, tokenizer, replace(arguments, max_steps=3, peak_tflops=1e-4, save_steps=0))
    layers = sum(m.weight.numel() for m in model.model.modules() if isinstance(m, torch.nn.Linear))
    expected = 6 * layers + 6 * model.lm_head.weight.numel() * (BLOCK - 1) / BLOCK + 2 * 3 * 4 * BLOCK * 32
    for entry in log.entries:
        assert entry["mfu"] * 1e8 / entry["tokens_per_second"] == pytest.approx(expected, rel=0.01)
    assert log.peak_tflops == 1e-4


@pytest.mark.parametrize(
    ("name", "precision", "dtype", "given", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", torch.float32, None, 989),
        ("NVIDIA H100 PCIe", "no", torch.bfloat16, None, 756),
        ("NVIDIA L40S", "fp16", torch.float32, None, 362),
        ("NVIDIA L4", "bf16", torch.float32, None, 121),
        ("NVIDIA L40", "bf16", torch.float32, None, None),
        ("NVIDIA H100 80GB HBM3", "no", torch.float32, None, None),
        ("NVIDIA H100 80GB HBM3", "no", torch.float32, 60.0, 60),
    ],
)
def test_the_peak_of_a_device_is_known_or_given_and_never_guessed(
    name, precision, dtype, given, peak, monkeypatch, arguments
):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    accelerator = SimpleNamespace(device=torch.device("cuda"), mixed_precision=precision)
    assert peak_tflops(accelerator, llama().to(dtype), replace(arguments, peak_tflops=given)) == peak
    accelerator.device = torch.device("cpu")
    assert peak_tflops(accelerator, llama().to(dtype), replace(arguments, peak_tflops=given)) == given


def test_a_masked_model_learns(arguments, bert_tokenizer):
    log = finetune(bert(), bert_tokenizer, replace(arguments, max_steps=30, mlm_probability=0.3))
    assert log.objective == "masked"
    assert log.chunked_loss
    assert losses(log)[0] == pytest.approx(math.log(VOCABULARY), rel=0.05)
    assert np.mean(losses(log)[-5:]) < 4.5


def test_weight_decay_and_frozen_weights(arguments, tokenizer):
    model = llama()
    model.model.embed_tokens.requires_grad_(False)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    asked = {"weight_decay": 50.0, "learning_rate": 1e-2, "max_steps": 3, "lr_scheduler_type": "constant"}
    finetune(model, tokenizer, replace(arguments, **asked))
    after = dict(model.named_parameters())
    assert torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    assert after["lm_head.weight"].norm() < 0.3 * before["lm_head.weight"].norm()
    assert after["model.norm.weight"].norm() > 0.9 * before["model.norm.weight"].norm()


def test_trackers_get_every_entry(arguments, tokenizer):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log = finetune(llama(), tokenizer, replace(arguments, report_to="tensorboard"))
    events = next(p.parent for p in Path(arguments.output_dir).rglob("events.*") if p.parent.name == "hf_posswap")
    board = accumulator.EventAccumulator(str(events))
    board.Reload()
    assert [event.step for event in board.Scalars("loss")] == [1, 2, 3, 4]
    assert [event.value for event in board.Scalars("loss")] == pytest.approx(losses(log))


def test_a_loss_that_is_not_finite_stops_before_the_weights_are_lost(arguments, tokenizer):
    model = llama()
    with pytest.raises(PosSwapError, match=r"the (loss|norm of the gradient) of step [23] is (nan|inf)"):
        finetune(model, tokenizer, replace(arguments, learning_rate=1e30, lr_scheduler_type="constant"))
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert "forward" not in vars(model)
    (saved,) = Path(arguments.output_dir).glob("failed-step-*-process-0.safetensors")
    step = int(saved.name.split("-")[2]) - 1
    blocks = Blocks(tokenize(read_documents(arguments), tokenizer), BLOCK)
    (batch,) = Batches(blocks, tokenizer, arguments, "causal", 4).of_process(step, 0, 1)
    kept = load_file(saved)
    assert kept.keys() == {f"0.{name}" for name in batch}
    assert all(torch.equal(kept[f"0.{name}"], tensor) for name, tensor in batch.items())


def test_a_start_loss_above_the_limit_stops_before_the_first_update(arguments, tokenizer):
    model = llama()
    before = model.lm_head.weight.detach().clone()
    with pytest.raises(PosSwapError, match=r"max_start_loss=2: the first loss is \d"):
        finetune(model, tokenizer, replace(arguments, max_start_loss=2.0))
    assert torch.equal(model.lm_head.weight, before)


def test_a_swap_that_broke_a_trained_model_is_stopped_before_any_step(arguments, tokenizer):
    """Healthy: a swapped model costs more than the unpatched one and less than guessing. Broken: it guesses."""
    base = llama()
    finetune(base, tokenizer, replace(arguments, output_dir=arguments.output_dir + "-base", max_steps=60, save_steps=0))
    healthy = patch_model(copy.deepcopy(base), "yarn", factor=4)
    log = finetune(healthy, tokenizer, replace(arguments, block_size=2 * BLOCK, save_steps=0))
    assert log.start["tokens"] == BLOCK
    blocks = Blocks(tokenize(read_documents(arguments), tokenizer), 2 * BLOCK)
    rows = Batches(blocks, tokenizer, arguments, "causal", 4).rows(0)[1]
    ids = torch.from_numpy(np.stack([blocks[int(row)][0][:BLOCK] for row in rows]))
    for name, model in (("unpatched", base), ("swapped", patch_model(copy.deepcopy(base), "yarn", factor=4))):
        expected = model.eval()(input_ids=ids, labels=ids).loss.item()
        assert log.start[name] == pytest.approx(expected, abs=1e-3)

    base = gpt2()
    finetune(base, tokenizer, replace(arguments, output_dir=arguments.output_dir + "-gpt2", max_steps=60, save_steps=0))
    broken = patch_model(base, "learned", max_positions=80)
    broken.transformer.wpe.weight.data[:] = 100 * broken.transformer.wte.weight[0]  # drowns every token
    before = broken.lm_head.weight.clone()
    asked = replace(arguments, output_dir=arguments.output_dir + "-broken")
    with pytest.raises(PosSwapError, match=r"the first rows cost .* before the swap; guessing costs 5.56.*probe"):
        finetune(broken, tokenizer, asked)
    assert torch.equal(broken.lm_head.weight, before)
    assert broken.config.n_positions == 80


# --- checkpoints and processes


def test_the_same_command_goes_on_where_only_the_last_save_was_missing(arguments, tokenizer):
    """Killed after its last checkpoint: what is left to do is to write the model."""
    base, out = Path(arguments.output_dir + "-base"), Path(arguments.output_dir)
    llama().save_pretrained(base)
    tokenizer.save_pretrained(base)
    asked = replace(arguments, model=str(base), save_steps=2)
    whole = finetune(*load(asked), asked)
    expected = from_pretrained(out).state_dict()
    for file in ("model.safetensors", "train_log.json"):
        (out / file).unlink()
    again = finetune(*load(asked), asked)
    assert losses(again) == losses(whole)
    weights = from_pretrained(out).state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    with pytest.raises(PosSwapError, match=r"max_steps=4: .*checkpoint-4 has done 4 already"):
        finetune(*load(asked), asked)


def test_a_full_disk_costs_no_more_than_the_steps_since_the_last_checkpoint(tmp_path, arguments, tokenizer):
    """From checkpoint-4 on the process may write no file of more than 4 kB."""
    base = tmp_path / "base"
    llama().save_pretrained(base)
    tokenizer.save_pretrained(base)
    asked = replace(arguments, model=str(base), save_steps=2)
    full = tmp_path / "full.py"
    full.write_text(
        "import pathlib, resource, runpy, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "mkdir = pathlib.Path.mkdir\n"
        "def fill(self, *args, **kwargs):\n"
        "    if 'checkpoint-4' in str(self):\n"
        "        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))\n"
        "    mkdir(self, *args, **kwargs)\n"
        "pathlib.Path.mkdir = fill\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    done = run(sys.executable, full, SCRIPT, *flags(asked), expect=1)
    assert "File too large" in done.stderr
    left = {path.name for path in Path(arguments.output_dir).iterdir()}
    assert left == {"checkpoint-2", ".checkpoint-4.partial"}
    log = finetune(*load(asked), asked)
    assert losses(log) == losses(finetune(llama(), tokenizer, replace(asked, output_dir=str(tmp_path / "whole"))))
    assert {p.name for p in Path(arguments.output_dir).glob("*checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}


def test_resume_after_a_kill_in_the_middle_of_a_save_equals_the_run_in_one_go(tmp_path, arguments, tokenizer):
    """The process dies while it writes checkpoint-4; dropout makes the random state matter."""
    base = tmp_path / "base"
    llama(attention_dropout=0.3).save_pretrained(base)
    tokenizer.save_pretrained(base)
    scheme = ["--scheme", "yarn", "--factor", "2", "--original_max_position_embeddings", str(BLOCK)]
    asked = replace(arguments, model=str(base), max_steps=6, save_steps=2, lr_scheduler_type="cosine")
    killed = replace(asked, output_dir=str(tmp_path / "killed"))

    death = tmp_path / "death.py"
    death.write_text(
        "import os, signal, sys, runpy, torch\n"
        "save, calls = torch.save, []\n"
        "def die(value, file, *rest, **options):\n"
        "    if 'checkpoint-4' in str(file):\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    save(value, file, *rest, **options)\n"
        "torch.save = die\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    run(sys.executable, death, SCRIPT, *flags(killed), *scheme, expect=-signal.SIGKILL)
    left = {path.name for path in Path(killed.output_dir).iterdir()}
    assert left == {"checkpoint-2", ".checkpoint-4.partial"}
    checkpoint = Path(killed.output_dir) / "checkpoint-2"
    assert from_pretrained(checkpoint).config.rope_parameters["rope_type"] == "yarn"
    assert not list((checkpoint / STATE).glob("*.safetensors"))  # the weights are there once

    whole = load(asked, patched_scheme())
    expected = finetune(*whole, asked)
    shutil.rmtree(base)  # a resumed run has no use for it
    done = run(sys.executable, SCRIPT, *flags(killed), *scheme)  # the same command
    assert "resumed after step 2" in done.stdout
    log = TrainingLog.read(killed.output_dir)
    assert log.steps == 6
    for ours, theirs in zip(log.entries, expected.entries, strict=True):
        for name in ("step", "loss", "learning_rate", "grad_norm"):
            assert ours[name] == theirs[name], (ours, theirs)
    weights = from_pretrained(killed.output_dir).state_dict()
    for name, tensor in whole[0].state_dict().items():
        assert torch.equal(weights[name], tensor), name
    assert {p.name for p in Path(killed.output_dir).glob("checkpoint-*")} == {
        "checkpoint-2",
        "checkpoint-4",
        "checkpoint-6",
    }


def patched_scheme():
    return make_scheme("yarn", {"factor": 2.0, "original_max_position_embeddings": BLOCK})


def test_resume_refuses_what_would_not_continue_the_run(arguments, tokenizer):
    asked = replace(arguments, max_steps=2, save_steps=2)
    model = patch_model(llama(), "linear", factor=2)
    finetune(model, tokenizer, asked)
    latest = replace(asked, max_steps=4)
    with pytest.raises(PosSwapError, match=r"model: it was loaded from .* load the checkpoint's own model, or give an"):
        finetune(patch_model(llama(), "linear", factor=2), tokenizer, latest)
    with pytest.raises(PosSwapError, match=r"scheme=yarn.* was given, and .*checkpoint-2 carries linear\(factor=2"):
        load(latest, patched_scheme())
    for change, message in (
        ({"learning_rate": 1e-4}, r"learning_rate=0.0001 differs from the 0.01 of the run"),
        ({"per_device_train_batch_size": 2}, r"global_batch_size=2 differs from the 4"),
        ({"max_steps": 2}, r"max_steps=2: .*checkpoint-2 has done 2 already"),
        ({"resume_from_checkpoint": "nowhere"}, r"resume_from_checkpoint='nowhere' is not a checkpoint.*checkpoint-2"),
    ):
        with pytest.raises(PosSwapError, match=message):
            finetune(*load(latest), replace(latest, **change))
    with pytest.raises(PosSwapError, match="model=None: give the folder of the model to train"):
        load(replace(latest, output_dir=arguments.output_dir + "-none"))
    log = finetune(*load(latest), replace(latest, per_device_train_batch_size=1, gradient_accumulation_steps=4))
    assert [entry["step"] for entry in log.entries] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("make", "scheme", "params"),
    [
        (llama, "sinusoidal", {}),
        (llama, "nope", {}),
        (gpt2, "learned", {"max_positions": 64}),
        (gpt2, "sinusoidal", {}),
    ],
    ids=["sinusoidal-rotary", "nope-rotary", "learned-table", "sinusoidal-table"],
)
@pytest.mark.filterwarnings("ignore::hf_posswap.RecalibrationWarning")
def test_every_kind_of_checkpoint_is_resumed_to_the_same_end(make, scheme, params, tmp_path, arguments, tokenizer):
    model = patch_model(make(), scheme, **params)
    whole = finetune(model, tokenizer, replace(arguments, save_steps=2))
    again = replace(
        arguments,
        output_dir=str(tmp_path / "again"),
        resume_from_checkpoint=str(Path(arguments.output_dir) / "checkpoint-2"),
    )
    resumed, its_tokenizer = load(again)
    log = finetune(resumed, its_tokenizer, again)
    assert log.scheme["scheme"] == scheme
    assert losses(log) == losses(whole)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(from_pretrained(tmp_path / "again")(ids).logits, model.eval()(ids).logits)


def test_weights_are_loaded_as_float32_unless_asked_otherwise(tmp_path, arguments, tokenizer):
    patch_model(llama(), "linear", factor=2).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    asked = replace(arguments, model=str(tmp_path / "base"))
    for dtype, expected in (("float32", torch.float32), ("auto", torch.bfloat16)):
        one = replace(asked, dtype=dtype, output_dir=str(tmp_path / dtype))
        model = load(one)[0]
        finetune(model, tokenizer, one)
        assert {parameter.dtype for parameter in model.parameters()} == {expected}
        assert from_pretrained(one.output_dir).dtype == expected


DEEPSPEED = [
    pytest.mark.long,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed"),
]


@pytest.mark.parametrize(
    ("config", "tied", "scheme"),
    [
        ("ddp", False, {}),
        ("fsdp2", False, {"scheme": "t5", "distil": 0.5}),
        pytest.param("fsdp2", True, {"scheme": "yarn", "factor": 2.0}, marks=pytest.mark.long),
        pytest.param("ddp", True, {"scheme": "t5"}, marks=pytest.mark.long),
        pytest.param("zero3", False, {"scheme": "yarn", "factor": 2.0}, marks=DEEPSPEED),
        pytest.param("zero3", False, {"scheme": "t5", "distil": 0.5}, marks=DEEPSPEED),
    ],
    ids=["ddp", "fsdp2-t5-distil", "fsdp2-yarn-tied", "ddp-t5-tied", "zero3-yarn", "zero3-t5-distil"],
)
@pytest.mark.filterwarnings("ignore::hf_posswap.RecalibrationWarning")
def test_two_processes_train_and_resume_as_one_does(
    config, tied, scheme, tmp_path, arguments, tokenizer, short_documents, monkeypatch
):
    """Rows of uneven targets, so that a mean of the processes' means would differ; and several pieces of logits."""
    base = tmp_path / "base"
    llama(tie_word_embeddings=tied).save_pretrained(base)
    tokenizer.save_pretrained(base)
    monkeypatch.setattr(loss, "LOGITS_AT_ONCE", 10 * VOCABULARY)
    parameters = dict(scheme)
    name, distil = parameters.pop("scheme", None), parameters.pop("distil", 0.0)
    short = {"train_dir": short_documents, "packing": "documents", "save_steps": 2, "distil": distil}
    asked = replace(arguments, model=str(base), **short)
    swap = None if name is None else make_scheme(name, parameters)
    one = finetune(*load(asked, swap), asked, load_teacher(asked))
    shape = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    shared = replace(asked, output_dir=str(tmp_path / "two"), **shape)
    words = ["--scheme", name, *(str(word) for pair in parameters.items() for word in (f"--{pair[0]}", pair[1]))]
    words = words if name else []
    two = launch(2, shared, *words, config=config)
    assert two.hardware["distributed"] == {"ddp": "MULTI_CPU", "fsdp2": "FSDP", "zero3": "DEEPSPEED"}[config]
    again = replace(
        shared, output_dir=str(tmp_path / "again"), resume_from_checkpoint=str(tmp_path / "two" / "checkpoint-2")
    )
    resumed = launch(2, again, *words, config=config)
    for log in (two, resumed):
        assert losses(log) == pytest.approx(losses(one), rel=1e-5)
        norms = [[entry["grad_norm"] for entry in one_of.entries] for one_of in (one, log)]
        assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    ids = torch.arange(20)[None]
    outputs = [from_pretrained(run.output_dir)(ids).logits for run in (asked, shared, again)]
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(outputs[2], outputs[1], rtol=1e-4, atol=1e-4)


@pytest.mark.long
def test_two_processes_of_a_masked_model_resume_as_one_process_does(tmp_path, arguments, bert_tokenizer):
    base = tmp_path / "base"
    bert().save_pretrained(base)
    bert_tokenizer.save_pretrained(base)
    asked = replace(arguments, model=str(base), save_steps=2)
    one = finetune(*load(asked), asked)
    shared = replace(asked, output_dir=str(tmp_path / "two"), per_device_train_batch_size=2)
    launch(2, replace(shared, max_steps=2))
    two = launch(2, replace(shared, resume_from_checkpoint="latest"))
    # the schedule of the first two steps was that of a shorter run
    assert losses(two)[:2] == pytest.approx(losses(one)[:2], rel=1e-5)
    assert len(losses(two)) == 4


@dataclass(frozen=True)
class Spread:
    """What check_parallelism asks of an Accelerator, which cannot be had here with these settings."""

    distributed_type: DistributedType = DistributedType.FSDP
    is_fsdp2: bool = True
    parallelism_config: ParallelismConfig | None = None


@pytest.mark.parametrize(
    ("make", "objective", "change", "spread", "message"),
    [
        (llama, "causal", {"train": "lora"}, Spread(), "train='lora' merges whole weights, and FSDP holds a part"),
        (llama, "causal", {}, Spread(is_fsdp2=False), "fsdp_version=1 is not carried"),
        (lambda: patch_model(llama(), "alibi"), "causal", {}, 2, "cp_size=2: a part of a row .* which alibi"),
        (bert, "masked", {}, 2, "cp_size=2: its hooks make every attention causal"),
        (llama, "causal", {"packing": "documents"}, 2, "cp_size=2: its hooks drop the mask that keeps documents apart"),
        (llama, "causal", {}, 2, "cp_size=2: this loop gives every process whole rows; use cp_size=1"),
    ],
)
@pytest.mark.filterwarnings("ignore::hf_posswap.RecalibrationWarning")
def test_ways_to_spread_the_work_that_are_not_survived_are_refused(make, objective, change, spread, message, arguments):
    if spread == 2:
        spread = Spread(parallelism_config=ParallelismConfig(cp_size=2))
    with pytest.raises(PosSwapError, match=message):
        check_parallelism(spread, make(), objective, replace(arguments, **change))
    check_parallelism(Spread(DistributedType.MULTI_GPU, False), make(), objective, replace(arguments, **change))


def test_sharding_that_accelerate_leaves_out_is_no_silent_ddp(monkeypatch, arguments, tokenizer):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    with pytest.raises(PosSwapError, match="FSDP was asked for, and accelerate leaves it out here"):
        finetune(llama(), tokenizer, arguments)


def test_processes_that_would_train_apart_are_refused(monkeypatch, arguments, tokenizer):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")  # what `accelerate launch --cpu --num_processes 2` sets
    with pytest.raises(PosSwapError, match=r"`accelerate launch --cpu` starts one; .*--multi_gpu --num_processes N"):
        finetune(llama(), tokenizer, arguments)


def test_log_says_nothing_of_where_the_files_were(arguments, tokenizer):
    """It is pushed with the model."""
    finetune(llama(), tokenizer, replace(arguments, max_steps=1, save_steps=0))
    written = json.loads(Path(arguments.output_dir, "train_log.json").read_text())["arguments"]
    local = [arguments.output_dir, arguments.train_dir, *(arguments.train_file or [])]
    assert sum(str(path) != "None" and Path(path).is_absolute() for path in local) > 1
    for path in filter(None, local):
        assert str(path) not in json.dumps(written)
        assert Path(path).name in json.dumps(written)


# --- refusals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_steps": 0}, "max_steps=0 is too small; the least value is 1"),
        ({"block_size": 1}, "block_size=1 is too small; the least value is 8"),
        ({"block_size": 16.5}, "block_size=16.5 is not a whole number"),
        ({"learning_rate": 0.0}, "learning_rate=0.0 is too small; it must be greater than 0"),
        ({"learning_rate": math.nan}, "learning_rate=nan"),
        ({"per_device_train_batch_size": -1}, "per_device_train_batch_size=-1 is too small"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0 is too small"),
        ({"warmup_steps": -1}, "warmup_steps=-1 is too small; the least value is 0"),
        ({"mlm_probability": 1.0}, "mlm_probability=1.0 is too great; it must be less than 1"),
        ({"train_dir": None}, "give exactly one of train_file, train_dir, dataset_name, image_dir; got none"),
        ({"dataset_name": "x"}, "give exactly one of"),
        (
            {"train_dir": None, "image_dir": "x"},
            "image_dir='x' is not for LlamaForCausalLM, which reads text, a token at a time; leave it out",
        ),
        ({"label_column": "class"}, "label_column='class' is not for LlamaForCausalLM"),
        ({"file_pattern": "*.txt"}, r"train_dir=.* no file that matches file_pattern='\*.txt'; it holds \*.py"),
        ({"train_dir": "missing"}, "train_dir='missing' is not a folder"),
        ({"train_dir": None, "train_file": ["missing.txt"]}, "train_file='missing.txt' is not a file"),
        (
            {"per_device_train_batch_size": 10**6},
            "rows, and one global batch takes 1000000; give more text$",
        ),
        ({"objective": "masked"}, "objective='masked' does not fit LlamaForCausalLM; choose 'causal'"),
        ({"lr_scheduler_type": "lineer"}, "lr_scheduler_type='lineer' is unknown here; did you mean 'linear'"),
        ({"lr_scheduler_kwargs": "{"}, "lr_scheduler_kwargs='{' does not suit lr_scheduler_type='linear'"),
        ({"lr_scheduler_kwargs": '{"power": 2}'}, "does not suit lr_scheduler_type='linear'"),
        ({"report_to": "tensorbord"}, "report_to='tensorbord' is unknown; did you mean 'tensorboard'"),
        ({"mixed_precision": "fp16"}, "mixed_precision='fp16' is ignored by accelerate on a CPU; choose 'bf16'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_that_cannot_be_honoured(change, message, arguments, tokenizer):
    model = llama()
    with pytest.raises(PosSwapError, match=message):
        finetune(model, tokenizer, replace(arguments, **change))
    assert "forward" not in vars(model)


def test_an_empty_folder_and_a_file_that_is_no_text(tmp_path, arguments, tokenizer):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(PosSwapError, match=r"file_pattern='\*.py'; it is empty"):
        finetune(llama(), tokenizer, replace(arguments, train_dir=str(empty)))
    (empty / "blank.py").write_text("\n")
    with pytest.raises(PosSwapError, match="the text's 0 tokens fill 0 rows"):
        finetune(llama(), tokenizer, replace(arguments, train_dir=str(empty)))
    (empty / "latin.py").write_bytes(b"\xe9t\xe9")
    with pytest.raises(PosSwapError, match=r"train_dir=.* cannot be read: .*utf-8"):
        finetune(llama(), tokenizer, replace(arguments, train_dir=str(empty)))


def test_models_and_tokenizers_that_do_not_fit(arguments, tokenizer, bert_tokenizer):
    cases = [
        (bert(), tokenizer, {}, "tokenizer: mask_token=None"),
        (bert(), bert_tokenizer, {"packing": "documents"}, "packing='documents' is for causal models"),
        (bart(), bert_tokenizer, {}, "model=BartForConditionalGeneration has no language-model head"),
        (BertModel(bert().config), bert_tokenizer, {}, "model=BertModel has no language-model head"),
        (llama(vocab_size=200), tokenizer, {}, "tokenizer: its 261 tokens do not fit the 200 rows"),
        (bert(), bert_tokenizer, {"block_size": BLOCK + 1}, r"block_size=33 is longer than the 32 positions of Bert"),
        (gpt2(), tokenizer, {"block_size": 48}, "block_size=48 is longer than the 40 positions.*--max_positions 48"),
    ]
    for model, its_tokenizer, change, message in cases:
        with pytest.raises(PosSwapError, match=message):
            finetune(model, its_tokenizer, replace(arguments, **change))


def test_rows_may_be_longer_than_a_rotary_models_config_and_as_long_as_a_table(arguments, tokenizer):
    finetune(llama(), tokenizer, replace(arguments, block_size=4 * BLOCK, max_steps=1))
    exact = replace(arguments, output_dir=arguments.output_dir + "-2", block_size=40, max_steps=1)
    finetune(gpt2(), tokenizer, exact)
    longer = patch_model(gpt2(), "learned", max_positions=64)
    finetune(longer, tokenizer, replace(exact, output_dir=arguments.output_dir + "-3", block_size=64))


@pytest.mark.filterwarnings("ignore::hf_posswap.RecalibrationWarning")
def test_rows_may_be_longer_than_a_table_that_a_swap_has_silenced(arguments, bert_tokenizer):
    log = finetune(patch_model(bert(), "alibi"), bert_tokenizer, replace(arguments, block_size=3 * BLOCK, max_steps=1))
    assert log.block_size == 3 * BLOCK


# --- the script


def test_help_is_printed_without_torch():
    code = "import sys, runpy\ntry:\n    runpy.run_path(sys.argv[1], run_name='__main__')\nexcept SystemExit: pass\n"
    done = run(sys.executable, "-c", code + "sys.exit('torch' in sys.modules)", SCRIPT, "--help")
    # argv[1] is the script itself here, so the flag reached it as any other
    assert "--per_device_train_batch_size" in done.stdout
    assert "--target_length" in done.stdout


def test_a_mistake_on_the_command_line_is_one_line_and_status_2(arguments, monkeypatch, capsys):
    for command, message in (
        (["--blok_size", "8"], "unknown argument '--blok_size'; did you mean '--block_size'"),
        (["--factor", "2"], "error: --factor was given without --scheme"),
        (["--model", "nowhere/at-all"], "error: model='nowhere/at-all' cannot be loaded"),
        ([], "error: model=None: give the folder of the model to train"),
    ):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *flags(arguments), *command])
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        with pytest.raises(SystemExit) as stopped:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err
