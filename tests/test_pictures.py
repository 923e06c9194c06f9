"""Classifiers of pictures: trained by the same loop, resumed, and measured by size."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from PIL import Image
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

from hf_posswap import PosSwapError, describe, from_pretrained, patch_model
from hf_posswap.evaluation import images
from hf_posswap.evaluation.compare import Entry, compare_images
from hf_posswap.pictures import Picture
from hf_posswap.scheme import make_scheme
from hf_posswap.training.arguments import FinetuneArguments
from hf_posswap.training.log import TrainingLog
from hf_posswap.training.loop import finetune, load

from .small import ROOT, SCRIPT, call, run

CLASSES = ("left", "right")
SIDE = 16


# before 5.23 the Auto class is there with torchvision alone
auto = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23") and find_spec("torchvision") is None, reason="needs torchvision"
)


def vit(**settings) -> ViTForImageClassification:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"image_size": SIDE, "patch_size": 4, "num_labels": 2}
    sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return ViTForImageClassification(ViTConfig(**sizes | settings))


def processor(side: int = SIDE) -> ViTImageProcessor:
    return ViTImageProcessor(size={"height": side, "width": side})


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Dark pictures with a light half: its side is the class."""
    root, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for label, name in enumerate(CLASSES):
        (root / name).mkdir()
        for number in range(32):
            picture = rng.integers(0, 80, (SIDE, SIDE, 3), dtype=np.uint8)
            picture[:, label * SIDE // 2 : (label + 1) * SIDE // 2] += 120
            Image.fromarray(picture).save(root / name / f"{number}.png")
    return root


def arguments(folder: Path, output: Path, **changes) -> FinetuneArguments:
    settings = {"max_steps": 20, "per_device_train_batch_size": 16, "learning_rate": 3e-3, "warmup_steps": 2}
    settings |= {"save_steps": 0, "output_dir": str(output), "image_dir": str(folder)}
    return FinetuneArguments(**settings | changes)


@auto
def test_a_resized_classifier_learns_and_says_its_classes(folder: Path, tmp_path: Path):
    vit().save_pretrained(tmp_path / "base")
    processor().save_pretrained(tmp_path / "base")
    given = arguments(folder, tmp_path / "out", model=str(tmp_path / "base"))
    model, reader = load(given, make_scheme("learned2d", {}), {"image_size": 24})
    assert dict(reader.size) == {"height": 24, "width": 24}
    log = finetune(model, reader, given)
    assert (log.objective, log.rows, log.block_size, log.chunked_loss) == ("images", 64, 36, False)
    assert log.entries[-1]["loss"] < 0.2 < log.entries[0]["loss"]
    assert log.tokens == 20 * 16 * 36
    assert TrainingLog.read(tmp_path / "out").arguments["image_dir"] == folder.name
    reloaded = from_pretrained(tmp_path / "out")
    assert reloaded.config.id2label == dict(enumerate(CLASSES))
    pictures, labels = images.read_images(str(folder), reader), images.read_labels(str(folder), CLASSES)
    (point,) = images.accuracy(reloaded, pictures, labels, [24], name="vit")["points"]
    assert point == {"length": 24, "accuracy": 1.0, "images": 64}


def test_the_loss_is_the_cross_entropy_of_the_rows_that_the_seed_chose(folder: Path, tmp_path: Path):
    """By another route: PIL, numpy and the order of the files."""
    log = finetune(vit(), processor(), arguments(folder, tmp_path, max_steps=1))
    files = sorted(folder.rglob("*.png"), key=str)
    chosen = np.random.default_rng((42, 0, 0)).permutation(64)[:16]
    pixels = np.stack([np.asarray(Image.open(files[i])) for i in chosen]).transpose(0, 3, 1, 2)
    pixels = torch.tensor((pixels / 255 - 0.5) / 0.5, dtype=torch.float32)
    labels = torch.tensor([CLASSES.index(files[i].parent.name) for i in chosen])
    expected = torch.nn.functional.cross_entropy(vit()(pixels).logits.double(), labels)
    assert log.entries[0]["loss"] == pytest.approx(expected.item(), abs=1e-5)


@auto
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(folder: Path, tmp_path: Path):
    given = {"save_steps": 3, "lr_scheduler_type": "constant_with_warmup"}
    finetune(vit(), processor(), arguments(folder, tmp_path / "parts", max_steps=3, **given))
    resumed, reader = load(arguments(folder, tmp_path / "parts", max_steps=6, **given))
    log = finetune(resumed, reader, arguments(folder, tmp_path / "parts", max_steps=6, **given))
    assert log.steps == 6
    assert [entry["step"] for entry in log.entries] == [1, 2, 3, 4, 5, 6]
    straight = vit()
    finetune(straight, processor(), arguments(folder, tmp_path / "straight", max_steps=6, **given))
    for name, value in straight.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], value)


