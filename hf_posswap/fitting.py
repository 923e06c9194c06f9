"""Fitting: before a model is touched, measure what its positions add to its attention logits, and give the scheme that
is to replace them the parameters that add the same.
"""

from __future__ import annotations

import inspect
import operator
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .anatomy import kind, own_attention
from .attention import ATTRIBUTE, Attached
from .calibration import Images, Rows
from .edits import Replace
from .errors import PosSwapError, nearest
from .fitting_rotation import Heard, choose, refuse_unturnable, write
from .grid import Grid
from .listening import Contents, listen, replaced_bias, turns
from .planning.images import is_image, patch_embedding, trained_grid
from .planning.plan import Plan, trained_length
from .profile import Fit, Pairs, Tally
from .record import FIT
from .scheme import registry
from .sites import EMBED, RELATIVE

if TYPE_CHECKING:
    from .scheme import Scheme

BESIDE_TEXT = ("image", "pixel_values")  # what models of pages call the image beside their text


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
    """Choose the parameters that a plan is to install, from what its model does on text or images; the model is left as
    it was.

    batches: an iterable of (B, S) or (S,) token ids, of dicts of a model's inputs, or with a tokenizer of strings or
    lists of them; padding, by `attention_mask`, is taken out of each row. For image models, of `pixel_values`
    (B, C, height, width) or dicts of them, of the size that the model was trained on. Memory does not grow with their
    number.

    Raises PosSwapError, before anything is changed, where the scheme has nothing to choose, the model cannot be
    listened to, or a batch is not of that kind; the plan is not to be used then.
    """
    attached = {edit.owner: edit.value[0] for edit in new.edits if isinstance(edit, Replace) and edit.name == ATTRIBUTE}
    if not attached or any(one.rotation is None and one.change.fit is None for one in attached.values()):
        raise PosSwapError(f"{new.scheme}: fit= finds no parameters to choose; {new.scheme.fits_with}")
    _refuse_deaf(new, attached)
    first = next(iter(attached.values()))
    if first.rotation is not None:
        refuse_unturnable(new)
    pairs = _pairs(new, first)
    inputs = _texts(new, batches, tokenizer) if pairs is None else _images(new, batches, pairs)
    fit = _fit_bias if first.rotation is None else _fit_rotation
    explained, longest = {}, 0
    for module, (tally, bias) in fit(new, attached, inputs, pairs).items():
        explained[module] = [round(value, 4) for value in tally.explained(bias).tolist()]
        longest = max(longest, tally.longest)
    in_order = {path: explained[m] for path, m in new.anatomy.model.named_modules() if m in explained}
    found = Fit(in_order, inputs.tokens, longest)
    new.measured[FIT] = asdict(found)
    new.notes.append(f"fitted: {found}")
    new.finish()


Fitted = dict[nn.Module, tuple[Tally, Tensor]]  # by attention module: what its positions added, the bias in its place


def _fit_bias(new: Plan, attached: Mapping[nn.Module, Attached], inputs: Images | Rows, pairs: Pairs | None) -> Fitted:
    """Give what is to be attached the parameters that come closest; modules that share them, together."""
    tallies = listen(new, attached, inputs, pairs)
    together: dict[Attached, list[nn.Module]] = defaultdict(list)
    for module, one in attached.items():
        together[one].append(module)
    for one, modules in together.items():
        fitted = one.change.fit(reduce(operator.add, (tallies[module] for module in modules)).profile())
        for name, value in fitted.items():
            parameter = one.get_parameter(name)
            parameter.data = value.to(parameter.device, parameter.dtype).reshape(parameter.shape)
    return {module: (tally, bias_of(attached[module], tally)) for module, tally in tallies.items()}


