"""fire - Functional Interpolation for Relative Positions Improves Long Context Transformers, https://arxiv.org/abs/2310.04418"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..errors import PosSwapError
from ..scheme import Scheme
from ..sites import BIAS, BiasChange, BiasGeometry, Tensors

GUESSES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # of c, when the network is fitted: how finely near distances are told apart
RIDGE = 1e-6  # of its output weights then


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
    fits: ClassVar = True

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
            fit=self.fit,
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

    def fit(self, profile):
        """A line that bends at even steps, by least squares, and goes on level behind the last; nothing is drawn.

        L becomes the longest distance met where init_L is shorter: up to there the bias is one of distances alone.
        """
        import torch

        longest = profile.distance.abs().max().item()
        threshold = float(max(self.init_L, longest))
        bends = torch.arange(self.mlp_width, dtype=torch.float64) / max(1, self.mlp_width - 1)
        found = []
        for c in GUESSES:
            x = (c * profile.distance.abs().double()).log1p() / torch.tensor(c * threshold).double().log1p()
            reach = x.max()  # of the text: all bends lie where it tells something
            steps = (x[:, None] - bends[:-1] * reach).relu()
            basis = torch.cat([steps, torch.ones(len(x), 1)], dim=1)
            weights, errors = profile.weights(basis, RIDGE)
            found.append((errors.sum().item(), c, reach, weights))
        _, c, reach, weights = min(found, key=lambda one: one[0])
        return {
            "c": torch.tensor(c),
            "L": torch.tensor(threshold),
            "hidden_weight": torch.ones(self.mlp_width),
            "hidden_bias": -bends * reach,
            "out_weight": torch.cat([weights[:, :-1], -weights[:, :-1].sum(1, keepdim=True)], dim=1),
            "out_bias": weights[:, -1],
        }
