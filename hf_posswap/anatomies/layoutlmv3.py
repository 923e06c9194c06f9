"""LayoutLMv3: RoBERTa's attention with biases per distance in tokens and on the page, divided as its logits are."""

from operator import attrgetter

from ..anatomy import AttentionDeclaration
from ..heads import never, project_as_bert

V3_USES = """
Softmax all_head_size amax attention_head_size cogview_attention contiguous dropout has_relative_attention_bias
has_spatial_attention_bias key math matmul nn num_attention_heads permute query shape size sqrt torch transpose
unsqueeze value view
"""


def _bias(module, query, call):
    """The spatial one is read beside the other alone: with it, or not at all."""
    if not module.has_relative_attention_bias:
        return None
    bias = call["rel_pos"] + call["rel_2d_pos"] if module.has_spatial_attention_bias else call["rel_pos"]
    return bias * query.shape[-1] ** -0.5


ATTENTION = AttentionDeclaration(
    holds=frozenset({"query", "key", "value", "has_relative_attention_bias", "has_spatial_attention_bias"}),
    project=project_as_bert,
    bias=_bias,
    dropout=attrgetter("dropout.p"),
    causal=never,
    does=frozenset(V3_USES.split()),
)
