"""Patching: plan, apply, record, undo. Only this file (through `edits.py`) changes a model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import nn

from .anatomy import Anatomy, BiasTable, examine, kind, text_config
from .edits import ABSENT, Journal, Replace
from .errors import PosSwapError, RecalibrationWarning
from .pictures import Picture
from .planning import plan
from .planning.images import chosen_ndim
from .planning.layers import chosen_layers
from .planning.limits import limit_edits
from .planning.picture import form_edits, frames
from .planning.plan import Plan
from .planning.rotary import keep_dtype, pairing_edits, rotary_edits, rotary_geometry, scaled_layer_types
from .record import FIT, KEY, PORTABLE, Record, config_values, owner_of
from .saving import save_edit
from .scheme import Scheme, make_scheme, scheme_of, silenced_by
from .sites import BIAS, EMBED, RELATIVE, ROTARY, SILENCE, SPATIAL

ATTRIBUTE = "_posswap"


@dataclass
class Patch:
    """What a patched model carries. `journal` takes the patch back; None on a reloaded model, until it is asked for.

    `outside` are edits of the tokenizer and processor that the caller handed in: theirs, not the model's, to undo.
    """

    record: Record
    journal: Journal | None
    outside: Journal = field(default_factory=Journal)


def patch_model(
    model: nn.Module,
    scheme: str | Scheme,
    *,
    tokenizer: Any = None,
    processor: Any = None,
    dry_run: bool = False,
    layers: Sequence[int] | None = None,
    stack: str | None = None,
    relative_bias: str | None = None,
    spatial_bias: str | None = None,
    ndim: int | None = None,
    fit: Iterable[Any] | None = None,
    image_size: int | Sequence[int] | None = None,
    patch_size: int | Sequence[int] | None = None,
    num_frames: int | None = None,
    num_channels: int | None = None,
    patch_form: str | None = None,
    **params: Any,
) -> Any:
    """Swap the way a model knows where a token is, in place, and return the same model.

    Args:
        model: a transformers model, not wrapped by PEFT, DDP or torch.compile.
        scheme: a name from `list_schemes()`, or a Scheme object.
        tokenizer, processor: their limits (tokens, pixels) are updated with the model's.
        dry_run: return the Plan, which prints itself, and change nothing.
        stack: of an encoder-decoder model, the `encoder` or the `decoder` alone; both where None or `both`.
        relative_bias: `keep` or `silence` a learned bias per distance in tokens (T5, MPNet, LayoutLMv2 and v3, UDOP) or
            in patches (BEiT); None: as the scheme says, which leaves it alone where it replaces something else like for
            like, and silences it otherwise.
        spatial_bias: `keep` (also None) or `silence` a document model's bias of distances on the page.
        layers: indices of the layers that take the scheme; the others keep the positions they have. None: all.
        ndim: 1 lets a scheme of one dimension number the patches of an image model row by row; None (or 2) asks for a
            scheme of two there.
        fit: calibration text, an iterable of batches: (batch, sequence) token ids, dicts of a model's inputs, or with
            tokenizer= strings (cut into rows of the trained length); of an image model, `pixel_values` (batch,
            channels, height, width) of the size that it was trained on. The model is run on it before anything is
            changed, and the scheme's learned parameters are chosen so that they do what the old positions did;
            `describe` says how well.
        image_size, patch_size: what an image model reads from now on, in pixels: one number or (height, width).
            Kernels of patches are resized by FlexiViT's pseudo-inverse. A tubelet has (frames, height, width).
        num_frames: of a video.
        num_channels: of a pixel; kernels keep what they make of grey.
        patch_form: how patches are embedded, `linear` (one product of matrices) or `convolution`: the same numbers to
            rounding. A stock transformers that loads the checkpoint computes in its own form.
        params: the scheme's own parameters, under transformers' names.

    Raises:
        PosSwapError: an argument is wrong, the pair is unsupported, or nothing would change. The model is then
            as it was, to the bit.

    A patched model is patched anew from its un-patched original, and the same patch twice is one (with fit=, the
    second: it may be of other text). Warns with RecalibrationWarning where the model must be fine-tuned before it is
    of use.
    """
    scheme = make_scheme(scheme, params)
    picture = Picture.asked(
        image_size=image_size,
        patch_size=patch_size,
        num_frames=num_frames,
        num_channels=num_channels,
        patch_form=patch_form,
    )
    if fit is not None:
        from .fitting import fit_plan, refuse_unfittable  # imports transformers' modeling code, seconds of it

        refuse_unfittable(scheme)
    biases = {name: value for name, value in ((RELATIVE, relative_bias), (SPATIAL, spatial_bias)) if value is not None}
    patch = patch_of(model)
    asked_for = {"layers": layers, "stack": stack, "biases": biases, "ndim": ndim, "picture": picture}
    if patch is not None and fit is None and carries(model, scheme, **asked_for) and not dry_run:
        done = patch.record
        limits = limit_edits(model, text_config(model), done.length, tokenizer, processor, done.original)
        _swap_limits(model, patch, limits)
        return model
    if patch is not None:
        _revert(model, patch)
    try:
        new = plan(model, scheme, tokenizer, processor, **asked_for)
        if fit is not None:
            fit_plan(new, fit, tokenizer)
        if not dry_run:
            install(model, new)
    except BaseException:
        _reapply(model, patch)
        raise
    if dry_run:
        _reapply(model, patch)
        return new
    if new.recalibrate:
        warnings.warn(new.notes[0], RecalibrationWarning, stacklevel=2)
    return model


def carries(
    model: nn.Module,
    scheme: Scheme,
    layers: Sequence[int] | None,
    stack: str | None = None,
    biases: Mapping[str, str] | None = None,
    ndim: int | None = None,
    picture: Picture | None = None,
) -> bool:
    """Whether a model's record is of this very swap."""
    record, anatomy = record_of(model), examine(model).within(stack, biases)
    chosen = chosen_layers(anatomy, layers)
    if record is None or (record.stack, record.biases) != (anatomy.stack, anatomy.biases):
        return False
    if record.ndim != chosen_ndim(anatomy, scheme, ndim):
        return False
    asked = None if chosen is None else list(chosen), None if picture is None else picture.given()
    return _is_recorded(scheme, record) and (record.layers, record.picture) == asked


