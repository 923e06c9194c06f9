"""Bros: BERT's attention, where a query meets the vector from its box to the key's; boxes are in parts of the page."""

from operator import attrgetter

import torch

from ..anatomy import AttentionDeclaration, PageDeclaration
from ..heads import project_as_bert

BROS_USES = """
all_head_size attention_head_size bbox_pos_emb contiguous dropout einsum is_decoder key math matmul nn
num_attention_heads permute query shape size Softmax sqrt torch transpose value view
"""


def _whole_page(module) -> float:
    return 1.0


def _box_projection(module):
    return ("bbox_projection",)


PAGE = PageDeclaration(
    frozenset({"bbox_sinusoid_emb", "bbox_projection"}), largest=_whole_page, spatial=_box_projection
)


def _bias(module, query, call):
    """`bbox_pos_emb`: (Q, K, B, D)."""
    return torch.einsum("bhqd,qkbd->bhqk", query, call["bbox_pos_emb"]) * query.shape[-1] ** -0.5


ATTENTION = AttentionDeclaration(
    holds=frozenset({"query", "key", "value", "all_head_size", "attention_head_size", "is_decoder"}),
    project=project_as_bert,
    bias=_bias,
    dropout=attrgetter("dropout.p"),
    causal=attrgetter("is_decoder"),
    does=frozenset(BROS_USES.split()),
)
