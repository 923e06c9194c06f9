"""Law 7 and law 11: a saved model, loaded in a fresh process, gives the same logits to the bit; every table is rebuilt
right by every way of loading. Checkpoints load where this package cannot be imported: native ones as they are,
portable ones through the code that travels with them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from hf_posswap import PosSwapError, describe, from_pretrained, patch_model, probe, unpatch_model
from hf_posswap.patching import record_of
from hf_posswap.saving import unswapped

from .conftest import by_id, first_of_each
from .families import FAMILIES, tokens
from .rows import ROTARY_ROWS, ROWS, SILENT_ROWS, Row, logits, moved

FRESH = Path(__file__).with_name("reload.py")
of_rows = first_of_each("scheme", "family")  # a row is saved once and loaded five times


def folder_name(row: Row) -> str:
    return f"{ROWS.index(row):03d}-{row.scheme}-{row.family}"


@pytest.fixture(scope="module")
def rows(request) -> list[Row]:
    """Those that the tests of this file chosen for this run ask for."""
    calls = [getattr(item, "callspec", None) for item in request.session.items if item.module is request.module]
    chosen = {call.params["row"].id for call in calls if call is not None and "row" in call.params}
    return [row for row in ROWS if row.id in chosen]


@pytest.fixture(scope="module")
def saved(tmp_path_factory, rows: list[Row]) -> Path:
    """Rows patched, what they added moved as by training, saved with their logits, then loaded by fresh processes."""
    root = tmp_path_factory.mktemp("checkpoints")
    shutil.copy(Path(__file__).with_name("detectron.py"), root / "before.py")
    for row in rows:
        model, inputs = moved(row.patched()), row.inputs()
        folder = root / folder_name(row)
        model.save_pretrained(folder)
        save_file(inputs, folder / "inputs.st")
        save_file({"logits": logits(model, **inputs).contiguous()}, folder / "memory.st")
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path_factory.mktemp("modules"))}
    for mode in ("stock", "forced", "travel", "package", "together"):
        subprocess.run([sys.executable, FRESH, mode, root], check=True, env=environment)
    return root


def frozen(model: torch.nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if not parameter.requires_grad}


def read(folder: Path, mode: str) -> torch.Tensor:
    error = folder / f"{mode}.error"
    assert not error.exists(), error.read_text()
    return load_file(folder / f"{mode}.st")["logits"]


@of_rows([row for row in ROWS if row.native])
def test_stock_transformers_gives_the_same_logits(row: Row, saved: Path):
    folder = saved / folder_name(row)
    assert torch.equal(read(folder, "stock"), read(folder, "memory"))


@of_rows([row for row in ROWS if not row.native])
def test_stock_transformers_never_loads_a_portable_checkpoint_wrongly(row: Row, saved: Path):
    folder = saved / folder_name(row)
    for mode in ("stock", "forced"):
        assert "load it with hf_posswap.from_pretrained" in (folder / f"{mode}.error").read_text()


@of_rows([row for row in ROWS if not row.native])
def test_code_in_a_portable_checkpoint_gives_the_same_logits_and_is_saved_again(row: Row, saved: Path):
    folder = saved / folder_name(row)
    assert torch.equal(read(folder, "travel"), read(folder, "memory"))
    for file in (folder / "again").iterdir():
        assert file.read_bytes() == (folder / file.name).read_bytes(), file.name


@of_rows([row for row in ROWS if not row.native])
@pytest.mark.parametrize("mode", ["travel", "package"])
def test_many_that_travelled_and_the_package_live_in_one_process(row: Row, mode: str, saved: Path):
    folder = saved / folder_name(row)
    assert not (folder / "together.error").exists(), (folder / "together.error").read_text()
    assert torch.equal(read(folder, f"together-{mode}"), read(folder, "memory"))


def test_code_that_travels_mentions_nothing_that_it_lacks(saved: Path, rows: list[Row]):
    files = list(saved.glob("*/modeling_posswap.py"))
    assert len(files) == sum(not row.native for row in rows)
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select", "F,E9", *files]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@of_rows(ROWS)
def test_package_gives_the_same_logits(row: Row, saved: Path):
    folder = saved / folder_name(row)
    assert torch.equal(read(folder, "package"), read(folder, "memory"))


@of_rows(ROWS)
def test_saving_again_gives_the_same_files(row: Row, saved: Path, tmp_path: Path):
    folder = saved / folder_name(row)
    from_pretrained(folder).save_pretrained(tmp_path)
    for file in tmp_path.iterdir():
        assert file.read_bytes() == (folder / file.name).read_bytes(), file.name


@of_rows(ROWS)
def test_reloaded_is_described_probed_and_undone_as_in_memory(row: Row, saved: Path):
    model, inputs = from_pretrained(saved / folder_name(row)), row.inputs()
    in_memory = moved(row.patched())
    assert str(describe(model)) == str(describe(in_memory))
    assert probe(model).faults == ()
    own = frozen(row.source())  # RoFormer's sinusoids, which transformers loads as trainable
    assert frozen(model) - own == frozen(in_memory) - own
    if not row.undoable:
        with pytest.raises(PosSwapError, match="no longer holds the table"):
            unpatch_model(model)
        assert torch.equal(logits(model, **inputs), logits(in_memory, **inputs))
        return
    unpatch_model(model)
    inputs = row.plain_inputs()
    assert torch.equal(logits(model, **inputs), logits(row.source(), **inputs))


WAYS = {
    "dtype": {"dtype": torch.bfloat16},
    "device_map": {"device_map": "cpu"},
    "auto": {"device_map": "auto"},
}


@of_rows([row for row in ROWS if row.scheme in ("yarn", "dynamic", "nope", "sinusoidal", "learned")])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_way_of_loading_rebuilds_every_buffer(row: Row, way: str, saved: Path):
    plain = from_pretrained(saved / folder_name(row))
    other = from_pretrained(saved / folder_name(row), **WAYS[way])
    expected = dict(plain.named_buffers())
    found = dict(other.named_buffers())
    assert found.keys() == expected.keys()
    for name, buffer in found.items():
        if (
            ("inv_freq" in name and "bbox" not in name) or not buffer.is_floating_point()
        ):  # others (Gemma's embed_scale, the waves of Bros' boxes) follow the dtype asked for
            assert buffer.dtype == expected[name].dtype
            assert torch.equal(buffer, expected[name]), name


@by_id(ROTARY_ROWS + [row for row in SILENT_ROWS if row in ROWS[: len(ROTARY_ROWS) + 5]])
def test_meta_model_is_materialised_right(row: Row):
    """Patched on the meta device, given memory, initialised by transformers: every frequency as if built plainly."""
    with torch.device("meta"):
        empty = row.patched()
    empty.to_empty(device="cpu")
    for module in empty.modules():
        module._is_hf_initialized = False
    for tensor in [*empty.parameters(), *empty.buffers()]:
        tensor._is_hf_initialized = False
    empty.initialize_weights()
    expected = dict(row.patched().named_buffers())
    for name, buffer in empty.named_buffers():
        if "inv_freq" in name:
            assert torch.equal(buffer, expected[name]), name


@pytest.mark.parametrize(("scheme", "params"), [("yarn", {"factor": 4}), ("sinusoidal", {"combine": "concat"})])
@pytest.mark.filterwarnings("ignore::hf_posswap.RecalibrationWarning")
def test_sharded_checkpoint(scheme, params, tmp_path: Path):
    model, ids = moved(patch_model(FAMILIES["llama"].build(), scheme, **params)), tokens(2, 40)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert torch.equal(logits(from_pretrained(tmp_path), input_ids=ids), logits(model, input_ids=ids))


def test_unpatched_checkpoint_loads_as_it_is(tmp_path: Path):
    model, ids = FAMILIES["bert"].build(), tokens(2, 20)
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert torch.equal(logits(loaded, input_ids=ids), logits(model, input_ids=ids))


def test_stock_model_with_a_record_can_be_patched_and_undone(tmp_path: Path):
    """A user who loads with transformers itself and then calls us: the record in the config is taken over."""
    source, ids = FAMILIES["llama"].build(), tokens(2, 40)
    before = logits(source, input_ids=ids)
    patch_model(source, "yarn", factor=4).save_pretrained(tmp_path)
    loaded = type(source).from_pretrained(tmp_path)
    patch_model(loaded, "linear", factor=2)
    expected = logits(patch_model(FAMILIES["llama"].build(), "linear", factor=2), input_ids=ids)
    assert torch.equal(logits(loaded, input_ids=ids), expected)
    assert torch.equal(logits(unpatch_model(loaded), input_ids=ids), before)


RECORD_FAULTS = {
    "unknown key": lambda r: r.update(extra=1),
    "missing key": lambda r: r.pop("storage"),
    "from the future": lambda r: r.update(version=99),
    "unknown scheme": lambda r: r.update(scheme="yarm"),
    "unknown parameter": lambda r: r["params"].update(faktor=4),
    "wrong type": lambda r: r.update(length="long"),
    "not a record": lambda r: r.clear(),
    "unknown storage": lambda r: r.update(storage="elsewhere"),
}


@pytest.mark.parametrize("fault", RECORD_FAULTS)
def test_broken_record_is_refused(fault: str, tmp_path: Path):
    patch_model(FAMILIES["llama"].build(), "yarn", factor=4).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    RECORD_FAULTS[fault](config["posswap"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(PosSwapError):
        from_pretrained(tmp_path)


def test_record_from_the_future_says_what_to_install(tmp_path: Path):
    patch_model(FAMILIES["llama"].build(), "yarn", factor=4).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["posswap"]["version"] = 3
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(PosSwapError, match=r"version=3 .* install 'hf_posswap>=0\.3'"):
        from_pretrained(tmp_path)


def test_loader_runs_no_code_of_a_checkpoint(tmp_path: Path):
    patch_model(FAMILIES["llama"].build(), "yarn", factor=4).save_pretrained(tmp_path)
    with pytest.raises(PosSwapError, match="never runs code"):
        from_pretrained(tmp_path, trust_remote_code=True)
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["os.system"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(PosSwapError, match="architectures"):
        from_pretrained(tmp_path)


def test_loader_returns_a_model_alone(tmp_path: Path):
    patch_model(FAMILIES["llama"].build(), "yarn", factor=4).save_pretrained(tmp_path)
    with pytest.raises(PosSwapError, match="output_loading_info"):
        from_pretrained(tmp_path, output_loading_info=True)


class MyLlama(LlamaForCausalLM):
    """A class of a user's own: transformers has no code of it to send along."""


