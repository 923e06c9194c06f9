"""BERT, RoBERTa, XLM-R, ELECTRA, DistilBERT, CamemBERT, MPNet, TAPAS, Longformer and their kin.

A table beside an index buffer or the table of words. RoBERTa-like tables number positions from `padding_idx + 1`, and
their config counts the rows before.
"""

from torch import nn

from ..anatomy import TableDeclaration


def _fits(owner, config) -> bool:
    table = owner.position_embeddings
    plain = type(table) is nn.Embedding and "word_embeddings" in owner._modules  # ProphetNet's numbers tokens by itself
    return (
        isinstance(table, nn.Embedding)
        and ("position_ids" in owner._buffers or plain)
        and table.num_embeddings == config.max_position_embeddings
    )


def _reserved(owner) -> int:
    padding_idx = owner.position_embeddings.padding_idx
    return 0 if padding_idx is None else padding_idx + 1


TABLE = TableDeclaration(
    family="bert-like",
    attribute="position_embeddings",
    fits=_fits,
    reserved=_reserved,
    buffers=("position_ids", "token_type_ids"),
)
