"""The work of an evaluation: interruption, journals, processes; and that sharing forwards changes no number."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from hf_posswap import PosSwapError, patch_model
from hf_posswap.evaluation import Work, curve, key_tokens, make_protocol, measure
from hf_posswap.evaluation.losses import rows_of, window_losses
from hf_posswap.evaluation.protocols import Window

from .families import FAMILIES, tokens

ROOT = Path(__file__).resolve().parent.parent
TEXT = tokens(1, 400)[0]


def losses(model, ids) -> torch.Tensor:
    """-log p of tokens 1, 2, ... of a sequence, float64."""
    with torch.no_grad():
        logits = model(torch.as_tensor(ids)[None]).logits[0].double()
    return -logits.log_softmax(-1)[:-1].gather(1, torch.as_tensor(ids)[1:, None])[:, 0]


# --- the journal


def test_an_interrupted_run_goes_on_and_ends_as_one_that_was_not(tmp_path: Path):
    journal, seen = tmp_path / "unfinished.jsonl", []

    def compute(task: int) -> float:
        if task == 20 and len(seen) < 30:
            raise KeyboardInterrupt
        seen.append(task)
        return task**0.5

    tasks = list(range(40))
    with pytest.raises(KeyboardInterrupt):
        Work(journal).map({"measure": "a"}, tasks, compute)
    kept = sum(len(json.loads(line)["results"]) for line in journal.read_text().splitlines())
    assert kept == 16  # two whole groups of 8
    first, seen = seen, [*range(30)]
    assert Work(journal).map({"measure": "a"}, tasks, compute) == [task**0.5 for task in tasks]
    assert seen[30:] == list(range(16, 40))  # what was finished is not computed again
    assert first[:16] == list(range(16))


def test_other_work_has_results_of_its_own(tmp_path: Path):
    journal = tmp_path / "unfinished.jsonl"
    Work(journal).map({"model": "a"}, [1, 2], lambda task: task)
    assert Work(journal).map({"model": "b"}, [1, 2], lambda task: -task) == [-1, -2]
    assert Work(journal).map({"model": "a"}, [1, 2], lambda task: 1 / 0) == [1, 2]


def test_a_half_written_line_is_computed_again_and_the_others_are_kept(tmp_path: Path, capsys):
    journal = tmp_path / "unfinished.jsonl"
    Work(journal).map({"measure": "a"}, list(range(20)), lambda task: task)
    journal.write_text(journal.read_text()[:-9])
    computed = []
    assert Work(journal).map({"measure": "a"}, list(range(20)), lambda task: computed.append(task) or task) == [
        *range(20)
    ]
    assert computed == [16, 17, 18, 19]
    (line,) = capsys.readouterr().err.splitlines()
    assert "its last line is half-written and is computed again; 16 results are kept" in line
    assert len(Work(journal).finished.popitem()[1]) == 20


def test_a_broken_line_is_refused_and_nothing_is_lost(tmp_path: Path):
    journal = tmp_path / "unfinished.jsonl"
    Work(journal).map({"measure": "a"}, list(range(16)), lambda task: task)
    first, *rest = journal.read_text().splitlines(keepends=True)
    journal.write_text(first[:20] + "\n" + "".join(rest))
    before = journal.read_text()
    with pytest.raises(PosSwapError, match="line 1 is not a line of results"):
        Work(journal)
    assert journal.read_text() == before


# --- forwards that serve several windows

WINDOWS = [Window(0, 0, end, 40) for end in (40 + 8, 120, 200, 400)] + [Window(0, 80, 400, 7), Window(0, 80, 393, 5)]


def test_windows_that_begin_together_share_a_row():
    rows = list(rows_of(WINDOWS, apart=False, most=10**6))
    assert [(row.begin, row.end, row.windows) for row in rows] == [(80, 400, (5, 4)), (0, 400, (0, 1, 2, 3))]
    assert len(list(rows_of(WINDOWS, apart=True, most=10**6))) == len(WINDOWS)
    assert max(len(row.windows) for row in rows_of(WINDOWS, apart=False, most=80)) == 2


@pytest.mark.parametrize(
    ("family", "scheme", "params"),
    [
        ("llama", None, {}),
        ("llama", "yarn", {"factor": 16}),
        ("llama", "dynamic", {"factor": 16}),
        ("llama", "alibi", {}),
        ("llama", "logn", {}),
        ("gpt_neox", "linear", {"factor": 16}),
        ("gemma3", None, {}),
        ("llama_longrope", None, {}),
        ("bloom", None, {}),
    ],
)
@pytest.mark.filterwarnings("ignore::hf_posswap.RecalibrationWarning")
def test_every_window_is_scored_as_by_itself(family, scheme, params):
    def build():
        model = FAMILIES[family].build()
        return model if scheme is None else patch_model(model, scheme, **params)

    found = window_losses(build(), [TEXT], WINDOWS, reduce=lambda index, found: found.tolist())
    for window, one in zip(WINDOWS, found, strict=True):  # a fresh model each: dynamic NTK remembers the longest text
        alone = losses(build(), TEXT[window.begin : window.end])[-window.targets :]
        torch.testing.assert_close(torch.tensor(one, dtype=torch.float64), alone, rtol=1e-4, atol=1e-4)


def test_strict_lengths_share_their_rows():
    """Where the stride divides their difference, a shorter length's window begins a longer one's."""
    protocol = make_protocol("strict", range(32, 257, 32), stride=16)
    windows = [window for length in protocol.lengths for window in protocol.windows([400], length)]
    shared = list(rows_of(windows, apart=False, most=10**6))
    fed = sum(row.end - row.begin for row in shared)
    assert fed < 0.4 * sum(window.end - window.begin for window in windows)


def tiny_demo():
    """The architecture of the demo's model; untrained weights take the same time."""
    import demo

    return demo.tiny_llama(demo.DemoArguments(), 258).eval()


