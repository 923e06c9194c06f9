"""SqueezeBERT: convolutions instead of linear layers, channels before tokens."""

from operator import attrgetter

from ..anatomy import AttentionDeclaration
from ..heads import never


def _project(module, call):
    shape = (module.num_attention_heads, module.attention_head_size)
    layers = (module.query, module.key, module.value)
    return [layer(call["hidden_states"]).unflatten(1, shape).transpose(2, 3) for layer in layers]


def _finish(module, output, call):
    return output.transpose(1, 2)


def _returns(module, output, weights):
    return {"context_layer": output, "attention_score": weights}


ATTENTION = AttentionDeclaration(
    holds=frozenset({"query", "key", "value", "matmul_qk", "matmul_qkv"}),
    project=_project,
    finish=_finish,
    returns=_returns,
    dropout=attrgetter("dropout.p"),
    causal=never,
)
