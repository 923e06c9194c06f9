"""Planning for document models: boxes are checked; a bias of distances on the page is silenced where that is asked."""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from .. import parts
from ..anatomy import PageSite, kind
from ..edits import Hook, Replace
from .plan import refuse_quantised

if TYPE_CHECKING:
    from ..scheme import Scheme
    from .plan import Plan


def guard_page(new: Plan, scheme: Scheme) -> None:
    """A box off the page is refused by name, where a table would end in an index error or a clip would be silent."""
    new.edits.append(box_guard(new.anatomy.page))


def box_guard(page: PageSite) -> Hook:
    names = tuple(inspect.signature(page.reader.forward).parameters)
    return Hook(page.reader, partial(parts.refuse_boxes, names=names, largest=page.largest), kind(page.reader))


def silence_spatial(new: Plan, scheme: Scheme) -> None:
    """Zeros for weights of the bias on the page, which transformers adds as before."""
    refuse_quantised(new.anatomy.model, str(scheme))
    for path, table in new.anatomy.page.spatial.items():
        zeros = nn.Parameter(torch.zeros_like(table.weight), requires_grad=False)
        new.edits.append(Replace(table.owner, table.attribute, zeros, path))
    new.effective = True
