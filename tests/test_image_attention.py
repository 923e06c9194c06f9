"""What is particular to attention on a grid of patches: its oracles, the laws of two dimensions, and the grid of every
call."""

from __future__ import annotations

import copy
import re

import numpy as np
import pytest
import torch
import transformers
from transformers.models.dinov3_vit import modeling_dinov3_vit as dinov3s

from hf_posswap import PosSwapError, describe, from_pretrained, list_schemes, patch_model, probe, unpatch_model
from hf_posswap.grid import Grid

from . import oracles, oracles_bias, oracles_grid
from .families import FAMILIES, HEADS, PATCHES, WIDTH, pixels
from .rows import ONE_AXIS
from .test_laws import close
from .test_refusals import state, unchanged

pytestmark = pytest.mark.filterwarnings("ignore::hf_posswap.RecalibrationWarning")

DIM = WIDTH // HEADS
DETECTION = {"num_detection_tokens": 3, "use_mid_position_embeddings": False, "image_size": [32, 32]}
# name -> (model, config, settings, tokens before the patches, tokens behind them)
TOWERS = {
    "vit": ("ViTModel", "ViTConfig", {}, 1, 0),
    "deit": ("DeiTModel", "DeiTConfig", {}, 2, 0),
    "dinov2": ("Dinov2Model", "Dinov2Config", {}, 1, 0),
    "dinov2_with_registers": ("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", {}, 5, 0),
    "clip": ("CLIPVisionModel", "CLIPVisionConfig", {}, 1, 0),
    "siglip": ("SiglipVisionModel", "SiglipVisionConfig", {}, 0, 0),
    "ijepa": ("IJepaModel", "IJepaConfig", {}, 0, 0),
    "beit": ("BeitModel", "BeitConfig", {"use_absolute_position_embeddings": True}, 1, 0),
    "yolos": ("YolosModel", "YolosConfig", DETECTION, 1, 3),
    "dinov3": ("DINOv3ViTModel", "DINOv3ViTConfig", {"num_register_tokens": 3}, 4, 0),
    "beit_bias": ("BeitModel", "BeitConfig", {"use_relative_position_bias": True}, 1, 0),
}
towers = pytest.mark.parametrize("tower", TOWERS)
SIZED = ("dinov2", "dinov2_with_registers")  # read any size without being asked


def built(tower: str, layers: int = 1, **settings) -> transformers.PreTrainedModel:
    model, config, more, *_ = TOWERS[tower]
    torch.manual_seed(0)
    sizes = PATCHES | {"num_hidden_layers": layers} | more
    model = getattr(transformers, model)(getattr(transformers, config)(**sizes), **settings)
    model.set_attn_implementation("eager")
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.1)
    return model.eval()


def states(model, image: torch.Tensor, **asked) -> torch.Tensor:
    with torch.no_grad():
        return model(pixel_values=image, **asked).last_hidden_state


def attention_of(model, image: torch.Tensor) -> tuple[np.ndarray, np.ndarray, torch.nn.Module]:
    """Of the first layer and image: what its attention reads (S, E), the weights (H, S, S), and the module."""
    seen = {}
    module = next(m for m in model.modules() if hasattr(m, "_posswap_attention"))

    def keep(_, args, kwargs):
        seen["hidden"] = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]

    handle = module.register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        weights = model(pixel_values=image, output_attentions=True).attentions[0]
    handle.remove()
    return seen["hidden"][0].double().numpy(), weights[0].double().numpy(), module


def projected(module, hidden: np.ndarray, *names: str) -> np.ndarray:
    """(H, S, D) by the projection that a family calls one of these names."""
    linear = next(getattr(module, name) for name in names if hasattr(module, name))
    bias = 0 if linear.bias is None else linear.bias.detach().double().numpy()
    out = hidden @ linear.weight.detach().double().numpy().T + bias
    return out.reshape(len(hidden), HEADS, DIM).transpose(1, 0, 2)


# --- oracles


