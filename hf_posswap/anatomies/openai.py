"""The first GPT: `positions_embed`, one row per position, beside an index buffer."""

from ..anatomy import TableDeclaration

TABLE = TableDeclaration(
    family="openai-gpt",
    attribute="positions_embed",
    fits=lambda owner, config: owner.positions_embed.num_embeddings == config.max_position_embeddings,
    reserved=lambda owner: 0,
    buffers=("position_ids",),
)
