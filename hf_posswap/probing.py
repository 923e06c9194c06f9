"""Probing: what a model's positions do, measured on it, and whether what is installed is what its config says."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .anatomy import Anatomy, TableSite, examine, follows_rotary_contract, kind, reads_pictures, text_config
from .describing import silenced, silenced_here
from .edits import same
from .errors import PosSwapError
from .patching import config_before, record_of
from .planning.images import patch_embedding, trained_grid
from .planning.layers import SECOND, second_config
from .planning.plan import plain_state
from .planning.rotary import build, has_second_factor, unscaled
from .planning.table import rms_key
from .quiet import quiet
from .record import FOREIGN_ROPE_TYPE, PORTABLE, Record
from .scheme import scheme_of
from .sites import EMBED, ROTARY, EmbedGeometry, RotaryGeometry

IMAGE_SIDE = 224  # pixels of the images that LayoutLMv2 reads


@dataclass(frozen=True)
class Probe:
    """What `probe` measured. Changes are relative: the largest difference of outputs over their root mean square.

    order: change when the order of the input changes (for a causal model, of what precedes the last token, seen
    after one layer: deeper ones learn order from the mask alone). shift: change when every position is moved by
    the same amount, None where the model takes no positions. distance: (tokens away, change that one token makes
    there). longest: positions accepted, None where there is no limit. faults: where what is installed is not what
    the config says.
    """

    order: float
    shift: float | None
    distance: tuple[tuple[int, float], ...]
    longest: int | None
    faults: tuple[str, ...]
    tolerance: float

    @property
    def knows_order(self) -> bool:
        return self.order > self.tolerance

    @property
    def knows_absolute(self) -> bool | None:
        return None if self.shift is None else self.shift > self.tolerance

    @property
    def ok(self) -> bool:
        return not self.faults

    def __str__(self) -> str:
        shift = {None: "takes no positions", True: "absolute", False: "relative"}[self.knows_absolute]
        lines = [
            f"order     {self.order:.2e}  ({'a' if self.knows_order else 'no'} position reaches the output)",
            f"shift     {'' if self.shift is None else f'{self.shift:.2e}  '}({shift})",
            "distance  " + ", ".join(f"{d}: {change:.2e}" for d, change in self.distance),
            f"longest   {'no limit' if self.longest is None else self.longest}",
        ]
        return "\n".join(
            lines + [f"FAULT     {fault}" for fault in self.faults or ()] + ([] if self.faults else ["faults    none"])
        )


def probe(model: nn.Module) -> Probe:
    """Measure, on a tiny input, whether and how position reaches the live model's output, and whether what is
    installed is what the config says. The model is run a few times without gradients and left as it was.

    Raises:
        PosSwapError: not a transformers model, or one without a recognised site; an image model that does not give a
            vector for every patch (MAE, unless mask_ratio is 0).
    """
    anatomy = examine(model)
    with quiet(model), torch.no_grad():
        subject = _ImageSubject(anatomy) if reads_pictures(model) else _TextSubject(anatomy)
        called = _rotary_calls(anatomy, subject)
        order, shift, distance = subject.order(), subject.shift(), subject.distance()
    dtype = next(model.parameters()).dtype
    return Probe(
        order=order,
        shift=shift,
        distance=distance,
        longest=None if anatomy.table is None or _table_is_bypassed(anatomy) else anatomy.table.length,
        faults=tuple(_faults(anatomy, called)),
        tolerance=100 * torch.finfo(dtype).eps,  # rounding through a stack of layers
    )


def _table_is_bypassed(anatomy: Anatomy) -> bool:
    record = record_of(anatomy.model)
    return silenced(anatomy, record, EMBED) and record.storage == PORTABLE


def _relative(a: Tensor, b: Tensor) -> float:
    scale = b.double().square().mean().sqrt().clamp(min=torch.finfo(torch.float64).tiny)
    return ((a.double() - b.double()).abs().max() / scale).item()


class _Subject:
    """A model and a tiny input: hidden states (S, E) after its first layer, and after its last."""

    def __init__(self, anatomy: Anatomy) -> None:
        self.model, self.table, self.page = anatomy.model, anatomy.table, anatomy.page
        layers = anatomy.layers()[1]
        self.layer, self.last = layers[0], layers[-1]
        model = anatomy.model
        if model.config.is_encoder_decoder:
            self.stack = model.get_encoder()
        else:  # Llama 4's text model names a base that it has only inside of the whole
            stack = model.get_submodule(anatomy.layers()[0].rpartition(".")[0])
            self.stack = stack if model.base_model is model else model.base_model

    def run(self, **inputs: Any) -> tuple[Tensor, Tensor]:
        seen: list[Tensor] = []
        handles = [
            layer.register_forward_hook(lambda _m, _a, out: seen.append(out if isinstance(out, Tensor) else out[0]))
            for layer in (self.layer, self.last)
        ]
        try:
            out = self.stack(**inputs)
        finally:
            for handle in handles:
                handle.remove()
        if not seen:  # SqueezeBERT calls the forward of its layers past their hooks
            seen.append(self.stack(**inputs, output_hidden_states=True).hidden_states[1])
        last = out.last_hidden_state if "last_hidden_state" in out else seen[-1]  # a backbone gives maps
        return seen[0][0], last[0]

    def blank_page(self, ids: Tensor) -> dict[str, Tensor]:
        """What a document model must be given beside (S,) tokens: one place for all of them, and a white image."""
        page = self.page
        if page is None:
            return {}
        boxes = torch.zeros(1, len(ids), 4, dtype=torch.long if page.largest > 1 else torch.float, device=ids.device)
        image = torch.zeros(1, 3, IMAGE_SIDE, IMAGE_SIDE, dtype=self.model.dtype, device=ids.device)
        return {"bbox": boxes} | ({"image": image} if page.image is not None else {})


class _TextSubject(_Subject):
    def __init__(self, anatomy: Anatomy) -> None:
        super().__init__(anatomy)
        limit = self.table.length if self.table is not None else 10**9
        window = getattr(anatomy.config, "sliding_window", None) or limit  # its mask tells order by itself
        self.length = min(16, max(2, limit // 2), max(2, window))
        self.room = limit - self.length
        generator = torch.Generator().manual_seed(0)
        config = anatomy.config
        special = {getattr(config, f"{name}_token_id", None) for name in ("pad", "bos", "eos", "sep", "cls", "mask")}
        usable = [i for i in range(min(config.vocab_size, 512)) if i not in special]
        picks = torch.randperm(len(usable), generator=generator)[: self.length]
        self.ids = torch.tensor(usable)[picks.repeat(self.length)[: self.length]].to(self.model.device)
        changed = self.ids.clone()
        changed[-1] = self.ids[0]
        self.causal = _relative(self.states(changed)[1][0], self.states(self.ids)[1][0]) == 0.0

    def states(self, ids: Tensor, shift: int | None = None) -> tuple[Tensor, Tensor]:
        arguments = {"input_ids": ids[None], "attention_mask": torch.ones_like(ids)[None]}
        if shift is not None:
            arguments["position_ids"] = torch.arange(shift, shift + len(ids), device=ids.device)[None]
        first, last = self.run(**arguments, **self.blank_page(ids))
        return first[: len(ids)], last[: len(ids)]  # an image's tokens stand behind

    def order(self) -> float:
        count = len(self.ids) - 1 if self.causal else len(self.ids)
        permutation = torch.arange(len(self.ids), device=self.ids.device)
        # no reversal: a symmetric bias cannot tell one
        permutation[:count] = torch.randperm(count, generator=torch.Generator().manual_seed(1)).to(permutation.device)
        layer = 0 if self.causal else 1
        straight, permuted = self.states(self.ids)[layer], self.states(self.ids[permutation])[layer]
        return _relative(permuted[-1], straight[-1]) if self.causal else _relative(permuted, straight[permutation])

    def shift(self) -> float | None:
        step = min(7, self.room)
        if step < 1 or "position_ids" not in inspect.signature(self.stack.forward).parameters:
            return None
        first = self.table.reserved if self.table is not None and self.table.counted else 0
        return _relative(self.states(self.ids, first + step)[1], self.states(self.ids, first)[1])

    def distance(self) -> tuple[tuple[int, float], ...]:
        filler = self.ids[:1].repeat(self.length)
        plain, found, away = self.states(filler)[0][-1], [], 1
        while away < self.length:
            marked = filler.clone()
            marked[-1 - away] = self.ids[1]
            found.append((away, _relative(self.states(marked)[0][-1], plain)))
            away *= 2
        return tuple(found)


class _ImageSubject(_Subject):
    """Order is that of the patches; distance, of columns from the first patch."""

    def __init__(self, anatomy: Anatomy) -> None:
        super().__init__(anatomy)
        path = patch_embedding(anatomy)[0] if self.table is None else self.table.path
        self.stack = None  # that takes the picture; the layers' own takes patches
        while not isinstance(self.stack, PreTrainedModel) or "pixel_values" not in _arguments(self.stack):
            path = path.rpartition(".")[0]
            self.stack = self.model.get_submodule(path)
        self.grid = trained_grid(anatomy)
        self.patch = patch_embedding(anatomy)[1].kernel_size if self.table is None else self.table.patch
        sides = [side for both in zip(self.grid, self.patch, strict=True) for side in both]
        shape = (1, anatomy.config.num_channels, *sides)  # patches and pixels in turn, along each axis
        pixels = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        self.pixels = pixels.to(self.model.device, self.model.dtype)
        count = math.prod(self.grid)
        found = self.states(self.pixels)
        self.first = found.shape[0] - count - (0 if self.table is None else self.table.trailing)
        if found.dim() != 2 or self.first < 0:
            raise PosSwapError(
                f"{kind(self.model)} does not give one vector for each of {count} patches, but {tuple(found.shape)}; "
                "what their order does to them cannot be measured"
            )
        self.patches = slice(self.first, self.first + count)

    def states(self, pixels: Tensor) -> Tensor:
        """The last layer's (S, E); a video goes in with its frames before the channels."""
        size = [n * side for n, side in zip(self.grid, self.patch, strict=True)]
        pixels = pixels.reshape(1, -1, *size)
        inputs = {"pixel_values": pixels if len(size) == 2 else pixels.transpose(1, 2)}
        if "noise" in _arguments(self.stack):  # by which MAE shuffles its patches
            inputs["noise"] = torch.arange(math.prod(self.grid), device=pixels.device, dtype=torch.float)[None]
        return self.run(**inputs)[1]

    def order(self) -> float:
        axes = range(len(self.grid))  # no reversal: a symmetric bias cannot tell one
        moved = self.pixels.roll([1] * len(axes), [2 + 2 * axis for axis in axes])
        straight, permuted = self.states(self.pixels), self.states(moved)
        places = torch.arange(math.prod(self.grid), device=straight.device).reshape(self.grid)
        straight[self.patches] = straight[self.patches][places.roll([1] * len(axes), [*axes]).flatten()]
        return _relative(permuted, straight)

    def shift(self) -> None:
        return None

    def distance(self) -> tuple[tuple[int, float], ...]:
        plain, found, away = self.states(self.pixels)[self.first], [], 1
        while away < self.grid[-1]:
            blank = self.pixels.clone()
            first = [0, slice(None)] * (len(self.grid) - 1)
            blank[(slice(None), slice(None), *first, away)] = 0
            found.append((away, _relative(self.states(blank)[self.first], plain)))
            away *= 2
        return tuple(found)


