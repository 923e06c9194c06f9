"""RoFormer: BERT's attention, which turns q and k by itself."""

from functools import partial
from operator import attrgetter

from ..anatomy import AttentionDeclaration
from ..heads import project_apart


def _is_plain(module) -> bool:
    return not module.rotary_value


ATTENTION = AttentionDeclaration(
    holds=frozenset({"query", "key", "value", "rotary_value"}),
    project=partial(
        project_apart, layers=("query", "key", "value"), size="attention_head_size", states="hidden_states"
    ),
    dropout=attrgetter("dropout.p"),
    cache="past_key_values",
    causal=attrgetter("is_decoder"),
    when=_is_plain,
    turns=attrgetter("attention_head_size"),
)
