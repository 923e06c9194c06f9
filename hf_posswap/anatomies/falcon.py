"""Falcon: one fused projection, then its own rotation, or an ALiBi that the stack adds to the mask of all layers."""

import sys
from operator import attrgetter

from ..anatomy import AttentionDeclaration


def _project(module, call):
    fused = module.query_key_value(call["hidden_states"])
    query, key, value = (part.transpose(1, 2) for part in module._split_heads(fused))
    if not module.config.alibi:
        rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
        query, key = rotate(query, key, *call["position_embeddings"])
    return query, key, value


def _finish(module, output, call):
    return module.dense(output)


def _dropout(module):
    return module.attention_dropout.p if module.config.alibi else 0.0


def _groups(module):
    return module.num_heads if module.multi_query and not module.new_decoder_architecture else 1


ATTENTION = AttentionDeclaration(
    holds=frozenset({"query_key_value", "new_decoder_architecture"}),
    project=_project,
    finish=_finish,
    scaling=attrgetter("inv_norm_factor"),
    dropout=_dropout,
    groups=_groups,
    cache="layer_past",
    alibi="alibi",
    off={"use_alibi": False},
)
