"""Longformer without global tokens: BERT's attention within a window, computed here behind a mask of all pairs, so that
memory grows with the square of the length.
"""

from operator import attrgetter

from torch import arange

from ..anatomy import AttentionDeclaration
from ..errors import PosSwapError
from ..heads import never, project_apart


def _project(module, call):
    if call.get("is_global_attn"):
        raise PosSwapError(f"{type(module).__name__}: tokens of global attention have no scheme here; leave them out")
    return project_apart(module, call, layers=("query", "key", "value"), size="head_dim", states="hidden_states")


def _mask(module, call):
    masked = call["attention_mask"] != 0  # (B, K)
    places = arange(masked.shape[1], device=masked.device)
    far = (places - places[:, None]).abs() > module.one_sided_attn_window_size
    return (masked[:, None] | far)[:, None]


def _finish(module, output, call):
    return output.masked_fill(call["is_index_masked"][..., None], 0)


ATTENTION = AttentionDeclaration(
    holds=frozenset({"query", "key", "value", "query_global", "one_sided_attn_window_size"}),
    project=_project,
    mask=_mask,
    finish=_finish,
    dropout=attrgetter("dropout"),
    causal=never,
)
