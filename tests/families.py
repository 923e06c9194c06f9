"""Tiny random models of real transformers classes, one builder per anatomy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers

VOCAB, WIDTH, HEADS, LENGTH, PAD = 64, 64, 4, 32, 1
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_attention_heads": HEADS,
    "max_position_embeddings": LENGTH,
    "pad_token_id": PAD,
    "bos_token_id": 2,
    "eos_token_id": 2,
}
ROTARY = SIZES | {"num_key_value_heads": 2}
ENCODER = SIZES | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@dataclass(frozen=True)
class Family:
    """A model class, its config, and what the laws need to know of it.

    causal: tokens see only what precedes them. positions: the forward takes position_ids. first: the position id
    of a first token. packs: position_ids that start again separate documents. renames: the layer count's key.
    """

    model: str
    config: str
    settings: dict
    causal: bool
    positions: bool = True
    first: int = 0
    packs: bool = False
    layers_key: str = "num_hidden_layers"
    vision: bool = False

    def build(self, layers: int = 2, seed: int = 0, **overrides: object) -> transformers.PreTrainedModel:
        torch.manual_seed(seed)
        settings = self.settings | {self.layers_key: layers} | overrides
        if "layer_types" in settings:
            settings["layer_types"] = settings["layer_types"][:layers]
        config = getattr(transformers, self.config)(**settings)
        model = getattr(transformers, self.model)(config).eval()
        for (
            parameter
        ) in model.parameters():  # the default 0.02 leaves attention so flat that a law could pass by rounding
            if parameter.dim() > 1:
                parameter.data.mul_(4.0)
        return model


def _roberta(model: str, config: str) -> Family:
    return Family(model, config, ENCODER | {"max_position_embeddings": LENGTH + PAD + 1}, False, first=PAD + 1)


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", "LlamaConfig", ROTARY, True, packs=True),
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3Config", ROTARY | {"head_dim": 32}, True, packs=True),
    "gpt_neox": Family("GPTNeoXForCausalLM", "GPTNeoXConfig", SIZES | {"rotary_pct": 0.25}, True, packs=True),
    "cohere": Family("CohereForCausalLM", "CohereConfig", ROTARY, True, packs=True),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        ROTARY | {"head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
        True,
        packs=True,
    ),
    "modernbert": Family(
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        SIZES | {"local_attention": 16, "layer_types": ["sliding_attention", "full_attention"]},
        False,
    ),
    "bert": Family("BertForMaskedLM", "BertConfig", ENCODER, False),
    "electra": Family("ElectraForMaskedLM", "ElectraConfig", ENCODER | {"embedding_size": 32}, False),
    "distilbert": Family(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {"vocab_size": VOCAB, "dim": WIDTH, "hidden_dim": 96, "n_heads": HEADS, "max_position_embeddings": LENGTH}
        | {"dropout": 0.0, "attention_dropout": 0.0, "pad_token_id": PAD},
        False,
        layers_key="n_layers",
    ),
    "roberta": _roberta("RobertaForMaskedLM", "RobertaConfig"),
    "xlm_roberta": _roberta("XLMRobertaForMaskedLM", "XLMRobertaConfig"),
    "camembert": _roberta("CamembertForMaskedLM", "CamembertConfig"),
    "mpnet": _roberta("MPNetForMaskedLM", "MPNetConfig"),
    "gpt2": Family(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": VOCAB, "n_embd": WIDTH, "n_head": HEADS, "n_positions": LENGTH, "pad_token_id": PAD}
        | {"bos_token_id": 2, "eos_token_id": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        True,
        layers_key="n_layer",
        packs=True,
    ),
    "opt": Family(
        "OPTForCausalLM",
        "OPTConfig",
        SIZES | {"ffn_dim": 96, "word_embed_proj_dim": WIDTH, "dropout": 0.0},
        True,
    ),
    "vit": Family(
        "ViTForImageClassification",
        "ViTConfig",
        {"hidden_size": WIDTH, "num_attention_heads": HEADS, "intermediate_size": 96, "image_size": 32, "patch_size": 8}
        | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        False,
        positions=False,
        vision=True,
    ),
}


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Ids (batch, length) without special ones."""
    return torch.randint(4, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def pixels(size: int | tuple[int, int], seed: int = 0) -> torch.Tensor:
    height, width = size if isinstance(size, tuple) else (size, size)
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(seed))


Run = Callable[[transformers.PreTrainedModel], torch.Tensor]
