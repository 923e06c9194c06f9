"""GPT-J: turns a part of each head by itself, off a table of its own."""

from functools import partial
from operator import attrgetter

from ..anatomy import AttentionDeclaration
from ..heads import project_apart


def finish(module, output, call):
    return module.resid_dropout(module.out_proj(output))


ATTENTION = AttentionDeclaration(
    holds=frozenset({"q_proj", "k_proj", "v_proj", "out_proj", "resid_dropout", "rotary_dim", "scale_attn"}),
    project=partial(project_apart, layers=("q_proj", "k_proj", "v_proj"), size="head_dim", states="hidden_states"),
    finish=finish,
    dropout=attrgetter("attn_dropout.p"),
    cache="layer_past",
    turns=attrgetter("rotary_dim"),
)