def _arguments(module: nn.Module) -> Iterable[str]:
    return inspect.signature(module.forward).parameters


def _rotary_calls(anatomy: Anatomy, subject: _Subject) -> set[str]:
    """Paths of the rotary modules that one forward pass calls."""
    called: set[str] = set()
    handles = [
        module.register_forward_hook(lambda *_, path=path: called.add(path))
        for path, module in _rotary_modules(anatomy).items()
    ]
    try:
        subject.order()
    finally:
        for handle in handles:
            handle.remove()
    return called


def _rotary_modules(anatomy: Anatomy) -> dict[str, nn.Module]:
    """Every module of the rotary contract in the text stack, also one that reads another config or is read by none."""
    if anatomy.rotary is None:
        return {}
    stack = anatomy.layers()[0].rpartition(".")[0]
    root = anatomy.model.get_submodule(stack)
    return {
        f"{stack}.{path}".lstrip("."): module
        for path, module in root.named_modules()
        if follows_rotary_contract(module)
    }


def _faults(anatomy: Anatomy, called: set[str]) -> Iterator[str]:
    record = record_of(anatomy.model)
    ours = silenced_here(anatomy, record)
    for path, module in _rotary_modules(anatomy).items():
        if path not in called:
            yield f"{path}: no forward pass reads this rotary module; what it holds has no effect"
        if path.rpartition(".")[2] == SECOND:
            yield from _rotary_faults(second_config(anatomy, scheme_of(record), record.layers), path, module)
        elif module.config is not text_config(anatomy.model):
            yield f"{path}: reads another config than the model's"
        elif not ours:
            yield from _rotary_faults(anatomy.config, path, module)
        elif any(bool(buffer.any()) for buffer in module._buffers.values()):
            yield f"{path}: the config says it is silenced, and it turns"
    if record is not None:
        yield from _record_faults(anatomy, record)
        yield from _attention_faults(anatomy.model)
    for table in anatomy.tables:
        mine = record if record is None or table in anatomy.within(record.stack).tables else None
        yield from _table_faults(anatomy, table, mine)


