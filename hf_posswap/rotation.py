"""Pure rotation of queries and keys by their place, for attention that had none. No state, no transformers.

Halves pairing: dimension i turns with i + R / 2,
    before  [a_0 a_1 | b_0 b_1 | rest]        after  [a cos - b sin | b cos + a sin | rest]
interleaved: dimension 2i turns with 2i + 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Rotation:
    """Angles place * frequencies (R/2,), `scale` on q and k each; `decay` is xPos's scale base around `centre`."""

    frequencies: Tensor
    scale: float = 1.0
    interleaved: bool = False
    decay: float | None = None
    centre: int = 0

    def move(self, to: Callable[[Tensor], Tensor]) -> Rotation:
        return Rotation(to(self.frequencies), self.scale, self.interleaved, self.decay, self.centre)

    def tables(self, x: Tensor, places: Tensor, is_key: bool) -> tuple[Tensor, Tensor]:
        """What `turn` needs for the places (S,) or (B, S) of x (B, H, S, D): cos and sin (S, R) or (B, 1, S, R), in its
        dtype. The first of the two dimensions of a pair has its sine negative.
        """
        places = places if places.dim() == 1 else places[:, None]
        angle = places[..., None].float() * self.frequencies.to(x.device)
        cos, sin = angle.cos() * self.scale, angle.sin() * self.scale
        if self.decay is not None:
            size = self._decay(places - self.centre, is_key)
            cos, sin = cos * size, sin * size
        along = -1 if self.interleaved else -2
        return tuple(torch.stack(both, along).flatten(-2).to(x.dtype) for both in ((cos, cos), (-sin, sin)))

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x (B, H, S, D) turned by `tables` -> the same shape."""
        width = cos.shape[-1]
        if width < x.shape[-1]:
            return torch.cat((self.turn(x[..., :width], cos, sin), x[..., width:]), dim=-1)
        partner = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if self.interleaved else x.roll(width // 2, -1)
        return torch.addcmul(x * cos, partner, sin)

    def _decay(self, places: Tensor, is_key: bool) -> Tensor:
        """zeta_i^(n / decay) on queries and its inverse on keys (xPos, eq. 14): (S, R/2)."""
        half = self.frequencies.shape[-1]
        zeta = (torch.arange(half, device=places.device) / half + 0.4) / 1.4
        power = places[..., None].float() / self.decay
        return zeta ** (-power if is_key else power)