@towers
@pytest.mark.parametrize(
    ("scheme", "params"),
    [("alibi", {}), ("t5", {}), ("kerple", {}), ("sandwich", {}), ("bias2d", {}), ("bias2d", {"per_layer": False})],
    ids=str,
)
def test_bias_is_all_that_a_silent_query_sees(tower: str, scheme: str, params: dict):
    """With queries of zero the attention is the softmax of the bias alone."""
    model = built(tower)
    for name, parameter in model.named_parameters():
        if any(query in name for query in ("q_proj", "query")):
            parameter.data.zero_()
    patch_model(model, scheme, **params | (ONE_AXIS if scheme != "bias2d" else {}))
    for name, parameter in model.named_parameters():
        if "posswap" in name.split("."):  # away from where it starts
            parameter.data.add_(0.3 * torch.rand(parameter.shape, generator=torch.Generator().manual_seed(1)))
    tokens = oracles_grid.tokens_of(4, 4, *TOWERS[tower][3:])
    learned = {name.rpartition(".")[2]: p.detach().double().numpy() for name, p in model.named_parameters()}
    if scheme == "bias2d":
        expected = oracles_grid.bias2d(tokens, learned["table"], learned["beside"])
    else:
        flat = getattr(oracles_bias, scheme)(HEADS, 16, state=learned, causal=False, **params)
        flat = flat - (flat[:, :1, :1] if scheme == "sandwich" else 0)  # its softmax sees no constant but beside others
        expected = oracles_grid.on_flat_grid(flat, tokens)
    found = attention_of(model, pixels(32))[1]
    np.testing.assert_allclose(found, oracles_bias.softmax(expected, False), atol=2e-6)


ROTATIONS = [
    ("rope", ONE_AXIS),
    ("yarn", ONE_AXIS | {"factor": 4}),
    ("rope2d", {}),
    ("rope2d", {"convention": "xy", "rope_theta": 10000.0, "pairing": "interleaved"}),
    ("rope2d", {"coordinates": "image"}),
    ("rope2d", {"kind": "mixed", "convention": "xy"}),
]


@pytest.mark.parametrize("tower", ["vit", "dinov2_with_registers", "clip", "siglip", "yolos", "dinov3"])
@pytest.mark.parametrize(("scheme", "params"), ROTATIONS, ids=str)
def test_rotation_turns_patches_and_leaves_other_tokens(tower: str, scheme: str, params: dict):
    model = patch_model(built(tower), scheme, **params)
    for name, parameter in model.named_parameters():
        if "posswap" in name.split("."):
            parameter.data.add_(0.3 * torch.rand(parameter.shape, generator=torch.Generator().manual_seed(1)))
    hidden, found, module = attention_of(model, pixels(32))
    q, k = (projected(module, hidden, *names) for names in (("q_proj", "query"), ("k_proj", "key")))
    tokens, scale = oracles_grid.tokens_of(4, 4, *TOWERS[tower][3:]), 1.0
    if scheme == "rope2d" and params.get("kind") == "mixed":
        (learned,) = (p.detach().double().numpy() for n, p in model.named_parameters() if "posswap" in n.split("."))
        by_head = [tuple(of_head) for of_head in learned]
    elif scheme == "rope2d":
        by_head = [oracles_grid.axial(DIM, params.get("rope_theta", 100.0), params.get("convention", "ij"))] * HEADS
    else:  # a patch's number is 4 times its row and its column
        frequencies, scale = getattr(oracles, scheme)(DIM, 1e4, factor=4, length=16)
        by_head = [(4 * frequencies, frequencies)] * HEADS
    for head in range(HEADS):
        of_image = params.get("coordinates") == "image"
        turn = oracles_grid.turns(DIM, tokens, by_head[head], (4, 4), of_image)
        turn *= np.array([[1.0 if token is None else scale] for token in tokens])
        logits = oracles_grid.scores(q[head], k[head], turn, params.get("pairing", "halves"))
        np.testing.assert_allclose(found[head], oracles_bias.softmax(logits, False), atol=2e-6)


# --- laws of two dimensions

RELATIVE = [("rope2d", {}), ("rope2d", {"kind": "mixed"}), ("rope", ONE_AXIS)]


@pytest.mark.parametrize(("scheme", "params"), RELATIVE, ids=str)
def test_common_shift_of_all_coordinates_changes_nothing(scheme: str, params: dict, monkeypatch):
    """Between patches: a token without a place is not turned, and so stands at the origin."""
    model, image = patch_model(built("ijepa", 2), scheme, **params), pixels(32)
    before, plain = states(model, image), Grid.coordinates
    monkeypatch.setattr(Grid, "coordinates", lambda *a: plain(*a) + torch.arange(3, 3 + a[1]))
    close(states(model, image), before)
    monkeypatch.setattr(Grid, "coordinates", lambda *a: 2 * plain(*a))
    assert (states(model, image) - before).abs().max() > 1e-3


