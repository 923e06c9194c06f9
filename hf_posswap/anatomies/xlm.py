"""XLM, FlauBERT: queries, keys and values apart, and a mask of ones where a key is seen."""

from functools import partial
from operator import attrgetter

from ..anatomy import AttentionDeclaration
from ..heads import never, project_apart


def _finish(module, output, call):
    return module.out_lin(output)


def _mask(module, call):
    hidden = call["mask"] == 0  # (B, K), or (B, Q, K) where it is causal
    return hidden[:, None] if hidden.dim() == 3 else hidden[:, None, None].expand(-1, -1, call["input"].shape[1], -1)


ATTENTION = AttentionDeclaration(
    holds=frozenset({"q_lin", "k_lin", "v_lin", "out_lin", "n_heads", "layer_id"}),
    project=partial(project_apart, layers=("q_lin", "k_lin", "v_lin"), size="head_dim", states="input"),
    finish=_finish,
    mask=_mask,
    dropout=attrgetter("dropout"),
    cache="cache",
    causal=never,
    layer="layer_id",
)
