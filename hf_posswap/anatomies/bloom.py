"""Bloom: one fused projection, ALiBi in every layer."""

from operator import attrgetter

from torch.nn.functional import dropout

from ..anatomy import AttentionDeclaration


def _project(module, call):
    return module._reshape(module.query_key_value(call["hidden_states"]))


def _finish(module, output, call):
    return dropout(module.dense(output), module.hidden_dropout, module.training) + call["residual"]


ATTENTION = AttentionDeclaration(
    holds=frozenset({"query_key_value", "slow_but_exact"}),
    project=_project,
    finish=_finish,
    scaling=attrgetter("inv_norm_factor"),
    dropout=attrgetter("attention_dropout.p"),
    cache="layer_past",
    alibi=True,
)
