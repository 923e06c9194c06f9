"""MPNet: BERT's attention with a bias that the encoder reads off T5's buckets for all layers."""

from functools import partial
from operator import attrgetter

from ..anatomy import AttentionDeclaration
from ..heads import never, project_apart


def _finish(module, output, call):
    return module.o(output)


def _bias(module, query, call):
    return call.get("position_bias")


ATTENTION = AttentionDeclaration(
    holds=frozenset({"q", "k", "v", "o", "attention_head_size"}),
    project=partial(project_apart, layers=("q", "k", "v"), size="attention_head_size", states="hidden_states"),
    finish=_finish,
    bias=_bias,
    dropout=attrgetter("dropout.p"),
    causal=never,
)
