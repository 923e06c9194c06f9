"""Listening: what the positions of a model add to its attention logits, counted while it runs.

Attention modules are listened to through transformers' attention interface, under names of their own beside those of
`attention.py`. What positions add to a logit:
    rotary   q R(d) k - q k: every module is run a second time, unrotated, on the hidden states that it really gets
    table    E[q] E[k] at two positions, the means over the text of what each position makes of its query and key; of
             patches, less what is left of it without a place: the product of the means over all of them
    bias     itself
`Contents` hears what queries and keys are without a table of positions, in a second run of every batch.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from .anatomy import Anatomy, AttentionDeclaration, own_attention
from .attention import ATTRIBUTE, DENSE, PLACES, Places, stock
from .edits import Hook, Journal, Replace
from .parts import exchange_rotation
from .planning.attention import is_causal, reroute_edits
from .planning.images import is_image
from .planning.page import box_guard
from .planning.plan import Plan
from .planning.table import silence_table
from .profile import Pairs, Tally
from .projections import TracingEar
from .quiet import quiet
from .sites import EMBED, KEEP, RELATIVE, ROTARY, ROTARY_2D

HEARD = "posswap_heard_"  # names in the attention interface: the stock backend, listened to
PAIRS_AT_ONCE = 2**22  # of queries and keys: 16 MiB of float32 logits


def turns(anatomy: Anatomy) -> bool:
    """Whether the model hands its layers a rotation, by place or by row and column."""
    return bool(anatomy.sites & {ROTARY, ROTARY_2D})


def replaced_bias(anatomy: Anatomy) -> bool:
    """Whether the model has a learned bias of distances that a swap replaces."""
    return bool(anatomy.bias and anatomy.bias.tables) and anatomy.biases.get(RELATIVE) != KEEP


def listen(
    new: Plan,
    modules: Iterable[nn.Module],
    batches: Iterable[Mapping[str, Tensor]],
    pairs: Pairs | None,
    also: Callable[[Mapping[str, Tensor]], None] | None = None,
) -> dict[nn.Module, Tally]:
    """Run the source model on batches without padding, and count what its positions add in each attention module.

    pairs: of the tokens of an image, which count together. also: what else is done with every batch.
    """
    anatomy, own = new.anatomy, own_attention(new.anatomy.model)
    kind = TurnedEar if turns(anatomy) else PlacedEar if EMBED in anatomy.sites else BiasedEar
    ears = {module: kind(is_causal(module, own.get(module)), pairs) for module in modules}
    edits = [edit for module, ear in ears.items() for edit in ear.edits(module)]
    edits += _within_hearing(anatomy, {module: own.get(module) for module in ears})
    longest = 0
    with quiet(anatomy.model), torch.no_grad(), _applied(edits):
        for inputs in batches:
            count = inputs["input_ids"].shape[1] if pairs is None else len(pairs.kind)
            if replaced_bias(anatomy) and count > longest:
                longest = count
                for module, bias in _biases(anatomy, ears, inputs).items():
                    ears[module].bias = bias[:, :count, :count]
            for ear in ears.values():
                ear.tokens = count
            _run(anatomy, inputs)
            if also is not None:
                also(inputs)
    return {module: ear.tally() for module, ear in ears.items()}


def _run(anatomy: Anatomy, inputs: Mapping[str, Tensor]) -> None:
    """One forward, without a head of text; a decoder reads what its encoder does."""
    model = anatomy.model if is_image(anatomy) else anatomy.model.base_model
    given = {name: value.to(model.device) for name, value in inputs.items()}
    if "decoder_input_ids" in inspect.signature(model.forward).parameters:
        given["decoder_input_ids"] = given["input_ids"]
    if "use_cache" in inspect.signature(model.forward).parameters:
        given["use_cache"] = False
    model(**given)


def _biases(anatomy: Anatomy, modules: Iterable[nn.Module], inputs: Mapping[str, Tensor]) -> dict[nn.Module, Tensor]:
    """What each module itself adds to the logits, (H, S, S), heard on one row; not what it adds for the page."""
    ears = {module: BiasEar() for module in modules}
    page = anatomy.page.spatial.values() if anatomy.page is not None else ()
    silent = [
        Replace(table.owner, table.attribute, nn.Parameter(torch.zeros_like(table.weight), requires_grad=False))
        for table in page
    ]
    with _applied([*silent, *(Replace(module, ATTRIBUTE, (ear,)) for module, ear in ears.items())]):
        _run(anatomy, {name: value[:1] for name, value in inputs.items()})
    return {module: ear.bias for module, ear in ears.items()}


def _within_hearing(anatomy: Anatomy, modules: Mapping[nn.Module, AttentionDeclaration | None]) -> list[Replace | Hook]:
    """Edits that lead attention past the ears; modules of declared families first to transformers' interface."""
    edits: list[Replace | Hook] = [] if anatomy.page is None else [box_guard(anatomy.page)]
    for module, declaration in modules.items():
        if declaration is not None:
            edits += [*reroute_edits(module, declaration, anatomy.config), Hook(module, _hand_no_places)]
    dense = DENSE if any(modules.values()) else ""
    configs = {id(c): c for c in (getattr(module, "config", anatomy.config) for module in modules)}
    for config in configs.values():
        backend = "eager" if config._attn_implementation == "eager" else "sdpa"
        edits.append(Replace(config, "_attn_implementation_internal", f"{HEARD}{dense}{backend}"))
    return edits


