"""Image models: every tower resized as transformers would on the fly, its patches resized, saved, reloaded, undone."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import transformers

from hf_posswap import PosSwapError, describe, from_pretrained, patch_model, probe, unpatch_model
from hf_posswap.patches import resize_kernel

from .families import pixels

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
IMAGE = SMALL | {"image_size": 32, "patch_size": 8}
TOWERS = {
    # name -> (model, config, settings, prefix tokens)
    "vit": ("ViTModel", "ViTConfig", {}, 1),
    "deit": ("DeiTModel", "DeiTConfig", {}, 2),
    "dinov2": ("Dinov2Model", "Dinov2Config", {}, 1),
    "dinov2_with_registers": ("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", {}, 5),
    "clip": ("CLIPVisionModel", "CLIPVisionConfig", {}, 1),
    "siglip": ("SiglipVisionModel", "SiglipVisionConfig", {}, 0),
    "ijepa": ("IJepaModel", "IJepaConfig", {}, 0),
    "mae": ("ViTMAEModel", "ViTMAEConfig", {"mask_ratio": 0.0}, 1),
    "beit": ("BeitModel", "BeitConfig", {"use_absolute_position_embeddings": True}, 1),
}
SWIN = {"embed_dim": 16, "depths": [1, 1], "num_attention_heads": [2, 2], "window_size": 2, "patch_size": 4}
towers = pytest.mark.parametrize("tower", TOWERS)


def built(tower: str) -> transformers.PreTrainedModel:
    """A tower whose table is drawn: some families begin with zeros."""
    model, config, settings, _ = TOWERS[tower]
    torch.manual_seed(0)
    built = getattr(transformers, model)(getattr(transformers, config)(**IMAGE | settings)).eval()
    for name, parameter in built.named_parameters():
        if "position_embedding" in name:
            torch.nn.init.normal_(parameter)
    return built


def states(model: torch.nn.Module, image: torch.Tensor, **asked) -> torch.Tensor:
    """Last hidden states; MAE shuffles its patches, with a noise that is given here."""
    size = image.shape[-2:]
    if hasattr(model.config, "mask_ratio"):
        patch = model.config.patch_size
        asked["noise"] = torch.arange(float(size[0] // patch * (size[1] // patch))).expand(len(image), -1)
    with torch.no_grad():
        return model(pixel_values=image, **asked).last_hidden_state


@towers
def test_resized_tower_needs_no_flag_and_equals_transformers_own_interpolation(tower: str):
    model, image = built(tower), pixels(48)
    expected = states(model, image, interpolate_pos_encoding=True) if tower != "beit" else None
    patch_model(model, "learned", image_size=48)
    found = states(model, image)
    assert found.shape[1] == 36 + TOWERS[tower][3]
    assert probe(model).faults == ()
    if expected is not None:
        torch.testing.assert_close(found, expected)


@towers
@pytest.mark.parametrize("params", [{"image_size": 48}, {"image_size": 48, "patch_size": 12}, {"patch_size": 4}])
def test_resized_tower_is_saved_reloaded_and_undone(tower: str, params: dict, tmp_path: Path):
    model, small = built(tower), pixels(32)
    before = states(model, small)
    patch_model(model, "learned", **params)
    image = pixels(params.get("image_size", 32))
    after = states(model, image)
    model.save_pretrained(tmp_path)
    stock = type(model).from_pretrained(tmp_path)
    assert torch.equal(states(stock, image), after)
    assert torch.equal(states(from_pretrained(tmp_path), image), after)
    assert describe(stock).length == describe(model).length
    assert describe(model).length_had == 16
    assert torch.equal(states(unpatch_model(model), small), before)


@towers
def test_config_is_undone(tower: str):
    model = built(tower)
    config = model.config.to_dict()
    patch_model(model, "learned", image_size=64, patch_size=4)
    assert (model.config.image_size, model.config.patch_size) == (64, 4)
    assert unpatch_model(model).config.to_dict() == config


@towers
def test_enlarged_image_in_enlarged_patches_is_seen_as_the_small_one(tower: str):
    """FlexiViT, section 3.4: patches twice as large, of an image twice as large, give the same tokens."""
    model, image = built(tower), pixels(32)
    before = states(model, image)
    blocks = image.unfold(2, 8, 8).unfold(3, 8, 8).reshape(-1, 1, 8, 8)
    larger = torch.nn.functional.interpolate(blocks, size=(16, 16), mode="bilinear", align_corners=False)
    larger = larger.reshape(2, 3, 4, 4, 16, 16).permute(0, 1, 2, 4, 3, 5).reshape(2, 3, 64, 64)
    patch_model(model, "learned", image_size=64, patch_size=16)
    torch.testing.assert_close(states(model, larger), before, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("shared", [False, True])
def test_resized_beit_has_its_biases_resized_as_its_own_forward_does(shared: bool, tmp_path: Path):
    kind = "use_shared_relative_position_bias" if shared else "use_relative_position_bias"
    torch.manual_seed(0)
    config = transformers.BeitConfig(**IMAGE | {"use_absolute_position_embeddings": True, kind: True})
    model, image = transformers.BeitModel(config).eval(), pixels(48)
    for name, parameter in model.named_parameters():
        if "position" in name:
            torch.nn.init.normal_(parameter)
    small, before, after = pixels(32), states(model, pixels(32)), states(model, image)
    with pytest.raises(PosSwapError, match="on a square of patches alone, and 4 x 8 are asked for"):
        patch_model(model, "learned", image_size=(32, 64))
    patch_model(model, "learned", image_size=48)
    torch.testing.assert_close(states(model, image), after)
    model.save_pretrained(tmp_path)
    assert torch.equal(states(type(model).from_pretrained(tmp_path), image), states(model, image))
    assert torch.equal(states(unpatch_model(model), small), before)


@towers
def test_same_size_changes_nothing_and_is_refused(tower: str):
    model, image = built(tower), pixels(32)
    before = states(model, image)
    with pytest.raises(PosSwapError, match="change nothing"):
        patch_model(model, "learned", image_size=32, patch_size=8)
    assert torch.equal(states(model, image), before)


def test_patch_kernel_is_the_resized_one():
    model = built("vit")
    old = copy.deepcopy(model.embeddings.patch_embeddings.projection)
    patch_model(model, "learned", patch_size=16)
    new = model.embeddings.patch_embeddings.projection
    assert torch.equal(new.weight, resize_kernel(old.weight, (16, 16)))
    assert new.kernel_size == new.stride == (16, 16)
    assert torch.equal(new.bias, old.bias)


def test_patches_and_images_may_be_oblong():
    model = built("vit")
    patch_model(model, "learned", image_size=(48, 64), patch_size=(8, 16))
    assert states(model, pixels((48, 64))).shape[1] == 1 + 6 * 4
    assert model.config.patch_size == [8, 16]


REFUSED = [
    ("vit", {"image_size": 50}, r"image_size=50 is not one or two multiples of the patch size 8"),
    ("vit", {"image_size": 32, "patch_size": 5}, r"image_size=32 is not one or two multiples of the patch size 5"),
    ("vit", {"patch_size": 5}, r"patch_size=5 does not divide the image size 32; give image_size too"),
    ("vit", {"patch_size": 0}, r"patch_size=0 is not one or two positive numbers"),
    ("vit", {"image_size": 64, "max_positions": 64}, r"give exactly one of"),
    ("clip", {"image_size": (32, 64)}, r"image_size"),
]


@pytest.mark.parametrize(("tower", "params", "reason"), REFUSED)
def test_refused_and_untouched(tower: str, params: dict, reason: str):
    model, image = built(tower), pixels(32)
    before, config = states(model, image), model.config.to_dict()
    with pytest.raises(PosSwapError, match=reason):
        patch_model(model, "learned", **params)
    assert torch.equal(states(model, image), before)
    assert model.config.to_dict() == config


@pytest.mark.parametrize(
    ("model", "config", "settings", "reason"),
    [
        ("YolosModel", "YolosConfig", {"image_size": [32, 32]}, "another table of positions"),
        ("VivitModel", "VivitConfig", {"num_frames": 4, "tubelet_size": [2, 8, 8]}, "no site"),
        ("BeitModel", "BeitConfig", {"use_relative_position_bias": True}, "has no table of positions to resize"),
        ("SwinModel", "SwinConfig", SWIN, "no site this package recognises: .* bias within windows at .*which shift"),
    ],
    ids=["yolos", "vivit", "beit", "swin"],
)
def test_model_that_is_not_understood_is_refused(model: str, config: str, settings: dict, reason: str):
    built = getattr(transformers, model)(getattr(transformers, config)(**IMAGE | settings))
    with pytest.raises(PosSwapError, match=reason):
        patch_model(built, "learned", image_size=48)


@pytest.mark.parametrize(
    ("processor", "settings"),
    [
        ("ViTImageProcessor", {"size": {"height": 32, "width": 32}}),
        ("CLIPImageProcessor", {"size": {"shortest_edge": 36}, "crop_size": {"height": 32, "width": 32}}),
    ],
)
def test_image_processor_follows_and_goes_back(processor: str, settings: dict):
    model, processor = built("vit"), getattr(transformers, processor)(**settings)
    before = processor.to_dict()
    patch_model(model, "learned", image_size=(48, 64), processor=processor)
    image = torch.randint(0, 255, (3, 100, 80), dtype=torch.uint8).numpy()
    assert processor(image, return_tensors="pt")["pixel_values"].shape == (1, 3, 48, 64)
    unpatch_model(model, processor=processor)
    assert processor.to_dict() == before
