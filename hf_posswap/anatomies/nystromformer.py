"""Nyströmformer with as many landmarks as tokens: BERT's attention, and a convolution of the values."""

from functools import partial
from operator import attrgetter

from ..anatomy import AttentionDeclaration
from ..heads import never, project_apart

_project = partial(project_apart, layers=("query", "key", "value"), size="attention_head_size", states="hidden_states")


def _finish(module, output, call):
    if module.conv_kernel_size is None:
        return output
    return output + module.conv(_project(module, call)[2]).transpose(1, 2).flatten(2)


def _is_whole(module) -> bool:
    return module.num_landmarks == module.seq_len


ATTENTION = AttentionDeclaration(
    holds=frozenset({"query", "key", "value", "num_landmarks", "conv_kernel_size"}),
    project=_project,
    finish=_finish,
    dropout=attrgetter("dropout.p"),
    causal=never,
    when=_is_whole,
)
