"""Distillation against losses written down whole, and the run that mixes it in."""

from __future__ import annotations

import copy
import os
import shutil
import signal
import sys
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from hf_posswap import PosSwapError, patch_model
from hf_posswap.scheme import make_scheme
from hf_posswap.training import precomputed
from hf_posswap.training.data import IGNORED
from hf_posswap.training.distil import Distillation, load_teacher, make_teacher, open_teacher
from hf_posswap.training.loop import finetune, load
from hf_posswap.training.loss import chunk_loss
from hf_posswap.training.precomputed import Precomputed

from .small import BLOCK, SCRIPT, VOCABULARY, bert, flags, gemma2, gpt2, launch, llama, losses, run

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


# --- the teacher that has read all rows before training


def lively() -> torch.nn.Module:
    return other(llama(), 1.2)


ROWS_IN_FILE = 32


@pytest.fixture
def reads_before(tmp_path, arguments, tokenizer, monkeypatch):
    """The teacher in a folder, and a run that has it read the rows of one text before, in several files."""
    monkeypatch.setattr(precomputed, "AT_ONCE", ROWS_IN_FILE * BLOCK)
    lively().save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    cached = {"distil": 0.5, "teacher_cache": str(tmp_path / "cache"), "save_steps": 0, "max_steps": 1}
    return replace(arguments, model=str(tmp_path / "base"), file_pattern="bisect.py", **cached)


def run_of(asked, name: str = "run", scheme: tuple = ("t5", {})):
    """The log of a run of its own."""
    asked = replace(asked, output_dir=f"{asked.output_dir}-{name}")
    return finetune(*load(asked, make_scheme(*scheme)), asked, load_teacher(asked))


def curve(log) -> list[tuple[float, ...]]:
    return [(entry["loss"], entry["task_loss"], entry["grad_norm"]) for entry in log.entries]


def swapped() -> torch.nn.Module:
    return patch_model(llama(), "t5")


def unloaded(*_):
    raise AssertionError("the teacher was loaded")


@pytest.mark.parametrize(
    ("make", "scheme", "change", "bytes_of_a_token"),
    [
        (lively, ("t5", {}), {}, 128),
        (lively, ("yarn", {"factor": 2}), {"block_size": 2 * BLOCK}, 64),  # the teacher knows half of each row
        pytest.param(lively, ("t5", {}), {"packing": "whole"}, 128, marks=pytest.mark.long),
        (lively, ("t5", {}), {"packing": "documents", "curriculum": [8], "curriculum_steps": 2}, 256),
        (lambda: lively().to(torch.bfloat16), ("t5", {}), {"distil_temperature": 2.0}, 64),
        (gpt2, ("alibi", {}), {"distil": 1.0}, 128),  # with dropout
    ],
    ids=["concat", "longer", "whole", "curriculum", "bfloat16", "gpt2"],
)
def test_a_teacher_that_has_read_all_rows_gives_the_curve_of_one_that_reads_along(
    make, scheme, change, bytes_of_a_token, reads_before, monkeypatch
):
    """To the bit; a second run loads no teacher, and of the first one none is left in training."""
    make().save_pretrained(reads_before.model)
    asked = replace(reads_before, max_steps=4, **change)
    along = run_of(replace(asked, teacher_cache=None), "along", scheme)
    teachers, read = [], Precomputed.read

    def opened(arguments):
        teachers.append(weakref.ref(teacher := open_teacher(arguments)))
        return teacher

    def reading(self, *rest):
        assert [teacher() for teacher in teachers] == [None]
        return read(self, *rest)

    monkeypatch.setattr(precomputed, "open_teacher", opened)
    monkeypatch.setattr(Precomputed, "read", reading)
    first = run_of(asked, "first", scheme)
    monkeypatch.setattr(precomputed, "open_teacher", unloaded)
    second = run_of(asked, "second", scheme)
    assert curve(first) == curve(along) == curve(second)
    assert along.precomputed is None
    assert first.precomputed["files_written"] > 1
    assert second.precomputed["files_written"] == 0
    assert first.arguments["teacher_cache"] == "cache"  # a name, not a place
    head = Path(asked.teacher_cache, first.precomputed["key"], "head.safetensors").stat().st_size
    tokens = first.rows * first.block_size
    assert first.precomputed["gib"] * 2**30 - head == pytest.approx(tokens * bytes_of_a_token, rel=0.02)