REFUSED = [
    ({}, {"block_size": 16}, r"block_size=16 is not for ViTForImageClassification, which reads pictures; leave it out"),
    ({}, {"packing": "documents"}, r"packing='documents' is not for ViT"),
    ({}, {"fit_tokens": 64}, r"fit_tokens=64: ViTForImageClassification comes without a fitted swap; give `load` a"),
    ({}, {"mlm_probability": 0.3}, r"mlm_probability=0.3 is not for ViT"),
    ({}, {"objective": "causal"}, r"objective='causal' does not fit ViTForImageClassification; choose 'images'"),
    ({"num_labels": 3}, {}, r"has 2 classes \(left, right\), and ViTForImageClassification has 3"),
    ({}, {"per_device_train_batch_size": 65}, r"64 pictures do not fill one global batch, which takes 65"),
    ({"image_size": 32}, {}, r"makes 16 x 16 pixels, and this ViTForImageClassification reads 32"),
]


@pytest.mark.parametrize(("settings", "changes", "reason"), REFUSED)
def test_what_does_not_fit_is_refused(settings: dict, changes: dict, reason: str, folder: Path, tmp_path: Path):
    with pytest.raises(PosSwapError, match=reason):
        finetune(vit(**settings), processor(), arguments(folder, tmp_path, **changes))
    assert not list(tmp_path.iterdir())


@auto
def test_flags_of_text_are_refused_before_the_swap(folder: Path, tmp_path: Path):
    vit().save_pretrained(tmp_path)
    processor().save_pretrained(tmp_path)
    given = arguments(folder, tmp_path / "out", model=str(tmp_path), packing="documents")
    with pytest.raises(PosSwapError, match="packing='documents' is not for ViTForImageClassification, which reads"):
        load(given, make_scheme("bias2d", {}), {"image_size": 24})


@auto
def test_a_scheme_is_fitted_to_the_pictures(folder: Path, tmp_path: Path):
    """By the trainer, to some of those that it trains on, and by the script that patches."""
    vit().save_pretrained(tmp_path / "base")
    processor().save_pretrained(tmp_path / "base")
    asked = arguments(folder, tmp_path / "out", model=str(tmp_path / "base"), fit_tokens=3 * 16 + 5)
    model, _ = load(asked, make_scheme("bias2d", {}))
    assert describe(model).fit.tokens == 3 * 17  # of the class, too
    with pytest.raises(PosSwapError, match="fit_tokens=15: a picture has 16 patches, and there are 64 of them; give"):
        load(replace(asked, fit_tokens=15), make_scheme("bias2d", {}))
    flags = ["--model", tmp_path / "base", "--scheme", "bias2d", "--dry_run", "--fit"]
    done = call("patch.py", *flags, *sorted(folder.rglob("*.png"))[:2])
    assert "on 34 tokens, to distance 3" in done.stdout
    broken = call("patch.py", *flags, tmp_path / "base" / "config.json")
    assert broken.returncode == 2
    assert "cannot be read" in broken.stderr


