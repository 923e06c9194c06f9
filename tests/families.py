"""Tiny random models of real transformers classes, one builder per anatomy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import transformers

from .detectron import stand_in

stand_in()

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
BY_TYPE = {"layer_types": ["sliding_attention", "full_attention"]}
LATENT = ROTARY | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "num_key_value_heads": HEADS,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
PLAIN = {key: SIZES[key] for key in ("vocab_size", "hidden_size", "pad_token_id", "bos_token_id", "eos_token_id")}
FALCON = SIZES | {"num_kv_heads": 2}
ENCODER = SIZES | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
DISENTANGLED = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "type_vocab_size": 0}


@dataclass(frozen=True)
class Family:
    """A model class, its config, and what the laws need to know of it.

    causal: tokens see only what precedes them. positions: the forward takes position_ids. first: the position id
    of a first token. packs: position_ids that start again separate documents. layers_key: the layer count's key.
    pads: the sides on which a padded row stays as it is; image tokens count from the first token, padding or not.
    fused: this transformers lets it choose sdpa. anchored: image tokens stay where they are when position_ids move.
    beside: settings of a config that nests the stack's as `nested`.
    """

    model: str
    config: str
    settings: dict
    causal: bool
    positions: bool = True
    first: int = 0
    packs: bool = False
    pads: tuple[str, ...] = ("left", "right")
    fused: bool = True
    anchored: bool = False
    layers_key: str = "num_hidden_layers"
    vision: bool = False
    beside: dict | None = None
    nested: str = "text_config"

    def build(self, layers: int = 2, seed: int = 0, **overrides: object) -> transformers.PreTrainedModel:
        torch.manual_seed(seed)
        settings = self.settings | {self.layers_key: layers} | overrides
        if "layer_types" in settings:
            settings["layer_types"] = settings["layer_types"][:layers]
        if self.beside is not None:
            settings = {self.nested: settings} | self.beside
        config = getattr(transformers, self.config)(**settings)
        model = getattr(transformers, self.model)(config).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:  # the default 0.02 leaves attention so flat that a law could pass by rounding
                parameter.data.mul_(4.0)
                if not parameter.is_meta and not parameter.any():  # tables of some families begin with zeros
                    parameter.data.normal_(std=0.5)
        return model


LABELS = ENCODER | {"num_labels": VOCAB}  # token classification, with logits as wide as a language model's
OFFSET = {"max_position_embeddings": LENGTH + PAD + 1}
TABLES_OF_COORDINATES = {"coordinate_size": 12, "shape_size": 8}


def _document(name: str, settings: dict, **flags: object) -> Family:
    return Family(f"{name}ForTokenClassification", f"{name}Config", LABELS | settings, False, **flags)


def _roberta(model: str, config: str) -> Family:
    return Family(model, config, ENCODER | {"max_position_embeddings": LENGTH + PAD + 1}, False, first=PAD + 1)


def _scaled(scaling: dict, length: int) -> Family:
    settings = {"rope_parameters": {"rope_theta": 1e4} | scaling, "max_position_embeddings": length}
    return Family("LlamaForCausalLM", "LlamaConfig", ROTARY | settings, True, packs=True)


PATCHES = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "intermediate_size": 96, "image_size": 32}
PATCHES |= {"patch_size": 8, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _image(name: str, **settings: object) -> Family:
    model, config = f"{name}ForImageClassification", f"{name}Config"
    return Family(model, config, PATCHES | settings, False, positions=False, vision=True)


def _tower(name: str) -> Family:
    # transformers writes the dtype of a nested config only once it was loaded
    kept = {"dtype": "float32"}
    return replace(_image(name, **kept), beside={"text_config": kept}, nested="vision_config")


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", "LlamaConfig", ROTARY, True, packs=True),
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3Config", ROTARY | {"head_dim": 32}, True, packs=True),
    "gpt_neox": Family("GPTNeoXForCausalLM", "GPTNeoXConfig", SIZES | {"rotary_pct": 0.25}, True, packs=True),
    "phi": Family("PhiForCausalLM", "PhiConfig", SIZES | {"resid_pdrop": 0.0, "embd_pdrop": 0.0}, True, packs=True),
    "cohere": Family("CohereForCausalLM", "CohereConfig", ROTARY, True, packs=True),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        ROTARY | {"head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
        True,
        packs=True,
    ),
    "olmo3": Family("Olmo3ForCausalLM", "Olmo3Config", ROTARY | {"sliding_window": 8} | BY_TYPE, True, packs=True),
    "modernbert": Family(
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        SIZES | {"local_attention": 16, "cls_token_id": 2, "sep_token_id": 2} | BY_TYPE,
        False,
    ),
    "deepseek_v2": Family("DeepseekV2ForCausalLM", "DeepseekV2Config", LATENT, True),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", "DeepseekV3Config", LATENT, True),
    "llama4": Family(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        ROTARY
        | {"head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 2, "num_experts_per_tok": 1}
        | {"no_rope_layers": [1, 1], "layer_types": ["full_attention", "full_attention"]},
        True,
    ),
    "qwen2_vl": Family(
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        ROTARY
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
        | {"dtype": "float32"},  # of the nested configs too: a save without it differs from the next
        True,
        beside={
            "vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": WIDTH, "num_heads": 2, "patch_size": 4}
            | {"dtype": "float32"},
            "image_token_id": 60,
            "video_token_id": 61,
            "vision_start_token_id": 62,
            "vision_end_token_id": 63,
        },
    ),
    # models that carry a context scaling from their makers; each was trained at LENGTH
    "llama_linear": _scaled({"rope_type": "linear", "factor": 4.0}, LENGTH),
    "llama_dynamic": _scaled({"rope_type": "dynamic", "factor": 4.0}, LENGTH),
    "llama31": _scaled(
        {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        | {"original_max_position_embeddings": LENGTH},
        4 * LENGTH,
    ),
    "llama_yarn": _scaled({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": LENGTH}, 4 * LENGTH),
    "llama_longrope": _scaled(
        {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": LENGTH}
        | {"short_factor": [1.0] * 8, "long_factor": [1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0]},
        4 * LENGTH,
    ),
    "deepseek_v3_yarn": Family(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        LATENT
        | {
            "max_position_embeddings": 4 * LENGTH,
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0}
            | {"mscale_all_dim": 1.0, "original_max_position_embeddings": LENGTH},
        },
        True,
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        "Phi3Config",
        ROTARY
        | {
            "max_position_embeddings": 4 * LENGTH,
            "original_max_position_embeddings": LENGTH,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 8,
                "long_factor": [1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0],
            },
        },
        True,
        packs=True,
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
    # vectors of distances that meet q and k: beside a table; alone, in buckets, normalised, projected as q and k are
    "deberta": Family("DebertaForMaskedLM", "DebertaConfig", ENCODER | DISENTANGLED, False),
    "deberta_v2": Family(
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        ENCODER
        | DISENTANGLED
        | {"position_biased_input": False, "position_buckets": 8, "norm_rel_ebd": "layer_norm", "share_att_key": True},
        False,
    ),
    "squeezebert": Family("SqueezeBertForMaskedLM", "SqueezeBertConfig", ENCODER | {"embedding_size": WIDTH}, False),
    "xlm": Family(
        "XLMWithLMHeadModel",
        "XLMConfig",
        {"vocab_size": VOCAB, "emb_dim": WIDTH, "n_heads": HEADS, "max_position_embeddings": LENGTH, "dropout": 0.0}
        | {"attention_dropout": 0.0, "pad_token_id": PAD, "pad_index": PAD, "n_langs": 1},
        False,
        layers_key="n_layers",
    ),
    "roformer": Family("RoFormerForMaskedLM", "RoFormerConfig", ENCODER, False, positions=False),
    "gptj": Family(
        "GPTJForCausalLM",
        "GPTJConfig",
        PLAIN | {"n_head": HEADS, "n_positions": LENGTH, "rotary_dim": 8, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
        True,
    ),
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
    "bloom": Family(
        "BloomForCausalLM", "BloomConfig", PLAIN | {"n_head": HEADS, "seq_length": LENGTH}, True, positions=False
    ),
    "mpt": Family(
        "MptForCausalLM",
        "MptConfig",
        {"vocab_size": VOCAB, "d_model": WIDTH, "n_heads": HEADS, "max_seq_len": LENGTH, "pad_token_id": PAD}
        | {"attn_config": {"dtype": "float32"}},  # a save without it differs from the next
        True,
        positions=False,
        layers_key="n_layers",
    ),
    "falcon": Family("FalconForCausalLM", "FalconConfig", FALCON | {"new_decoder_architecture": True}, True),
    "falcon_alibi": Family("FalconForCausalLM", "FalconConfig", FALCON | {"alibi": True}, True),
    "t5_encoder": Family(
        "T5ForTokenClassification",
        "T5Config",
        {"vocab_size": VOCAB, "d_model": WIDTH, "d_kv": 16, "d_ff": 96, "num_heads": HEADS, "num_labels": VOCAB}
        | {"dropout_rate": 0.0, "n_positions": LENGTH, "pad_token_id": PAD, "relative_attention_num_buckets": 16},
        False,
        positions=False,
        layers_key="num_layers",
    ),
    "layoutlm": _document("LayoutLM", {}, fused=transformers.LayoutLMModel._supports_sdpa),
    "layoutlmv2": _document(
        "LayoutLMv2",
        TABLES_OF_COORDINATES | {"image_feature_pool_shape": [2, 3, 8]},
        anchored=True,
    ),
    "layoutlmv3": _document(
        "LayoutLMv3",
        OFFSET | TABLES_OF_COORDINATES | {"input_size": 32, "patch_size": 16},
        first=PAD + 1,
        pads=("right",),
    ),
    "lilt": _document("Lilt", OFFSET | {"hidden_size": 96}, first=PAD + 1),
    "bros": _document("Bros", {}),
    "vit": _image("ViT"),
    "deit": _image("DeiT"),
    "dinov2": _image("Dinov2"),
    "dinov2_registers": _image("Dinov2WithRegisters"),
    "beit_bias": _image("Beit", use_relative_position_bias=True),
    "beit_shared": _image("Beit", use_shared_relative_position_bias=True, use_absolute_position_embeddings=True),
    "beit": _image("Beit", use_absolute_position_embeddings=True),
    "ijepa": _image("IJepa"),
    "clip": _tower("CLIP"),
    "siglip": _tower("Siglip"),
    "vit_msn": _image("ViTMSN"),
    "metaclip_2": _tower("MetaClip2"),
}


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Ids (batch, length) without special ones."""
    return torch.randint(4, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def pixels(size: int | tuple[int, int], channels: int = 3, seed: int = 0) -> torch.Tensor:
    height, width = size if isinstance(size, tuple) else (size, size)
    return torch.randn(2, channels, height, width, generator=torch.Generator().manual_seed(seed))


FRACTIONS = ("bros", "udop")  # model types whose boxes are parts of the page, not thousandths


def with_page(model: transformers.PreTrainedModel | type, inputs: Mapping[str, torch.Tensor], side: int = 32) -> dict:
    """Inputs with what a document model is given beside tokens (B, S): boxes that follow from the ids, and an image of
    `side` pixels both ways.
    """
    names = inspect.signature(model.forward).parameters
    if "bbox" not in names or "input_ids" not in inputs:
        return dict(inputs)
    ids = inputs["input_ids"]
    boxes = torch.stack([ids * 7, ids * 5, ids * 8 + 100, ids * 6 + 40], dim=-1)
    boxes = boxes / 1000 if model.config_class.model_type in FRACTIONS else boxes
    image = torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(3)).expand(len(ids), -1, -1, -1)
    pictures = {name: image.contiguous() for name in ("image", "pixel_values") if name in names}
    return {"bbox": boxes} | pictures | dict(inputs)


Run = Callable[[transformers.PreTrainedModel], torch.Tensor]