def _rotary_faults(config: Any, path: str, module: nn.Module) -> Iterator[str]:
    """Where one live rotary module is not what transformers builds from its config."""
    if FOREIGN_ROPE_TYPE in str(config.rope_parameters):
        yield f"{path}: the config is of a portable checkpoint; load it with hf_posswap.from_pretrained"
        return
    twin = build(type(module), config)
    plain = plain_state(twin)
    varies = "dynamic" in str(plain.get("rope_type")) or "longrope" in str(plain.get("rope_type"))
    for name, fresh in twin._buffers.items():
        regrows = varies and not name.endswith("original_inv_freq")
        if not regrows and not same(module._buffers.get(name), fresh):
            yield (
                f"{path}.{name}: differs from what config.rope_parameters says "
                f"({config.rope_parameters}); was the config changed after the model was built?"
            )
    for name, value in plain.items():
        if ("attention_scaling" in name or name == "rope_type") and not same(vars(module).get(name), value):
            yield f"{path}.{name}: is {vars(module).get(name)!r} and the config says {value!r}"


def _record_faults(anatomy: Anatomy, record: Record) -> Iterator[str]:
    """Where the config is not what the recorded scheme writes."""
    scheme, site = scheme_of(record), anatomy.rotary
    if site is None or ROTARY not in scheme.sites or scheme.in_attention or record.layers is not None:
        return
    before = config_before(anatomy.model, record).get_text_config()
    for layer_type in getattr(scheme, "layer_types", None) or (("full_attention",) if site.layer_types else (None,)):
        buffer = next(iter(site.modules.values())).get_buffer(f"{layer_type}_inv_freq" if layer_type else "inv_freq")
        base, trained = unscaled(site.parameters(before, layer_type), before)
        head_dim = getattr(site.config, "head_dim", None) or site.config.hidden_size // site.config.num_attention_heads
        change = scheme.rotary(
            RotaryGeometry(base, trained, head_dim, 2 * buffer.shape[-1], None, has_second_factor(anatomy))
        )
        for what, says, has in (
            ("rope_parameters", change.rope_parameters, site.parameters(site.config, layer_type)),
            ("max_position_embeddings", change.config_length, site.config.max_position_embeddings),
        ):
            if says != has:
                yield f"config.{what}: is {has} and the recorded {scheme} writes {says}"


