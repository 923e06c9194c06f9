"""Several models in one report: what is in it, what stops it, the script, and lm-eval."""

from __future__ import annotations

import json
import re
import sys
import sysconfig
from pathlib import Path

import demo
import pytest
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, ViTImageProcessor

from hf_posswap import PosSwapError, patch_model
from hf_posswap.evaluation import Work, compare_causal, measure, write_report
from hf_posswap.evaluation.compare import Entry, Extras, compare_encoders, compare_images
from hf_posswap.evaluation.prompts import Strict, Yarn
from hf_posswap.evaluation.report import table

from .families import FAMILIES, pixels, tokens
from .small import ROOT, call, run
from .test_encoders import bert

DOCUMENTS = [*tokens(2, 300)]
BYTES = {"vocab_size": 258, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}


def entry(name: str, family: str = "llama", base: str | None = "base", **params) -> Entry:
    scheme = name.partition("(")[0]
    if base is None:
        return Entry(name, lambda: FAMILIES[family].build(**BYTES))
    return Entry(name, lambda: patch_model(FAMILIES[family].build(**BYTES), scheme, **params), base)


ENTRIES = [entry("base", base=None), entry("yarn", factor=4), entry("linear", factor=4), entry("dynamic", factor=4)]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Everything that is measured of causal models, of four of them, written to a folder."""
    bytes_ = demo.byte_tokenizer()
    askers = [Strict(bytes_, "passkey", samples=1, depths=(0.0, 1.0)), Yarn(bytes_, samples=1)]
    extras = Extras(curve=2, askers=askers, ask_lengths=[600], diagnostics=1)
    folder = tmp_path_factory.mktemp("report")
    work = Work(folder / "unfinished.jsonl")
    made = compare_causal(ENTRIES, DOCUMENTS, [16, 128], stride=8, extras=extras, source={"from": "here"}, work=work)
    return made, folder, write_report(made, folder)


def test_one_table_of_all_models_each_with_its_cost_at_the_trained_length(report):
    made, _, _ = report
    assert [one["name"] for one in made["series"]] == ["base", "yarn", "linear", "dynamic"]
    alone = measure(ENTRIES[2].load(), DOCUMENTS, _protocol(), name="linear")
    assert made["series"][2]["points"] == alone["points"]
    base, linear = (made["series"][i]["points"][1] for i in (0, 2))
    assert base["length"] == made["original_length"] == 32
    assert made["shorts"]["linear"]["delta"] == linear["loss"] - base["loss"] != 0
    assert made["shorts"]["dynamic"]["delta"] == pytest.approx(0, abs=1e-6)
    assert set(made["shorts"]) == {"yarn", "linear", "dynamic"}
    assert len({model["sample"] for model in made["models"].values()}) == 4
    for line in ("linear", "32*", f"{linear['perplexity']:.4g}"):
        assert line in table(made)


def _protocol():
    from hf_posswap.evaluation import make_protocol

    return make_protocol("strict", [16, 32, 128], stride=8)


def test_every_measure_has_every_model_a_picture_and_its_numbers_on_the_page(report):
    made, folder, paths = report
    assert set(made["measures"]) == {"curve", "passkey_strict", "passkey_yarn", "diagnostics"}
    page = paths["md"].read_text()
    for name, found in made["measures"].items():
        assert [one["name"] for one in found["series"]] == ["base", "yarn", "linear", "dynamic"]
        assert (folder / f"evaluation_{name}.png").read_bytes().startswith(b"\x89PNG")
        assert f"](evaluation_{name}.png)" in page
        assert f"## {found['title']}" in page
    assert all((folder / picture).is_file() for picture in re.findall(r"\]\((\S+\.png)\)", page))
    for one in made["series"]:
        for point in one["points"]:
            assert f"{point['perplexity']:.3f}" in page
    passkey = made["measures"]["passkey_strict"]["series"][1]["points"]
    assert {point["depth"] for point in passkey} == {0.0, 1.0}
    assert all(570 < point["shortest_prompt"] <= point["longest_prompt"] < 600 for point in passkey)
    diagnosed = made["measures"]["diagnostics"]["series"]
    assert diagnosed[1]["points"][-1]["shift"] < 1e-3 < diagnosed[3]["points"][-1]["shift"]  # dynamic is not relative
    assert len(diagnosed[0]["points"][0]["distances"]) == 2


def test_a_report_says_what_ran_on_what(report):
    made, folder, paths = report
    assert json.loads(paths["json"].read_text()) == made
    assert made["data"]["source"] == {"from": "here"}
    assert re.fullmatch("[0-9a-f]{64}", made["data"]["sha256"])
    assert {"torch", "transformers", "python", "hf_posswap"} <= made["versions"].keys()
    assert {"device", "cpus", "threads", "machine"} <= made["hardware"].keys()
    assert made["command"]
    assert made["settings"]["processes"] == 1
    assert sum(1 for _ in (folder / "unfinished.jsonl").open()) > 10
    again = compare_causal(ENTRIES, DOCUMENTS, [16, 128], stride=8, work=Work(folder / "unfinished.jsonl"))
    assert again["series"][1]["points"] == made["series"][1]["points"]


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ([ENTRIES[0]], "needs an unpatched model and at least one that came from it"),
        ([ENTRIES[1]], "base='base' of yarn is not among the models"),
        ([ENTRIES[0], ENTRIES[1], ENTRIES[1]], "two models are called alike: base, yarn, yarn"),
        ([Entry("base", ENTRIES[1].load), ENTRIES[2]], r"base=LlamaForCausalLM is itself patched \(yarn"),
    ],
)
def test_a_comparison_without_its_base_stops(entries, says):
    with pytest.raises(PosSwapError, match=says):
        compare_causal(entries, DOCUMENTS, [16], stride=8)


def test_an_evaluator_is_one_of_the_models():
    with pytest.raises(PosSwapError, match="evaluator='ntk' is none of the models; choose one of: base, yarn"):
        compare_causal(ENTRIES[:2], DOCUMENTS, [16], stride=8, extras=Extras(evaluator="ntk"))


# --- encoders and images


@pytest.mark.filterwarnings("ignore::hf_posswap.RecalibrationWarning")
def test_encoders_are_compared_beside_their_base(bert_tokenizer, tmp_path):
    def swapped():
        return patch_model(bert(64), "learned", max_positions=96, init="tile")

    entries = [Entry("base", lambda: bert(64)), Entry("learned", swapped, "base")]
    made = compare_encoders(entries, DOCUMENTS, [16, 96], bert_tokenizer, targets=3)
    assert [[point["length"] for point in one["points"]] for one in made["series"]] == [[16, 64], [16, 64, 96]]
    assert made["short"]["delta"] == pytest.approx(0, abs=1e-6)  # tiled: the first 64 rows are the same
    assert made["short"]["vector"] == pytest.approx(0, abs=1e-6)
    (found,) = (made["measures"][name] for name in made["measures"])
    assert [point["tokens_read"] for point in found["series"][0]["points"]] == [16, 64, 64]
    assert "Pseudo-perplexity" in write_report(made, tmp_path)["md"].read_text()


def test_images_are_compared_beside_their_base(tmp_path):
    def swapped():
        return patch_model(FAMILIES["vit"].build(), "learned", image_size=48)

    entries = [Entry("base", FAMILIES["vit"].build), Entry("learned", swapped, "base")]
    made = compare_images(entries, list(pixels(40)), [48])
    assert [point["length"] for point in made["series"][1]["points"]] == [32, 48]
    assert made["original_length"] == 32
    assert made["short"]["delta"] == made["series"][1]["points"][0]["shift"]
    assert "Feature shift" in write_report(made, tmp_path)["md"].read_text()


# --- the script


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    (tmp_path / "texts").mkdir()
    for i, letter in enumerate("ab"):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"the text of {letter}, " * 40)
    return tmp_path / "texts"


def test_the_script_compares_schemes_and_resumes(checkpoint: Path, texts: Path, tmp_path: Path):
    arguments = ["--model", checkpoint, "--scheme", "yarn", "--scheme", "linear", "--factor", 2, "--lengths", 128]
    arguments += ["--stride", 32, "--eval_dir", texts, "--output_dir", tmp_path / "out", "--device", "cpu"]
    out = tmp_path / "out"
    out.mkdir()
    (out / "unfinished.jsonl").write_text('{"key": "0", "results": [[0, 1.0]]}\n{"key": ')
    done = call("evaluate.py", *arguments, "--curve", 2)
    assert done.returncode == 0, done.stderr
    assert "its last line is half-written" in done.stderr
    assert not (out / "unfinished.jsonl").exists()
    made = json.loads((out / "evaluation.json").read_text())
    assert [one["name"] for one in made["series"]] == ["base", "yarn(factor=2)", "linear(factor=2)"]
    assert {"evaluation.md", "evaluation.png", "evaluation_curve.png"} <= {path.name for path in out.iterdir()}


def test_the_script_finds_the_same_on_two_processes(checkpoint: Path, texts: Path, tmp_path: Path):
    arguments = ["--model", checkpoint, "--scheme", "yarn", "--factor", 4, "--lengths", 128, "--stride", 32]
    arguments += ["--eval_dir", texts, "--curve", 2, "--diagnostics", 1, "--retrieval", "passkey"]
    arguments += ["--retrieval_lengths", 500, "--retrieval_samples", 1, "--output_dir"]
    script = ROOT / "scripts" / "evaluate.py"
    two = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", 2]
    run(sys.executable, script, *arguments, tmp_path / "one", ACCELERATE_USE_CPU="true")
    run(*two, "--main_process_port", 0, script, *arguments, tmp_path / "two", ACCELERATE_USE_CPU="true")
    one, two = (json.loads((tmp_path / name / "evaluation.json").read_text()) for name in ("one", "two"))
    assert (one["settings"]["processes"], two["settings"]["processes"]) == (1, 2)
    assert list(one["measures"]) == ["curve", "passkey_strict", "diagnostics"]
    for found in (one, two):
        for part in (found, *found["measures"].values()):
            for line in part["series"]:
                del line["seconds"]
    assert one["series"] == two["series"]
    assert one["measures"] == two["measures"]


def test_the_script_measures_images_on_a_checkpoint(tmp_path: Path):
    model = FAMILIES["vit"].build()
    size = {"height": 32, "width": 32}
    processor = ViTImageProcessor(size=size)
    for folder, one in (("base", model), ("resized", patch_model(FAMILIES["vit"].build(), "learned", image_size=64))):
        one.save_pretrained(tmp_path / folder)
        processor.save_pretrained(tmp_path / folder)
    (tmp_path / "pictures").mkdir()
    for i, picture in enumerate(pixels(40)):
        levels = (picture.clamp(-1, 1) * 127 + 128).byte().permute(1, 2, 0).numpy()
        Image.fromarray(levels).save(tmp_path / "pictures" / f"{i}.png")
    arguments = ["--model", tmp_path / "resized", "--base", tmp_path / "base", "--image_dir", tmp_path / "pictures"]
    done = call("evaluate.py", *arguments, "--lengths", 48, 64, "--output_dir", tmp_path / "out", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    made = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert [[point["length"] for point in one["points"]] for one in made["series"]] == [[32, 48, 64]] * 2
    assert made["series"][0]["points"][0]["shift"] == pytest.approx(0, abs=1e-9)
    assert "Feature shift" in (tmp_path / "out" / "evaluation.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--lengths", "100000"], "no document is long enough: length=100000 needs 100000 tokens"),
        (["--lengths", "128", "--retrieval", "passkee"], "task='passkee' is unknown; did you mean 'passkey'"),
        (["--lengths", "128", "--retrieval", "passkey"], "length=128 is too short for passkey"),
        (["--lengths", "128", "--protocol", "strikt"], "protocol='strikt' is unknown; did you mean 'strict'"),
        (["--lengths", "128", "--retrieval_protocol", "jarn"], "did you mean 'yarn'"),
        (["--lengths", "128", "--evaluator", "base"], "give --key_tokens true with it"),
        (["--lengths", "128", "--image_dir", "x"], "pictures are for image models"),
        (["--lengths", "128", "--beta_fast", "3", "--scheme", "linear"], "beta_fast=3.0 is a parameter of none of"),
    ],
)
def test_script_mistakes_stop_it_with_one_line(arguments, says, checkpoint, texts, tmp_path, capsys, monkeypatch):
    import evaluate

    where = ["--eval_dir", str(texts), "--output_dir", str(tmp_path / "out"), "--device", "cpu", "--factor", "2"]
    given = ["--model", str(checkpoint), "--scheme", "ntk", *where, *map(str, arguments)]
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *given])
    with pytest.raises(SystemExit) as stopped:
        evaluate.run(evaluate.main)
    assert stopped.value.code == 2
    assert says in capsys.readouterr().err.strip().splitlines()[-1]


# --- lm-eval


@pytest.fixture
def harness():
    return pytest.importorskip("lm_eval")


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> Path:
    """A folder with a tokenizer of the usual kind: RULER sizes two of its tasks by steps of several words."""
    folder = tmp_path_factory.mktemp("words")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=8000, special_tokens=["<eos>"], initial_alphabet=letters)
    backend.train(sorted(map(str, Path(sysconfig.get_path("stdlib")).glob("*.py"))), trainer)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>").save_pretrained(folder)
    return folder


@pytest.mark.long  # lm-eval makes 500 prompts, however few are asked
@pytest.mark.parametrize(
    "task", ["niah_single_1", "niah_multikey_2", "niah_multikey_3", "ruler_vt", "ruler_cwe", "ruler_fwe"]
)
def test_ruler_runs_on_the_model_in_memory(task, harness, words: Path):
    pytest.importorskip("wonderwords")
    from hf_posswap.evaluation.tasks import Tasks

    tokenizer = AutoTokenizer.from_pretrained(words)
    settings = {"tokenizer": tokenizer, "tokenizer_name": str(words), "lengths": [4096], "limit": 2}
    model = patch_model(FAMILIES["llama"].build(vocab_size=len(tokenizer)), "yarn", factor=128)
    (point,) = Tasks(names=[task], max_length=4096, **settings).measure(model, name="yarn")["points"]
    assert (point["task"], point["length"], point["metric"], point["requests"]) == (task, 4096, "accuracy", 2)
    assert 0 <= point["value"] <= 1
    assert 2048 < point["shortest_request"] <= point["longest_request"] <= 4096
    cut = point["longest_request"] - 1
    with pytest.raises(PosSwapError, match=rf"a request takes \d+ tokens with its answer, and max_length={cut} would"):
        Tasks(names=[task], max_length=cut, **settings).measure(model, name="yarn")


def test_a_task_that_is_unknown_or_none_is_refused(harness, checkpoint: Path):
    from hf_posswap.evaluation.tasks import Tasks

    settings = {"tokenizer": demo.byte_tokenizer(), "tokenizer_name": str(checkpoint), "max_length": 512}
    with pytest.raises(PosSwapError, match="lm-eval has no 'niah_singel_1'; did you mean 'niah_single_1'"):
        Tasks(names=["niah_singel_1"], **settings)
    with pytest.raises(PosSwapError, match=r"tasks=\[\] asks for nothing"):
        Tasks(names=[], **settings)


# --- the committed run

COMMITTED = ROOT / "docs" / "evaluation"


def test_the_example_shows_what_the_literature_reports():
    made = json.loads((COMMITTED / "evaluation.json").read_text())
    at = {one["name"]: {p["length"]: p["perplexity"] for p in one["points"]} for one in made["series"]}
    short, trained, long = made["original_length"], at["base"][made["original_length"]], max(at["base"])
    schemes = [f"{name}(factor=8)" for name in ("yarn", "linear", "ntk", "dynamic")]
    assert at["base"][long] > 3 * trained  # plain extrapolation falls apart
    for name in ("yarn(factor=8)", "dynamic(factor=8)"):
        assert at[name][long] < 0.5 * at["base"][long]
    assert at["ntk(factor=8)"][2 * short] < 0.7 * at["base"][2 * short]
    assert at["linear(factor=8)"][short] == max(at[name][short] for name in schemes)  # linear costs at short lengths
    tuned = [name for name in at if ": " in name]
    assert len(tuned) == 3
    for name in tuned:
        assert at[name][long] < at[name.partition(": ")[2]][long]
        assert at[name][long] < 0.5 * at["base"][long]


def test_the_example_s_page_is_made_from_its_numbers():
    from hf_posswap.evaluation.pages import page

    made = json.loads((COMMITTED / "evaluation.json").read_text())
    pictures = {made["measure"]: COMMITTED / "evaluation.png"}
    pictures |= {name: COMMITTED / f"evaluation_{name}.png" for name in made["measures"] if name != "tasks"}
    assert page(made, pictures) == (COMMITTED / "evaluation.md").read_text()
