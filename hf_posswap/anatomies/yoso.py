"""YOSO, MRA, Nyströmformer: BERT's table with two rows before the first position, which the config does not count."""

from torch import nn

from ..anatomy import TableDeclaration


def _fits(owner, config) -> bool:
    table = owner.position_embeddings
    return (
        isinstance(table, nn.Embedding)
        and "position_ids" in owner._buffers
        and owner.position_ids.shape[-1] == config.max_position_embeddings == table.num_embeddings - 2
    )


def _reserved(owner) -> int:
    return 2


TABLE = TableDeclaration(
    family="yoso",
    attribute="position_embeddings",
    fits=_fits,
    reserved=_reserved,
    counted=False,
    buffers=("position_ids", "token_type_ids"),
)
