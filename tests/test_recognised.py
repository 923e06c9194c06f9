"""Models found by structure alone: a sample of transformers' causal types here, all of them in the long run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from hf_posswap import PosSwapError, patch_model

from .recognised import outcome
from .zoo import build, model_types

RECORDED = json.loads((Path(__file__).parent.parent / "docs" / "recognised.json").read_text())
SAMPLE = [
    "mistral",
    "qwen2",
    "gemma2",
    "olmo2",
    "phi",
    "starcoder2",
    "glm4",
    "deepseek_v3",
    "gpt_oss",
    "falcon",
    "mixtral",
]


def check(model_type: str) -> None:
    _, yarn = outcome(model_type)
    assert not yarn.startswith("wrong"), yarn
    assert yarn.split(":")[0] == RECORDED["types"][model_type]["yarn"].split(":")[0], yarn


@pytest.mark.parametrize("model_type", SAMPLE)
def test_sample(model_type: str):
    check(model_type)


@pytest.mark.long
@pytest.mark.parametrize("model_type", model_types("causal-lm"))
def test_every_type_is_patched_or_refused(model_type: str):
    if transformers.__version__ != RECORDED["summary"]["transformers"]:
        pytest.skip(f"recorded with transformers {RECORDED['summary']['transformers']}")
    check(model_type)


def test_config_without_a_trained_length_is_refused_also_for_nope():
    model = build("recurrent_gemma", "causal-lm")
    with pytest.raises(PosSwapError, match="does not say the trained length"):
        patch_model(model, "nope")


def test_record_has_no_third_outcome():
    assert not [name for name, one in RECORDED["types"].items() if one["yarn"].startswith("wrong")]
    assert RECORDED["summary"]["recognised"] >= 140
