"""OPT, BART and Blenderbot and their kin: `embed_positions` adds its own `offset`, where it has one, to every position;
the config does not count those rows.
"""

from torch import nn

from ..anatomy import TableDeclaration


def _fits(owner, config) -> bool:
    table = owner.embed_positions
    if not isinstance(table, nn.Embedding) or hasattr(table, "create_weight") or hasattr(table, "make_weights"):
        return False
    length = getattr(config, "max_position_embeddings", None)  # LED counts those of its stacks apart
    return length is not None and table.num_embeddings == length + _reserved(owner)


def _reserved(owner) -> int:
    return getattr(owner.embed_positions, "offset", 0)


TABLE = TableDeclaration(
    family="opt",
    attribute="embed_positions",
    fits=_fits,
    reserved=_reserved,
    counted=False,
)
