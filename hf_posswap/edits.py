"""Edits: the only way this package changes a model, so that every change can be taken back and made again.

An edit holds one side while the model holds the other; `swap` exchanges them. Applying, undoing and redoing are
the same operation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

ABSENT = "<absent>"  # a string: an edit must survive pickling and deepcopy, where object() would not stay itself


@dataclass
class Replace:
    """Exchange the attribute `name` of `owner` (module, config, tokenizer) for `value`."""

    owner: Any
    name: str
    value: Any
    where: str = ""

    @property
    def current(self) -> Any:
        if not isinstance(self.owner, nn.Module):
            return getattr(self.owner, self.name, ABSENT)
        for store in (self.owner._parameters, self.owner._buffers, self.owner._modules, vars(self.owner)):
            if self.name in store:
                return store[self.name]
        return ABSENT

    @property
    def is_idle(self) -> bool:
        """Whether both sides are equal."""
        return same(self.current, self.value)

    def swap(self) -> None:
        outgoing, incoming = self.current, self.value
        if isinstance(outgoing, Tensor) and isinstance(incoming, Tensor):
            incoming = _follow(incoming, outgoing)
        if isinstance(incoming, str) and incoming == ABSENT:
            if not (isinstance(outgoing, str) and outgoing == ABSENT):
                delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, incoming)
        self.value = outgoing

    def __str__(self) -> str:
        return f"{self.where or type(self.owner).__name__}.{self.name}: {_short(self.current)} -> {_short(self.value)}"


@dataclass
class Hook:
    """Install, or remove, a forward pre-hook that sees keyword arguments; `after`: a hook behind the forward."""

    owner: nn.Module
    function: Callable
    where: str = ""
    after: bool = False
    handle: Any = None

    def swap(self) -> None:
        if self.handle is None and self.after:
            self.handle = self.owner.register_forward_hook(self.function)
        elif self.handle is None:
            self.handle = self.owner.register_forward_pre_hook(self.function, with_kwargs=True)
        else:
            self.handle.remove()
            self.handle = None

    def __str__(self) -> str:
        name = getattr(self.function, "func", self.function).__name__
        return f"{self.where or type(self.owner).__name__}: {'after' if self.after else 'before'} forward, {name}"


@dataclass
class Journal:
    """Edits in order. `apply` makes all of them or none; `revert` takes them back in reverse."""

    edits: list[Replace | Hook] = field(default_factory=list)

    def apply(self) -> None:
        self._swap(self.edits)

    def revert(self) -> None:
        self._swap(self.edits[::-1])

    @staticmethod
    def _swap(edits: list[Replace | Hook]) -> None:
        done: list[Replace | Hook] = []
        try:
            for edit in edits:
                edit.swap()
                done.append(edit)
        except BaseException:
            for edit in reversed(done):
                edit.swap()
            raise


def same(a: Any, b: Any) -> bool:
    """Equality that understands tensors; on the meta device, where there are no values, of shapes."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or a.is_meta or b.is_meta:
            return a.shape == b.shape
        return bool((a.to(b.device) == b).all())
    return type(a) is type(b) and a == b


def _follow(incoming: Tensor, outgoing: Tensor) -> Tensor:
    """`incoming` where the model has meanwhile been moved to; a parameter also in the model's dtype."""
    dtype = outgoing.dtype if isinstance(incoming, nn.Parameter) else incoming.dtype
    if incoming.device == outgoing.device and incoming.dtype == dtype:
        return incoming
    moved = incoming.detach().to(outgoing.device, dtype)
    return nn.Parameter(moved, incoming.requires_grad) if isinstance(incoming, nn.Parameter) else moved


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{type(value).__name__}{tuple(value.shape)}"
    if callable(value):
        return getattr(getattr(value, "func", value), "__name__", repr(value))
    return value if value == ABSENT else repr(value)
