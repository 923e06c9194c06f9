"""The coverage table: a fair sample of it is made again here, all of it by `make coverage`."""

from __future__ import annotations

import importlib.util
import json
import sys
import warnings

import pytest
import torch
import transformers

from hf_posswap import PosSwapError, describe, patch_model, unpatch_model

from . import coverage, zoo

REPORT = json.loads(coverage.COMMITTED.read_text(encoding="utf-8"))
EVERY = 29  # types of which one is in the sample: a prime, so that no order of names is favoured
SAMPLE = coverage.every()[::EVERY]
GOALS = {"causal-lm": 150, "masked-lm": 45, "seq2seq-lm": 20, "document": 5, "image": 24}
PLANTED = "planted"


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    """The records of the sample, checkpoints reloaded in fresh processes."""
    records = coverage.batch(SAMPLE, tmp_path_factory.mktemp("coverage"))
    return {f"{record['task']}/{record['type']}": record for record in records}


@pytest.mark.parametrize("name", [f"{task}/{model_type}" for task, model_type in SAMPLE])
def test_every_scheme_works_or_is_refused(name: str, found: dict):
    assert coverage.verdict(found[name]) != coverage.WRONG, found[name]["cells"]


def test_nothing_that_worked_is_lost(found: dict):
    if transformers.__version__ != REPORT["transformers"]:
        pytest.skip(f"the table is of transformers {REPORT['transformers']}")
    assert coverage.lost(REPORT["types"], found) == []


def test_a_lost_type_is_named():
    name = next(name for name, record in REPORT["types"].items() if coverage.verdict(record) == coverage.WORKS)
    record = REPORT["types"][name]
    refused = record | {"cells": record["cells"] | {"nope": "refused: for a test"}}
    assert coverage.lost({name: record}, {name: refused}) == [f"{name} nope: refused: for a test"]
    assert coverage.lost({name: record}, {name: {"not built": "for a test"}})
    assert coverage.lost({name: record}, {}) == []


def test_tasks_that_were_not_run_stay_as_they_were():
    committed, one = REPORT | {"transformers": transformers.__version__}, {"not built": "for a test"}
    found = coverage.beside(committed, {"image/vit": one}, ["image"])
    assert found.pop("image/vit") == one
    names = {f"{task}/{model_type}" for task, model_type in coverage.every() if task != "image"}
    assert found.keys() == names & committed["types"].keys()
    assert all(record == committed["types"][name] for name, record in found.items())
    with pytest.raises(ValueError, match="run all tasks"):
        coverage.beside(committed | {"transformers": "0"}, {}, ["image"])


def test_the_table_is_whole_and_has_no_third_outcome():
    assert not [name for name, record in REPORT["types"].items() if coverage.verdict(record) == coverage.WRONG]
    for task, count in REPORT["summary"].items():
        assert sum(count.values()) == sum(name.startswith(f"{task}/") for name in REPORT["types"])
        assert count[coverage.WORKS] >= GOALS[task]
    if transformers.__version__ == REPORT["transformers"]:
        assert list(REPORT["types"]) == [f"{task}/{model_type}" for task, model_type in coverage.every()]


def test_the_page_is_of_the_table():
    assert coverage.COMMITTED.with_suffix(".md").read_text(encoding="utf-8") == coverage.page(REPORT)


@pytest.mark.parametrize("model_type", ["mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"])
def test_recurrent_models_are_refused_by_name(model_type: str):
    model = zoo.build(model_type, "causal-lm")
    before = zoo.forward(model)
    with pytest.raises(PosSwapError, match=r"no positions to swap: it knows order by recurrence"):
        patch_model(model, "nope")
    assert torch.equal(zoo.forward(model), before)


# --- attention of declared families, which the interface computes once it is patched

BUCKETED = {"position_buckets": 8, "norm_rel_ebd": "layer_norm"}
RELATIVE = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
OWN = [
    ("big_bird", {}),
    ("bigbird_pegasus", {}),
    ("convbert", {}),
    ("deberta", {}),
    ("deberta", RELATIVE),
    ("deberta-v2", {}),
    ("deberta-v2", RELATIVE | BUCKETED),
    ("deberta-v2", RELATIVE | {"share_att_key": True}),
    ("flaubert", {}),
    ("longformer", {"attention_window": [4, 8]}),
    ("mpnet", {}),
    ("nystromformer", {}),
    ("rembert", {}),
    ("squeezebert", {}),
    ("tapas", {}),
    ("xlm", {}),
    ("xlm", {"causal": True}),
]
TURNING = [("roformer", "masked-lm"), ("gptj", "causal-lm"), ("codegen", "causal-lm")]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("model_type", "settings"), OWN)
def test_own_attention_computes_as_before_on_its_new_way(model_type: str, settings: dict):
    """With a bias of zeros it is the model that transformers computes without positions."""
    task = "seq2seq-lm" if model_type == "bigbird_pegasus" else "masked-lm"
    model = zoo.build(model_type, task, **settings)
    before, silent = zoo.forward(model), zoo.forward(patch_model(zoo.build(model_type, task, **settings), "nope"))
    patch_model(model, "t5")
    for name, parameter in model.named_parameters():
        if "posswap" in name:
            parameter.data.zero_()
    assert coverage.apart(zoo.forward(model), silent) < 1e-5 < 1e-3 < coverage.apart(before, silent)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("model_type", "task"), TURNING)
