"""rope2d - Rotary Position Embedding for Vision Transformer, https://arxiv.org/abs/2403.13298"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..errors import PosSwapError
from ..scheme import Scheme
from ..sites import ROTARY, RotaryChange, RotaryGeometry

KINDS = ("axial", "mixed")
CONVENTIONS = ("ij", "xy")
COORDINATES = ("patches", "image")
ORDERS = ("halves", "interleaved")
THETAS = {"axial": 100.0, "mixed": 10.0}  # of the paper, sections 3.2 and 3.3


@dataclass(frozen=True, kw_only=True)
class Rope2d(Scheme):
    """Pairs of dimensions of a patch's q and k turned by its row and its column; other tokens are left as they are.

    kind: `axial`, half of a head's pairs turned by one axis and half by the other, each by theta_i = rope_theta^(-4i/D)
    (eq. 5); `mixed`, every pair by both, with learned frequencies for each head and layer (eq. 7) that start as axial
    ones, aslant by another angle in each head.
    rope_theta: base of the frequencies, no unit (100 for axial and 10 for mixed, the paper's, where None).
    convention: which axis turns the first half of the pairs: `ij` the row (DINOv3, Pixtral, Qwen2-VL), `xy` the column
    (the paper's code, SAM 2, Llama 4).
    coordinates: `patches`, whole numbers, an angle is radians per patch (the paper's code, SAM 2, Pixtral, Qwen2-VL);
    `image`, of a patch's centre, from -2 pi to 2 pi over each side of the image whatever its size (DINOv3).
    pairing: which two dimensions are a pair, `halves` (i, i + D/2; DINOv3, Pixtral) or `interleaved` (2i, 2i + 1; the
    paper's code, SAM 2).
    """

    name = "rope2d"
    paper = "https://arxiv.org/abs/2403.13298"
    sites: ClassVar = frozenset({ROTARY})
    in_attention: ClassVar = True
    learns: ClassVar = "its frequencies, with kind='mixed'"
    ndim: ClassVar = 2

    kind: str = "axial"
    rope_theta: float | None = None
    convention: str = "ij"
    coordinates: str = "patches"
    pairing: str = "halves"

    def __post_init__(self) -> None:
        self.check_choice("kind", KINDS)
        self.check_number("rope_theta", above=0)
        self.check_choice("convention", CONVENTIONS)
        self.check_choice("coordinates", COORDINATES)
        self.check_choice("pairing", ORDERS)

    def rotary(self, site: RotaryGeometry) -> RotaryChange:
        if site.head_dim % 4:
            raise PosSwapError(
                f"rope2d: head_dim={site.head_dim} is no multiple of 4: two axes with pairs of their own"
            )
        return RotaryChange(
            {},
            config_length=site.length,
            length=site.length,
            pairing=self.pairing,
            frequencies=self.frequencies(site.heads, site.head_dim),
            learned=self.kind == "mixed",
            of_image=self.coordinates == "image",
        )

    def frequencies(self, heads: int, dim: int):
        """(2, D/2), or (H, 2, D/2) where heads differ, by row and by column."""
        import math

        import torch

        theta = self.rope_theta or THETAS[self.kind]
        sizes = theta ** (-torch.arange(0, dim, 4, dtype=torch.float64) / dim)
        angles = torch.zeros(1, 1, dtype=torch.float64)
        if self.kind == "mixed":  # the authors draw them; a quarter of a turn brings back the same axes
            angles = torch.arange(heads, dtype=torch.float64)[:, None] / heads * math.pi / 2
        first = torch.cat([sizes * angles.cos(), -sizes * angles.sin()], -1)
        second = torch.cat([sizes * angles.sin(), sizes * angles.cos()], -1)
        axes = (first, second) if self.convention == "ij" else (second, first)
        found = torch.stack(axes, -2).float()
        return found if self.kind == "mixed" else found[0]
