"""Fitting: before a model is touched, measure what its positions add to its attention logits, and give the scheme that
is to replace them the parameters that add the same.

Attention modules are listened to through transformers' attention interface, under names of their own beside those of
`attention.py`. What positions add to a logit:
    rotary   q R(d) k - q k: every module is run a second time, unrotated, on the hidden states that it really gets
    table    E[q] E[k] at two positions, the means over the text of what each position makes of its query and key
"""

from __future__ import annotations

import inspect
import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from .anatomy import kind, own_attention
from .attention import ATTRIBUTE, Attached, stock
from .edits import Hook, Journal, Replace
from .errors import PosSwapError, nearest
from .parts import exchange_rotation
from .planning.attention import is_causal
from .planning.images import is_image
from .planning.plan import Plan, trained_length
from .profile import Fit, Tally
from .quiet import quiet
from .record import FIT
from .scheme import registry
from .sites import ROTARY

if TYPE_CHECKING:
    from .scheme import Scheme

HEARD = "posswap_heard_"  # names in the attention interface: the stock backend, listened to
PAIRS_AT_ONCE = 2**22  # of queries and keys: 16 MiB of float32 logits
SECONDS_BEFORE_A_BAR = 5
UNDERSTOOD = ("input_ids", "attention_mask", "token_type_ids", "bbox")


def refuse_unfittable(scheme: Scheme) -> None:
    """Raise PosSwapError for a scheme without parameters that text could choose."""
    if scheme.fits:
        return
    names = [name for name, cls in registry().items() if cls.fits]
    raise PosSwapError(
        f"{scheme}: fit= was given, and {scheme.name} has no parameters that text could choose; "
        f"{scheme.fits_with or nearest(scheme.name, names)}"
    )


def fit_plan(new: Plan, batches: Any, tokenizer: Any = None) -> None:
    """Choose the parameters that a plan is to install, from what its model does on text; the model is left as it was.

    batches: an iterable of (B, S) or (S,) token ids, of dicts of a model's inputs, or with a tokenizer of strings or
    lists of them. Padding, by `attention_mask`, is taken out of each row. Memory does not grow with their number.

    Raises PosSwapError, before anything is changed, where the scheme has nothing to choose, the model cannot be
    listened to, or a batch is not of that kind; the plan is not to be used then.
    """
    attached = {edit.owner: edit.value[0] for edit in new.edits if isinstance(edit, Replace) and edit.name == ATTRIBUTE}
    if any(one.change.fit is None for one in attached.values()):
        raise PosSwapError(f"{new.scheme}: fit= finds no parameters to choose; {new.scheme.fits_with}")
    _refuse_deaf(new, attached)
    vocabulary = new.anatomy.model.get_input_embeddings().weight.shape[0]
    rows = Rows(batches, tokenizer, trained_length(new), vocabulary)
    tallies = listen(new, attached, rows)
    together: dict[Attached, list[nn.Module]] = defaultdict(list)
    for module, one in attached.items():
        together[one].append(module)
    paths = {module: path for path, module in new.anatomy.model.named_modules()}
    explained = {}
    for one, modules in together.items():
        fitted = one.change.fit(reduce(operator.add, (tallies[module] for module in modules)).profile())
        for name, value in fitted.items():
            parameter = one.get_parameter(name)
            parameter.data = value.to(parameter.device, parameter.dtype).reshape(parameter.shape)
        for module in modules:
            share = tallies[module].explained(bias_of(one, tallies[module].distance))
            explained[paths[module]] = [round(value, 4) for value in share.tolist()]
    longest = max(tally.length for tally in tallies.values())
    found = Fit({path: explained[path] for path in paths.values() if path in explained}, rows.tokens, longest - 1)
    new.measured[FIT] = asdict(found)
    new.notes.append(f"fitted: {found}")
    new.finish()


def bias_of(attached: Attached, distance: Tensor) -> Tensor:
    """(H, P) that a scheme adds at distances (P,), to a query where it begins."""
    tensors = attached.tensors(torch.device("cpu"))
    with torch.no_grad():
        if attached.change.placed is None:
            return attached.change.bias(tensors, distance)
        return attached.change.placed(tensors, distance[None], torch.zeros(1, 1))[:, 0]


def _refuse_deaf(new: Plan, attached: Mapping[nn.Module, Attached]) -> None:
    """Raise PosSwapError where what the positions of this model do cannot be measured."""
    anatomy, model = new.anatomy, new.anatomy.model
    if anatomy.bias is not None or model.config.is_encoder_decoder:
        raise PosSwapError(
            f"fit= measures what a rotation or a table of positions does, and {kind(model)} has a bias; leave it out"
        )
    if is_image(anatomy):
        raise PosSwapError(f"{new.scheme}: fit= reads text, and {kind(model)} reads pictures; leave it out")
    own = own_attention(model)
    for module in attached:
        if module in own:
            raise PosSwapError(
                f"fit= listens to attention through transformers' interface, which {kind(module)} does not call; leave "
                "it out"
            )
        if ROTARY in anatomy.sites and "position_embeddings" not in inspect.signature(module.forward).parameters:
            raise PosSwapError(f"fit= cannot take the rotation from {kind(module)}, which makes its own; leave it out")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise PosSwapError(f"fit= runs the model, and this {kind(model)} has weights on the meta device; load it first")