def test_what_a_teacher_made_of_anything_else_is_not_used(tmp_path, reads_before, texts):
    """Other lengths, documents, precision; one weight of the teacher; one letter of the text."""
    shutil.copytree(texts, tmp_path / "texts")
    source, teacher = tmp_path / "texts" / "bisect.py", open_teacher(reads_before)
    run_of(reads_before)
    moved = replace(reads_before, train_dir=str(tmp_path / "texts"))
    assert run_of(moved, "moved").precomputed["files_written"] == 0
    changes = [{"block_size": 16}, {"packing": "documents"}, {"mixed_precision": "bf16"}]
    logs = [run_of(replace(moved, **change), str(place)) for place, change in enumerate(changes)]
    teacher.lm_head.weight.data[0, 0] += 1
    teacher.save_pretrained(moved.model)
    logs.append(run_of(moved, "teacher"))
    source.write_text(source.read_text().replace("def ", "dEf ", 1))
    logs.append(run_of(moved, "text"))
    assert all(log.precomputed["files_written"] > 1 for log in logs)
    assert len(list(Path(moved.teacher_cache).iterdir())) == 1 + len(logs)


def test_a_teacher_that_was_killed_goes_on_and_the_run_resumes(tmp_path, reads_before, monkeypatch):
    """It dies while it writes the second file of rows: the first one is not made again."""
    asked = replace(reads_before, max_steps=4, save_steps=2)
    killed = replace(asked, output_dir=str(tmp_path / "killed"))

    def die(tensors, path):
        save_file(tensors, path)
        if second in str(path):
            os.truncate(path, os.path.getsize(path) // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    second = f"{BLOCK}-{ROWS_IN_FILE:09d}"
    child = os.fork()
    if not child:
        precomputed.save_file = die
        finetune(*load(killed, make_scheme("t5", {})), killed)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    (folder,) = Path(killed.teacher_cache).iterdir()
    left = {path: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}
    assert {path.name for path in left} == {"head.safetensors", f"{BLOCK}-000000000.safetensors"}
    whole = finetune(*load(killed, make_scheme("t5", {})), killed)
    assert whole.precomputed["files_written"] == -(-whole.rows // ROWS_IN_FILE) - 1
    assert left.items() <= {path: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}.items()
    assert curve(whole) == curve(run_of(replace(asked, teacher_cache=None), "along"))

    monkeypatch.setattr(precomputed, "open_teacher", unloaded)
    asked = replace(asked, resume_from_checkpoint=f"{killed.output_dir}/checkpoint-2")
    assert curve(finetune(*load(asked), asked)) == curve(whole)


@pytest.mark.long
def test_two_processes_have_it_read_as_one_does(tmp_path, reads_before, monkeypatch):
    monkeypatch.setattr(precomputed, "AT_ONCE", 2**14)  # as in the processes
    asked = replace(reads_before, packing="documents", max_steps=4, file_pattern="*.py")
    one = finetune(*load(asked, make_scheme("t5", {})), asked)
    shape = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    two = replace(asked, output_dir=str(tmp_path / "two"), teacher_cache=str(tmp_path / "cache-2"), **shape)
    made, found = (launch(2, two, "--scheme", "t5", config="fsdp2"), launch(2, two, "--scheme", "t5"))
    for log, written in ((made, one.precomputed["files_written"]), (found, 0)):
        assert log.precomputed["files_written"] == written
        for ours, theirs in zip(curve(log), curve(one), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4)


FIRST, LAST = (f"{BLOCK}-{file * ROWS_IN_FILE:09d}.safetensors" for file in (0, 3))


def cut_in_half(folder: Path) -> None:
    os.truncate(folder / FIRST, (folder / FIRST).stat().st_size // 2)


def of_fewer_rows(folder: Path) -> None:
    shutil.copy(folder / LAST, folder / FIRST)


def without_a_head(folder: Path) -> None:
    (folder / "head.safetensors").write_bytes(b"")


def test_what_is_there_and_does_not_fit_is_refused(reads_before, tokenizer):
    run_of(reads_before)
    with pytest.raises(PosSwapError, match=r"teacher='.*' has 261 tokens, and the model 300; both need one vocabulary"):
        finetune(patch_model(llama(vocab_size=300), "t5"), tokenizer, reads_before)
    (folder,) = Path(reads_before.teacher_cache).iterdir()
    for damage, message in (
        (cut_in_half, f"{FIRST} cannot be read .* remove it, and what it held is made again"),
        (of_fewer_rows, f"{FIRST} has .* rows, and should have {ROWS_IN_FILE}; remove it"),
        (without_a_head, "head.safetensors cannot be read"),
    ):
        damage(folder)
        with pytest.raises(PosSwapError, match=message):
            run_of(reads_before, "second")


def test_a_disk_without_room_is_told_after_the_first_file(reads_before, monkeypatch):
    usage = shutil.disk_usage(reads_before.model)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2**17))
    with pytest.raises(
        PosSwapError, match=r"GiB are still to be written, and 0.000122 are free; give a folder with mo"
    ):
        run_of(reads_before)


@pytest.mark.parametrize(
    ("make", "saved", "change", "message"),
    [
        (llama, llama, {"model": "nowhere"}, "teacher='nowhere' cannot be loaded"),
        (llama, llama, {"teacher_cache": __file__}, "teacher_cache='.*' cannot be written: .*Not a directory"),
        (partial(llama, vocab_size=300), llama, {}, "teacher=LlamaForCausalLM has 261 tokens, and the model 300"),
        (llama, swapped, {}, "carries the swap of the model that it is to teach; give the unpatched"),
        (llama, gemma2, {}, "more of its logits than its head does"),
    ],
)
def test_a_teacher_that_cannot_read_before_is_refused(make, saved, change, message, reads_before, tokenizer):
    saved().save_pretrained(reads_before.model)
    model = patch_model(make(), "t5")
    with pytest.raises(PosSwapError, match=message):
        finetune(model, tokenizer, replace(reads_before, **change))
    assert "forward" not in vars(model)


@pytest.mark.parametrize(
    ("make", "teacher", "change", "message"),
    [
        (llama, None, {"distil": 0.5}, "distil=0.5 and a teacher go together"),
        (llama, llama, {}, "distil=0 and a teacher go together"),
        (llama, llama, {"distil": 0.5, "teacher_cache": "x"}, "teacher_cache='x': the teacher is loaded from its fold"),
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


def test_an_adapter_cannot_read_before(reads_before, tokenizer):
    Path(reads_before.model, "adapter_config.json").write_text("{}")
    with pytest.raises(PosSwapError, match=r"teacher='.*' is an adapter, whose base lies elsewhere; merge it, and"):
        finetune(swapped(), tokenizer, reads_before)


def test_a_masked_teacher_cannot_read_before(arguments, bert_tokenizer):
    with pytest.raises(PosSwapError, match="teacher_cache='x': which tokens are masked is drawn anew in every epoch"):
        finetune(bert(), bert_tokenizer, replace(arguments, distil=0.5, teacher_cache="x"))


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
        ({"teacher_cache": "x"}, "teacher_cache='x' was given with distil=0"),
        (
            {"distil": 0.5, "distil_hidden": 1.0, "teacher_cache": "x"},
            "teacher_cache='x' keeps one state of a token, and distil_hidden=1 asks for those of every layer; use dis",
        ),
        ({"distil": 0.5, "pose_length": 64, "teacher_cache": "x"}, "pose_length=64 does not go with distil=0.5"),
    ],
)
def test_arguments_of_distillation(change, message, arguments):
    with pytest.raises(PosSwapError, match=message):
        replace(arguments, **change)
