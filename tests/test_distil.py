"""Distillation against losses written down whole, and the run that mixes it in."""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from hf_posswap import PosSwapError, patch_model
from hf_posswap.training.data import IGNORED
from hf_posswap.training.distil import Distillation, load_teacher, make_teacher
from hf_posswap.training.loop import finetune, load
from hf_posswap.training.loss import chunk_loss

from .small import BLOCK, SCRIPT, VOCABULARY, bert, flags, gemma2, gpt2, llama, losses, run

pytestmark = pytest.mark.filterwarnings("ignore::hf_posswap.RecalibrationWarning")
MODELS = {"causal": (llama, True), "masked": (bert, False), "table": (gpt2, True)}


def batch(rows: int = 3, length: int = 20) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (rows, length), generator=generator)
    labels = torch.where(torch.rand(rows, length, generator=generator) < 0.6, ids, IGNORED)
    return {"input_ids": ids, "labels": labels}


def other(model: torch.nn.Module, scale: float = 1.5) -> torch.nn.Module:
    """The same model with other weights."""
    changed = copy.deepcopy(model)
    for parameter in changed.parameters():
        parameter.data.mul_(scale)
    return changed


def teach(student, teacher, causal: bool, chunk: int, length: int = 100, **settings: float):
    """(the losses of one batch through the code under test, the batch)."""
    hidden = settings.get("hidden", 0.0)
    guide = make_teacher(teacher, student, causal=causal, longest=20, layers=hidden > 0, device=torch.device("cpu"))
    guide.length = min(guide.length, length)
    assert chunk_loss(student, chunk, causal=causal, distillation=Distillation(guide.head_on(guide.device), **settings))
    inputs = batch()
    return student(**inputs, taught=guide.read(inputs))


def by_hand(student, teacher, causal: bool, known: int, weight: float, temperature: float, hidden: float):
    """The same from whole logits in float64, target by target."""
    inputs = batch()
    ours, theirs = (
        model(input_ids=inputs["input_ids"], output_hidden_states=True)
        for model in (student, teacher.requires_grad_(False))
    )
    total, task, count = 0.0, 0.0, 0
    for row in range(3):
        for place in range(20 - causal):
            target = inputs["labels"][row, place + causal]
            if target == IGNORED:
                continue
            count += 1
            logits = ours.logits[row, place].double()
            cross = F.cross_entropy(logits, target)
            task += cross
            if place >= known:
                total += cross
                continue
            p = (theirs.logits[row, place].double() / temperature).softmax(-1)
            q = (logits / temperature).softmax(-1)
            distances = [
                (a[row, place] - b[row, place]).double().square().sum() / b[row, place].double().square().sum()
                for a, b in zip(ours.hidden_states, theirs.hidden_states, strict=True)
            ]
            divergence = temperature**2 * (p * (p / q).log()).sum()
            total += (1 - weight) * cross + weight * (divergence + hidden * sum(distances) / len(distances))
    return total / count, task / count


@pytest.mark.parametrize("hidden", [0.0, 0.5])
@pytest.mark.parametrize(
    ("kind", "chunk", "known"),
    [*[(kind, chunk, 20) for kind in MODELS for chunk in (7, 1000)], ("causal", 7, 9), ("table", 1000, 9)],
)
def test_losses_and_gradients_equal_those_of_whole_logits(kind, hidden, chunk, known):
    make, causal = MODELS[kind]
    student, whole = make().eval(), make().eval()
    teacher = other(make()).eval()
    found = teach(student, teacher, causal, chunk, known, weight=0.3, temperature=2.0, hidden=hidden)
    loss, task = by_hand(whole, teacher, causal, known, 0.3, 2.0, hidden)
    assert found.loss.item() == pytest.approx(loss.item(), rel=1e-5)
    assert found.task.item() == pytest.approx(task.item(), rel=1e-5)
    found.loss.backward()
    loss.backward()
    for (name, parameter), expected in zip(student.named_parameters(), whole.parameters(), strict=True):
        if expected.grad is not None:
            torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", MODELS)
