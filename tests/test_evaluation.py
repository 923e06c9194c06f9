"""Evaluation: both protocols against plain references, reports, refusals, and the script."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_posswap import PosSwapError, patch_model
from hf_posswap.evaluation import (
    accepted_length,
    evaluate,
    make_protocol,
    measure,
    plot_lengths,
    read_texts,
    table,
    tokenize,
    trained_length,
    window_bos,
    write_report,
)
from hf_posswap.evaluation.losses import window_losses

VOCABULARY = 61
SCRIPT = Path(__file__).parents[1] / "scripts" / "evaluate.py"


def llama(**changes) -> LlamaForCausalLM:
    config = LlamaConfig(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "max_position_embeddings": 32,
            "initializer_range": 0.3,  # large enough that every token of the context counts
        }
        | changes
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def gpt2(positions: int) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=positions, n_embd=32, n_layer=1, n_head=2))


def bloom() -> BloomForCausalLM:
    return BloomForCausalLM(BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=1, n_head=2))


@pytest.fixture(scope="module")
def model():
    return llama().double()


@pytest.fixture(scope="module")
def documents():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in (150, 40, 97, 63, 64)]


def losses(model, ids: list[int]) -> torch.Tensor:
    """-log p of tokens 1, 2, ... of a sequence, from all its logits at once."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    return -logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0]


def strict_reference(model, documents, length, longest, stride, bos) -> float:
    head, found = ([] if bos is None else [bos]), []
    for document in documents:
        for start in range(longest - len(head) - stride, len(document), stride):
            if len(document) < longest - len(head):
                continue
            stop = min(start + stride, len(document))
            window = head + document[stop - length + len(head) : stop]
            assert len(window) == length
            found.append(losses(model, window)[-(stop - start) :])
    return torch.cat(found).mean().item()


def yarn_reference(model, documents, length, stride, bos, truncate) -> float:
    """Transcribed from the description of jquesnelle/yarn, eval/perplexity.py, with the loss in float64."""
    room, nlls = length - (bos is not None), []
    if truncate:
        documents, stride = [document[:room] for document in documents], room
    for document in documents:
        previous = 0
        for begin in range(0, len(document), stride):
            end = min(begin + room, len(document))
            target_length = end - previous
            ids = ([] if bos is None else [bos]) + document[begin:end]
            labels = torch.tensor(ids)
            labels[:-target_length] = -100
            nlls.append(losses(model, ids)[labels[1:] != -100].mean())
            previous = end
            if end == len(document):
                break
    return torch.stack(nlls).mean().exp().item()


@pytest.mark.parametrize("bos", [None, 3])
@pytest.mark.parametrize(("stride", "batch_size"), [(8, 1), (7, 5), (15, 3)])
def test_strict_equals_a_plain_loop(model, documents, bos, stride, batch_size):
    protocol = make_protocol("strict", [16, 64, 33], bos_token_id=bos, stride=stride)
    chosen, read = protocol.choose(documents)
    assert read == len(documents)
    assert [len(d) for d in chosen] == ([150, 97, 64] if bos is None else [150, 97, 63, 64])
    series = measure(model, list(map(torch.tensor, chosen)), protocol, name="m", batch_size=batch_size)
    assert [point["length"] for point in series["points"]] == [16, 33, 64]
    for point in series["points"]:
        expected = strict_reference(model, documents, point["length"], 64, stride, bos)
        assert point["loss"] == pytest.approx(expected, rel=1e-12)
        assert point["perplexity"] == pytest.approx(math.exp(expected), rel=1e-12)
        assert point["shortest_window"] == point["longest_window"] == point["length"]
        assert point["targets"] == sum(len(d) for d in chosen) - len(chosen) * (64 - (bos is not None) - stride)