@pytest.mark.parametrize(("scheme", "params"), [*RELATIVE, ("bias2d", {}), ("alibi", ONE_AXIS)], ids=str)
def test_patches_that_change_places_with_their_coordinates_change_places(scheme: str, params: dict, monkeypatch):
    """The output of a permuted image, whose places are permuted alike, is the permuted output."""
    from hf_posswap.attention import Attached

    model, image = patch_model(built("dinov2", 2), scheme, **params), pixels((32, 48))
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    tokens = torch.cat([torch.zeros(1, dtype=torch.long), 1 + order])
    before = states(model, image)
    blocks = image.unfold(2, 8, 8).unfold(3, 8, 8).permute(0, 2, 3, 1, 4, 5).flatten(1, 2)[:, order]
    permuted = blocks.unflatten(1, (4, 6)).permute(0, 3, 1, 4, 2, 5).reshape(image.shape)
    assert (states(model, permuted) - before[:, tokens]).abs().max() > 1e-3
    coordinates, on_grid = Grid.coordinates, Attached.on_grid
    monkeypatch.setattr(Grid, "coordinates", lambda *a: coordinates(*a)[order])
    monkeypatch.setattr(Attached, "on_grid", lambda *a: on_grid(*a)[:, tokens][:, :, tokens])
    close(states(model, permuted), before[:, tokens])


def test_conventions_are_each_others_transpose():
    """Rows and columns exchanged, in the image and in the convention."""
    image = pixels((32, 48))
    of = {convention: patch_model(built("dinov2", 2), "rope2d", convention=convention) for convention in ("ij", "xy")}
    transposed = image.unfold(2, 8, 8).unfold(3, 8, 8).permute(0, 1, 3, 4, 2, 5).reshape(2, 3, 48, 32)
    found = states(of["xy"], transposed)[:, 1:].unflatten(1, (6, 4)).transpose(1, 2).flatten(1, 2)
    close(found, states(of["ij"], image)[:, 1:])


# --- the grid of every call


@towers
@pytest.mark.parametrize("scheme", ["rope2d", "bias2d", "rope", "alibi"])
def test_every_tower_takes_it_and_gives_it_back(tower: str, scheme: str, tmp_path):
    model, image = built(tower, 2), pixels(32)
    before, config = states(model, image), model.config.to_dict()
    patch_model(model, scheme, **(ONE_AXIS if scheme in ("rope", "alibi") else {}))
    after = states(model, image)
    assert (after - before).abs().max() > 1e-3
    assert probe(model).faults == ()
    assert "inside attention" in str(describe(model))
    copy.deepcopy(model).save_pretrained(tmp_path)  # which writes into its config
    assert torch.equal(states(from_pretrained(tmp_path, attn_implementation="eager"), image), after)
    model.set_attn_implementation("sdpa")
    close(states(model, image), after)
    model.set_attn_implementation("eager")
    unpatch_model(model)
    assert torch.equal(states(model, image), before)
    assert model.config.to_dict() == config


@pytest.mark.parametrize(("scheme", "params"), [("rope2d", {}), ("bias2d", {}), ("alibi", ONE_AXIS)], ids=str)
def test_images_of_every_size_are_numbered_by_their_own_grid(scheme: str, params: dict):
    model = patch_model(built("dinov2_with_registers", 2), scheme, **params)
    sizes = [(32, 32), (16, 64), (48, 32), (32, 48)]
    alone = [states(copy.deepcopy(model), pixels(size)) for size in sizes]
    for size, expected in zip(sizes + sizes[::-1], alone + alone[::-1], strict=True):
        assert torch.equal(states(model, pixels(size)), expected)


def test_layers_run_again_by_gradient_checkpointing_know_their_image():
    """Two crops go forward before either goes back, as in self-distillation."""
    found = []
    for checkpointing in (False, True):
        model = patch_model(built("dinov2", 2), "rope2d", kind="mixed").train()
        if checkpointing:
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        crops = [model(pixel_values=pixels(size)).last_hidden_state.square().sum() for size in (32, (16, 48))]
        sum(crops).backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    for name, grad in found[0].items():
        close(found[1][name], grad)
    with pytest.raises(PosSwapError, match="2 x 8 patches and others of as many cannot be told apart"):
        model(pixel_values=pixels((16, 64)))


