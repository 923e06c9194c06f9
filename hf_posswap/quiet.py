"""A model run for measuring: nothing of the run stays behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from .anatomy import follows_rotary_contract
from .planning.plan import plain_state


@contextmanager
def quiet(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and rotary buffers that a long input may have regrown put back."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    rotary = [m for m in model.modules() if follows_rotary_contract(m)]
    state = [(m, dict(m._buffers), {n: b.clone() for n, b in m._buffers.items()}, plain_state(m)) for m in rotary]
    try:
        yield
    finally:
        for module in training:
            module.training = True
        for module, buffers, values, plain in state:
            module._buffers.update(buffers)
            for name, value in values.items():
                buffers[name].copy_(value)  # transformers writes longrope's into the buffer itself
            for name, value in plain.items():
                setattr(module, name, value)