def _attention_faults(model: nn.Module) -> Iterator[str]:
    """Attention modules that carry a scheme and are not routed through it."""
    from .attention import ATTRIBUTE, NAMES

    for path, module in model.named_modules():
        if ATTRIBUTE in vars(module) and module.config._attn_implementation not in NAMES:
            yield f"{path}: attention is {module.config._attn_implementation!r}, past what is installed there"


def _table_faults(anatomy: Anatomy, table: TableSite, record: Record | None) -> Iterator[str]:
    for name in table.buffers:
        if table.owner.get_buffer(name).shape[-1] != table.rows.shape[0]:
            held, rows = table.owner.get_buffer(name).shape[-1], table.rows.shape[0]
            yield f"{name}: holds {held} positions and the table {rows}"
    if record is None:
        return
    scheme = scheme_of(record)
    if EMBED in scheme.sites and scheme.recomputable:
        rows = table.positions
        rms = record.measured.get(rms_key(anatomy.within(record.stack), table), 1.0)
        geometry = EmbedGeometry(rows.shape[-1], len(rows), rows, lambda: rms, table.grid, table.grid)
        expected = scheme.embed(geometry).vectors(torch.arange(len(rows), device=rows.device))
        saved = (rows.dtype, torch.float16, torch.bfloat16)  # a checkpoint may hold fewer digits than it is loaded with
        if not any(same(rows, expected.to(dtype).to(rows.dtype)) for dtype in saved):
            yield f"{table.path}: is not the {scheme} table that the record says"
    if silenced(anatomy, record, EMBED) and bool(table.rows.any()):
        yield f"{table.path}: the record says it is silenced, and it is not zero"