def test_table_of_another_grid_is_resampled_as_transformers_resamples_beits():
    from transformers.models.beit.modeling_beit import BeitRelativePositionBias

    model = patch_model(built("dinov2"), "bias2d", per_layer=False)
    parameters = dict(model.named_parameters())
    own = BeitRelativePositionBias(transformers.BeitConfig(image_size=32, patch_size=8, num_attention_heads=HEADS))
    for part in parameters["posswap.table"], parameters["posswap.beside"]:
        part.data.normal_()
    flipped = parameters["posswap.table"].detach().flip(1, 2).flatten(1)  # BEiT's runs from key to query
    own.relative_position_bias_table.data = torch.cat([flipped, parameters["posswap.beside"].detach()], 1).T
    for size in (4, 6, 3):
        with torch.no_grad():
            expected = own((size, size))[0]
        found = model.posswap.on_grid(torch.zeros(1, HEADS, size * size + 1, DIM), Grid(size, size, 1))
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("image", [(32, 32), (32, 48)], ids=str)
def test_dinov3s_own_rotation_made_again_is_the_unpatched_model(image: tuple[int, int]):
    model, image = built("dinov3", 2), pixels(image)
    before = states(model, image)
    patch_model(model, "rope2d", coordinates="image")
    close(states(model, image), before)
    assert re.search(r"rotary2d rope2d +inside attention", str(describe(model)))
    patch_model(model, "rope2d", coordinates="image", rope_theta=50.0)
    assert (states(model, image) - before).abs().max() > 1e-3


def pixtral():
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "intermediate_size": 96, "num_hidden_layers": 2}
    model = transformers.PixtralVisionModel(transformers.PixtralVisionConfig(**sizes, image_size=32, patch_size=8))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.1)
    return model


OTHER_PICTURES = [
    ({"patch_size": 4}, 32, 3, 64),
    ({"patch_size": (4, 8)}, 32, 3, 32),
    ({"image_size": 64}, 64, 3, 64),
    ({"image_size": (32, 64), "patch_size": 16}, (32, 64), 3, 8),
    ({"num_channels": 1}, 32, 1, 16),
    ({"patch_form": "linear"}, 32, 3, 16),
]


def runs_without_numbers(build) -> bool:
    """Whether a model can be tried without memory for its weights; Pixtral of transformers 5.17 reads its mask's."""
    try:
        with torch.device("meta"), torch.no_grad():
            build()(torch.empty(1, 3, 32, 32))
    except RuntimeError:
        return False
    return True


# name -> (model, tokens before the patches, what may be oblong: in DINOv3 of transformers 5.17 nothing)
TURNING = {
    "dinov3": (lambda: built("dinov3", 2), 4, {"image_size", "patch_size"} if hasattr(dinov3s, "Iterable") else set()),
    "pixtral": (pixtral, 0, {"image_size"}),
}


def takes(tower: str, asked: dict) -> bool:
    """Whether this transformers does."""
    build, _, oblong = TURNING[tower]
    return oblong >= {key for key, value in asked.items() if isinstance(value, tuple)} and runs_without_numbers(build)


PROCESSORS = {
    "dinov3": lambda: transformers.ViTImageProcessor(size={"height": 32, "width": 32}),
    "pixtral": lambda: transformers.PixtralImageProcessor(
        size={"longest_edge": 32}, patch_size={"height": 8, "width": 8}
    ),
}
EACH = [(tower, *row) for tower in TURNING for row in OTHER_PICTURES]
TAKEN = [row for row in EACH if takes(*row[:2])]


@pytest.mark.parametrize(("tower", "asked", "size", "channels", "patches"), TAKEN, ids=str)
def test_a_model_that_turns_reads_other_pictures(tower: str, asked: dict, size, channels: int, patches: int, tmp_path):
    """What stock transformers makes of the checkpoint is what the patched model does, and no position is lost."""
    build, before_them, _ = TURNING[tower]
    model, image = build().eval(), pixels(size, channels)[:1]
    before = states(model, pixels(32))
    found = states(patch_model(model, "learned2d", **asked), image)
    assert found.shape[1] == before_them + patches
    assert f"length   {f'16 -> {patches}' if patches != 16 else 16}\n" in str(describe(model))
    assert "rotary2d rope2d     " in str(describe(model))
    assert probe(model).knows_order
    model.save_pretrained(tmp_path)
    close(states(type(model).from_pretrained(tmp_path).eval(), image), found)
    close(states(from_pretrained(tmp_path).eval(), image), found)
    assert torch.equal(states(unpatch_model(model), pixels(32)), before)


@pytest.mark.parametrize(("tower", "asked"), [row[:2] for row in EACH if row not in TAKEN], ids=str)
def test_a_picture_that_transformers_cannot_read_there_is_refused(tower: str, asked: dict):
    model = TURNING[tower][0]()
    before = state(model)
    with pytest.raises(PosSwapError, match=r"cannot be built with .*and read such a picture"):
        patch_model(model, "learned2d", **asked)
    unchanged(model, before)


