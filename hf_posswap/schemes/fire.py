"""fire - Functional Interpolation for Relative Positions Improves Long Context Transformers, https://arxiv.org/abs/2310.04418"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..errors import PosSwapError
from ..scheme import Scheme
from ..sites import BIAS, BiasChange, BiasGeometry, Tensors


@dataclass(frozen=True, kw_only=True)
class Fire(Scheme):
    """A small learned network of the distance, relative to how far the query can look: f(psi(i - j) / psi(max(L, i))).

    psi(x) = log(c x + 1) with learned c (0.1 at first), L a learned threshold (eq. 4). mlp_width: hidden units of f.
    init_L: the threshold at first, in tokens. per_layer: a network for each layer; else one for all (FIRE-S).
    """

    name = "fire"
    paper = "https://arxiv.org/abs/2310.04418"
    sites: ClassVar = frozenset({BIAS})
    learns: ClassVar = "its network"

    mlp_width: int = 32
    init_L: int = 512
    per_layer: bool = False

    def __post_init__(self) -> None:
        self.check_count("mlp_width")
        self.check_count("init_L")
        self.check_choice("per_layer", (False, True))

    def bias(self, site: BiasGeometry) -> BiasChange:
        import torch

        if not site.causal:
            raise PosSwapError("fire: it divides by how far a causal query can look, and this model is not causal")
        generator = torch.Generator().manual_seed(0)

        def uniform(*shape: int, fan_in: int):  # as torch's own Linear starts
            return (2 * torch.rand(shape, generator=generator) - 1) * fan_in**-0.5

        width = self.mlp_width
        return BiasChange(
            placed=self.network,
            parameters={
                "c": torch.tensor(0.1),
                "L": torch.tensor(float(self.init_L)),
                "hidden_weight": uniform(width, fan_in=1),
                "hidden_bias": uniform(width, fan_in=1),
                "out_weight": uniform(site.heads, width, fan_in=width),
                "out_bias": uniform(site.heads, fan_in=width),
            },
            shared=not self.per_layer,
        )

    @staticmethod
    def network(tensors: Tensors, distance, position):
        import torch

        c = tensors["c"].abs()
        reach = position.float().maximum(tensors["L"].abs())
        x = (c * distance.abs()).log1p() / (c * reach).log1p().clamp(min=1e-6)  # (..., Q, K)
        weight, bias = (tensors[f"hidden_{what}"][:, None, None] for what in ("weight", "bias"))
        hidden = (x[..., None, :, :] * weight + bias).relu()  # (..., width, Q, K)
        heads = tensors["out_weight"]
        return torch.einsum("hw,...wqk->...hqk", heads, hidden) + tensors["out_bias"][:, None, None]