def test_pictures_have_the_channels_that_the_processor_normalises(folder: Path):
    grey = ViTImageProcessor(size={"height": SIDE, "width": SIDE}, image_mean=[0.5], image_std=[0.5])
    (file, *_) = sorted(folder.rglob("*.png"))
    expected = (np.asarray(Image.open(file).convert("L")) / 255 - 0.5) / 0.5
    (found, *_) = images.read_images(str(folder), grey)
    torch.testing.assert_close(found.double(), torch.tensor(expected)[None], atol=1e-6, rtol=0)


def test_a_folder_without_classes_is_refused(folder: Path, tmp_path: Path):
    with pytest.raises(PosSwapError, match="'label' is no column of ClassLabel; it has none; give a subfolder"):
        finetune(vit(), processor(), arguments(folder / "left", tmp_path))


def test_right_classes_are_compared_by_size(folder: Path):
    def base():
        return vit(id2label=dict(enumerate(CLASSES)), label2id={n: i for i, n in enumerate(CLASSES)})

    def swapped():
        return patch_model(base(), "learned2d", image_size=32)

    pictures, labels = images.read_images(str(folder), processor()), images.read_labels(str(folder), CLASSES)
    entries = [Entry("base", base), Entry("learned2d", swapped, "base")]
    report = compare_images(entries, pictures, [32], labels=labels)
    found = {one["name"]: one["points"] for one in report["measures"]["accuracy"]["series"]}
    model, side = swapped().eval(), 32
    with torch.no_grad():
        pixels = torch.nn.functional.interpolate(torch.stack(pictures), (side, side), mode="bicubic", antialias=True)
        right = (model(pixels).logits.argmax(1) == torch.tensor([CLASSES.index(n) for n in labels])).double().mean()
    assert [point["length"] for point in found["base"]] == [SIDE, 32]
    assert found["learned2d"][-1]["accuracy"] == pytest.approx(right.item())
    assert images.read_labels(str(folder), ("up", "down")) is None
    entries[1] = Entry("other", lambda: patch_model(vit(), "learned2d", image_size=32), "base")
    with pytest.raises(PosSwapError, match="'left' is no class of other; choose one of: LABEL_0, LABEL_1"):
        compare_images(entries, pictures, [32], labels=labels)


@auto
def test_the_script_patches_trains_and_evaluates(folder: Path, tmp_path: Path):
    vit().save_pretrained(tmp_path / "base")
    processor().save_pretrained(tmp_path / "base")
    tune = ["--model", tmp_path / "base", "--output_dir", tmp_path / "out", "--image_dir", folder, "--max_steps", 2]
    tune += ["--per_device_train_batch_size", 8, "--scheme", "nope", "--image_size", 24, "--patch_form", "linear"]
    run(sys.executable, SCRIPT, *tune)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["image_size"], config["posswap"]["scheme"]) == (24, "nope")
    assert Picture(**config["posswap"]["picture"]) == Picture(image_size=24, patch_form="linear")
    measured = ["--base", tmp_path / "base", "--model", tmp_path / "out", "--lengths", 24, "--image_dir", folder]
    measured += ["--scheme", "learned2d", "sincos2d", "--image_size", 24]
    base = json.loads((tmp_path / "base" / "config.json").read_text())
    (tmp_path / "base" / "config.json").write_text(json.dumps(base | {k: config[k] for k in ("id2label", "label2id")}))
    run(sys.executable, ROOT / "scripts" / "evaluate.py", *measured, "--output_dir", tmp_path / "report")
    report = json.loads((tmp_path / "report" / "evaluation.json").read_text())
    found = {one["name"]: one["points"][-1]["images"] for one in report["measures"]["accuracy"]["series"]}
    assert found.keys() >= {"base", "learned2d", "sincos2d"}
    assert set(found.values()) == {64}
