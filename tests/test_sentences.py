"""Sentence encoders: their losses against vectors of texts run alone, and the run that trains them."""

from __future__ import annotations

import copy
import math
import random
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import BertModel

from hf_posswap import PosSwapError, from_pretrained, patch_model
from hf_posswap.card import card
from hf_posswap.scheme import make_scheme
from hf_posswap.training.data import read_documents
from hf_posswap.training.distil import load_teacher
from hf_posswap.training.log import TrainingLog
from hf_posswap.training.loop import finetune, load
from hf_posswap.training.sentences import SentenceBatches, Texts
from hf_posswap.training.vectors import SentenceLoss, embed_for_loss, make_sentence_teacher, padded

from .small import BLOCK, SCRIPT, VOCABULARY, bert, flags, launch, losses, run

pytestmark = pytest.mark.filterwarnings("ignore::hf_posswap.RecalibrationWarning")
AROUND, PAD, CPU = ([257], [258]), 260, torch.device("cpu")


def encoder(seed: int = 0, **changes) -> BertModel:
    """Weights so large that texts, and the orders of their tokens, have vectors of their own."""
    config = bert(**{"initializer_range": 0.3} | changes).config
    torch.manual_seed(seed)
    model = BertModel(config)
    model.embeddings.word_embeddings.weight.data *= 4
    return model


@pytest.fixture
def sentences(arguments):
    return replace(arguments, objective="sentences", distil=1.0, learning_rate=3e-3, save_steps=0)


def texts_of(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.cat([torch.tensor([257]), torch.randint(256, (n - 2,), generator=generator), torch.tensor([258])])
        for n in lengths
    ]


def alone(model: BertModel, ids: torch.Tensor, pooling: str) -> torch.Tensor:
    """The vector (E,) float64 of a text in a batch of its own, without padding and without a mask."""
    states = model(input_ids=ids[None]).last_hidden_state[0].double()
    return F.normalize(states[0] if pooling == "cls" else states.mean(0), dim=0)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize(("weight", "group"), [(1.0, 0), (0.3, 2), (0.3, 4), (0.0, 2)])
def test_the_loss_and_its_gradients_are_those_of_texts_run_alone(pooling, weight, group):
    student, whole, teacher = encoder(), encoder(), encoder(seed=1).eval()
    texts = texts_of(5, 9, 30, 12, 3, 17, 8, 20)
    embed_for_loss(student, SentenceLoss(weight, group, 0.2, pooling))
    guide = make_sentence_teacher(teacher, student, AROUND, PAD, pooling, CPU)
    batch = padded(texts, PAD)
    found = student(**batch, taught=guide.read(batch) if weight else None)

    vectors = [alone(whole, ids, pooling) for ids in texts]
    expected = torch.zeros((), dtype=torch.float64)
    for ids, vector in zip(texts, vectors, strict=True):
        expected = expected + weight * (1 - vector @ alone(teacher, ids, pooling).detach()) / len(texts)
    for seeker in range(8 if weight < 1 else 0):
        first, partner = seeker // (2 * group) * 2 * group, seeker ^ 1
        others = [vectors[j] for j in range(first + partner % 2, first + 2 * group, 2)]
        shares = torch.stack([(vectors[seeker] @ other / 0.2).exp() for other in others])
        right = (vectors[seeker] @ vectors[partner] / 0.2).exp() / shares.sum()
        expected = expected - (1 - weight) * right.log() / 8
    assert found.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    found.loss.backward()
    expected.backward()
    for (name, parameter), other in zip(student.named_parameters(), whole.named_parameters(), strict=True):
        assert parameter.requires_grad != name.startswith("pooler")
        if other[1].grad is not None:
            torch.testing.assert_close(parameter.grad, other[1].grad, rtol=1e-3, atol=1e-6, msg=name)


