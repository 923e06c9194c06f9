"""Patch embeddings: a kernel applied to patches that do not overlap, of images (2-D) or of video (3-D tubelets).

Shapes: E width, C channels, K... one kernel size per axis, S... pixels per axis, N... patches per axis.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .edits import Replace
from .errors import PosSwapError

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def resize_kernel(kernel: Tensor, size: tuple[int, ...]) -> Tensor:
    """(E, C, K...) -> (E, C, *size): FlexiViT, https://arxiv.org/abs/2212.08013, section 3.4.

    The kernel w' that reads the resized patch B x most nearly as w reads the patch x, for x of uncorrelated pixels:
    w' = pinv(B^T) w, where B is linear interpolation, against aliasing where it shrinks. A larger patch is read
    exactly. B is one matrix for each axis, and so is its pseudo-inverse. Computed in float64; the dtype is kept.
    """
    if len(size) != kernel.dim() - 2 or any(type(s) is not int or s < 1 for s in size):
        raise PosSwapError(f"patch_size={size!r} is not {kernel.dim() - 2} positive integers")
    resized = kernel.double()
    for axis, (old, new) in enumerate(zip(kernel.shape[2:], size, strict=True), start=2):
        if old != new:
            inverse = torch.linalg.pinv(_interpolation(old, new).T)
            resized = torch.tensordot(resized, inverse, dims=([axis], [1])).movedim(-1, axis)
    return kernel if resized.shape == kernel.shape else resized.to(kernel.dtype).contiguous()


def _interpolation(old: int, new: int) -> Tensor:
    """(new, old), float64: what linear interpolation does to one axis."""
    identity = torch.eye(old, dtype=torch.float64)[None, None]
    return F.interpolate(identity, size=(new, old), mode="bilinear", align_corners=False, antialias=True)[0, 0]


def rechannel_kernel(kernel: Tensor, channels: int) -> Tensor:
    """(E, C, K...) -> (E, channels, K...): what it made of grey, it makes of the same grey in other channels.

    To fewer channels their sum is shared out evenly; to more they are repeated in turn, each with its copies summing
    to what it was. The sum over channels stays; to one channel it is what timm does.
    """
    if type(channels) is not int or channels < 1:
        raise PosSwapError(f"num_channels={channels!r} is not a positive integer")
    old = kernel.shape[1]
    if channels == old:
        return kernel
    if channels < old:
        shared = kernel.double().sum(1, keepdim=True) / channels
        return shared.expand(-1, channels, *kernel.shape[2:]).to(kernel.dtype).contiguous()
    source = torch.arange(channels, device=kernel.device) % old
    copies = torch.bincount(source, minlength=old).to(torch.float64)
    scale = (1 / copies[source]).reshape(-1, *[1] * (kernel.dim() - 2))
    return (kernel.double()[:, source] * scale).to(kernel.dtype)


def unfold_patches(pixels: Tensor, size: tuple[int, ...]) -> Tensor:
    """(B, C, S...) -> (B, N..., C * prod K): each patch as a vector, channel first; a rest at the end is dropped."""
    counts = [pixels.shape[axis] // k for axis, k in enumerate(size, start=2)]
    for axis, (count, k) in enumerate(zip(counts, size, strict=True), start=2):
        pixels = pixels.narrow(axis, 0, count * k)
    split = pixels.reshape(*pixels.shape[:2], *[n for pair in zip(counts, size, strict=True) for n in pair])
    axes = range(2, split.dim())
    return split.permute(0, *axes[::2], 1, *axes[1::2]).flatten(len(size) + 1)


def as_linear(convolution: nn.Module, pixels: Tensor) -> Tensor:
    """A patch convolution's forward by one matrix product: (B, C, S...) -> (B, E, N...), equal to rounding."""
    flat = unfold_patches(pixels, convolution.kernel_size)
    return F.linear(flat, convolution.weight.flatten(1), convolution.bias).movedim(-1, 1)


def as_convolution(linear: nn.Linear, patches: Tensor, *, size: tuple[int, ...]) -> Tensor:
    """A patch projection's forward by a convolution: patches (..., prod K * C), channel last, -> (..., E).

    transformers' models that take patches instead of pixels (SigLIP 2) lay them out so.
    """
    channels = linear.in_features // math.prod(size)
    kernel = linear.weight.unflatten(1, (*size, channels)).movedim(-1, 1)
    pixels = patches.reshape(-1, *size, channels).movedim(-1, 1)
    convolve = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(size)]
    return convolve(pixels, kernel, linear.bias).flatten(1).unflatten(0, patches.shape[:-1])


def is_patch_convolution(module: nn.Module) -> bool:
    """Whether patches do not overlap and all of a patch is read: then it is a matrix product in another form."""
    return (
        isinstance(module, CONVOLUTIONS)
        and tuple(module.kernel_size) == tuple(module.stride)
        and module.groups == 1
        and set(module.dilation) == {1}
        and module.padding in ("valid", (0,) * len(module.kernel_size))
        and max(module.kernel_size) > 1
    )


def linear_form(convolution: nn.Module) -> Replace:
    """The edit that makes a patch convolution compute by a matrix product; its parameters stay as they are named."""
    if not is_patch_convolution(convolution):
        raise PosSwapError(f"{convolution} is no patch embedding: its patches overlap, or are not read whole")
    return Replace(convolution, "forward", partial(as_linear, convolution))


def convolution_form(linear: nn.Linear, size: tuple[int, ...]) -> Replace:
    """The edit that makes a projection of patches of that size compute by a convolution."""
    if not isinstance(linear, nn.Linear) or linear.in_features % math.prod(size):
        raise PosSwapError(f"{linear} is no projection of patches of {size} pixels")
    return Replace(linear, "forward", partial(as_convolution, linear, size=tuple(size)))
