"""Megatron-BERT, RemBERT, TAPAS, BigBird: BERT's attention as it was before transformers' attention interface."""

from operator import attrgetter

from ..anatomy import AttentionDeclaration
from ..heads import project_as_bert

BERT_USES = """
EncoderDecoderCache all_head_size attention_head_size contiguous cross_attention_cache dropout functional get
get_seq_length is_decoder is_updated isinstance key keys layer_idx layers math matmul nn permute query
self_attention_cache shape size softmax sqrt torch transpose update value values view
"""
ATTENTION = AttentionDeclaration(
    holds=frozenset({"query", "key", "value", "all_head_size", "attention_head_size", "is_decoder"}),
    project=project_as_bert,
    dropout=attrgetter("dropout.p"),
    cache="past_key_values",
    causal=attrgetter("is_decoder"),
    does=frozenset(BERT_USES.split()),
)