def _hand_no_places(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Before a module that was led to the interface: it hands on where tokens stand, which no ear asks."""
    return args, kwargs | {PLACES: Places()}


@contextmanager
def _applied(edits: list[Replace | Hook]) -> Iterator[None]:
    journal = Journal(edits)
    journal.apply()
    try:
        yield
    finally:
        journal.revert()


def overhear(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *, backend: str, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """An attention function of transformers' interface: the stock one, after the module's ear has heard."""
    kwargs.pop(PLACES, None)
    if ATTRIBUTE in module.__dict__:
        (ear,) = module.__dict__[ATTRIBUTE]
        scaling = kwargs.get("scaling")
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        groups = query.shape[1] // key.shape[1]
        heard = query.float() * scaling, key.float().repeat_interleave(groups, dim=1)
        ear.hear(*(vectors[:, :, : ear.tokens] for vectors in heard), attention_mask, kwargs.get("position_bias"))
    return stock(module, backend)(module, query, key, value, attention_mask, **kwargs)


for _backend in ("eager", "sdpa"):
    for _mask in ("", DENSE):
        AttentionInterface.register(f"{HEARD}{_mask}{_backend}", partial(overhear, backend=_backend))
        AttentionMaskInterface.register(
            f"{HEARD}{_mask}{_backend}", ALL_MASK_ATTENTION_FUNCTIONS["eager" if _mask else _backend]
        )


@dataclass
class BiasEar:
    """Hears what one module itself adds to the logits of one row, (H, S, S) float32; 0 at keys that are not seen."""

    bias: Tensor | None = None
    tokens: int | None = None

    def hear(self, query: Tensor, key: Tensor, mask: Any, added: Tensor | None) -> None:
        shape = (*query.shape[1:3], key.shape[2])
        self.bias = torch.zeros(shape, device=query.device) if added is None else added[0].float().expand(shape)
        if mask is not None and mask.is_floating_point():
            mask = mask[0, ..., : shape[2]].float()
            self.bias = self.bias + mask.where(_is_seen(mask), 0)


@dataclass
class Ear:
    """Hears one module. `bias`: what it itself adds, (H, S, S), where that is replaced; `tokens`: those of a row that
    count, in front of an image's.
    """

    causal: bool
    pairs: Pairs | None = None
    bias: Tensor | None = None
    tokens: int | None = None

    def edits(self, module: nn.Module) -> list[Replace | Hook]:
        """What has it hear the module."""
        return [Replace(module, ATTRIBUTE, (self,))]


@dataclass
class TurnedEar(Ear):
    """Hears one module of a rotary model twice a forward: unturned, by its own doing, then as the model runs it."""

    total: Tally | None = None
    first: bool = False
    unturned: tuple[Tensor, Tensor] | None = None

    def edits(self, module: nn.Module) -> list[Replace | Hook]:
        names = tuple(inspect.signature(module.forward).parameters)
        return [Hook(module, partial(self.before, names=names)), *super().edits(module)]

    def before(self, module: nn.Module, args: tuple, kwargs: dict, *, names: tuple[str, ...]) -> tuple[tuple, dict]:
        """Before the module: run it without a rotation."""
        unturned, keywords = exchange_rotation(module, args, kwargs, names=names, rotary=None, layer_type=None)
        self.first = True
        module.forward(*unturned, **keywords)
        self.first = False
        return args, kwargs

    def hear(self, query: Tensor, key: Tensor, mask: Any, added: Tensor | None) -> None:
        if self.first:
            self.unturned = query, key
            return
        (plain_query, plain_key), self.unturned = self.unturned, None
        self.total = self.total or Tally(query.shape[1], self.pairs)
        seen = visible(mask, query.shape[2], key.shape[2], self.causal, query.device)
        for first, rows in chunks(query, key):
            turned = query[:, :, rows] @ key.transpose(-1, -2)
            plain = plain_query[:, :, rows] @ plain_key.transpose(-1, -2)
            without, attention = (softmax(logits, seen[rows]) for logits in (plain, turned))
            self.total.add(turned - plain, without, attention, first)

    def tally(self) -> Tally:
        return self.total


@dataclass
class BiasedEar(Ear):
    """Hears one module of a model that knows order by its own bias alone."""

    total: Tally | None = None

    def hear(self, query: Tensor, key: Tensor, mask: Any, added: Tensor | None) -> None:
        self.total = self.total or Tally(query.shape[1], self.pairs)
        seen = visible(mask, query.shape[2], key.shape[2], self.causal, query.device)
        for first, rows in chunks(query, key):
            plain = query[:, :, rows] @ key.transpose(-1, -2)
            added = self.bias[:, : query.shape[2], : key.shape[2]][:, rows].expand_as(plain)
            without, attention = (softmax(logits, seen[rows]) for logits in (plain, plain + added))
            self.total.add(added, without, attention, first)

    def tally(self) -> Tally:
        return self.total


@dataclass
class PlacedEar(Ear):
    """Hears one module of a model with a table: sums of its queries and keys at each position, (H, S, D) float64."""

    sums: list[Tensor] | None = None
    lengths: Counter = field(default_factory=Counter)

    def hear(self, query: Tensor, key: Tensor, mask: Any, added: Tensor | None) -> None:
        sums = [vectors.sum(0).cpu().double() for vectors in (query, key)]
        if self.sums is not None:
            length = max(sums[0].shape[1], self.sums[0].shape[1])
            both = ([F.pad(one, (0, 0, 0, length - one.shape[1])) for one in pair] for pair in (sums, self.sums))
            sums = [new + old for new, old in zip(*both, strict=True)]
        self.sums = sums
        self.lengths[query.shape[2]] += len(query)

    def tally(self) -> Tally:
        """The logits of the mean query and the mean key at each two positions, as often as the text had them.

        Attention without them is taken to be even, on an image that of the logits without place: what it would be
        token by token, the means do not tell.
        """
        total = Tally(len(self.sums[0]), self.pairs)
        longest = self.sums[0].shape[1]
        times = sum(n * (torch.arange(longest) < length) for length, n in self.lengths.items())
        query, key = ((one / times[:, None])[None] for one in self.sums)
        for length, n in self.lengths.items():
            q, k = query[:, :, :length], key[:, :, :length]
            seen = visible(None, length, length, self.causal, q.device)
            for first, rows in chunks(q, k):
                plain = self._plain(q, k, rows)
                added = q[:, :, rows] @ k.transpose(-1, -2) - plain
                if self.bias is not None:
                    added = added + self.bias[:, :length, :length][:, rows].cpu()
                without, attention = (n * softmax(logits, seen[rows]) for logits in (plain, plain + added))
                total.add(added, without, attention, first)
        return total

    def _plain(self, query: Tensor, key: Tensor, rows: slice) -> Tensor:
        """The logits (1, H, Q, K) without place; of a text any constant, which no softmax sees."""
        if self.pairs is None:
            return query.new_zeros(*query[:, :, rows].shape[:3], key.shape[2])
        query, key = (self.pairs.plain(vectors) for vectors in (query, key))
        return query[:, :, rows] @ key.transpose(-1, -2)


@dataclass
class ContentEar:
    """Hears what one module's queries and keys are: sums (H, D) of them and of their products (H, D, D), float64."""

    tokens: int | None = None
    count: int = 0
    sums: list[Tensor] | None = None
    products: list[Tensor] | None = None

    def hear(self, query: Tensor, key: Tensor, mask: Any, added: Tensor | None) -> None:
        self.count += query.shape[0] * query.shape[2]
        both = [vectors.transpose(0, 1).flatten(1, 2).cpu().double() for vectors in (query, key)]  # (H, B S, D)
        sums, products = [one.sum(1) for one in both], [one.mT @ one for one in both]
        self.sums, self.products = (
            new if old is None else [a + b for a, b in zip(new, old, strict=True)]
            for new, old in ((sums, self.sums), (products, self.products))
        )

    def moments(self) -> tuple[Tensor, Tensor]:
        """Second moments (H, D, D): of queries about 0, of keys about their mean."""
        query, key = (products / self.count for products in self.products)
        mean = self.sums[1] / self.count
        return query, key - mean[:, :, None] * mean[:, None]


class Contents:
    """What the queries and keys of modules are once a table of positions is silenced, and which weights make them."""

    def __init__(self, new: Plan, modules: Iterable[nn.Module]) -> None:
        self.anatomy = new.anatomy
        self.ears = {module: ContentEar() for module in modules}
        self.traces: dict[nn.Module, TracingEar] = {}
        silent = Plan.of(new.anatomy, new.scheme)
        silence_table(silent, new.scheme)
        self.silence = silent.edits

    def hear(self, inputs: Mapping[str, Tensor]) -> None:
        """A batch, within `listen`."""
        listening = [Replace(module, ATTRIBUTE, (ear,)) for module, ear in self.ears.items()]
        with _applied([*self.silence, *listening]):
            for ear in self.ears.values():
                ear.tokens = inputs["input_ids"].shape[1]
            _run(self.anatomy, inputs)
        if not self.traces:
            traces = {module: TracingEar(module) for module in self.ears}
            with _applied([edit for ear in traces.values() for edit in ear.edits()]), torch.enable_grad():
                _run(self.anatomy, {name: value[:1] for name, value in inputs.items()})
            self.traces = traces


def chunks(query: Tensor, key: Tensor) -> Iterator[tuple[int, slice]]:
    """(first row, rows) of queries (B, H, Q, D), so few at once that their logits fit into memory."""
    size = max(1, PAIRS_AT_ONCE // (query.shape[0] * query.shape[1] * key.shape[2]))
    for first in range(0, query.shape[2], size):
        yield first, slice(first, first + size)


def softmax(logits: Tensor, seen: Tensor) -> Tensor:
    """Attention (B, H, Q, K) to the keys that are seen (Q, K)."""
    return logits.masked_fill(~seen, -torch.inf).softmax(-1)


def visible(mask: Any, queries: int, keys: int, causal: bool, device: torch.device) -> Tensor:
    """(Q, K) keys that a query sees, of rows without padding: by the mask where there is one (a sliding window)."""
    if mask is None:
        everything = torch.ones(queries, keys, dtype=torch.bool, device=device)
        return everything.tril() if causal else everything
    return _is_seen(mask[0, 0, :queries, :keys]).expand(queries, keys)


def _is_seen(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
