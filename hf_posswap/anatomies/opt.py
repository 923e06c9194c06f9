"""OPT: `embed_positions` adds its own `offset` to every position; the config does not count those rows."""

from ..anatomy import TableDeclaration


def _fits(owner, config) -> bool:
    offset = getattr(owner.embed_positions, "offset", None)
    return offset is not None and owner.embed_positions.num_embeddings == config.max_position_embeddings + offset


TABLE = TableDeclaration(
    family="opt",
    attribute="embed_positions",
    fits=_fits,
    reserved=lambda owner: owner.embed_positions.offset,
    counted=False,
)