# --- the text


@dataclass
class Rows:
    """Calibration text as rows of equal length without padding: dicts of (B, S) inputs, boxes (B, S, 4) among them.
    Counts its `tokens`.

    limit: tokens of the longest row, 0 where the model does not tell. vocabulary: ids that the model knows.
    """

    batches: Any
    tokenizer: Any
    limit: int
    vocabulary: int
    tokens: int = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        if isinstance(self.batches, (str, Tensor, Mapping)) or not isinstance(self.batches, Iterable):
            raise self._refuse(self.batches, "is not an iterable of batches; put it into a list")
        for batch in tqdm(self.batches, desc="fit", unit="batch", delay=SECONDS_BEFORE_A_BAR):
            for rows in self._unpadded(self._inputs(batch)):
                self.tokens += rows["input_ids"].numel()
                yield rows
        if not self.tokens:
            raise self._refuse(self.batches, "holds no tokens")

    def _inputs(self, batch: Any) -> dict[str, Tensor]:
        """Tensors (B, S) by name; `input_ids` among them."""
        texts = [batch] if isinstance(batch, str) else batch
        if isinstance(texts, (list, tuple)) and texts and all(isinstance(text, str) for text in texts):
            return self._tokenized(texts)
        if isinstance(batch, (list, tuple)):
            try:
                batch = torch.tensor(batch)
            except (TypeError, ValueError):
                raise self._refuse(batch, "is no rectangle of token ids") from None
        inputs = dict(batch) if isinstance(batch, Mapping) else {"input_ids": batch}
        inputs.pop("labels", None)
        ids = inputs.get("input_ids")
        if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dim() not in (1, 2):
            raise self._refuse(batch, "holds no token ids of shape (batch, sequence) or (sequence,)")
        if ids.numel() and not 0 <= ids.min() <= ids.max() < self.vocabulary:
            raise self._refuse(batch, f"holds ids that are not among this model's {self.vocabulary}")
        inputs = {name: value[None] if ids.dim() == 1 else value for name, value in inputs.items()}
        for name, value in inputs.items():
            of_token = value.shape[2:] if name == "bbox" else ()
            if name not in UNDERSTOOD or value.shape != (*inputs["input_ids"].shape, *of_token):
                raise self._refuse(name, "among the inputs is not understood; give input_ids and attention_mask alone")
        return inputs

    def _tokenized(self, texts: list[str]) -> dict[str, Tensor]:
        """Texts, cut into rows of the trained length."""
        if self.tokenizer is None:
            raise self._refuse(texts[0][:40], "is text; give tokenizer= too, or token ids")
        documents = self.tokenizer(list(texts), truncation=False, verbose=False)["input_ids"]
        size = self.limit or max(1, *map(len, documents))
        rows = [ids[begin : begin + size] for ids in documents for begin in range(0, len(ids), size)]
        longest = max(map(len, rows), default=0)
        padded = torch.zeros(len(rows), longest, dtype=torch.long)
        mask = torch.zeros_like(padded)
        for index, ids in enumerate(rows):
            padded[index, : len(ids)], mask[index, : len(ids)] = torch.tensor(ids), 1
        return {"input_ids": padded, "attention_mask": mask}

    def _unpadded(self, inputs: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """The real tokens of each row; rows of one length together."""
        mask = inputs.pop("attention_mask", None)
        real = torch.ones_like(inputs["input_ids"]).bool() if mask is None else mask.bool()
        lengths = real.sum(-1)
        for length in lengths.unique().tolist():
            if length > self.limit > 0:
                raise PosSwapError(
                    f"fit=: a sequence of {length} tokens is longer than the {self.limit} that this model was trained "
                    "on; cut it"
                )
            chosen = lengths == length
            if length:
                yield {name: v[chosen][real[chosen]].reshape(-1, length, *v.shape[2:]) for name, v in inputs.items()}

    @staticmethod
    def _refuse(value: Any, reason: str) -> PosSwapError:
        shown = repr(value)
        return PosSwapError(f"fit={shown if len(shown) < 80 else type(value).__name__} {reason}")


# --- listening


def listen(new: Plan, modules: Iterable[nn.Module], rows: Rows) -> dict[nn.Module, Tally]:
    """Run the source model on the rows, and count what its positions add in each attention module."""
    model = new.anatomy.model
    ears: dict[nn.Module, TurnedEar | PlacedEar] = {}
    edits: list[Replace | Hook] = []
    for module in modules:
        if ROTARY in new.anatomy.sites:
            ears[module] = TurnedEar(is_causal(module, None))
            names = tuple(inspect.signature(module.forward).parameters)
            edits.append(Hook(module, partial(ears[module].before, names=names)))
        else:
            ears[module] = PlacedEar(is_causal(module, None))
        edits.append(Replace(module, ATTRIBUTE, (ears[module],)))
    for config in {id(module.config): module.config for module in ears}.values():
        backend = "eager" if config._attn_implementation == "eager" else "sdpa"
        edits.append(Replace(config, "_attn_implementation_internal", f"{HEARD}{backend}"))
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.base_model.forward).parameters else {}
    with quiet(model), torch.no_grad(), _applied(Journal(edits)):
        for inputs in rows:
            model.base_model(**{name: value.to(model.device) for name, value in inputs.items()}, **options)
    return {module: ear.tally() for module, ear in ears.items()}


