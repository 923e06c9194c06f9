"""LiLT: a stream of text and a narrower one of layout. Each adds the other's logits to its own, so both attend alike:
one attention over heads of both widths, side by side. The layout has a table of the same positions.
"""

from operator import attrgetter

import torch
from torch import nn

from ..anatomy import AttentionDeclaration, TableDeclaration
from ..heads import never


def _is_layout(owner, config) -> bool:
    table = owner.box_position_embeddings
    return isinstance(table, nn.Embedding) and table.num_embeddings == config.max_position_embeddings


def _before_layout(owner) -> int:
    return owner.box_position_embeddings.padding_idx + 1


BOX_TABLE = TableDeclaration(
    family="lilt",
    attribute="box_position_embeddings",
    fits=_is_layout,
    reserved=_before_layout,
    beside=True,
)


def _project(module, call):
    streams = (
        (call["hidden_states"], (module.query, module.key, module.value)),
        (call["layout_inputs"], (module.layout_query, module.layout_key, module.layout_value)),
    )
    text, layout = (
        [layer(states).unflatten(-1, (module.num_attention_heads, -1)).transpose(1, 2) for layer in layers]
        for states, layers in streams
    )
    for stream in (text, layout):
        stream[0] = stream[0] * stream[0].shape[-1] ** -0.5
    return [torch.cat(pair, dim=-1) for pair in zip(text, layout, strict=True)]


def _finish(module, output, call):
    width = module.attention_head_size
    heads = output.unflatten(-1, (module.num_attention_heads, -1))
    return heads[..., :width].flatten(2), heads[..., width:].flatten(2)


def _returns(module, output, weights):
    return *output, weights


def _scaling(module):
    return 1.0


ATTENTION = AttentionDeclaration(
    holds=frozenset({"query", "key", "value", "layout_query", "layout_key", "layout_value", "channel_shrink_ratio"}),
    project=_project,
    finish=_finish,
    returns=_returns,
    scaling=_scaling,
    dropout=attrgetter("dropout.p"),
    causal=never,
)
