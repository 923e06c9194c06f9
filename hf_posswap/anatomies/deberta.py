"""DeBERTa, of one fused projection: vectors of distances meet q and k; without them a share of every key is left."""

from operator import attrgetter

from ..anatomy import AttentionDeclaration
from ..heads import never


def _project(module, call):
    query, key, value = module.transpose_for_scores(module.in_proj(call["hidden_states"])).chunk(3, dim=-1)
    query = query + module.transpose_for_scores(module.q_bias[None, None])
    value = value + module.transpose_for_scores(module.v_bias[None, None])
    if module.relative_attention and "p2c" in module.pos_att_type:  # silenced rows are all alike
        query = query + module.transpose_for_scores(module.pos_q_proj(call["rel_embeddings"][:1])[None])
    return query, key, value


def _scaling(module):
    return (module.attention_head_size * (1 + len(module.pos_att_type))) ** -0.5


def hidden(module, call):
    return call["attention_mask"] == 0  # (B, 1, Q, K), ones where a key is seen


def _is_plain(module) -> bool:
    return module.head_logits_proj is None


ATTENTION = AttentionDeclaration(
    holds=frozenset({"in_proj", "q_bias", "v_bias", "pos_att_type", "head_logits_proj"}),
    project=_project,
    scaling=_scaling,
    mask=hidden,
    dropout=attrgetter("dropout.p"),
    causal=never,
    when=_is_plain,
)