def _is_recorded(scheme: Scheme, record: Record) -> bool:
    """Whether a record is of a scheme; what the scheme leaves open, a fit may have chosen."""
    recorded = scheme_of(record)
    if FIT in record.measured and type(recorded) is type(scheme):
        open_ = {f.name: getattr(recorded, f.name) for f in fields(scheme) if getattr(scheme, f.name) is None}
        scheme = replace(scheme, **open_)
    return scheme == recorded


def unpatch_model(model: nn.Module, *, tokenizer: Any = None, processor: Any = None) -> Any:
    """Take a patch back, in place, and return the same model: logits, state_dict keys and config as before.

    A tokenizer or processor whose limits the patch updated gets its own back when passed here.

    Raises:
        PosSwapError: the model is not patched, or was reloaded from a checkpoint that no longer holds what the
            patch replaced (a table of positions).
    """
    patch = patch_of(model)
    if patch is None:
        raise PosSwapError(f"model={kind(model)} is not patched; there is nothing to undo")
    _revert(model, patch)
    given = (tokenizer, processor, getattr(processor, "tokenizer", None))
    for edit in reversed(patch.outside.edits):
        if any(edit.owner is one for one in given):
            edit.swap()
    return model


@contextmanager
def unpatched(model: nn.Module) -> Iterator[None]:
    """Within it a patched model is as it was before. Raises PosSwapError as `unpatch_model` does."""
    patch = patch_of(model)
    _revert(model, patch)
    try:
        yield
    finally:
        _reapply(model, patch)


def patch_of(model: nn.Module) -> Patch | None:
    """The patch a model carries; taken over from its config where transformers itself loaded the checkpoint."""
    patch = getattr(model, ATTRIBUTE, None)
    record = record_of(model)
    if patch is None and record is not None:
        patch = adopt(model, record)
    return patch


def record_of(model: nn.Module) -> Record | None:
    """What the model's config says of a swap, None where it says nothing."""
    data = getattr(getattr(model, "config", None), KEY, None)
    return None if data is None else Record.from_dict(data)


def install(model: nn.Module, new: Plan) -> None:
    """Apply a plan: the model gets a config of its own, then the edits; all of it or none."""
    outside = [e for e in new.edits if isinstance(e, Replace) and not isinstance(e.owner, nn.Module)]
    inside = [e for e in new.edits if e not in outside]
    Journal(new.config_edits() + inside + outside).apply()
    journal = Journal(_config_edits(new.config, new.original) + inside)
    setattr(model, ATTRIBUTE, Patch(new.record(), journal, Journal(outside)))