def test_weight_0_is_the_tasks_loss_alone(kind):
    make, causal = MODELS[kind]
    plain, student = make().eval(), make().eval()
    assert chunk_loss(plain, 7, causal=causal)
    found = teach(student, other(make()), causal, 7, weight=0.0)
    expected = plain(**batch())
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=0)
    for result in (found, expected):
        result.loss.backward()
    for one, two in zip(student.parameters(), plain.parameters(), strict=True):
        if two.grad is not None:
            torch.testing.assert_close(one.grad, two.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", MODELS)
def test_a_teacher_that_is_the_student_has_nothing_to_say(kind):
    make, causal = MODELS[kind]
    student = make().eval()
    found = teach(student, make(), causal, 7, weight=1.0, temperature=3.0, hidden=1.0)
    assert found.loss.item() == pytest.approx(0, abs=1e-6)
    found.loss.backward()
    grads = [p.grad.abs().max() for p in student.parameters() if p.grad is not None]
    assert grads
    assert max(grads) < 1e-6


def test_distilling_the_swapped_model_brings_it_nearer_to_the_model_it_was(arguments, tokenizer):
    """Of two runs that differ in the loss alone, the distilled one ends nearer to the unpatched model."""
    base = llama()
    finetune(base, tokenizer, replace(arguments, output_dir=arguments.output_dir + "-base", max_steps=60, save_steps=0))
    ids = torch.randint(VOCABULARY, (4, BLOCK), generator=torch.Generator().manual_seed(1))
    expected = base.eval()(ids).logits.log_softmax(-1)
    ends = {}
    for share in (0.0, 1.0):
        student = patch_model(copy.deepcopy(base), "nope")
        asked = replace(
            arguments,
            output_dir=f"{arguments.output_dir}-{share}",
            max_steps=20,
            save_steps=0,
            distil=share,
            teacher_device="cpu" if share else "same",
        )
        log = finetune(student, tokenizer, asked, copy.deepcopy(base) if share else None)
        assert ("task_loss" in log.entries[0]) == (share > 0)
        logits = student.eval()(ids).logits.log_softmax(-1)
        ends[share] = F.kl_div(logits, expected, log_target=True, reduction="batchmean").item()
    assert ends[1.0] < 0.8 * ends[0.0]


def test_rows_beyond_what_the_teacher_knows_have_the_tasks_loss(arguments, tokenizer):
    """Twice the teacher's length, so that half of each row is taught."""
    teacher = other(llama())
    asked = replace(arguments, block_size=2 * BLOCK, max_steps=1, distil=1.0)
    log = finetune(patch_model(llama(), "yarn", factor=2), tokenizer, asked, teacher)
    plain = replace(asked, output_dir=arguments.output_dir + "-plain", distil=0.0)
    alone = finetune(patch_model(llama(), "yarn", factor=2), tokenizer, plain)
    assert log.entries[0]["task_loss"] == pytest.approx(losses(alone)[0], rel=1e-6)
    assert losses(log)[0] != losses(alone)[0]


def test_a_run_of_the_script_distils_and_resumes(tmp_path, arguments, tokenizer):
    """The teacher is the model as it was before the swap, without a word more."""
    base = tmp_path / "base"
    other(llama(), 1.2).save_pretrained(base)
    tokenizer.save_pretrained(base)
    asked = replace(arguments, model=str(base), distil=0.5, save_steps=2, packing="documents")
    run(sys.executable, SCRIPT, *flags(asked), "--scheme", "t5")
    from hf_posswap.training.log import TrainingLog

    whole = TrainingLog.read(arguments.output_dir)
    again = replace(
        asked, output_dir=str(tmp_path / "again"), resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2")
    )
    log = finetune(*load(again), again, load_teacher(again))
    assert losses(log) == losses(whole)


@pytest.mark.parametrize(
    ("make", "teacher", "change", "message"),
    [
        (llama, None, {"distil": 0.5}, "distil=0.5 and a teacher go together"),
        (llama, llama, {}, "distil=0 and a teacher go together"),
        (llama, partial(llama, vocab_size=300), {"distil": 0.5}, "has 300 tokens, and the model 261"),
        (llama, gemma2, {"distil": 0.5}, "more of its logits than its head does"),
        (gemma2, llama, {"distil": 0.5}, "Gemma2ForCausalLM makes more of its logits"),
        (
            llama,
            partial(llama, num_hidden_layers=3),
            {"distil": 0.5, "distil_hidden": 1.0},
            "distil_hidden: teacher=LlamaForCausalLM has 3 layers of width 32, and the model 2",
        ),
    ],
)
def test_a_teacher_that_cannot_teach_is_refused_before_any_step(make, teacher, change, message, arguments, tokenizer):
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(PosSwapError, match=message):
        finetune(model, tokenizer, replace(arguments, **change), teacher and teacher())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert "forward" not in vars(model)


def test_what_a_masked_teacher_does_not_know_is_refused(arguments, bert_tokenizer):
    longer = patch_model(bert(), "learned", max_positions=2 * BLOCK)
    asked = replace(arguments, block_size=2 * BLOCK, distil=0.5)
    with pytest.raises(PosSwapError, match="block_size=64 is longer than the 32 tokens that teacher=BertForMaskedLM"):
        finetune(longer, bert_tokenizer, asked, bert())


def test_a_teacher_with_the_students_own_swap_is_refused(arguments, tokenizer):
    pair = [patch_model(llama(), "yarn", factor=2) for _ in range(2)]
    with pytest.raises(PosSwapError, match="carries the swap of the model that it is to teach; give the unpatched"):
        finetune(pair[0], tokenizer, replace(arguments, distil=0.5), pair[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"distil": 1.5}, "distil=1.5 is too great; the greatest value is 1"),
        ({"distil": -0.1}, "distil=-0.1 is too small"),
        ({"distil": 0.5, "distil_temperature": 0.0}, "distil_temperature=0.0 is too small"),
        ({"distil_hidden": 1.0}, "distil_hidden=1.0 was given with distil=0"),
        ({"teacher": "x"}, "teacher='x' was given with distil=0"),
    ],
)
def test_arguments_of_distillation(change, message, arguments):
    with pytest.raises(PosSwapError, match=message):
        replace(arguments, **change)
