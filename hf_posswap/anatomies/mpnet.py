"""MPNet: BERT's attention with a bias that the encoder reads off T5's buckets for all layers."""

from ..anatomy import AttentionDeclaration


def _project(module, call):
    shape = (module.num_attention_heads, module.attention_head_size)
    return [
        linear(call["hidden_states"]).unflatten(-1, shape).transpose(1, 2) for linear in (module.q, module.k, module.v)
    ]


def _finish(module, output, call):
    return module.o(output)


def _scaling(module):
    return module.attention_head_size**-0.5


def _dropout(module):
    return module.dropout.p


def _bias(module, query, call):
    return call.get("position_bias")


def _causal(module):
    return False


ATTENTION = AttentionDeclaration(
    holds=frozenset({"q", "k", "v", "o", "attention_head_size"}),
    project=_project,
    finish=_finish,
    bias=_bias,
    scaling=_scaling,
    dropout=_dropout,
    causal=_causal,
)
