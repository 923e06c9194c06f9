"""Nyströmformer with as many landmarks as tokens: BERT's attention, and a convolution of the values."""

from operator import attrgetter

from ..anatomy import AttentionDeclaration
from ..heads import never, project_as_bert


def _finish(module, output, call):
    if module.conv_kernel_size is None:
        return output
    return output + module.conv(project_as_bert(module, call)[2]).transpose(1, 2).flatten(2)


def _is_whole(module) -> bool:
    return module.num_landmarks == module.seq_len


ATTENTION = AttentionDeclaration(
    holds=frozenset({"query", "key", "value", "num_landmarks", "conv_kernel_size"}),
    project=project_as_bert,
    finish=_finish,
    dropout=attrgetter("dropout.p"),
    causal=never,
    when=_is_whole,
)
