"""A stand-in for LayoutLMv2's visual backbone, which is of detectron2: that is not among the packages one can install.

What it makes of an image has the shape of the real one's, (B, rows * columns, channels), from a pooled image and one
linear map. Text, layout, image tokens and attention around it are transformers' own code: those are what is tested.
LayoutXLM is LayoutLMv2's architecture; transformers has no other class for it.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn
from transformers.models.layoutlmv2 import modeling_layoutlmv2


class Backbone(nn.Module):
    """In place of detectron2's feature pyramid: images (B, 3, height, width) -> (B, rows * columns, channels)."""

    def __init__(self, config) -> None:
        super().__init__()
        rows, columns, channels = config.image_feature_pool_shape
        self.cfg = SimpleNamespace(MODEL=SimpleNamespace(PIXEL_MEAN=[0.0] * 3, PIXEL_STD=[1.0] * 3))
        for name in ("pixel_mean", "pixel_std"):
            self.register_buffer(name, torch.zeros(3, 1, 1), persistent=False)
        self.pool = nn.AdaptiveAvgPool2d((rows, columns))
        self.channels = nn.Conv2d(3, channels, 1)

    def forward(self, images):
        pooled = self.pool((images - self.pixel_mean) / self.pixel_std)
        return self.channels(pooled).flatten(2).transpose(1, 2)


class FrozenBatchNorm2d(nn.Module):
    """Nothing is one; transformers asks."""


def stand_in() -> None:
    """From now on transformers builds LayoutLMv2 in this process, with that backbone."""
    modeling_layoutlmv2.LayoutLMv2VisualBackbone = Backbone
    modeling_layoutlmv2.requires_backends = lambda model, backends: None
    modeling_layoutlmv2.detectron2 = SimpleNamespace(layers=SimpleNamespace(FrozenBatchNorm2d=FrozenBatchNorm2d))