@pytest.mark.parametrize(
    ("own", "kwargs", "reason"),
    [(True, {}, "MyLlama.*cannot travel"), (False, {"push_to_hub": True}, "push_to_hub=True")],
    ids=["class of one's own", "push"],
)
def test_save_that_cannot_be_complete_writes_nothing(own: bool, kwargs: dict, reason: str, tmp_path: Path):
    model = FAMILIES["llama"].build()
    if own:
        model = MyLlama(model.config)
    patch_model(model, "sinusoidal")
    with pytest.raises(PosSwapError, match=reason):
        model.save_pretrained(tmp_path / "out", **kwargs)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("module", "kept"), [("modeling_posswap", False), ("modeling_own", True)])
@pytest.mark.parametrize("prefix", ["", "me/model--"])
def test_code_of_others_stays_named_in_the_config(module: str, kept: bool, prefix: str):
    """transformers puts the repository before every name of `auto_map` that it read from the hub."""
    model = patch_model(FAMILIES["llama"].build(), "sinusoidal")
    data = model.config.to_dict() | {"auto_map": {"AutoModelForCausalLM": f"{prefix}{module}.Model"}}
    assert ("auto_map" in unswapped(data, record_of(model))) == kept


CONFIG_TABLE = [
    # scheme, rope_type, theta, max_position_embeddings, keys beside; for a trained length of 32, factor 4, d = 16
    ("ntk", "default", 10000.0 * 4 ** (16 / 14), 128, {}),
    ("linear", "linear", 10000.0, 32, {"factor": 4}),
    ("dynamic", "dynamic", 10000.0, 32, {"factor": 4}),
    ("yarn", "yarn", 10000.0, 128, {"factor": 4, "original_max_position_embeddings": 32}),
    (
        "ntk-by-parts",
        "yarn",
        10000.0,
        128,
        {"factor": 4, "original_max_position_embeddings": 32, "attention_factor": 1.0},
    ),
    (
        "llama3",
        "llama3",
        10000.0,
        128,
        {"factor": 4, "original_max_position_embeddings": 32, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ),
]


@pytest.mark.parametrize(
    ("scheme", "rope_type", "theta", "length", "beside"), CONFIG_TABLE, ids=[r[0] for r in CONFIG_TABLE]
)
def test_what_is_written_to_the_config(scheme, rope_type, theta, length, beside, tmp_path):
    patch_model(FAMILIES["llama"].build(), scheme, factor=4).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rope_parameters"] == {"rope_type": rope_type, "rope_theta": pytest.approx(theta)} | beside
    assert config["max_position_embeddings"] == length
    assert isinstance(config["max_position_embeddings"], int)
    assert config["posswap"]["scheme"] == scheme