def test_what_turns_by_itself_turns_as_before_on_its_new_way(model_type: str, task: str):
    """Angles a hundred-millionth apart from its own."""
    model = zoo.build(model_type, task)
    before, silent = zoo.forward(model), zoo.forward(patch_model(zoo.build(model_type, task), "nope"))
    patched = patch_model(model, "rope", rope_theta=10000.0001)
    assert coverage.apart(zoo.forward(patched), before) < 1e-5 < 1e-3 < coverage.apart(before, silent)
    with pytest.raises(PosSwapError, match=r"would change nothing"):
        patch_model(model, "rope", rope_theta=10000.0)
    with pytest.raises(PosSwapError, match=r"turns q and k out of reach"):
        patch_model(model, "logn")


def test_what_computes_no_logits_has_no_scheme_inside_attention():
    mixed = {name: record for name, record in REPORT["types"].items() if record.get("mixing")}
    assert {name.partition("/")[2] for name in mixed} == {"fnet", "mra", "yoso"}
    for record in mixed.values():
        assert all(record["cells"][scheme].startswith(coverage.REFUSED) for scheme in coverage.INSIDE)


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("nystromformer", {"num_landmarks": 8}, r"has none: its tokens are compared with averages of them"),
        ("yoso", {}, r"has none: its tokens are compared by hashes"),
        ("big_bird", {"attention_type": "block_sparse"}, r"load it with attention_type='original_full'"),
        ("deberta", {"talking_head": True}, r"has an attention of its own"),
    ],
)
@pytest.mark.parametrize("scheme", ["alibi", "rope"])
def test_attention_out_of_reach_is_refused(model_type: str, settings: dict, reason: str, scheme: str):
    model = zoo.build(model_type, "masked-lm", **settings)
    before = coverage.state(model)
    with pytest.raises(PosSwapError, match=reason):
        patch_model(model, scheme)
    assert coverage.state(model) == before


def test_global_tokens_of_longformer_are_refused_where_a_scheme_would_miss_them():
    model = patch_model(zoo.build("longformer", "masked-lm"), "alibi")
    everywhere = torch.zeros(1, coverage.LENGTH, dtype=torch.long)
    zoo.forward(model)
    with pytest.raises(PosSwapError, match=r"tokens of global attention have no scheme here"):
        model(**zoo.inputs(model, coverage.LENGTH), global_attention_mask=everywhere.index_fill(1, torch.tensor(0), 1))


def test_half_of_an_encoder_decoder_model_is_refused():
    with pytest.raises(PosSwapError, match=r"alibi works inside attention, and that of the encoder of LongT5"):
        patch_model(zoo.build("longt5", "seq2seq-lm"), "alibi")
    patch_model(zoo.build("longt5", "seq2seq-lm"), "alibi", stack="decoder")


def test_what_is_computed_from_the_length_follows_it(tmp_path):
    """MRA counts blocks when it is built, and its kernel, which says nothing here, reads the count."""
    model = patch_model(zoo.build("mra", "masked-lm", max_position_embeddings=128), "learned", factor=2)
    model.save_pretrained(tmp_path)
    blocks = [
        [module.num_block for module in one.modules() if hasattr(module, "num_block")]
        for one in (model, transformers.MraForMaskedLM.from_pretrained(tmp_path), zoo.build("mra", "masked-lm"))
    ]
    assert blocks[0] == blocks[1] != blocks[2]


# --- a type that nobody has seen


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """LLaMA's modeling code under other names: a new type that follows the common structure."""
    source = importlib.util.find_spec("transformers.models.llama.modeling_llama").origin
    spec = importlib.util.spec_from_loader("transformers.models.llama.modeling_planted", loader=None)
    module = importlib.util.module_from_spec(spec)
    module.__file__, module.__package__ = source, "transformers.models.llama"
    sys.modules[spec.name] = module
    with open(source, encoding="utf-8") as file:
        text = file.read()
    for old, new in (("LlamaConfig", "Config_"), ("Llama", "Planted"), ("Config_", "LlamaConfig")):
        text = text.replace(old, new)
    exec(compile(text, source, "exec"), vars(module))

    class PlantedConfig(transformers.LlamaConfig):
        model_type = PLANTED

    for cls in vars(module).values():
        if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel) and cls.__module__ == spec.name:
            cls.config_class = PlantedConfig
    config = zoo.tiny_config(transformers.LlamaConfig).to_dict() | {"model_type": PLANTED}
    torch.manual_seed(0)
    model = module.PlantedForCausalLM(PlantedConfig(**config)).eval()
    model.save_pretrained(tmp_path_factory.mktemp(PLANTED))  # a save writes its class and dtype into the config
    yield model
    del sys.modules[spec.name]


@pytest.mark.parametrize("scheme", [scheme for scheme in coverage.SCHEMES if scheme != "learned"])
def test_a_planted_type_is_patched_with_no_new_code(planted, scheme: str, tmp_path):
    assert type(planted).__name__ == "PlantedForCausalLM"
    logits, before = zoo.forward(planted), coverage.state(planted)
    assert coverage.broken(coverage.measure(planted, coverage.LAWS)) == {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        name, params = coverage.try_patch(planted, coverage.attempts(scheme, planted), logits, before)
    assert (name, scheme in str(describe(planted)) or scheme == "nope") == (scheme, True), params
    patched = zoo.forward(planted)
    assert coverage.apart(patched, logits) > 1e-3
    assert coverage.broken(coverage.measure(planted, coverage.LAWS)) == {}
    if describe(planted).storage == "native":
        planted.save_pretrained(tmp_path)
        again = type(planted).from_pretrained(tmp_path).eval()
        assert torch.equal(zoo.forward(again), patched)
    else:
        with pytest.raises(PosSwapError, match="no model class of transformers"):
            planted.save_pretrained(tmp_path)
    coverage.unchanged(unpatch_model(planted), logits, before, "patch and undo")
