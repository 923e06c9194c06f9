"""The studies of docs/, small: what they read, what they refuse, and that their tables are what was measured."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import demo
import document_study
import fixed_or_learned
import image_study
import longrope_study
import numpy as np
import pytest
import recovery_study
import torch
from PIL import Image

from hf_posswap import PosSwapError, describe, from_pretrained
from hf_posswap.evaluation import recovery

from .small import ROOT, call


def test_the_demos_text_does_not_depend_on_the_process():
    code = "import demo; print(*demo.split_by_file(demo.DemoArguments())[0])"
    environments = [{"PYTHONHASHSEED": seed, "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}"} for seed in "12"]
    first, second = (
        subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
        for env in environments
    )
    assert first == second
    assert len(first.split()) > 50


def test_a_base_of_other_text_is_refused(tmp_path: Path):
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "train_log.json").write_text(json.dumps({"arguments": {"train_file": ["x.py"], "max_steps": 900}}))
    with pytest.raises(PosSwapError, match="holds a model of another text or length of training"):
        demo.Demo(demo.DemoArguments(output_dir=str(tmp_path))).base()


@pytest.mark.parametrize(("found", "says"), [(7.5, "factors beat YaRN"), (8.5, "factors did not beat YaRN")])
def test_the_verdict_follows_the_numbers(found, says):
    series = [
        {"name": name, "points": [{"length": 256, "perplexity": 1.0}, {"length": 2048, "perplexity": value}]}
        for name, value in (("yarn", 8.0), ("longrope", found))
    ]
    assert says in longrope_study.compare(series, 2048)
    assert f"{found:.3f} against 8.000" in longrope_study.compare(series, 2048)


def test_the_documented_search_is_what_its_numbers_say():
    """docs/longrope: the verdict is of its own series, and the factors are a longrope's."""
    study = json.loads((ROOT / "docs" / "longrope" / "results.json").read_text())
    page = (ROOT / "docs" / "longrope" / "table.md").read_text()
    assert study["verdict"] == longrope_study.compare(study["series"], 8 * study["original_length"])
    assert study["verdict"] in page
    assert study["search"]["loss"] <= min(study["search"]["starts"].values())
    assert study["search"]["factors"] == sorted(study["search"]["factors"])


