"""Planning: from a model and a scheme to a validated list of edits. Pure: the model is read, never touched."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..anatomy import examine, kind, refuse_foreign_rotary
from ..errors import PosSwapError
from ..record import KEY, Record
from ..scheme import Scheme
from ..sites import BIAS, EMBED, ROTARY
from .layers import chosen_layers, plan_layers
from .limits import limit_edits
from .plan import Plan
from .rotary import install_rotary, silence_rotary
from .table import install_addition, install_table, silence_bias, silence_table


def plan(
    model: nn.Module,
    scheme: Scheme,
    tokenizer: Any = None,
    processor: Any = None,
    recalled: Record | None = None,
    layers: Sequence[int] | None = None,
) -> Plan:
    """Everything `patch_model` would do, checked, in order. Raises PosSwapError if any of it cannot be done.

    `recalled` is the record of a checkpoint: its numbers are used instead of measuring the model again.
    """
    anatomy = examine(model)
    if anatomy.rotary is not None:
        refuse_foreign_rotary(model, anatomy.rotary)
        if getattr(anatomy.config, "max_position_embeddings", None) is None:
            raise PosSwapError(f"{scheme}: the config of {kind(model)} does not say the trained length")
    configs: dict[int, Any] = {}
    new = Plan(anatomy, scheme, copy.deepcopy(model.config, configs), configs=configs)
    new.source = model.config.name_or_path
    new.layers = chosen_layers(anatomy, layers)
    if recalled is not None:
        new.measured, new.source = dict(recalled.measured), recalled.source

    with torch.device("cpu"):  # a caller may be building on the meta device, where there are no numbers to plan with
        if new.layers is None:
            _plan_sites(new, scheme)
        else:
            plan_layers(new, scheme)
    if not new.effective:
        raise PosSwapError(f"{scheme} would change nothing on this {kind(model)}")
    _refuse_invalid(new)
    continues = (
        scheme.keeps_function and (scheme.stacks or scheme.sites & anatomy.sites) and "pairing" not in new.original
    )
    new.recalibrate = not continues
    if new.recalibrate:
        new.notes.append(
            f"{scheme.name} replaces the positions this model was trained with: fine-tune it before use (recalibrate)"
        )
    new.edits += limit_edits(model, new.text, new.length, tokenizer, processor)
    setattr(new.config, KEY, new.record().to_dict())
    return new


def _plan_sites(new: Plan, scheme: Scheme) -> None:
    """Silence and install, site by site."""
    native = new.anatomy.sites
    in_attention = scheme.sites & {BIAS}
    if ROTARY in scheme.sites and (scheme.in_attention or ROTARY not in native):
        in_attention |= {ROTARY}
    replaced = (scheme.sites & native) - in_attention
    silenced = frozenset() if replaced or scheme.stacks else native  # like for like leaves a model's other sites alone
    if ROTARY in replaced:
        install_rotary(new, scheme)
    if ROTARY in silenced:
        silence_rotary(new, must_be_portable=bool(scheme.sites))
    if EMBED in replaced:
        install_table(new, scheme)
    if EMBED in silenced:
        silence_table(new)
    if BIAS in silenced and new.anatomy.bias.tables:
        silence_bias(new)
    if EMBED in scheme.sites - native:
        install_addition(new, scheme)
    if in_attention or (BIAS in silenced and not new.anatomy.bias.tables):
        from .attention import install_attention  # imports transformers' modeling code, seconds of it

        install_attention(new, scheme, in_attention)


def _refuse_invalid(new: Plan) -> None:
    """Raise where transformers' own check of a config, made at every save, does not let the new one pass."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        getattr(new.text, "validate", bool)()  # configs of remote code may have none
    except StrictDataclassError as error:
        reason = str(error.__cause__ or error).strip()
        raise PosSwapError(
            f"{new.scheme}: the config of a {kind(new.anatomy.model)} cannot hold it ({reason}): it could not be saved"
        ) from error
