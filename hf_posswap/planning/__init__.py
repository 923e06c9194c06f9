"""Planning: from a model and a scheme to a validated list of edits. Pure: the model is read, never touched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from ..anatomy import Anatomy, examine, kind, refuse_foreign_rotary
from ..bundle import travel_of
from ..errors import PosSwapError
from ..pictures import Picture
from ..record import PORTABLE
from ..saving import save_edit
from ..scheme import Scheme
from ..sites import BIAS, EMBED, RELATIVE, ROTARY, ROTARY_2D, SILENCE, SPATIAL
from .images import chosen_ndim, silence_turning
from .layers import chosen_layers, plan_layers
from .limits import limit_edits
from .page import guard_page, silence_spatial
from .picture import refuse_picture, resize_frames
from .plan import Plan, invalid
from .rotary import install_rotary, is_silent_natively, silence_rotary, silence_rotary_natively
from .table import install_addition, install_table, resize_table, silence_bias, silence_table


def plan(
    model: nn.Module,
    scheme: Scheme,
    tokenizer: Any = None,
    processor: Any = None,
    layers: Sequence[int] | None = None,
    stack: str | None = None,
    biases: Mapping[str, str] | None = None,
    ndim: int | None = None,
    picture: Picture | None = None,
) -> Plan:
    """Everything `patch_model` would do, checked, in order. Raises PosSwapError if any of it cannot be done."""
    anatomy = examine(model).within(stack, biases)
    if anatomy.rotary is not None:
        refuse_foreign_rotary(model, anatomy.rotary)
        if getattr(anatomy.config, "max_position_embeddings", None) is None:
            raise PosSwapError(f"{scheme}: the config of {kind(model)} does not say the trained length")
    new = Plan.of(anatomy, scheme)
    new.layers, new.ndim = chosen_layers(anatomy, layers), chosen_ndim(anatomy, scheme, ndim)
    new.picture = picture
    refuse_picture(new)
    steps = choose_steps(anatomy, scheme, new.layers, picture)
    new.follow(steps)
    if not new.effective:
        raise PosSwapError(f"{scheme} would change nothing on this {kind(model)}")
    _refuse_invalid(new)
    continues = (
        scheme.keeps_function and (scheme.stacks or scheme.sites & anatomy.known) and "pairing" not in new.original
    )
    new.recalibrate = not continues or SILENCE in anatomy.biases.values()
    if new.recalibrate:
        new.notes.insert(
            0,
            f"{scheme.name} replaces the positions this model was trained with: fine-tune it before use (recalibrate)",
        )
    new.edits += limit_edits(model, new.text, new.length, tokenizer, processor, new.original)
    new.edits.append(save_edit(model, travel_of(anatomy, scheme, steps) if new.storage == PORTABLE else None))
    new.finish()
    return new


Step = Callable[[Plan, Scheme], None]


def choose_steps(
    anatomy: Anatomy, scheme: Scheme, layers: Sequence[int] | None, picture: Picture | None = None
) -> tuple[Step, ...]:
    """What silences and installs, site by site, in order."""
    page = [guard_page] if anatomy.page is not None else []
    page += [silence_spatial] if anatomy.biases.get(SPATIAL) == SILENCE else []
    framed = picture is not None and not anatomy.tables
    if layers is not None:
        resized = [] if picture is None else [resize_frames] if framed else [resize_table]
        return (*resized, plan_layers, *page)
    native, inside = anatomy.sites, scheme.sites_in_attention(anatomy.sites)
    replaced = (scheme.sites & native) - inside
    silenced = scheme.silences(native, anatomy.biases.get(RELATIVE), picture is not None)
    steps: list[Step] = [resize_frames] if framed else []
    if ROTARY in replaced:
        steps.append(install_rotary)
    if ROTARY in silenced:
        natively = not scheme.sites and is_silent_natively(anatomy)
        steps.append(silence_rotary_natively if natively else silence_rotary)
    if ROTARY_2D in silenced:
        steps.append(silence_turning)
    if EMBED in replaced:
        steps.append(install_table)
    if EMBED in silenced:
        steps.append(silence_table)
    if EMBED in native - replaced - silenced and picture is not None:
        steps.append(resize_table)
    if BIAS in silenced and anatomy.bias.tables:
        steps.append(silence_bias)
    if EMBED in scheme.sites - native and not scheme.adds_nothing(native, framed):
        steps.append(install_addition)
    turning = anatomy.turned is not None and not scheme.stacks
    if inside or turning or (BIAS in silenced and not anatomy.bias.tables):
        from .attention import install_attention  # imports transformers' modeling code, seconds of it

        steps.append(install_attention)
    return (*steps, *page)


def _refuse_invalid(new: Plan) -> None:
    """Raise where transformers' own check of a config, made at every save, does not let the new one pass."""
    error = invalid(new.text)
    if error is not None:
        reason = str(error.__cause__ or error).strip()
        raise PosSwapError(
            f"{new.scheme}: the config of a {kind(new.anatomy.model)} cannot hold it ({reason}): it could not be saved"
        ) from error