def test_fixed_or_learned_trains_every_scheme_and_its_table_is_what_it_measured(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(fixed_or_learned, "HELD_OUT_STEPS", 2)
    arguments = {"output_dir": tmp_path, "length": 32, "steps": 3, "seeds": 1, "width": 32, "layers": 1}
    flags = [str(part) for name, value in arguments.items() for part in (f"--{name}", value)]
    monkeypatch.setattr(sys, "argv", ["fixed_or_learned.py", *flags])
    fixed_or_learned.main()
    results, page = json.loads((tmp_path / "results.json").read_text()), (tmp_path / "table.md").read_text()
    assert [one["scheme"] for one in results["models"]] == list(fixed_or_learned.SCHEMES)
    for one in results["models"]:
        row = next(line for line in page.splitlines() if line.startswith(f"| {one['scheme']} |"))
        for loss in one["loss"].values():
            assert 2.0 < loss < 6.5
            assert f"{loss:.3f} [" in row
    assert len({one["loss"]["32"] for one in results["models"]}) == len(fixed_or_learned.SCHEMES)


def test_dilution_of_a_checkpoint(checkpoint: Path, tmp_path: Path):
    (tmp_path / "text.txt").write_text("a few words of no importance, " * 20)
    flags = ["--model", checkpoint, "--eval_file", tmp_path / "text.txt", "--output_dir", tmp_path, "--factor"]
    done = call("dilution.py", *flags, 2)
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads((tmp_path / "results.json").read_text())
    assert [one["name"] for one in results["series"]] == ["base", "logn", "ntk-by-parts", "yarn"]
    assert [point["length"] for point in results["series"][0]["points"]][-1] == 2 * results["original_length"] == 128
    assert (tmp_path / "dilution.png").stat().st_size > 10_000
    refused = call("dilution.py", *flags, 64)
    assert refused.returncode == 2
    assert "no text has the 4096 tokens" in refused.stderr


CURVE = [(0, 3.0), (100, 2.0), (200, 1.0)]


@pytest.mark.parametrize(("loss", "tokens"), [(3.5, 0), (3.0, 0), (2.5, 50), (2.0, 100), (1.25, 175), (0.9, None)])
def test_tokens_to_a_loss_are_read_off_the_curve(loss, tokens):
    assert recovery.tokens_to_reach(CURVE, loss) == tokens


def test_table_of_recovery_pairs_the_seeds():
    """Each fitted run is held against the cold one of its own seed; a recipe that was not run has no row."""

    def cell(recipe, seed, curve):
        return {"model": "m", "scheme": "t5", "recipe": recipe, "seed": seed, "curve": curve, "lengths": LENGTHS}

    LENGTHS = {"8": 1.0, "16": 1.5, "32": 1.7}
    cells = [
        cell("cold", 0, [(0, 4.0), (100, 2.0)]),
        cell("cold", 1, [(0, 4.0), (100, 3.0)]),
        cell("fit", 0, [(0, 3.0), (100, 1.0)]),
        cell("fit", 1, [(0, 4.0), (100, 1.0)]),
        cell("scratch", 0, [(0, 5.0), (900, 0.5)]),
    ]
    _, _, cold, fit = recovery.table(cells, "m").splitlines()
    assert cold == "| t5 | cold | 4.000 [4.000, 4.000] | 2.500 [2.000, 3.000] | 100 % [100 %, 100 %] " + (
        "| 1.500 [1.500, 1.500] | 1.700 [1.700, 1.700] | 0.500 |"
    )
    assert "| 3.500 [3.000, 4.000] | 1.000 [1.000, 1.000] | 42 % [33 %, 50 %] |" in fit
    assert recovery.goals(cells, "m").endswith("in every seed: t5 missed (50%).")
    tried = [*cells, cell("fit", 0, [(0, 3.0), (400, 1.02)]) | {"tried": "more"}]
    assert recovery.table(tried, "m") == recovery.table(cells, "m")
    *_, given, more = recovery.tried(tried, ("m", "t5", "fit"), 1.0).splitlines()
    assert (given, more) == ("| as in the table | 100 | 1.000 | 0.0% |", "| more | 400 | 1.020 | 2.0% |")
    assert recovery.untaught(cells, "m", 4.0)
    assert not recovery.untaught(cells, "m", 2.1)
    slow = [cell("cold", 0, [(0, 4.0), (100, 2.0)]), cell("fit", 0, [(0, 3.0), (100, 2.5)])]
    assert recovery.goals(slow, "m").endswith("t5 missed (never there).")
    assert "| not reached |" in recovery.table(slow, "m").splitlines()[-1]


def test_the_recovery_study_goes_on_where_it_stopped(tmp_path: Path, monkeypatch):
    """A BERT trained for a moment: a fitted cell, then, of a second run, the cold one beside it."""
    monkeypatch.setattr(recovery_study.BertSubject, "steps", 18)
    monkeypatch.setattr(recovery_study, "FIT_TOKENS", 1024)
    monkeypatch.setattr(recovery_study, "KEPT", recovery_study.Cell("bert", "t5", "fit", 0))
    folders = ["--output_dir", str(tmp_path / "docs"), "--work_dir", str(tmp_path / "work")]
    flags = ["--share", "0.5", "--seeds", "1", "--only", "bert-t5-cold", "bert-t5-fit-0", "--cells", "1"]
    for done in (1, 2):
        monkeypatch.setattr(sys, "argv", ["recovery_study.py", *folders, *flags])
        recovery_study.main()
        results = json.loads((tmp_path / "docs" / "results.json").read_text())
        assert len(results["cells"]) == done
    cold, fit = results["cells"]
    assert [one["recipe"] for one in (cold, fit)] == ["cold", "fit"]
    assert len(cold["curve"]) == recovery_study.POINTS + 1
    assert cold["curve"][-1][0] == 9 * 64 * 16
    assert fit["fit"]["tokens"] == 1024
    assert cold["fit"] is None
    assert f"| t5 | cold | {cold['curve'][0][1]:.3f} |" in (tmp_path / "docs" / "table.md").read_text()
    assert (tmp_path / "docs" / "recovery.png").stat().st_size > 10_000
    kept = tmp_path / "work" / "models" / "demo-bert-t5"
    assert describe(from_pretrained(kept)).fit.tokens == 1024
    assert f"| t5 | cold | {cold['curve'][0][1]:.3f} |" in (kept / "README.md").read_text().split("## Recovery")[1]
    assert (kept / "recovery.png").is_file()
    assert not [*kept.glob("checkpoint-*")]


# --- pages of documents


@pytest.mark.parametrize("lines", [*document_study.SHORT, *document_study.LONG])
@pytest.mark.parametrize("seed", range(0, 12, 3))
def test_a_words_label_and_an_answer_are_told_by_the_layout_alone(lines: int, seed: int):
    page = document_study.make_page(seed, lines)
    words = [document_study.VOCABULARY[i] for i in page.ids]
    columns, said = len(document_study.KINDS), [document_study.KINDS[kind] for kind in page.kinds]
    heads = {box[0]: word for word, box in zip(words[:columns], page.boxes, strict=False)}
    assert sorted(heads.values()) == sorted(document_study.KINDS)
    assert said == [heads[x0] for x0, *_ in page.boxes]
    assert {*words[columns:-columns]} <= {*document_study.CELLS}
    assert {*words[-columns:]} <= {*document_study.SUMS}
    assert page.boxes == sorted(page.boxes, key=lambda box: (box[1], box[0]))
    assert all(0 <= x0 < x1 <= 1000 and 0 <= y0 < y1 <= 1000 for x0, y0, x1, y1 in page.boxes)
    asking = page.with_question()
    assert document_study.VOCABULARY[asking.ids[1]] == heads[asking.boxes[asking.answer][0]]
    assert asking.ids[asking.answer] in asking.ids[-columns:]
    long = lines in document_study.LONG
    assert (len(asking.ids) > document_study.TRAINED) == (asking.answer >= document_study.TRAINED) == long
    assert len(asking.ids) <= document_study.EXTENDED


def test_windows_read_every_word_and_begin_with_the_question():
    page = document_study.make_page(0, 120).with_question()
    cut = document_study.windows(page, 512, 2)
    assert all(window[:2] == [0, 1] and len(window) <= 512 for window in cut)
    assert sorted({place for window in cut for place in window}) == list(range(len(page.ids)))


def test_the_documented_pages_are_what_was_measured():
    folder = ROOT / "docs" / "documents"
    results = json.loads((folder / "results.json").read_text())
    assert (folder / "table.md").read_text() == document_study.table(results)
    assert min(*results["trained"]["labels"].values(), *results["trained"]["answers"].values()) > 0.95
    found = {(cell["task"], cell["route"]): cell for cell in results["cells"]}
    for name in document_study.ROUTES:
        assert found["labels", name]["tuned"]["beyond"] > 0.9 > found["labels", "windows of 512"]["untuned"]["beyond"]
    for task, where in (("labels", "beyond"), ("answers", "answers")):
        assert found[task, document_study.DRAWN]["untuned"][where] > 0.95


def test_a_small_document_study_goes_on_where_it_was(tmp_path: Path):
    given = document_study.StudyArguments(output_dir="", work_dir=str(tmp_path), steps=1, tune_steps=1, pages=1)
    study = document_study.Study(given)
    cut, swapped = study.cell("answers", "cut at 512"), study.cell("labels", "alibi")
    again = document_study.Study(given)
    assert [again.cell("answers", "cut at 512"), again.cell("labels", "alibi")] == [cut, swapped]
    assert cut["untuned"] == {"answers": 0}
    assert swapped["untuned"].keys() == swapped["tuned"].keys() == {"to 512", "beyond"}


@pytest.mark.parametrize("scale", [1, 3])
def test_the_class_of_a_drawn_picture_is_where_the_blue_disc_stands(scale: int, tmp_path: Path):
    image_study.write_pictures(tmp_path / "pictures", 16, scale, (0, 0))
    for file in (tmp_path / "pictures").rglob("*.png"):
        picture = np.asarray(Image.open(file)).astype(int)
        assert picture.shape == (24 * scale, 24 * scale, 3)
        red, blue = (np.argwhere(picture[..., c] - picture[..., 2 - c] == 255).mean(0) for c in (0, 2))
        down, right = blue - red
        sides = {"above": -down, "below": down, "left": -right, "right": right}
        assert max(sides, key=sides.get) == file.parent.name


def test_the_documented_resolutions_are_what_was_measured():
    folder = ROOT / "docs" / "images"
    results = json.loads((folder / "results.json").read_text())
    assert (folder / "table.md").read_text() == image_study.table(results)
    assert results["base"]["untuned"] > 0.95
    for cell in results["cells"]:
        if cell["scheme"] == image_study.UNHARMED:
            assert cell["tuned"] >= cell["untuned"] > 0.95
    assert {cell["scale"] for cell in results["cells"]} == {2, 3}


def test_a_small_image_study_goes_on_where_it_was(tmp_path: Path):
    sizes = {"train_pictures": 64, "tune_pictures": 16, "test_pictures": 8, "steps": 1, "layers": 1, "width": 32}
    given = image_study.StudyArguments(output_dir="", work_dir=str(tmp_path), scales=[2], schemes=["nope"], **sizes)
    study = image_study.Study(given)
    results = {"arguments": asdict(given), "base": study.base_cell(), "rate": study.rate()}
    cell = study.cell("nope", 2)
    assert image_study.Study(given).cell("nope", 2) == cell
    assert image_study.Study(given).rate() == results["rate"]
    shares = [f"{100 * cell[when]:.1f} %" for when in ("untuned", "tuned")]
    assert f"| nope | {' | '.join(shares)} |" in image_study.table(results | {"cells": [cell]})


@pytest.mark.parametrize(
    ("tuned", "chosen"),
    [
        ({1e-4: 0.9, 3e-4: 0.9, 1e-3: 0.8}, 3e-4),
        ({1e-4: 0.8, 3e-4: 0.9, 1e-3: 0.95}, 1e-3),
        ({1e-4: 0.8, 3e-4: 0.7, 1e-3: 0.1}, 1e-4),
    ],
)
def test_the_rate_is_the_greatest_that_does_no_harm(tuned: dict, chosen: float):
    assert image_study.harmless(0.9, tuned) == chosen


def test_a_mosaic_shows_each_patch_in_its_place():
    """Of vectors at right angles: a patch is like itself alone."""
    shown = image_study.mosaic(torch.eye(12 * 12), 12)
    tiles = shown.reshape(6, 13, 6, 13).transpose(1, 2)[:, :, :12, :12].flatten(0, 1).flatten(1)
    assert tiles.argmax(1).tolist() == [12 * y + x for y in range(1, 12, 2) for x in range(1, 12, 2)]
    assert (tiles.sum(1) == 1).all()