@pytest.mark.parametrize("asked", [{"image_size": 64}, {"patch_size": 16}], ids=str)
@pytest.mark.parametrize("tower", [tower for tower in TURNING if takes(tower, {})])
def test_the_processor_of_a_model_that_turns_follows_and_goes_back(tower: str, asked: dict):
    """Pixtral's has the longest side of a picture, and the patches that its sides are multiples of."""
    model, processor = TURNING[tower][0]().eval(), PROCESSORS[tower]()
    before = processor.to_dict()
    patch_model(model, "learned2d", processor=processor, **asked)
    made = processor(np.zeros((3, 200, 200), dtype=np.uint8), return_tensors="pt")["pixel_values"]
    side, patch = asked.get("image_size", 32), asked.get("patch_size", 8)
    assert made.shape == (1, 3, side, side)
    assert states(model, made).shape[1] == TURNING[tower][1] + (side // patch) ** 2
    assert getattr(processor, "patch_size", None) in (None, {"height": patch, "width": patch})
    unpatch_model(model, processor=processor)
    assert processor.to_dict() == before


BOTH = [("dinov3", "nope"), ("dinov3", "rope2d"), ("dinov3", "bias2d"), ("pixtral", "nope")]


@pytest.mark.parametrize(("tower", "scheme"), [both for both in BOTH if takes(both[0], {})])
def test_a_model_that_turns_takes_patches_and_a_scheme_at_once(tower: str, scheme: str, tmp_path):
    build, before_them, _ = TURNING[tower]
    model, image = build().eval(), pixels(64)[:1]
    before = states(model, image)
    found = states(patch_model(model, scheme, image_size=64, patch_size=16), image)
    assert found.shape[1] == before_them + 16
    model.save_pretrained(tmp_path)
    close(states(from_pretrained(tmp_path).eval(), image), found)
    assert torch.equal(states(unpatch_model(model), image), before)


# --- refusals


def shuffling():
    return transformers.ViTMAEModel(transformers.ViTMAEConfig(**PATCHES, num_hidden_layers=1, mask_ratio=0.0))


def small_heads():
    return transformers.ViTModel(transformers.ViTConfig(**PATCHES | {"hidden_size": 24}, num_hidden_layers=1))


REFUSED = [
    (lambda: built("vit"), "alibi", {}, r"alibi: .* are a grid, and alibi has one dimension; give ndim=1 .* rope2d"),
    (lambda: built("vit"), "alibi", {"ndim": 2}, r"give ndim=1"),
    (lambda: built("vit"), "alibi", {"ndim": True}, r"ndim=True is no number of dimensions"),
    (lambda: built("vit"), "rope2d", {"ndim": 1}, r"ndim=1: rope2d has two dimensions"),
    (lambda: built("vit"), "nope", {"ndim": 1}, r"ndim=1: nope puts no places inside"),
    (lambda: built("vit"), "logn", {"ndim": 1}, r"ndim=1: logn puts no places inside"),
    (FAMILIES["bert"].build, "rope2d", {}, r"rope2d: the tokens of BertForMaskedLM stand in a row"),
    (FAMILIES["llama"].build, "alibi", {"ndim": 2}, r"ndim=2: the tokens of LlamaForCausalLM stand in a row"),
    (shuffling, "rope2d", {}, r"the patches of ViTMAEModel do not reach its attention whole and in order"),
    (small_heads, "rope2d", {}, r"head_dim=6 is no multiple of 4"),
    (pixtral, "rope2d", {}, r"the patches of PixtralVisionModel do not reach its attention whole .* one image in"),
    (lambda: built("beit_bias"), "logn", {}, r"logn joins what a model has, and BeitModel adds its own bias"),
    (lambda: built("vit"), "rope2d", {"convention": "yx"}, r"convention='yx' is unknown; did you mean 'xy'"),
    (lambda: built("vit"), "rope2d", {"kind": "diagonal"}, r"kind='diagonal' is unknown"),
    (lambda: built("vit"), "bias2d", {"init": "random"}, r"init='random' is unknown"),
]


@pytest.mark.parametrize(("build", "scheme", "params", "reason"), REFUSED, ids=[f"{r[1]}{r[2]}" for r in REFUSED])
def test_refused_and_untouched(build, scheme: str, params: dict, reason: str):
    model = build()
    before = state(model)
    with pytest.raises(PosSwapError, match=reason):
        patch_model(model, scheme, **params)
    unchanged(model, before)


def test_ndim_is_recorded_and_the_same_patch_twice_is_one():
    model = patch_model(built("vit"), "alibi", ndim=1)
    assert model.config.posswap["ndim"] == 1
    journal = model._posswap
    assert patch_model(model, "alibi", ndim=1)._posswap is journal
    assert "ndim" not in patch_model(built("vit"), "rope2d", ndim=2).config.posswap
    assert {"rope2d", "bias2d"} <= {*list_schemes()}