def test_a_text_that_the_teacher_cannot_read_at_once_has_the_mean_of_its_windows():
    teacher = encoder(max_position_embeddings=16).eval()
    guide = make_sentence_teacher(teacher, encoder(), AROUND, PAD, "mean", CPU)
    short, long = texts_of(9, 40)
    inside = long[1:-1]
    windows = [torch.cat([long[:1], inside[i : i + 14], long[-1:]]) for i in (0, 14, 28)]
    assert [len(window) for window in windows] == [16, 16, 12]
    total = sum(len(window) * alone(teacher, window, "mean") for window in windows)
    expected = torch.stack([alone(teacher, short, "mean"), F.normalize(total, dim=0)])
    torch.testing.assert_close(guide.read(padded([short, long], PAD)).reached.double(), expected, rtol=1e-5, atol=1e-6)


def batches_of(asked, tokenizer, size: int = 8) -> SentenceBatches:
    texts = Texts(read_documents(asked), tokenizer, asked.block_size)
    return SentenceBatches(texts, tokenizer, asked, "sentences", size)


def test_texts_are_the_documents_in_pieces_with_special_tokens_around_each(texts, sentences, bert_tokenizer):
    rows = batches_of(sentences, bert_tokenizer).blocks
    found = [rows[row].tolist() for row in range(len(rows))]
    files = [path.read_text() for path in sorted(texts.glob("*.py")) if path.name != "blank.py"]
    ids = [bert_tokenizer(text, add_special_tokens=False)["input_ids"] for text in files]
    cut = [one[i : i + BLOCK - 2] for one in ids for i in range(0, len(one), BLOCK - 2)]
    assert found == [one for one in cut if len(one) > 1]
    assert rows.longest_document() == BLOCK
    (batch,) = batches_of(sentences, bert_tokenizer).of_process(0, 0, 2)
    for row, mask in zip(batch["input_ids"].tolist(), batch["attention_mask"].tolist(), strict=True):
        real = row[: sum(mask)]
        assert real[1:-1] in found
        assert (real[0], real[-1], row[sum(mask) :]) == (257, 258, [PAD] * (len(row) - sum(mask)))


