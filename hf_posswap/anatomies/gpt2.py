"""GPT-2: `wpe`, one row per position."""

from ..anatomy import TableDeclaration

TABLE = TableDeclaration(
    family="gpt2",
    attribute="wpe",
    fits=lambda owner, config: owner.wpe.num_embeddings == config.max_position_embeddings,
    reserved=lambda owner: 0,
)
