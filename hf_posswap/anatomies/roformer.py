"""RoFormer: BERT's attention, which turns q and k by itself."""

from operator import attrgetter

from ..anatomy import AttentionDeclaration
from ..heads import project_as_bert


def _is_plain(module) -> bool:
    return not module.rotary_value


ATTENTION = AttentionDeclaration(
    holds=frozenset({"query", "key", "value", "rotary_value"}),
    project=project_as_bert,
    dropout=attrgetter("dropout.p"),
    cache="past_key_values",
    causal=attrgetter("is_decoder"),
    when=_is_plain,
    turns=attrgetter("attention_head_size"),
)