def timed(model, document, windows) -> float:
    """How many times longer it takes to evaluate every window anew, to the same answer."""
    started = time.process_time()
    shared = window_losses(model, [document], windows)
    middle = time.process_time()
    apart = [float(losses(model, document[w.begin : w.end])[-w.targets :].sum()) for w in windows]
    ended = time.process_time()
    assert shared == pytest.approx(apart, rel=1e-5)
    return (ended - middle) / (middle - started)


def test_a_text_of_4k_is_scored_three_times_faster_than_stride_by_stride():
    document = torch.randint(258, (4096,), generator=torch.Generator().manual_seed(0))
    assert timed(tiny_demo(), document, [Window(0, 0, end, 256) for end in range(512, 4097, 512)]) > 3


@pytest.mark.long
def test_perplexity_at_every_length_up_to_4k_is_three_times_faster_than_window_by_window():
    document = torch.randint(258, (4096 + 8192,), generator=torch.Generator().manual_seed(0))
    protocol = make_protocol("strict", range(512, 4097, 512), stride=256)
    windows = [window for length in protocol.lengths for window in protocol.windows([len(document)], length)]
    ratio = timed(tiny_demo(), document, windows)
    print(f"{len(windows)} windows: {ratio:.1f} times faster")
    assert ratio > 3


# --- by position, and on key tokens


@pytest.mark.parametrize("bos", [None, 3])
def test_curve_is_the_mean_loss_at_each_position(bos):
    model, documents, head = FAMILIES["llama"].build(), [TEXT[:150], TEXT[150:]], [] if bos is None else [bos]
    points = curve(model, documents, 64, name="m", rows=4, bos_token_id=bos)["points"]
    room = 64 - len(head)
    starts = [(0, 0), (1, 0), (0, room), (1, room)]
    rows = [losses(model, head + documents[d][b : b + room].tolist()) for d, b in starts]
    assert [point["length"] for point in points] == list(range(4, 65, 4))
    before = 1
    for point in points:
        expected = torch.cat([row[before - 1 : point["length"] - 1] for row in rows])
        assert point["loss"] == pytest.approx(expected.mean().item(), rel=1e-5)
        assert point["targets"] == len(expected)
        before = point["length"]
    with pytest.raises(PosSwapError, match="length=500 of the curve needs 500 tokens and the longest document has 250"):
        curve(model, documents, 500, name="m")


def test_key_tokens_are_those_that_gain_from_the_long_context(monkeypatch):
    gain, known = 0.5, 6.0  # an untrained model gains less, and knows less, than LongPPL asks for
    monkeypatch.setattr("hf_posswap.evaluation.perplexity.GAIN", gain)
    monkeypatch.setattr("hf_posswap.evaluation.perplexity.KNOWN", known)
    model, protocol = FAMILIES["llama"].build(), make_protocol("strict", [8, 128], stride=4)
    document = TEXT[:200].repeat(2)  # some of it comes again
    (found,) = key_tokens(model, [document], protocol)
    expected = torch.zeros(len(document), dtype=torch.bool)
    for end in [128, *range(132, 401, 4)]:
        long, short = (losses(model, document[end - n : end])[-4:] for n in (128, 8))
        expected[end - 4 : end] = (short - long > gain) & (long < known)
    assert expected.any()
    assert torch.equal(found, expected)
    points = measure(model, [document], protocol, name="m", keys=[found])["points"]
    (at_128,) = [point for point in points if point["length"] == 128]
    one_by_one = []
    for place in found.nonzero().flatten().tolist():
        end = 128 + -(-(place + 1 - 128) // 4) * 4
        one_by_one.append(losses(model, document[end - 128 : end])[place - end])
    assert at_128["key_targets"] == len(one_by_one)
    assert at_128["key_loss"] == pytest.approx(torch.stack(one_by_one).mean().item(), rel=1e-5)
    with pytest.raises(PosSwapError, match=r"no token gains more than 0\.5 nats"):
        key_tokens(model, [document[:9]], make_protocol("strict", [8, 9], stride=1))


# --- processes

TWO = """
import json, os, sys
import torch
from accelerate import PartialState
state = PartialState()
from hf_posswap import patch_model
from hf_posswap.evaluation import Work, make_protocol, measure
from tests.families import FAMILIES, tokens
model = patch_model(FAMILIES["llama"].build(), "yarn", factor=4)
protocol = make_protocol("strict", [32, 128], stride=16)
work = Work(sys.argv[1])
found = measure(model, list(tokens(3, 250)), protocol, name="m", batch_size=2, work=work)
assert work.processes == int(sys.argv[2])
if work.main:
    print("found", json.dumps([point["loss"] for point in found["points"]]))
if state.num_processes > 1:
    state.destroy_process_group()
"""


def test_one_and_two_processes_give_the_same_numbers(tmp_path: Path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    (tmp_path / "two.py").write_text(TWO)
    said = []
    for count in ("1", "2"):
        script = [str(tmp_path / "two.py"), str(tmp_path / f"{count}.jsonl"), count]
        launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]
        command = [sys.executable, *(launch if count == "2" else []), *script]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        said.append(next(line for line in done.stdout.splitlines() if line.startswith("found")))
    assert said[0] == said[1]
    one, two = (
        {
            json.dumps(pair)
            for line in (tmp_path / f"{n}.jsonl").read_text().splitlines()
            for pair in json.loads(line)["results"]
        }
        for n in (1, 2)
    )
    assert one == two
