"""MVP, TrOCR, XGLM: BART's attention as it was before transformers' attention interface."""

from operator import attrgetter

from ..anatomy import AttentionDeclaration
from ..errors import PosSwapError
from ..heads import project_apart

BART_USES = """
EncoderDecoderCache ValueError bmm cat cross_attention_cache device dropout dtype embed_dim expand finfo float16 float32
full functional get head_dim is_updated isinstance k_proj keys layer_idx layers max min nn num_heads out_proj q_proj
reshape scaling self_attention_cache shape size softmax to torch training transpose update v_proj values view zeros
"""


def _project(module, call):
    if call.get("attn_prompt") is not None:
        raise PosSwapError(f"{type(module).__name__}: the keys of a prompt have no places")
    return project_apart(module, call, layers=("q_proj", "k_proj", "v_proj"), size="head_dim", states="hidden_states")


def _finish(module, output, call):
    return module.out_proj(output)


ATTENTION = AttentionDeclaration(
    holds=frozenset({"q_proj", "k_proj", "v_proj", "out_proj", "embed_dim", "head_dim", "num_heads", "is_decoder"}),
    project=_project,
    finish=_finish,
    scaling=attrgetter("scaling"),
    dropout=attrgetter("dropout"),
    cache="past_key_values",
    causal=attrgetter("is_decoder"),
    does=frozenset(BART_USES.split()),
)
