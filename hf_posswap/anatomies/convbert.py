"""ConvBERT: beside BERT's heads, convolutions with a kernel that each token's query and neighbours make."""

from operator import attrgetter

from torch import cat
from torch.nn.functional import pad

from ..anatomy import AttentionDeclaration
from ..heads import never, project_as_bert


def _finish(module, output, call):
    states, heads, width = call["hidden_states"], (-1, module.attention_head_size), module.conv_kernel_size
    near = module.key_conv_attn_layer(states.transpose(1, 2)).transpose(1, 2) * module.query(states)
    kernel = module.conv_kernel_layer(near).unflatten(-1, (-1, width)).softmax(-1)  # (B, S, H, width)
    around = pad(module.conv_out_layer(states), (0, 0, (width - 1) // 2, (width - 1) // 2)).unfold(1, width, 1)
    convolved = (around.unflatten(2, heads) @ kernel[..., None]).squeeze(-1)  # (B, S, H, D)
    return cat((output.unflatten(-1, heads), convolved), dim=2).flatten(2)


ATTENTION = AttentionDeclaration(
    holds=frozenset({"query", "key", "value", "key_conv_attn_layer", "conv_out_layer"}),
    project=project_as_bert,
    finish=_finish,
    dropout=attrgetter("dropout.p"),
    causal=never,
)