@pytest.mark.parametrize("bos", [None, 3])
@pytest.mark.parametrize("truncate", [False, True])
@pytest.mark.parametrize(("length", "stride"), [(32, 8), (33, 33), (15, 15)])
def test_yarn_equals_the_transcription(model, documents, bos, truncate, length, stride):
    parameters = {"truncate_documents": True} if truncate else {"stride": stride}
    protocol = make_protocol("yarn", [length], bos_token_id=bos, **parameters)
    chosen, _ = protocol.choose(documents)
    point = measure(model, list(map(torch.tensor, chosen)), protocol, name="m", batch_size=4)["points"][0]
    expected = yarn_reference(model, documents, length, stride, bos, truncate)
    assert point["perplexity"] == pytest.approx(expected, rel=1e-12)


def test_yarn_leaves_out_a_window_of_one_token(model, documents):
    """97 = 6 * 16 + 1: theirs is NaN there, without a BOS to predict the last token from."""
    chosen = [documents[2]]
    assert math.isnan(yarn_reference(model, chosen, 16, 16, None, False))
    windows = make_protocol("yarn", [16], stride=16).windows([97], 16)
    assert [window.targets for window in windows] == [15] * 6


def test_yarn_window_is_the_loss_that_transformers_reports(model, documents):
    """Same masking of labels as theirs; transformers computes the loss in float32."""
    protocol = make_protocol("yarn", [32], bos_token_id=3, stride=8)
    window = protocol.windows([len(documents[0])], 32)[1]
    assert (window.begin, window.end, window.targets) == (8, 39, 8)
    ids = torch.tensor([[3, *documents[0][8:39]]])
    labels = ids.clone()
    labels[:, :-8] = -100
    mean = window_losses(model, [torch.tensor(documents[0])], [window], bos_token_id=3)[0] / 8
    assert mean == pytest.approx(model(ids, labels=labels).loss.item(), rel=1e-5)


def test_yarn_takes_the_first_samples_that_are_long_enough(documents):
    protocol = make_protocol("yarn", [32], stride=8, samples=2, dataset_min_tokens=64)
    chosen, read = protocol.choose(documents)
    assert [len(d) for d in chosen] == [150, 97]
    assert read == 3


def test_yarn_does_not_weigh_tokens(model, documents):
    """The fault that `strict` does not have: the two disagree even where they score the same tokens."""
    chosen = [torch.tensor(documents[0])]
    yarn = make_protocol("yarn", [64], stride=8)
    sums = window_losses(model, chosen, yarn.windows([150], 64))
    counts = [window.targets for window in yarn.windows([150], 64)]
    assert counts[0] == 63
    assert set(counts[1:]) == {8, 6}
    strict = make_protocol("strict", [64])
    assert abs(yarn.loss(sums, counts) - strict.loss(sums, counts)) > 1e-3


@pytest.mark.parametrize("bos", [None, 3])
@pytest.mark.parametrize("stride", [1, 5, 15])
@pytest.mark.parametrize("max_targets", [None, 1, 16, 61, 10**6])
def test_strict_scores_the_same_tokens_at_every_length(bos, stride, max_targets):
    protocol = make_protocol("strict", [16, 20, 47], bos_token_id=bos, stride=stride, max_targets=max_targets)
    sizes = [47, 64, 100]
    scored = []
    for length in protocol.lengths:
        positions = []
        for window in protocol.windows(sizes, length):
            assert 0 <= window.begin < window.end <= sizes[window.document]
            assert window.end - window.begin + (bos is not None) == length
            first_context = length - window.targets
            assert length - stride <= first_context <= length - 1
            positions += [(window.document, p) for p in range(window.end - window.targets, window.end)]
        assert len(set(positions)) == len(positions)
        scored.append(sorted(positions))
    assert scored[0] == scored[1] == scored[2]
    everything = sum(sizes) - len(sizes) * (47 - (bos is not None) - stride)
    assert len(scored[0]) == min(everything, max_targets or everything)
    if max_targets == 16 and stride == 5:
        assert {document for document, _ in scored[0]} == {0, 1, 2}