def _fit_rotation(
    new: Plan, attached: Mapping[nn.Module, Attached], inputs: Images | Rows, pairs: Pairs | None
) -> Fitted:
    """Choose the rotation, and plan the weights that go with it."""
    contents = Contents(new, attached)
    tallies = listen(new, attached, inputs, pairs, also=contents.hear)
    modules = {
        module: Heard.of(contents.traces[module], tally.profile(), contents.ears[module].moments())
        for module, tally in tallies.items()
    }
    new.scheme, rotation, waves = choose(new, [*modules.values()])
    for one in attached.values():
        one.rotation = rotation
    write(new, [*modules.values()], rotation, waves)
    lost = sum(one.basis.lost(rotation) for one in modules.values()) / len(modules)
    new.notes.append(f"gives up {lost:.1%} of what the contents of queries and keys did")
    of_module = dict(zip(modules, waves, strict=True))
    return {module: (tally, of_module[module].at(tally.distance)) for module, tally in tallies.items()}


def bias_of(attached: Attached, tally: Tally) -> Tensor:
    """(H, P) that a scheme adds at the distances of a tally, to a query where it begins."""
    tensors, distance = attached.tensors(torch.device("cpu")), tally.distance
    with torch.no_grad():
        if attached.change.between is not None:
            table = attached.change.between(tensors, tally.pairs.grid.rows, tally.pairs.grid.columns)
            return torch.cat([table.flatten(1), tensors["beside"]], dim=1)
        if attached.change.placed is None:
            return attached.change.bias(tensors, distance)
        return attached.change.placed(tensors, distance[None], torch.zeros(1, 1))[:, 0]


def _pairs(new: Plan, attached: Attached) -> Pairs | None:
    """Which tokens of an image are at a distance, as a scheme has it; None for text."""
    if not is_image(new.anatomy):
        return None
    grid = Grid(*trained_grid(new.anatomy), attached.sight.before, attached.sight.after)
    return Pairs.in_row(grid) if attached.change.between is None else Pairs.between(grid)


def _images(new: Plan, batches: Any, pairs: Pairs) -> Images:
    embedding = patch_embedding(new.anatomy)[1]
    sides = zip(trained_grid(new.anatomy), embedding.kernel_size, strict=True)
    return Images(batches, (embedding.in_channels, *(n * side for n, side in sides)), len(pairs.kind))


def _texts(new: Plan, batches: Any, tokenizer: Any) -> Rows:
    page, vocabulary = new.anatomy.page, new.anatomy.model.get_input_embeddings().weight.shape[0]
    names = () if page is None else inspect.signature(page.reader.forward).parameters
    return Rows(batches, tokenizer, trained_length(new), vocabulary, frozenset({*BESIDE_TEXT} & {*names}))


def _refuse_deaf(new: Plan, attached: Mapping[nn.Module, Attached]) -> None:
    """Raise PosSwapError where what the positions of this model do cannot be measured."""
    anatomy, model, bias = new.anatomy, new.anatomy.model, new.anatomy.bias
    if bias is not None and (not bias.tables or bias.name == "disentangled" or turns(anatomy)):
        raise PosSwapError(
            f"fit= measures what a rotation, a table of positions or a learned bias of distances does, and "
            f"{kind(model)} has a bias of another kind, {bias.name}; leave it out"
        )
    own = own_attention(model)
    for module in attached:
        if module in own and (turns(anatomy) or own[module].turns is not None):
            raise PosSwapError(
                f"fit= listens to attention through transformers' interface, which {kind(module)} does not call; leave "
                "it out"
            )
        if turns(anatomy) and "position_embeddings" not in inspect.signature(module.forward).parameters:
            raise PosSwapError(f"fit= cannot take the rotation from {kind(module)}, which makes its own; leave it out")
    if not (turns(anatomy) or EMBED in anatomy.sites or replaced_bias(anatomy)):
        raise PosSwapError(
            f"fit= measures the positions that {new.scheme.name} replaces, and {RELATIVE}_bias="
            f"{anatomy.biases.get(RELATIVE)!r} leaves all that {kind(model)} has; leave one of them out"
        )
    if not (is_image(anatomy) or model.main_input_name == "input_ids"):
        raise PosSwapError(f"fit= reads text or images, and {kind(model)} reads {model.main_input_name}; leave it out")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise PosSwapError(f"fit= runs the model, and this {kind(model)} has weights on the meta device; load it first")
