"""Pure rotation of queries and keys by their place, for attention that had none. No state, no transformers.

Halves pairing: dimension i turns with i + R / 2,
    before  [a_0 a_1 | b_0 b_1 | rest]        after  [a cos - b sin | b cos + a sin | rest]
interleaved: dimension 2i turns with 2i + 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Rotation:
    """Angles coordinates * frequencies, summed over the axes: (ndim, R/2), or (H, ndim, R/2) where heads have own ones.

    `scale` multiplies q and k each; `decay` is xPos's scale base around `centre`. `learned`: the frequencies are those
    at the start. `of_image`: coordinates are of an image from -2 pi to 2 pi, whatever its size.
    """

    frequencies: Tensor
    scale: float = 1.0
    interleaved: bool = False
    decay: float | None = None
    centre: int = 0
    learned: bool = False
    of_image: bool = False

    def of(self, frequencies: Tensor) -> Rotation:
        """The same with other frequencies, or with these elsewhere."""
        return replace(self, frequencies=frequencies)

    @property
    def ndim(self) -> int:
        return self.frequencies.shape[-2]

    def tables(self, coordinates: Tensor, is_key: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """What `turn` needs for tokens at coordinates (S, ndim), or (B, 1, S, ndim) where each row has its own: cos and
        sin (S, R) or (H, S, R), or (B, 1, S, R) or (B, H, S, R).

        The first of the two dimensions of a pair has its sine negative.
        """
        angle = (coordinates[..., None].float() * self.frequencies.to(coordinates.device)[..., None, :, :]).sum(-2)
        cos, sin = angle.cos() * self.scale, angle.sin() * self.scale
        if self.decay is not None:
            size = self._decay(coordinates - self.centre, is_key)
            cos, sin = cos * size, sin * size
        along = -1 if self.interleaved else -2
        return tuple(torch.stack(both, along).flatten(-2).to(dtype) for both in ((cos, cos), (-sin, sin)))

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x (B, H, S, D) turned by `tables` -> the same shape."""
        width = cos.shape[-1]
        if width < x.shape[-1]:
            return torch.cat((self.turn(x[..., :width], cos, sin), x[..., width:]), dim=-1)
        partner = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if self.interleaved else x.roll(width // 2, -1)
        return torch.addcmul(x * cos, partner, sin)

    def _decay(self, places: Tensor, is_key: bool) -> Tensor:
        """zeta_i^(n / decay) on queries, its inverse on keys (xPos, eq. 14), at places n (..., S, 1): (..., S, R/2)."""
        half = self.frequencies.shape[-1]
        zeta = (torch.arange(half, device=places.device) / half + 0.4) / 1.4
        power = places.float() / self.decay
        return zeta ** (-power if is_key else power)
