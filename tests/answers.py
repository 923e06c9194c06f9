"""What a model answers, whatever its output calls it. Nothing here needs hf_posswap: `reload.py` runs without it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def first(output: Any) -> Tensor:
    """Logits, or what else a model gives first; of a backbone its maps (B, ...) as one row (B, n) for each input."""
    found = output["logits"] if "logits" in output else output[0]
    return found if isinstance(found, Tensor) else torch.cat([one.flatten(1) for one in found], 1)