def test_crops_are_two_parts_of_a_text_and_the_same_for_any_number_of_processes(sentences, bert_tokenizer):
    shares, groups = [], {}
    for size, processes in ((8, 1), (4, 2), (2, 1)):
        asked = replace(sentences, distil=0.5, contrast_rows=2, per_device_train_batch_size=size)
        batches = batches_of(asked, bert_tokenizer)
        rows = [[] for _ in range(8 // size)]
        for process in range(processes):
            for place, batch in enumerate(batches.of_process(3, process, processes)):
                real = [
                    ids[: sum(m)]
                    for ids, m in zip(batch["input_ids"].tolist(), batch["attention_mask"].tolist(), strict=True)
                ]
                rows[place * processes + process] = real
        groups[size] = [crop for part in rows for crop in part]
        chosen = batches.rows(3)[1]
        for i, row in enumerate(chosen):
            whole = batches.blocks[int(row)].tolist()
            for crop in groups[size][2 * i : 2 * i + 2]:
                inside = crop[1:-1]
                assert any(whole[j : j + len(inside)] == inside for j in range(len(whole)))
                shares.append(len(inside) / len(whole))
    assert groups[8] == groups[4] == groups[2]
    assert 0.02 < min(shares) < max(shares) <= 0.55


def test_the_swapped_encoder_comes_back_to_the_vectors_that_it_had(sentences, bert_tokenizer):
    base = encoder()
    student = patch_model(copy.deepcopy(base), "rope")
    asked = replace(sentences, max_steps=40, learning_rate=1e-3)
    log = finetune(student, bert_tokenizer, asked, copy.deepcopy(base))
    assert (log.objective, log.chunked_loss) == ("sentences", False)
    rows = batches_of(sentences, bert_tokenizer, 4)
    first = [torch.from_numpy(np.concatenate([[257], rows.blocks[int(row)], [258]])) for row in rows.rows(0)[1]]
    swapped = patch_model(copy.deepcopy(base), "rope").eval()
    with torch.no_grad():
        expected = 1 - sum(alone(swapped, ids, "mean") @ alone(base.eval(), ids, "mean") for ids in first) / 4
    assert log.start == {"unpatched": 0.0, "swapped": pytest.approx(expected.item(), abs=1e-4), "tokens": BLOCK}
    assert losses(log)[0] == pytest.approx(expected.item(), rel=1e-4)
    assert np.mean(losses(log)[-10:]) < 0.9 * np.mean(losses(log)[:3])
    assert log.tokens == pytest.approx(40 * 4 * BLOCK, rel=0.02)  # few texts are shorter than a row
    weights = dict(swapped.named_parameters())
    trained = {name for name, one in weights.items() if one.requires_grad}
    assert log.trained_parameters == sum(weights[n].numel() for n in trained if not n.startswith("pooler"))
    assert {name for name, one in student.named_parameters() if one.requires_grad} == trained
    assert "forward" not in vars(student)
    assert "1 - cosine" in card(sentences.output_dir)


def test_without_a_teacher_crops_of_a_text_come_nearer_to_each_other(tmp_path, sentences, bert_tokenizer):
    """Texts of three letters each, and an encoder to which all are alike."""
    rng = random.Random(0)
    (tmp_path / "texts").mkdir()
    for i in range(64):
        (tmp_path / "texts" / f"{i}.py").write_text("".join(rng.choices(rng.sample("abcdefghijklmnop", 3), k=30)))
    asked = replace(sentences, train_dir=str(tmp_path / "texts"), distil=0.0, max_steps=40)
    asked = replace(asked, contrast_rows=4, contrast_temperature=0.5)
    log = finetune(BertModel(bert().config), bert_tokenizer, asked)
    assert losses(log)[0] > 0.8 * math.log(4)
    assert np.mean(losses(log)[-10:]) < 0.6 * math.log(4)


def test_a_run_of_the_script_resumes(tmp_path, sentences, bert_tokenizer):
    encoder().save_pretrained(tmp_path / "base")
    bert_tokenizer.save_pretrained(tmp_path / "base")
    asked = replace(sentences, model=str(tmp_path / "base"), distil=0.5, contrast_rows=2, save_steps=2)
    run(sys.executable, SCRIPT, *flags(asked), "--scheme", "alibi")
    whole = TrainingLog.read(asked.output_dir)
    assert {"loss", "task_loss"} <= whole.entries[0].keys()
    again = replace(
        asked, output_dir=str(tmp_path / "again"), resume_from_checkpoint=f"{asked.output_dir}/checkpoint-2"
    )
    log = finetune(*load(again), again, load_teacher(again))
    assert losses(log) == losses(whole)
    assert isinstance(from_pretrained(tmp_path / "again"), BertModel)


def test_a_teacher_that_has_read_all_texts_gives_the_curve_of_one_that_reads_along(tmp_path, sentences, bert_tokenizer):
    """Texts of several lengths lie beside others in a batch then, which rounds in another way."""
    encoder().save_pretrained(tmp_path / "base")
    bert_tokenizer.save_pretrained(tmp_path / "base")
    logs = []
    for name, cache, pooling in (
        ("along", None, "mean"),
        ("first", "x", "mean"),
        ("again", "x", "mean"),
        ("cls", "x", "cls"),
    ):
        cached = {"teacher_cache": cache and str(tmp_path / cache), "pooling": pooling, "file_pattern": "bisect.py"}
        asked = replace(sentences, output_dir=str(tmp_path / name), model=str(tmp_path / "base"), **cached)
        logs.append(finetune(*load(asked, make_scheme("rope", {})), asked, load_teacher(asked)))
    along, first, again, cls = logs
    assert losses(first) == pytest.approx(losses(along), rel=1e-5)
    assert losses(again) == losses(first)
    assert [log.precomputed["files_written"] for log in logs[1:]] == [1, 0, 1]
    assert first.precomputed["gib"] * 2**30 == pytest.approx(first.rows * 32 * 4, rel=0.02)
    assert losses(cls)[0] != losses(first)[0]
    with pytest.raises(PosSwapError, match=r"teacher='.*' has vectors of 32 numbers, and the model of 64"):
        finetune(encoder(hidden_size=64), bert_tokenizer, asked)


@pytest.mark.long
def test_two_processes_train_as_one_does(tmp_path, sentences, bert_tokenizer):
    encoder().save_pretrained(tmp_path / "base")
    bert_tokenizer.save_pretrained(tmp_path / "base")
    asked = replace(sentences, model=str(tmp_path / "base"), distil=0.5, contrast_rows=2)
    one = finetune(*load(asked), asked, load_teacher(asked))
    two = launch(2, replace(asked, output_dir=str(tmp_path / "two"), per_device_train_batch_size=2))
    for name in ("loss", "task_loss", "grad_norm"):
        assert [e[name] for e in two.entries] == pytest.approx([e[name] for e in one.entries], rel=1e-4)


def silenced() -> BertModel:
    """A swap whose last layer forgets what it has read."""
    model = patch_model(encoder(), "rope")
    model.encoder.layer[-1].output.LayerNorm.weight.data.zero_()
    return model


@pytest.mark.parametrize(
    ("make", "teacher", "change", "message"),
    [
        (encoder, None, {"objective": None, "distil": 0.0}, "no language-model head .*with objective='sentences'"),
        (bert, None, {"distil": 0.0}, "objective='sentences' does not fit BertForMaskedLM; choose 'masked'"),
        (
            encoder,
            encoder,
            {"packing": "documents"},
            "packing='documents' is not for BertModel, which reads text, for one v",
        ),
        (encoder, encoder, {"distil_hidden": 1.0}, "distil_hidden=1.0 is not for BertModel"),
        (
            bert,
            bert,
            {"objective": None, "pooling": "cls"},
            "pooling='cls' is not for BertForMaskedLM, which reads text, a t",
        ),
        (encoder, None, {"distil": 0.0}, "contrast_rows=0: with distil=0 texts are told apart, in groups of 2 or more"),
        (encoder, encoder, {"distil": 0.5, "contrast_rows": 3}, "contrast_rows=3: .*per_device_train_batch_size=4"),
        (
            encoder,
            None,
            {"distil": 0.5, "contrast_rows": 2, "teacher_cache": "x"},
            "teacher_cache='x': with distil=0.5 texts are cropped anew in every epoch, .* use distil=1",
        ),
        (encoder, encoder, {"contrast_rows": 2}, "contrast_rows=2 has no share of the loss with distil=1"),
        (encoder, None, {}, "distil=1 and a teacher go together"),
        (encoder, partial(encoder, vocab_size=300), {}, r"teacher=BertModel embeds tokens .* as \(300, 32\)"),
        (encoder, encoder, {"block_size": 2 * BLOCK}, "block_size=64 is longer than the 32 positions of BertModel"),
        (silenced, encoder, {}, r"the first texts' vectors have a cosine of .* The swapped model is broken"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_any_step(make, teacher, change, message, sentences, bert_tokenizer):
    model = make()
    before, trained = copy.deepcopy(model.state_dict()), [parameter.requires_grad for parameter in model.parameters()]
    with pytest.raises(PosSwapError, match=message):
        finetune(model, bert_tokenizer, replace(sentences, **change), teacher and teacher())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [parameter.requires_grad for parameter in model.parameters()] == trained
    assert "forward" not in vars(model)


def test_texts_that_cannot_be_padded_are_refused(sentences, tokenizer):
    with pytest.raises(PosSwapError, match="pad_token=None, and texts of several lengths need it"):
        finetune(encoder(vocab_size=VOCABULARY), tokenizer, sentences, encoder())