def adopt(model: nn.Module, record: Record) -> Patch:
    """Take over a native checkpoint that transformers loaded, so that it can be described, re-patched and undone."""
    if record.storage == PORTABLE:
        raise PosSwapError(
            f"this model's config says {record.scheme!r}, stored portable, and the model was built without it; "
            "load the checkpoint with hf_posswap.from_pretrained"
        )
    anatomy = examine(model).within(record.stack, record.biases)
    replaced = _replaced_sites(anatomy, record)
    trainable = scheme_of(record).trainable
    if EMBED in replaced and not trainable:  # transformers loads every table as trainable
        for table in anatomy.tables:
            table.weight.requires_grad_(False)
    if BIAS in replaced:
        for table in silent_biases(anatomy, record):
            table.weight.requires_grad_(False)
    if ROTARY in replaced:
        for module in anatomy.rotary.modules.values():
            keep_dtype(module).swap()
    for table in frames(anatomy) if record.picture is not None else ():
        for edit in form_edits(anatomy, table, record.picture.get("patch_form")):
            edit.swap()
    save_edit(model, None).swap()
    patch = Patch(record, None)
    setattr(model, ATTRIBUTE, patch)
    return patch


def forget_replaced(model: nn.Module) -> None:
    """A reloaded model whose table of positions was replaced has no way back: its checkpoint holds the new one."""
    patch = patch_of(model)
    if _replaced_sites(examine(model).within(patch.record.stack), patch.record) & {EMBED, BIAS}:
        patch.journal = None


def _replaced_sites(anatomy: Anatomy, record: Record) -> frozenset[str]:
    """The sites of a model whose numbers a recorded swap took over or silenced; an ALiBi has none, and
    neither have sinusoids that are computed.
    """
    scheme, native = scheme_of(record), anatomy.sites
    replaced = frozenset() if record.picture is None else frozenset({EMBED, BIAS})
    if record.layers is None:
        replaced |= silenced_by(record, native)
        replaced |= frozenset() if scheme.stacks else (scheme.sites & native) - scheme.sites_in_attention(native)
    numbers = {EMBED: anatomy.tables, BIAS: anatomy.bias is not None and anatomy.bias.tables, ROTARY: True}
    lost = frozenset(site for site in replaced if numbers.get(site))
    return lost | {BIAS} if silent_biases(anatomy, record) else lost


def silent_biases(anatomy: Anatomy, record: Record) -> list[BiasTable]:
    """The tables of biases, in tokens and on the page, that a recorded swap silenced."""
    silenced = silenced_by(record, anatomy.sites)
    tables = anatomy.bias.tables.items() if BIAS in silenced and anatomy.bias is not None else ()
    found = [table for path, table in tables if anatomy.is_in(path, record.layers)]
    spatial = anatomy.page.spatial if record.biases.get(SPATIAL) == SILENCE else {}
    return found + list(spatial.values())


def config_before(model: nn.Module, record: Record) -> Any:
    """The model's config as it was before the recorded swap: a copy."""
    before = copy.deepcopy(model.config)
    for path, value in config_values(record.original):
        Replace(*owner_of(before, path), copy.deepcopy(value)).swap()
    return before


def _way_back(model: nn.Module, record: Record) -> Journal:
    """Edits, already made, whose other side is a reloaded model's rotary site as its original config builds it."""
    anatomy = examine(model).within(record.stack)
    if _replaced_sites(anatomy, record) & {EMBED, BIAS}:
        raise PosSwapError(
            f"{record.scheme}: this checkpoint no longer holds the table that the swap replaced, so it cannot be "
            f"undone or swapped again; load {record.source or 'the original model'} and patch that"
        )
    back = Plan(anatomy, scheme_of(record), model.config)
    rotary_edits(back, anatomy.rotary, config_before(model, record).get_text_config())
    for edit in back.edits:
        if edit.name == "_apply":  # belongs to the patched side, and `adopt` made it
            edit.value = ABSENT
    if "pairing" in record.original:
        layer_types = scaled_layer_types(anatomy.rotary, back.scheme)
        geometry = rotary_geometry(anatomy, layer_types[0])
        # the rows are permuted already; the other order of the two is the inverse permutation
        other = "halves" if record.params["pairing"] == "interleaved" else "interleaved"
        pairing_edits(back, geometry, other, layer_types)
    saving = Replace(model, "save_pretrained", ABSENT)  # `adopt` made that one too
    return Journal([*_config_edits(model.config, record.original), *back.edits, saving])


def _config_edits(config: Any, original: dict[str, Any]) -> list[Replace]:
    """Edits, already made, whose other side is the config as it was."""
    before = [Replace(*owner_of(config, path), copy.deepcopy(value)) for path, value in config_values(original)]
    return [*before, Replace(config, KEY, ABSENT)]


def _revert(model: nn.Module, patch: Patch) -> None:
    if patch.journal is None:
        patch.journal = _way_back(model, patch.record)
    patch.journal.revert()
    delattr(model, ATTRIBUTE)


def _reapply(model: nn.Module, patch: Patch | None) -> None:
    if patch is not None:
        patch.journal.apply()
        setattr(model, ATTRIBUTE, patch)


def _swap_limits(model: nn.Module, patch: Patch, edits: list[Replace]) -> None:
    Journal(edits).apply()
    patch.outside.edits += edits
