"""LayoutLMv3: RoBERTa's attention with biases per distance in tokens and on the page, divided as its logits are."""

from operator import attrgetter

from ..anatomy import AttentionDeclaration

V3_USES = """
Softmax all_head_size amax attention_head_size cogview_attention contiguous dropout has_relative_attention_bias
has_spatial_attention_bias key math matmul nn num_attention_heads permute query shape size sqrt torch transpose
unsqueeze value view
"""


def _project(module, call):
    shape = (module.num_attention_heads, module.attention_head_size)
    layers = (module.query, module.key, module.value)
    return [layer(call["hidden_states"]).unflatten(-1, shape).transpose(1, 2) for layer in layers]


def _finish(module, output, call):
    return output


def _scaling(module):
    return module.attention_head_size**-0.5


def _causal(module):
    return False


def _bias(module, query, call):
    """The spatial one is read beside the other alone: with it, or not at all."""
    if not module.has_relative_attention_bias:
        return None
    bias = call["rel_pos"] + call["rel_2d_pos"] if module.has_spatial_attention_bias else call["rel_pos"]
    return bias * _scaling(module)


ATTENTION = AttentionDeclaration(
    holds=frozenset({"query", "key", "value", "has_relative_attention_bias", "has_spatial_attention_bias"}),
    project=_project,
    finish=_finish,
    bias=_bias,
    scaling=_scaling,
    dropout=attrgetter("dropout.p"),
    causal=_causal,
    does=frozenset(V3_USES.split()),
)
