"""MPT: one fused projection, clipped in some models, ALiBi in every layer."""

from operator import attrgetter

from ..anatomy import AttentionDeclaration


def _project(module, call):
    fused = module.Wqkv(call["hidden_states"])
    if module.clip_qkv:
        fused = fused.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    return [part.unflatten(-1, (module.n_heads, module.head_dim)).transpose(1, 2) for part in fused.chunk(3, dim=-1)]


def _finish(module, output, call):
    return module.out_proj(output)


ATTENTION = AttentionDeclaration(
    holds=frozenset({"Wqkv", "softmax_scale"}),
    project=_project,
    finish=_finish,
    scaling=attrgetter("softmax_scale"),
    dropout=attrgetter("attn_dropout_p"),
    cache="past_key_values",
    alibi=True,
)
