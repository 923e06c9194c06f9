"""Patch embeddings: exact changes of form, and kernels for other patch sizes and channels."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn
from transformers import Siglip2VisionConfig, Siglip2VisionModel, ViTConfig, ViTModel, VivitConfig, VivitModel

from hf_posswap import PosSwapError
from hf_posswap.patches import convolution_form, linear_form, rechannel_kernel, resize_kernel, unfold_patches

CONVOLUTIONS = {
    "1-D": (nn.Conv1d(2, 8, 4, 4), (2, 2, 18)),
    "square": (nn.Conv2d(3, 8, 4, 4), (2, 3, 16, 16)),
    "no bias": (nn.Conv2d(3, 8, 4, 4, bias=False), (2, 3, 16, 24)),
    "oblong": (nn.Conv2d(3, 8, (4, 2), (4, 2)), (2, 3, 12, 10)),
    "a rest": (nn.Conv2d(3, 8, 4, 4), (2, 3, 18, 19)),
    "tubelets": (nn.Conv3d(3, 8, (2, 4, 4), (2, 4, 4)), (2, 3, 4, 16, 8)),
}
cases = pytest.mark.parametrize("case", CONVOLUTIONS)


def built(case: str) -> tuple[nn.Module, torch.Tensor]:
    convolution, shape = CONVOLUTIONS[case]
    return copy.deepcopy(convolution), torch.randn(shape, generator=torch.Generator().manual_seed(0))


@cases
def test_linear_form_gives_the_same_and_is_undone(case: str):
    convolution, pixels = built(case)
    names, before = list(convolution.state_dict()), convolution(pixels)
    edit = linear_form(convolution)
    edit.swap()
    after = convolution(pixels)
    assert after.shape == before.shape
    torch.testing.assert_close(after, before)
    assert list(convolution.state_dict()) == names
    edit.swap()
    assert torch.equal(convolution(pixels), before)


@cases
def test_linear_form_has_the_gradients_of_the_convolution(case: str):
    convolution, pixels = built(case)
    twin = copy.deepcopy(convolution)
    linear_form(twin).swap()
    for module in (convolution, twin):
        module(pixels).square().sum().backward()
    torch.testing.assert_close(twin.weight.grad, convolution.weight.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "overlapping",
    [nn.Conv2d(3, 8, 4, 2), nn.Conv2d(3, 8, 4, 4, padding=1), nn.Conv2d(4, 8, 4, 4, groups=2), nn.Linear(4, 8)],
    ids=["stride", "padding", "groups", "linear"],
)
def test_what_is_no_patch_embedding_is_refused(overlapping: nn.Module):
    with pytest.raises(PosSwapError, match="no patch embedding"):
        linear_form(overlapping)


@pytest.mark.parametrize("model", ["vit", "vivit"])
def test_linear_form_inside_a_model(model: str):
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    if model == "vit":
        model = ViTModel(ViTConfig(**small, image_size=32, patch_size=8)).eval()
        pixels = torch.randn(2, 3, 32, 32)
    else:
        model = VivitModel(VivitConfig(**small, image_size=32, num_frames=4, tubelet_size=[2, 8, 8])).eval()
        pixels = torch.randn(2, 4, 3, 32, 32)
    (convolution,) = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Conv3d))]
    with torch.no_grad():
        before = model(pixels).last_hidden_state
        linear_form(convolution).swap()
        torch.testing.assert_close(model(pixels).last_hidden_state, before)


def test_convolution_form_of_a_model_that_takes_patches():
    torch.manual_seed(0)
    config = Siglip2VisionConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, patch_size=4, num_patches=16
    )
    (linear,) = [m for m in Siglip2VisionModel(config).modules() if isinstance(m, nn.Linear) and m.in_features == 48]
    image = torch.randn(2, 3, 16, 16)
    patches = unfold_patches(image, (4, 4)).unflatten(-1, (3, 4, 4)).movedim(-3, -1).flatten(-3).flatten(1, 2)
    before = linear(patches)
    edit = convolution_form(linear, (4, 4))
    edit.swap()
    torch.testing.assert_close(linear(patches), before)
    edit.swap()
    assert torch.equal(linear(patches), before)


@pytest.mark.parametrize("module", [nn.Linear(10, 4), nn.Conv2d(3, 8, 4, 4)], ids=["size", "kind"])
def test_what_is_no_projection_of_patches_is_refused(module: nn.Module):
    with pytest.raises(PosSwapError, match="no projection"):
        convolution_form(module, (4, 4))


def naive_resize(old: int, new: int) -> np.ndarray:
    """(new, old): the triangle filter, as wide as a step where it shrinks, at the centres of the new pixels."""
    step = max(1.0, old / new)
    found = np.zeros((new, old))
    for i in range(new):
        centre = (i + 0.5) * old / new - 0.5
        found[i] = [max(0.0, 1 - abs(j - centre) / step) for j in range(old)]
        if step == 1.0:  # beyond the edge the edge pixel stands
            found[i, 0] += max(0.0, -centre)
            found[i, -1] += max(0.0, centre - (old - 1))
        found[i] /= found[i].sum()
    return found


@pytest.mark.parametrize(("old", "new"), [(4, 8), (4, 6), (8, 4), (6, 4), (8, 7)])
def test_resized_kernel_is_the_least_squares_answer(old: int, new: int):
    """Of the normal equations, built of loops: the kernel w' that makes |w' B - w|^2 least, by numpy's lstsq."""
    kernel = torch.randn(5, 3, old, old, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    matrix = naive_resize(old, new)
    both = np.kron(matrix, matrix)  # of a patch's pixels, row by row
    expected, *_ = np.linalg.lstsq(both.T, kernel.reshape(15, -1).numpy().T, rcond=None)
    found = resize_kernel(kernel, (new, new)).reshape(15, -1)
    np.testing.assert_allclose(found.numpy(), expected.T, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("size", [(8, 8), (6, 10), (4, 4)])
def test_larger_patch_is_read_as_the_smaller_was(size):
    """FlexiViT's reason for the pseudo-inverse: the token of an enlarged patch is the token of the patch."""
    generator = torch.Generator().manual_seed(0)
    kernel, patch = (torch.randn(n, 3, 4, 4, dtype=torch.float64, generator=generator) for n in (5, 2))
    enlarged = torch.nn.functional.interpolate(patch, size=size, mode="bilinear", align_corners=False)
    before = torch.einsum("echw,bchw->be", kernel, patch)
    after = torch.einsum("echw,bchw->be", resize_kernel(kernel, size), enlarged)
    torch.testing.assert_close(after, before)


def test_tubelets_are_resized_in_time_too():
    kernel = torch.randn(5, 3, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    longer = resize_kernel(kernel, (4, 4, 4))
    still = torch.ones(4, 1, 1) * torch.randn(3, 1, 4, 4)
    torch.testing.assert_close((longer * still).sum((1, 2, 3, 4)), (kernel * still[:, :2]).sum((1, 2, 3, 4)))


def test_identity_is_exact():
    kernel = torch.randn(5, 3, 4, 4).bfloat16()
    assert resize_kernel(kernel, (4, 4)) is kernel
    assert rechannel_kernel(kernel, 3) is kernel


@pytest.mark.parametrize("channels", [1, 2, 4, 6, 7])
def test_grey_is_read_as_before_in_any_number_of_channels(channels: int):
    kernel, grey = torch.randn(5, 3, 4, 4), torch.randn(2, 1, 4, 4)
    before = torch.einsum("echw,bchw->be", kernel, grey.expand(-1, 3, -1, -1))
    after = torch.einsum("echw,bchw->be", rechannel_kernel(kernel, channels), grey.expand(-1, channels, -1, -1))
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [(8,), (8, 0), (8, 8, 8), (8.0, 8)])
def test_impossible_patch_size_is_refused(size):
    with pytest.raises(PosSwapError, match="patch_size"):
        resize_kernel(torch.zeros(math.prod((2, 3)), 3, 4, 4), size)


@pytest.mark.parametrize("channels", [0, -1, 2.5, True])
def test_impossible_channels_are_refused(channels):
    with pytest.raises(PosSwapError, match="num_channels"):
        rechannel_kernel(torch.zeros(6, 3, 4, 4), channels)
