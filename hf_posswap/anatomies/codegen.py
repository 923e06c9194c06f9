"""CodeGen: GPT-J's attention behind one projection, in the four parts of the machines that it was trained on."""

from operator import attrgetter

from ..anatomy import AttentionDeclaration
from .gptj import finish

PARTS = 4


def _project(module, call):
    heads = (PARTS, 3, module.num_attention_heads // PARTS, module.head_dim)
    query, value, key = module.qkv_proj(call["hidden_states"]).unflatten(-1, heads).unbind(-3)
    return [part.flatten(-3, -2).transpose(1, 2) for part in (query, key, value)]


ATTENTION = AttentionDeclaration(
    holds=frozenset({"qkv_proj", "out_proj", "resid_dropout", "rotary_dim", "scale_attn"}),
    project=_project,
    finish=finish,
    dropout=attrgetter("attn_dropout.p"),
    cache="layer_past",
    turns=attrgetter("rotary_dim"),
)
