"""Megatron-BERT, RemBERT, TAPAS: BERT's attention as it was before transformers' attention interface."""

from operator import attrgetter

from ..anatomy import AttentionDeclaration

BERT_USES = """
EncoderDecoderCache all_head_size attention_head_size contiguous cross_attention_cache dropout functional get is_decoder
is_updated isinstance key keys layer_idx layers math matmul nn permute query self_attention_cache shape size softmax
sqrt torch transpose update value values view
"""


def _project(module, call):
    shape = (module.num_attention_heads, module.attention_head_size)
    layers = (module.query, module.key, module.value)
    return [layer(call["hidden_states"]).unflatten(-1, shape).transpose(1, 2) for layer in layers]


def _finish(module, output, call):
    return output


def _scaling(module):
    return module.attention_head_size**-0.5


ATTENTION = AttentionDeclaration(
    holds=frozenset({"query", "key", "value", "all_head_size", "attention_head_size", "is_decoder"}),
    project=_project,
    finish=_finish,
    scaling=_scaling,
    dropout=attrgetter("dropout.p"),
    cache="past_key_values",
    causal=attrgetter("is_decoder"),
    does=frozenset(BERT_USES.split()),
)