@contextmanager
def _applied(journal: Journal) -> Iterator[None]:
    journal.apply()
    try:
        yield
    finally:
        journal.revert()


def overhear(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *, backend: str, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """An attention function of transformers' interface: the stock one, after the module's ear has heard."""
    if ATTRIBUTE in module.__dict__:
        (ear,) = module.__dict__[ATTRIBUTE]
        scaling = kwargs.get("scaling")
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        groups = query.shape[1] // key.shape[1]
        ear.hear(query.float() * scaling, key.float().repeat_interleave(groups, dim=1), attention_mask)
    return stock(module, backend)(module, query, key, value, attention_mask, **kwargs)


for _backend in ("eager", "sdpa"):
    AttentionInterface.register(f"{HEARD}{_backend}", partial(overhear, backend=_backend))
    AttentionMaskInterface.register(f"{HEARD}{_backend}", ALL_MASK_ATTENTION_FUNCTIONS[_backend])


@dataclass
class TurnedEar:
    """Hears one module of a rotary model twice a forward: unturned, by its own doing, then as the model runs it."""

    causal: bool
    total: Tally | None = None
    first: bool = False
    plain: tuple[Tensor, Tensor] | None = None

    def before(self, module: nn.Module, args: tuple, kwargs: dict, *, names: tuple[str, ...]) -> tuple[tuple, dict]:
        """Before the module: run it without a rotation."""
        unturned, keywords = exchange_rotation(module, args, kwargs, names=names, rotary=None, layer_type=None)
        self.first = True
        module.forward(*unturned, **keywords)
        self.first = False
        return args, kwargs

    def hear(self, query: Tensor, key: Tensor, mask: Any) -> None:
        if self.first:
            self.plain = query, key
            return
        (plain_query, plain_key), self.plain = self.plain, None
        self.total = self.total or Tally(query.shape[1])
        seen = visible(mask, query.shape[2], key.shape[2], self.causal, query.device)
        for first, rows in chunks(query, key):
            turned = query[:, :, rows] @ key.transpose(-1, -2)
            plain = plain_query[:, :, rows] @ plain_key.transpose(-1, -2)
            without, attention = (softmax(logits, seen[rows]) for logits in (plain, turned))
            self.total.add(turned - plain, without, attention, first)

    def tally(self) -> Tally:
        return self.total


@dataclass
class PlacedEar:
    """Hears one module of a model with a table: sums of its queries and keys at each position, (H, S, D) float64."""

    causal: bool
    sums: list[Tensor] | None = None
    lengths: Counter = field(default_factory=Counter)

    def hear(self, query: Tensor, key: Tensor, mask: Any) -> None:
        sums = [vectors.sum(0).cpu().double() for vectors in (query, key)]
        if self.sums is not None:
            length = max(sums[0].shape[1], self.sums[0].shape[1])
            both = ([F.pad(one, (0, 0, 0, length - one.shape[1])) for one in pair] for pair in (sums, self.sums))
            sums = [new + old for new, old in zip(*both, strict=True)]
        self.sums = sums
        self.lengths[query.shape[2]] += len(query)

    def tally(self) -> Tally:
        """The logits of the mean query and the mean key at each two positions, as often as the text had them.

        Attention is taken to be even without them: what it would be token by token, the means do not tell.
        """
        total = Tally(len(self.sums[0]))
        longest = self.sums[0].shape[1]
        times = sum(n * (torch.arange(longest) < length) for length, n in self.lengths.items())
        query, key = ((one / times[:, None])[None] for one in self.sums)
        for length, n in self.lengths.items():
            q, k = query[:, :, :length], key[:, :, :length]
            seen = visible(None, length, length, self.causal, q.device)
            for first, rows in chunks(q, k):
                added = q[:, :, rows] @ k.transpose(-1, -2)
                even = n * softmax(torch.zeros_like(added), seen[rows])
                total.add(added, even, n * softmax(added, seen[rows]), first)
        return total


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
    mask = mask[0, 0, :, :keys]
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
