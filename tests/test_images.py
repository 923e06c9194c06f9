"""Image models: every tower resized as transformers would on the fly, its patches resized, saved, reloaded, undone."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import transformers
from transformers import ViTModel

from hf_posswap import PosSwapError, describe, from_pretrained, patch_model, probe, unpatch_model
from hf_posswap.patches import resize_kernel

from . import oracles
from .families import pixels
from .small import byte_tokenizer

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
IMAGE = SMALL | {"image_size": 32, "patch_size": 8}
YOLOS = {"image_size": [32, 32], "num_detection_tokens": 5, "use_mid_position_embeddings": False}
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
    "yolos": ("YolosModel", "YolosConfig", YOLOS, 6),
    "internvl": ("InternVLVisionModel", "InternVLVisionConfig", {"image_size": [32, 32], "patch_size": [8, 8]}, 1),
}
SWIN = {"embed_dim": 16, "depths": [1, 1], "num_attention_heads": [2, 2], "window_size": 2, "patch_size": 4}
ON_THE_FLY = {"yolos": {}, "internvl": {}}  # arguments by which a tower resamples as it is called; these always do
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
    expected = states(model, image, **ON_THE_FLY.get(tower, {"interpolate_pos_encoding": True}))
    patch_model(model, "learned2d", image_size=48)
    found = states(model, image)
    assert found.shape[1] == 36 + TOWERS[tower][3]
    assert probe(model).faults == ()
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
    patch_model(model, "learned", image_size=64, patch_size=4, num_channels=1)
    assert model.config.image_size in (64, [64, 64])
    assert model.config.patch_size in (4, [4, 4])
    assert model.config.num_channels == 1
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


@pytest.mark.parametrize("table", [True, False])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", ["Beit", "Data2VecVision"])
def test_resized_beit_has_its_biases_resized_as_its_own_forward_does(
    name: str, shared: bool, table: bool, tmp_path: Path
):
    """With a table of positions beside them, or without."""
    keep = {} if table else {"relative_bias": "keep"}
    kind = "use_shared_relative_position_bias" if shared else "use_relative_position_bias"
    torch.manual_seed(0)
    settings = IMAGE | {"use_absolute_position_embeddings": table, kind: True}
    config = getattr(transformers, f"{name}Config")(**settings)
    model, image = getattr(transformers, f"{name}Model")(config).eval(), pixels(48)
    for name, parameter in model.named_parameters():
        if "position" in name:
            torch.nn.init.normal_(parameter)
    small, before, after = pixels(32), states(model, pixels(32)), states(model, image)
    with pytest.raises(PosSwapError, match="on a square of patches alone, and 4 x 8 are asked for"):
        patch_model(model, "learned", image_size=(32, 64), **keep)
    patch_model(model, "learned", image_size=48, **keep)
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
    ("vit", {"image_size": 64, "max_positions": 64}, r"max_positions=64 is for text; give image_size"),
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
        ("ViTMAEForPreTraining", "ViTMAEConfig", {"decoder_hidden_size": 16}, "another table of positions"),
        ("VideoMAEModel", "VideoMAEConfig", {"num_frames": 4}, "no site"),
        ("BeitModel", "BeitConfig", {"use_relative_position_bias": True}, "give learned alone, with .*='keep'"),
        ("Gemma4VisionModel", "Gemma4VisionConfig", {}, "images of every size as they come; leave image_size out"),
        ("TimesformerModel", "TimesformerConfig", {"num_frames": 4}, "another table of positions at .*time_embeddings"),
        ("Sam3ViTModel", "Sam3ViTConfig", {}, "hands layers.0.attention a rotation too"),
        ("SwinModel", "SwinConfig", SWIN, "no site this package recognises: .* bias within windows at .*which shift"),
    ],
    ids=["yolos", "mae decoder", "videomae", "beit", "gemma4", "timesformer", "sam3", "swin"],
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


# --- laws of pictures


SMOOTH = {"learned2d": {"resize": "bicubic"}, "learned2d antialias": {"resize": "bilinear", "antialias": True}}


@pytest.mark.parametrize("params", SMOOTH.values(), ids=SMOOTH)
def test_a_resize_up_and_down_again_is_close_to_the_identity(params: dict, tmp_path: Path):
    """Of a table as training leaves them: smooth over the grid."""
    model = ViTModel(transformers.ViTConfig(**IMAGE | {"image_size": 64})).eval()
    rows, columns = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
    wave = 0.5 * torch.rand(2, 32, generator=torch.Generator().manual_seed(0))
    table = torch.sin(rows[..., None] * wave[0] + columns[..., None] * wave[1]).reshape(1, 64, 32)
    model.embeddings.position_embeddings.data[:, 1:] = table
    patch_model(model, "learned2d", **params, image_size=(128, 192))
    up = ViTModel(transformers.ViTConfig(**IMAGE | {"image_size": (128, 192)})).eval()
    up.load_state_dict(model.state_dict())
    patch_model(up, "learned2d", **params, image_size=64)
    error = (up.embeddings.position_embeddings[:, 1:] - table).square().mean().sqrt() / table.square().mean().sqrt()
    assert error < 0.05


@pytest.mark.filterwarnings("ignore::hf_posswap.RecalibrationWarning")
@pytest.mark.parametrize("scheme", ["nope", "sincos2d"])
def test_patches_permuted_with_their_coordinates_permute_the_output(scheme: str):
    model, image = patch_model(built("vit"), scheme, image_size=(32, 48)), pixels((32, 48))
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    before = states(model, image)
    table = model.embeddings.position_embeddings
    table.data[:, 1:] = table.data[:, 1:][:, order]
    blocks = image.unfold(2, 8, 8).unfold(3, 8, 8).reshape(2, 3, 24, 8, 8)[:, :, order]
    permuted = blocks.reshape(2, 3, 4, 6, 8, 8).permute(0, 1, 2, 4, 3, 5).reshape(image.shape)
    after = states(model, permuted)
    torch.testing.assert_close(after[:, 0], before[:, 0])
    torch.testing.assert_close(after[:, 1:], before[:, 1:][:, order])


@pytest.mark.filterwarnings("ignore::hf_posswap.RecalibrationWarning")
@pytest.mark.parametrize("tower", ["mae", "ijepa", "vit"])
@pytest.mark.parametrize("convention", ["mae", "moco", "big_vision"])
def test_a_table_that_is_sincos_is_known_and_computed_anew(tower: str, convention: str):
    model = built(tower)
    table, rows = model.embeddings.position_embeddings, oracles.sincos2d(4, 4, 32, convention)
    prefix = TOWERS[tower][3]
    table.data[:, prefix:] = torch.tensor(rows)
    assert describe(model).sites[0].had == describe(model).sites[0].has == f"sincos2d ({convention})"
    patch_model(model, "sincos2d", convention=convention, image_size=(48, 64))
    expected = torch.tensor(oracles.sincos2d(6, 8, 32, convention), dtype=torch.float32)
    torch.testing.assert_close(model.embeddings.position_embeddings[0, prefix:], expected, rtol=0, atol=2e-7)
    assert describe(model).sites[0].had == f"sincos2d ({convention})"
    assert probe(model).faults == ()


@towers
def test_patches_embedded_by_a_product_of_matrices(tower: str, tmp_path: Path):
    """The same to rounding; once saved, stock transformers computes it as a convolution, and this package as it was."""
    model, image = built(tower), pixels(32)
    before = states(model, image)
    plan = patch_model(model, "learned2d", patch_form="linear", dry_run=True)
    assert any("as_linear" in str(edit) for edit in plan.edits)
    patch_model(model, "learned2d", patch_form="linear")
    after = states(model, image)
    torch.testing.assert_close(after, before)
    model.save_pretrained(tmp_path)
    reloaded = from_pretrained(tmp_path)
    assert "as_linear" in str([vars(m).get("forward") for m in reloaded.modules()])
    assert torch.equal(states(reloaded, image), after)
    assert torch.equal(states(copy.deepcopy(model), image), after)
    assert torch.equal(states(type(model).from_pretrained(tmp_path), image), before)
    assert torch.equal(states(unpatch_model(model), image), before)


def test_convolution_is_what_a_model_has():
    with pytest.raises(PosSwapError, match="would change nothing"):
        patch_model(built("vit"), "learned2d", patch_form="convolution")


def test_grey_pictures_are_read_as_grey_in_colour():
    model, grey = built("vit"), pixels(32, 1)
    before = states(model, grey.expand(-1, 3, -1, -1))
    patch_model(model, "learned2d", num_channels=1)
    torch.testing.assert_close(states(model, grey), before)


# --- video


def video() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    settings = SMALL | {"image_size": 32, "num_frames": 4, "tubelet_size": [2, 8, 8]}
    model = transformers.VivitModel(transformers.VivitConfig(**settings)).eval()
    torch.nn.init.normal_(model.embeddings.position_embeddings)
    return model


def frames(count: int, size: tuple[int, int], channels: int = 3) -> torch.Tensor:
    return torch.randn(1, count, channels, *size, generator=torch.Generator().manual_seed(0))


VIDEOS = {
    "oblong": ({"image_size": (32, 48)}, frames(4, (32, 48))),
    "longer": ({"num_frames": 8, "image_size": 48}, frames(8, (48, 48))),
    "tubelets": ({"patch_size": (4, 4, 4), "num_channels": 1}, frames(4, (32, 32), 1)),
    "form": ({"patch_form": "linear", "num_frames": 2}, frames(2, (32, 32))),
}


@pytest.mark.filterwarnings("ignore::hf_posswap.RecalibrationWarning")
@pytest.mark.parametrize("scheme", ["learned2d", "nope"])
@pytest.mark.parametrize(("params", "seen"), VIDEOS.values(), ids=VIDEOS)
def test_video_is_resized_saved_reloaded_and_undone(scheme: str, params: dict, seen: torch.Tensor, tmp_path: Path):
    model, small = video(), frames(4, (32, 32))
    before, config = states(model, small), model.config.to_dict()
    unpatch_model(patch_model(model, scheme, **params))
    assert model.config.to_dict() == config
    patch_model(model, scheme, **params)
    after = states(model, seen)
    found = probe(model)
    assert found.ok
    assert found.knows_order == (scheme != "nope")
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(states(type(model).from_pretrained(tmp_path), seen), after)
    assert torch.equal(states(from_pretrained(tmp_path), seen), after)
    assert describe(model).length_had == 32
    assert torch.equal(states(unpatch_model(model), small), before)


def test_positions_that_do_not_change_with_time_stay_so_in_more_frames():
    model = video()
    table = model.embeddings.position_embeddings
    still = table.data[:, 1:17].clone()
    table.data[:, 1:] = still.repeat(1, 2, 1)
    patch_model(model, "learned2d", num_frames=12)
    torch.testing.assert_close(model.embeddings.position_embeddings[:, 1:], still.repeat(1, 6, 1))


@pytest.mark.parametrize("scheme", ["rope2d", "bias2d", "alibi"])
def test_what_has_places_in_rows_and_columns_is_not_for_video(scheme: str):
    model = video()
    before = states(model, frames(4, (32, 32)))
    with pytest.raises(PosSwapError, match=f"{scheme}: VivitModel reads video"):
        patch_model(model, scheme)
    assert torch.equal(states(model, frames(4, (32, 32))), before)


# --- what is measured on towers that give no vector for each patch, or do not say that they read images


@pytest.mark.filterwarnings("ignore::hf_posswap.RecalibrationWarning")
def test_a_backbone_is_probed_by_its_last_layer():
    model = transformers.Dinov2Backbone(transformers.Dinov2Config(**IMAGE)).eval()
    assert probe(model).knows_order
    assert not probe(patch_model(model, "nope")).knows_order


@pytest.mark.filterwarnings("ignore::hf_posswap.RecalibrationWarning")
def test_what_shuffles_or_drops_patches_is_probed_in_order_or_refused():
    model = patch_model(built("mae"), "nope")
    assert not probe(model).knows_order
    model.config.mask_ratio = 0.75
    with pytest.raises(PosSwapError, match="does not give one vector for each of 16 patches"):
        probe(model)


@pytest.mark.filterwarnings("ignore::hf_posswap.RecalibrationWarning")
@pytest.mark.parametrize(("scheme", "params"), [("rope2d", {}), ("alibi", {"ndim": 1}), ("nope", {})])
def test_a_tower_that_says_input_ids_and_takes_pixels_is_one_of_images(scheme: str, params: dict):
    torch.manual_seed(0)
    model, image = transformers.Idefics3VisionTransformer(transformers.Idefics3VisionConfig(**IMAGE)).eval(), pixels(32)
    assert model.main_input_name == "input_ids"
    torch.nn.init.normal_(model.embeddings.position_embedding.weight)
    before = states(model, image)
    patch_model(model, scheme, **params)
    assert (states(model, image) - before).abs().max() > 1e-3
    assert probe(model).knows_order == (scheme != "nope")
    assert torch.equal(states(unpatch_model(model), image), before)


# --- the processor


def test_tokenizer_of_a_model_of_images_is_refused():
    with pytest.raises(PosSwapError, match=r"ViTModel reads images and no tokens; give processor="):
        patch_model(built("vit"), "learned2d", image_size=48, tokenizer=byte_tokenizer())


CROPS = {"size": {"shortest_edge": 36}, "crop_size": {"height": 64, "width": 64}}
SQUARE = {"size": {"height": 32, "width": 32}}
FOREIGN = [
    ("ViTImageProcessor", {"size": {"height": 224, "width": 224}}, r"makes 224 x 224 pixels, and .* reads 32"),
    ("CLIPImageProcessor", CROPS, r"makes 64 x 64 pixels"),
    ("ViTImageProcessor", SQUARE | {"image_mean": [0.5]}, r"num_channels=1, and .* 3"),
    ("Siglip2ImageProcessor", {"patch_size": 16}, r"has no size|patch_size=16"),
]


@pytest.mark.parametrize(("processor", "settings", "reason"), FOREIGN)
def test_processor_of_another_model_is_refused(processor: str, settings: dict, reason: str):
    model, processor = built("vit"), getattr(transformers, processor)(**settings)
    before, config = processor.to_dict(), model.config.to_dict()
    with pytest.raises(PosSwapError, match=reason):
        patch_model(model, "learned2d", image_size=48, processor=processor)
    assert processor.to_dict() == before
    assert model.config.to_dict() == config


def test_a_model_that_takes_any_size_has_no_wrong_processor():
    """DINOv2 says 518 in its config, and its processor makes 224."""
    model = built("dinov2")
    processor = transformers.ViTImageProcessor(size={"height": 24, "width": 24})
    patch_model(model, "learned2d", image_size=48, processor=processor)
    assert dict(processor.size) == {"height": 48, "width": 48}


def test_processor_normalises_other_channels():
    model = built("vit")
    settings = SQUARE | {"image_mean": [0.3, 0.4, 0.5], "image_std": [0.1, 0.2, 0.3]}
    processor = transformers.ViTImageProcessor(**settings)
    patch_model(model, "learned2d", image_size=48, num_channels=1, processor=processor)
    image = torch.randint(0, 255, (1, 40, 40), dtype=torch.uint8).numpy()
    made = processor(image, input_data_format="channels_first", return_tensors="pt")["pixel_values"]
    assert made.shape == (1, 1, 48, 48)
    assert states(model, made).shape[1] == 37
    assert processor.image_mean == [pytest.approx(0.4)]
    patch_model(model, "learned2d", image_size=48, num_channels=1, processor=processor)  # again, with the new one
    unpatch_model(model, processor=processor)
    assert list(processor.image_mean) == settings["image_mean"]
