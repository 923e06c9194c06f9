"""DeBERTa v2 and v3: vectors of distances meet q and k; without them a share of every key is left."""

from operator import attrgetter

from ..anatomy import AttentionDeclaration
from ..heads import never, project_apart
from .deberta import hidden


def _project(module, call):
    layers, size = ("query_proj", "key_proj", "value_proj"), "attention_head_size"
    query, key, value = project_apart(module, call, layers=layers, size=size, states="hidden_states")
    if module.relative_attention and "p2c" in module.pos_att_type:  # silenced rows are all alike
        of_distances = module.query_proj if module.share_att_key else module.pos_query_proj
        query = query + of_distances(call["rel_embeddings"][0]).unflatten(-1, (-1, 1, module.attention_head_size))
    return query, key, value


def _scaling(module):
    return (module.attention_head_size * (1 + len({"c2p", "p2c"}.intersection(module.pos_att_type)))) ** -0.5


ATTENTION = AttentionDeclaration(
    holds=frozenset({"query_proj", "key_proj", "value_proj", "pos_att_type", "share_att_key"}),
    project=_project,
    scaling=_scaling,
    mask=hidden,
    dropout=attrgetter("dropout.p"),
    causal=never,
)
