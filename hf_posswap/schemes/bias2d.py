"""bias2d - BEiT: BERT Pre-Training of Image Transformers, section 2.1 and its code, https://arxiv.org/abs/2106.08254"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..scheme import Scheme
from ..sites import BIAS, BiasChange, BiasGeometry, Tensors

STARTS = ("alibi", "zeros")


@dataclass(frozen=True, kw_only=True)
class Bias2d(Scheme):
    """A learned number per head for every (rows, columns) between two patches, and three for tokens that are none.

    Of the grid that the model was trained on; for images of another the table is resampled, linearly (as transformers
    does BEiT's). The three: from such a token to a patch, from a patch to it, between two. per_layer: a table for
    each layer, BEiT's default; else one for all. init: `alibi` starts at ALiBi's slope times the logarithm of the
    distance, as the crow flies, `zeros` without any position.
    """

    name = "bias2d"
    paper = "https://arxiv.org/abs/2106.08254"
    sites: ClassVar = frozenset({BIAS})
    learns: ClassVar = "its table"
    fits: ClassVar = True
    ndim: ClassVar = 2

    per_layer: bool = True
    init: str = "alibi"

    def __post_init__(self) -> None:
        self.check_choice("per_layer", (False, True))
        self.check_choice("init", STARTS)

    def bias(self, site: BiasGeometry) -> BiasChange:
        import torch

        from ..relative import alibi_slopes

        rows, columns = (torch.arange(1 - side, side).float() for side in site.grid)
        table = torch.zeros(site.heads, len(rows), len(columns))
        if self.init == "alibi":
            away = (rows[:, None] ** 2 + columns**2).sqrt()
            table = -torch.tensor(alibi_slopes(site.heads))[:, None, None] * away.log1p()
        return BiasChange(
            between=self.between,
            parameters={"table": table, "beside": torch.zeros(site.heads, 3)},
            shared=not self.per_layer,
            fit=self.fit,
        )

    @staticmethod
    def fit(profile):
        """The mean at each difference of two places, and of each kind of pair beside them."""
        return {"table": profile.mean[:, :-3], "beside": profile.mean[:, -3:]}

    @staticmethod
    def between(tensors: Tensors, rows: int, columns: int):
        import torch.nn.functional as F

        table, size = tensors["table"], (2 * rows - 1, 2 * columns - 1)
        if table.shape[1:] == size:
            return table
        return F.interpolate(table[None], size=size, mode="bilinear", align_corners=False)[0]
