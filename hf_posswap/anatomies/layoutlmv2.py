"""LayoutLMv2, LayoutXLM: BERT's attention with biases per distance in tokens and on the page."""

from operator import attrgetter

from ..anatomy import AttentionDeclaration
from ..heads import never


def _project(module, call):
    shape = (module.num_attention_heads, module.attention_head_size)
    return [vectors.unflatten(-1, shape).transpose(1, 2) for vectors in module.compute_qkv(call["hidden_states"])]


def _bias(module, query, call):
    in_tokens = call["rel_pos"] if module.has_relative_attention_bias else None
    on_page = call["rel_2d_pos"] if module.has_spatial_attention_bias else None
    return on_page if in_tokens is None else in_tokens if on_page is None else in_tokens + on_page


ATTENTION = AttentionDeclaration(
    holds=frozenset({"fast_qkv", "attention_head_size", "has_relative_attention_bias", "has_spatial_attention_bias"}),
    project=_project,
    bias=_bias,
    dropout=attrgetter("dropout.p"),
    causal=never,
)