def test_logits_are_computed_only_where_they_are_scored(model, documents, monkeypatch):
    protocol = make_protocol("strict", [16, 64], stride=8)
    chosen = [torch.tensor(documents[0])]
    kept = []
    head = model.lm_head.register_forward_hook(lambda module, args, output: kept.append(output.shape[1]))
    spared = measure(model, chosen, protocol, name="m")
    head.remove()
    assert max(kept) == 16  # the causality check reads 8 whole tokens; the rest, the targets of up to two windows

    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda input_ids: forward(input_ids=input_ids))
    full = measure(model, chosen, protocol, name="m")
    assert [p["loss"] for p in full["points"]] == pytest.approx([p["loss"] for p in spared["points"]], rel=1e-12)


def test_loss_in_pieces_equals_loss_at_once(model, documents, monkeypatch):
    chosen, windows = (
        [torch.tensor(documents[0])],
        make_protocol("strict", [64], stride=30).windows([150], 64),
    )
    whole = window_losses(model, chosen, windows)
    monkeypatch.setattr("hf_posswap.evaluation.losses.LOGITS_AT_ONCE", 7 * VOCABULARY)
    assert window_losses(model, chosen, windows) == pytest.approx(whole, rel=1e-12)


def test_the_model_can_train_after_evaluation_and_keeps_its_mode(documents):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = llama(rope_parameters=rope).train()
    measure(model, [torch.tensor(documents[0])], make_protocol("strict", [16, 64]), name="m")
    assert model.training
    assert not any(buffer.is_inference() for buffer in model.buffers())
    ids = torch.tensor([documents[0][:48]])
    model(ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_dynamic_ntk_does_not_remember_longer_windows(documents):
    """The last window is shorter than those before it, and is scored as by a model that saw no other."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    chosen, windows = [torch.tensor(documents[0])], make_protocol("yarn", [64], stride=8).windows([150], 64)
    assert windows[-1].end - windows[-1].begin == 62
    alone = [window_losses(llama(rope_parameters=rope), chosen, [window])[0] for window in windows]
    assert window_losses(llama(rope_parameters=rope), chosen, windows) == alone


# --- the report


def test_report_has_the_original_length_and_the_change_against_the_base(documents, tmp_path):
    base, model = llama(), patch_model(llama(), "yarn", factor=4)
    report = evaluate(model, base, documents, [16, 64], stride=8, source={"eval_dir": "texts"})
    assert report["original_length"] == 32
    base_series, series = report["series"]
    assert (base_series["name"], series["name"]) == ("base", "yarn(factor=4)")
    assert [p["length"] for p in base_series["points"]] == [16, 32, 64]
    assert [p["length"] for p in series["points"]] == [16, 32, 64]
    assert {p["targets"] for one in report["series"] for p in one["points"]} == {150 + 97 + 64 - 3 * (64 - 8)}

    short = report["short"]
    assert short["length"] == 32
    assert [entry["length"] for entry in short["lengths"]] == [16, 32]
    assert short["delta"] == series["points"][1]["loss"] - base_series["points"][1]["loss"] != 0
    assert short["lengths"][1]["perplexity_ratio"] == pytest.approx(math.exp(short["delta"]))

    assert report["settings"]["stride"] == 8
    assert report["models"]["model"]["scheme"] == "yarn(factor=4)"
    data = report["data"]
    assert (data["documents"], data["read"], data["tokens"], data["longest"]) == (3, 5, 311, 150)
    other = [[*documents[0][:-1], (documents[0][-1] + 1) % VOCABULARY], *documents[1:]]
    assert evaluate(model, base, other, [64], stride=8)["data"]["sha256"] != data["sha256"]
    assert {"torch", "transformers", "hf_posswap"} <= report["versions"].keys()

    paths = write_report(report, tmp_path / "new")
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == [
        "evaluation.csv",
        "evaluation.json",
        "evaluation.md",
        "evaluation.png",
    ]
    assert json.loads(paths["json"].read_text()) == report
    rows = list(csv.DictReader(paths["csv"].open()))
    assert [(row["name"], int(row["length"])) for row in rows] == [
        (name, length) for name in ("base", "yarn(factor=4)") for length in (16, 32, 64)
    ]
    assert float(rows[0]["loss"]) == base_series["points"][0]["loss"]
    assert paths["png"].read_bytes().startswith(b"\x89PNG")
    assert "32*" in table(report)


def test_an_unchanged_model_costs_nothing_and_numbers_repeat(documents):
    first, second = (evaluate(llama(), llama(), documents, [16], stride=8, batch_size=b) for b in (1, 4))
    assert first["short"]["delta"] == 0
    assert first["series"][1]["points"][0]["loss"] == pytest.approx(second["series"][1]["points"][0]["loss"], rel=1e-6)
    assert (
        evaluate(llama(), llama(), documents, [16], stride=8)["series"][0]["points"][0]["loss"]
        == (first["series"][0]["points"][0]["loss"])
    )


def test_a_base_with_a_table_is_measured_up_to_its_end(documents):
    base, model = gpt2(32), patch_model(gpt2(32), "learned", max_positions=64)
    report = evaluate(model, base, documents, [16, 64], stride=8)
    assert [p["length"] for p in report["series"][0]["points"]] == [16, 32]
    assert [p["length"] for p in report["series"][1]["points"]] == [16, 32, 64]
    assert " -" in table(report)
    with pytest.raises(PosSwapError, match="length 65 is longer than its 64 positions"):
        evaluate(model, base, documents, [65], stride=8)


def test_trained_length_ignores_scaling():
    scaled = {
        "rope_type": "yarn",
        "factor": 4.0,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 32,
    }
    assert trained_length(llama(rope_parameters=scaled, max_position_embeddings=128)) == 32
    assert trained_length(llama()) == 32
    assert trained_length(gpt2(48)) == 48
    with pytest.raises(PosSwapError, match="original_length is needed: the config of BloomForCausalLM"):
        trained_length(bloom())


def test_accepted_length_is_that_of_the_table():
    assert accepted_length(gpt2(48)) == 48
    assert accepted_length(llama()) is None
    assert accepted_length(bloom()) is None
    gptj = GPTJForCausalLM(GPTJConfig(vocab_size=9, n_positions=40, n_embd=32, n_layer=1, n_head=2, rotary_dim=8))
    assert accepted_length(gptj) == 40  # rotary, but from a table of fixed size


@pytest.mark.filterwarnings("ignore::hf_posswap.RecalibrationWarning")
@pytest.mark.parametrize(("scheme", "limit"), [("alibi", None), ("rope", None), ("logn", 48), ("nope", 48)])
def test_a_table_that_attention_has_replaced_is_no_limit(scheme, limit):
    model = patch_model(gpt2(48), scheme)
    assert accepted_length(model) == limit
    longer = torch.arange(60)[None] % 9
    with nullcontext() if limit is None else pytest.raises((PosSwapError, IndexError)):
        model(longer)


def test_a_failed_write_leaves_the_old_report(documents, tmp_path, monkeypatch):
    report = evaluate(llama(), llama(), documents, [16], stride=8)
    paths = write_report(report, tmp_path)
    before = {kind: path.read_bytes() for kind, path in paths.items()}
    with paths["json"].open("rb") as reader:
        write_report(report, tmp_path)
        assert reader.read() == before["json"]  # whole, for whoever had it open
        assert os.fstat(reader.fileno()).st_ino != paths["json"].stat().st_ino
    with pytest.raises(ValueError, match="JSON"):
        write_report(report | {"seconds": float("nan")}, tmp_path)
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        plot_lengths(report, paths["png"])
    assert {kind: path.read_bytes() for kind, path in paths.items()} == before
    assert len(list(tmp_path.iterdir())) == 4


def test_plot_takes_several_schemes_before_and_after(tmp_path):
    def series(name, stage, *perplexities):
        points = [{"length": 2**i, "perplexity": p} for i, p in enumerate(perplexities, 6)]
        return {"name": name, "stage": stage, "points": points}

    found = [
        series("base", None, 4, 3, 90),
        series("nope", "before", 40, 41, 42),
        series("nope", "after", 5, 4, 6),
    ]
    plot_lengths(found, tmp_path / "plot.png", original_length=128, title="Tiny model")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    with pytest.raises(PosSwapError, match="nothing to draw"):
        plot_lengths([], tmp_path / "none.png")


# --- refusals


def test_a_protocol_needs_a_length():
    with pytest.raises(PosSwapError, match=r"lengths=\[\] asks for nothing"):
        make_protocol("strict", [])


REFUSALS = [
    ({"base": None}, "base=None"),
    ({"base": "same"}, "base is the same object as model"),
    ({"base": "patched"}, r"base=LlamaForCausalLM is itself patched \(yarn\(factor=2\)\)"),
    (
        {"base": "gpt2", "original_length": 33},
        "original_length=33 is longer than the 32 positions of the base",
    ),
    ({"model": "bert"}, "BertForMaskedLM sees the tokens that follow.*pseudo-perplexity"),
    ({"model": "t5"}, "T5ForConditionalGeneration is not a causal language model"),
    ({"model": "linear"}, "Linear is not a causal language model"),
    ({"model": "small"}, "model=LlamaForCausalLM: token id .. is outside its vocabulary of 50; .*tokenizer"),
    ({"model": "nan"}, "the loss at length 32 is nan in torch.float32"),
    ({"bos_token_id": 61}, "token id 61 is outside its vocabulary of 61"),
    ({"documents": []}, "token_documents is empty"),
    ({"documents": ["text"]}, "token_documents holds text"),
    ({"documents": [[0.5, 1.0]]}, "token_documents holds torch.float32"),
    (
        {"documents": [[1] * 90, [2] * 30]},
        "length=128 needs 128 tokens and the longest of 2 has 90; .*fits is 90",
    ),
    (
        {"documents": [[1] * 90], "bos_token_id": 3},
        "length=128 needs 127 tokens and the longest of 1 has 90; .*fits is 91",
    ),
    ({"lengths": [1]}, r"lengths=\[1, 32\] holds 1"),
    ({"lengths": [16.0]}, "holds 16.0"),
    ({"protocol": "strickt"}, "protocol='strickt' is unknown; did you mean 'strict'"),
    ({"stride": 32}, "stride=32 leaves a target without context at length 32; the greatest stride is 31"),
    ({"stride": 0}, "stride=0 is not a positive integer"),
    ({"max_targets": True}, "max_targets=True is not a positive integer"),
    ({"batch_size": 0}, "batch_size=0 is not a positive integer"),
    ({"original_length": -1}, "original_length=-1 is not a positive integer"),
    ({"samples": 2}, "samples=2 is not a parameter of protocol 'strict'"),
    ({"max_document": 2}, "max_document=2 is not a parameter .*did you mean 'max_documents'"),
    ({"protocol": "yarn", "stride": 33}, "stride=33 skips tokens at length 32; the greatest stride is 32"),
    ({"protocol": "yarn", "stride": 8, "truncate_documents": True}, "stride=8 has no effect"),
    (
        {"protocol": "yarn", "stride": 8, "dataset_min_tokens": 151},
        "dataset_min_tokens=151 needs 151 tokens and the longest of 5 has 150",
    ),
    (
        {"protocol": "yarn", "stride": 8, "lengths": [512]},
        "length=512 needs 512 tokens and the longest of 5 has 150",
    ),
]


def built(kind):
    if kind == "bert":
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
        return BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, **sizes))
    if kind == "t5":
        sizes = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 1, "num_heads": 2}
        return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, **sizes))
    if kind == "nan":
        broken = llama()
        torch.nn.init.constant_(broken.model.norm.weight, math.nan)
        return broken
    return {
        None: lambda: None,
        "llama": llama,
        "small": lambda: llama(vocab_size=50),
        "patched": lambda: patch_model(llama(), "yarn", factor=2),
        "gpt2": lambda: gpt2(32),
        "linear": lambda: torch.nn.Linear(2, 2),
    }[kind]()


@pytest.mark.parametrize(("changes", "message"), REFUSALS, ids=lambda v: str(v)[:60])
def test_refusals(documents, changes, message):
    given = {"model": "llama", "base": "llama", "documents": documents, "lengths": [128]} | changes
    model = built(given.pop("model"))
    base = given.pop("base")
    base = model if base == "same" else built(base)
    if any(len(d) == 90 for d in given["documents"]) or "lengths" in changes or not given["documents"]:
        given.setdefault("stride", 8)
    with pytest.raises(PosSwapError, match=message):
        evaluate(model, base, given.pop("documents"), given.pop("lengths"), **given)


# --- text


def test_texts_are_read_in_the_order_of_their_paths(tmp_path):
    (tmp_path / "sub").mkdir()
    for name, text in {"b.txt": "two", "a.txt": "one", "sub/c.txt": "three", "d.md": "no"}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    texts, source = read_texts(eval_dir=str(tmp_path))
    assert list(texts) == ["one", "two", "three"]
    assert source["files"] == 3
    assert list(read_texts(eval_file=str(tmp_path / "d.md"))[0]) == ["no"]
    assert list(read_texts(eval_dir=str(tmp_path), file_pattern="*.md")[0]) == ["no"]


def test_rows_of_a_dataset_are_documents(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "test.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n', encoding="utf-8")
    texts, source = read_texts(dataset_name=str(folder))
    assert list(texts) == ["one", "two"]
    assert source["split"] == "test"
    with pytest.raises(PosSwapError, match=r"text_column='txt' is not a column of .*did you mean 'text'"):
        read_texts(dataset_name=str(folder), text_column="txt")
    with pytest.raises(PosSwapError, match="split='train' cannot be loaded"):
        read_texts(dataset_name=str(folder), split="train")


def test_text_refusals(tmp_path):
    with pytest.raises(PosSwapError, match=r"no file that matches file_pattern='\*.txt'; it holds no files"):
        read_texts(eval_dir=str(tmp_path))
    (tmp_path / "a.md").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PosSwapError, match=r"it holds \*.md"):
        read_texts(eval_dir=str(tmp_path))
    with pytest.raises(PosSwapError, match="not UTF-8"):
        list(read_texts(eval_dir=str(tmp_path), file_pattern="*.md")[0])
    with pytest.raises(PosSwapError, match="not a folder"):
        read_texts(eval_dir=str(tmp_path / "none"))
    with pytest.raises(PosSwapError, match="not a file"):
        read_texts(eval_file=str(tmp_path / "none"))
    with pytest.raises(PosSwapError, match="exactly one of eval_dir, eval_file, dataset_name; got none"):
        read_texts()
    with pytest.raises(PosSwapError, match="exactly one"):
        read_texts(eval_dir="a", eval_file="b")


def byte_tokenizer(starts_with_bos: bool = True):
    """61 tokens: the BOS, the unknown, and single characters; a limit of 16 that nothing may obey."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<s>": 0, "<unk>": 1} | {chr(63 + i): i for i in range(2, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    if starts_with_bos:
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>", model_max_length=16)


def test_tokenize_cuts_nothing_and_adds_nothing():
    tokenizer = byte_tokenizer()
    assert list(tokenize(["A" * 100, "AB"], tokenizer)) == [[2] * 100, [2, 3]]


def test_bos_is_what_the_protocol_says():
    assert window_bos(byte_tokenizer(), "strict") == 0
    assert window_bos(byte_tokenizer(starts_with_bos=False), "strict") is None
    assert window_bos(byte_tokenizer(starts_with_bos=False), "yarn") == 0


# --- the script


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A base and its yarn version, saved with a tokenizer, and texts."""
    root = tmp_path_factory.mktemp("evaluation")
    generator = torch.Generator().manual_seed(2)
    (root / "texts").mkdir()
    for i in range(3):
        letters = torch.randint(65, 63 + VOCABULARY, (90 + i,), generator=generator).tolist()
        (root / "texts" / f"{i}.txt").write_text("".join(map(chr, letters)))
    for name, saved in {"base": llama(), "yarn": patch_model(llama(), "yarn", factor=2)}.items():
        saved.save_pretrained(root / name)
        byte_tokenizer().save_pretrained(root / name)
    return root


@pytest.fixture
def script(monkeypatch, folders, tmp_path):
    specification = importlib.util.spec_from_file_location("evaluate_script", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, "evaluate_script", module)
    specification.loader.exec_module(module)

    def call(*arguments):
        where = ["--eval_dir", str(folders / "texts"), "--output_dir", str(tmp_path), "--device", "cpu"]
        monkeypatch.setattr(sys, "argv", ["evaluate.py", "--lengths", "16", "64", *where, *map(str, arguments)])
        module.run(module.main)
        return json.loads((tmp_path / "evaluation.json").read_text())

    return call


def test_script_on_a_saved_model_equals_the_scheme_in_memory(script, folders, capsys):
    saved = script("--model", folders / "yarn", "--base", folders / "base", "--stride", 8)
    printed = capsys.readouterr().out
    assert "evaluation.png" in printed
    assert "32*" in printed
    patched = script("--model", folders / "base", "--scheme", "yarn", "--factor", 2, "--stride", 8)
    assert [p["loss"] for p in saved["series"][1]["points"]] == [p["loss"] for p in patched["series"][1]["points"]]
    assert saved["settings"]["bos_token_id"] == 0
    assert saved["series"][1]["name"] == "yarn(factor=2)"
    assert saved["data"]["source"]["files"] == 3
    assert saved["data"]["tokens"] == 90 + 91 + 92
    assert saved["command"].endswith("--stride 8")


def test_script_runs_the_yarn_protocol(script, folders):
    report = script(
        *("--model", folders / "base", "--scheme", "linear", "--factor", 2, "--protocol", "yarn"),
        *("--samples", 2, "--truncate_documents", "true"),
    )
    assert [p["windows"] for p in report["series"][1]["points"]] == [2, 2, 2]
    assert report["data"]["documents"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--base is missing"),
        (("--scheme", "yarm"), "did you mean 'yarn'"),
        (("--base", "BASE", "--dtype", "bfloat"), "did you mean 'bfloat16'"),
        (("--base", "BASE", "--protocol", "jarn"), "did you mean 'yarn'"),
        (("--base", "BASE", "--samples", 3), "samples=3 is not a parameter of protocol 'strict'"),
        (("--base", "/no/where"), "no model can be loaded from --base='/no/where'"),
        (("--base", "BASE", "--tokenizer_name", "/no/where"), "no tokenizer can be loaded from '/no/where'"),
        (("--base", "BASE", "--file_pattern", "*.tex"), r"it holds \*.txt"),
        (("--base", "BASE", "--strid", 3), "unknown argument '--strid'"),
    ],
)
def test_script_mistakes_are_one_line_and_status_2(script, folders, capsys, arguments, message):
    arguments = [folders / "base" if a == "BASE" else a for a in arguments]
    with pytest.raises(SystemExit) as stopped:
        script("--model", folders / "yarn", *arguments)
    assert stopped.value.code == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.search(message, last), last


def test_help_does_not_import_torch():
    code = (
        "import runpy, sys\n"
        f"sys.argv = [{str(SCRIPT)!r}, '--help']\n"
        "try:\n    runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as stopped:\n    assert stopped.code == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "--lengths" in done.stdout
