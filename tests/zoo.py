"""The zoo: a tiny random instance of every text and image model type in transformers' own auto mappings.

    python -m tests.zoo --output census.json        # what can be built here, and if not, why

A type's own config class is walked field by field and every size is capped by what the field means; one layer of
each kind the type has is kept. What that cannot guess is declared in `OVERRIDES`.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_posswap.anatomy import text_config

from .answers import first
from .families import with_page

TASKS = {
    "causal-lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked-lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq-lm": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "document": "",
    "image": "",
}
# Types that read boxes: no mapping has all of them and no others. LayoutLMv2 is built with a stand-in for its visual
# backbone, which is of detectron2 (`detectron.py`); LayoutXLM is its architecture, and has no class of its own.
DOCUMENTS = {
    "bros": "BrosForTokenClassification",
    "layoutlm": "LayoutLMForTokenClassification",
    "layoutlmv2": "LayoutLMv2ForTokenClassification",
    "layoutlmv3": "LayoutLMv3ForTokenClassification",
    "lilt": "LiltForTokenClassification",
    "udop": "UdopForConditionalGeneration",
}
# A type that reads images or videos has the first class that is in one of these. What else has a tower that takes
# pixels and nothing beside them (SigLIP 2's are cut into patches) is among all of transformers' models.
PICTURES = ("IMAGE_CLASSIFICATION", "VIDEO_CLASSIFICATION", "IMAGE", "BACKBONE")
TOWERS = (
    "chinese_clip_vision_model",
    "clip_vision_model",
    "granite_docling_vision",
    "idefics3_vision",
    "internvl_vision",
    "pixtral",
    "qianfan_ocr_vision",
    "sam3_vision_model",
    "sam3_vit_model",
    "sam_hq_vision_model",
    "sam_vision_model",
    "siglip2_vision_model",
    "smolvlm_vision",
)

VOCAB = 128
WORDS = range(16, 112)  # the ids of running text; special tokens are below and above
HEADS = 4
LARGEST = 64  # of any size that no cap below knows
SIDES = ("image_size", "crop_size")  # what configs call the pixels of a side
FRAMES = ("num_frames", "frames_per_clip")

# The cap of a size, by the first pattern that is the whole name of the field.
CAPS = {
    r".*vocab.*": VOCAB,
    r".*heads_per_layer": HEADS,
    r".*layers?": 2,
    r".*experts_per_tok(en)?|top_k_experts|moe_(top_?)?k": 2,
    r".*experts": 4,
    r"n_group|num_expert_group|topk_group": 1,
    r".*mamba.*heads": 8,
    r".*(heads?|n_head)": HEADS,
    r"qk_(nope|rope)_head_dim|rotary_dim|.*sliding_window|.*attention_window.*|local_attention|local_radius": 8,
    r".*head_?dim|d_head|d_kv|dim_head|kv_channels|attention_head_size|mamba_d_head|query_pre_attn_scalar": 16,
    r".*_d_state|.*state_size|original_max_position_embeddings": 16,
}

WINDOWS = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4}
DETR = {"use_timm_backbone": False, "backbone_config": {"model_type": "resnet", "depths": [1] * 4}}
PATCH_OF_A_PICTURE = {"model_type": "dinov2", "image_size": 16, "patch_size": 4, "apply_layernorm": True}
BOXES = {"max_2d_position_embeddings": 1024}  # coordinates go to 1000
ROPE = {"rope_type": "default", "rope_theta": 1e4}
BOTH = ["sliding_attention", "full_attention"]

# What capping cannot guess, by the model type of the config (or of the nested config) that has the fields.
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "blt": {"use_cache": False},  # its cache asks BltConfig for a num_hidden_layers that it does not have
    "cohere_compass_text": {
        "layer_types": BOTH,
        "rope_parameters": {name: dict(ROPE, mrope_section=[4, 2, 2]) for name in BOTH},
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v4": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": {"sliding_window": 8},
    "encoder-decoder": {
        "encoder": {"model_type": "bert"},
        "decoder": {"model_type": "bert", "is_decoder": True, "add_cross_attention": True},
    },
    "esm": {"vocab_size": VOCAB, "pad_token_id": 1, "mask_token_id": 2},
    "flint": {"mlp_only_layers": [0]},
    "gemma3n_text": {"num_hidden_layers": 4, "layer_types": BOTH * 2, "num_kv_shared_layers": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granite_swa": {"layer_rope_theta": [1e6, 1e4]},
    "granitemoe_swa": {"layer_rope_theta": [1e6, 1e4]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "position_embedding_type": "rope"},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "laguna": {"layer_types": BOTH},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"head_dim": 8},
    "layoutlm": BOXES,
    "layoutlmv2": BOXES | {"coordinate_size": 12, "shape_size": 8},
    "layoutlmv3": BOXES | {"coordinate_size": 12, "shape_size": 8},
    "lilt": BOXES | {"hidden_size": 96},
    "mamba2": {"num_heads": 8},
    "mellum": {"layer_types": BOTH},
    "mimo_v2_flash": {"head_dim": 24},  # a third of it is rotated
    "ministral": {"head_dim": 16},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "nystromformer": {"conv_kernel_size": 5},
    "phimoe": {
        "rope_parameters": {
            **ROPE,
            "rope_type": "longrope",
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
            "short_mscale": 1.1,
            "long_mscale": 1.2,
            "original_max_position_embeddings": 16,
        },
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {
        "attn_layers": ["local", "lsh"],
        "axial_pos_shape": [8, 8],
        "axial_pos_embds_dim": [16, 48],
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "hash_seed": 0,
    },
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 2, "depths": [1] * 7},
    "vibevoice_asr": {"acoustic_tokenizer_chunk_size": 3200},
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"use_mem_rope": True},
    "zaya": {"layer_types": ["hybrid", "hybrid_sliding"], "sliding_window": 8},
    # of images: towers whose checkpoints have what their config leaves out, or with too few patches at 64 pixels
    "beit": {"use_relative_position_bias": True},
    "chinese_clip_vision_model": {"patch_size": 16},
    "clip_vision_model": {"patch_size": 16},
    "data2vec-vision": {"use_relative_position_bias": True},
    "idefics3_vision": {"patch_size": 16},
    "metaclip_2_vision_model": {"patch_size": 16},
    "smolvlm_vision": {"patch_size": 16},
    "vit_mae": {"mask_ratio": 0.0},
    # sizes that depend on each other
    "bit": {"num_groups": 4, "depths": [1] * 4},
    "conditional_detr": DETR,
    "cvt": {"num_heads": [1, 2, 4]},
    "dab-detr": DETR,
    "deformable_detr": DETR,
    "depth_pro": {
        "patch_size": 16,
        "intermediate_hook_ids": [1, 0],
        "fov_model_config": PATCH_OF_A_PICTURE,
        "image_model_config": PATCH_OF_A_PICTURE,
        "patch_model_config": PATCH_OF_A_PICTURE,
    },
    "detr": DETR,
    "dinov3_convnext": {"hidden_sizes": [16, 16, 32, 32], "depths": [1] * 4},
    "donut-swin": WINDOWS,
    "efficientnet": {"width_coefficient": 0.1, "depth_coefficient": 0.1, "hidden_dim": 128},
    "focalnet": {"embed_dim": 16, "depths": [1] * 4},
    "hiera": {"embed_dim": 8, "depths": [1] * 4},
    "llama4_vision_model": {"intermediate_size": 256, "vision_output_dim": 64},
    "maskformer-swin": WINDOWS,
    "mobilenet_v1": {"depth_multiplier": 0.25},
    "mobilenet_v2": {"depth_multiplier": 0.25},
    "pp_lcnet": {"scale": 0.25},
    "pp_lcnet_v3": {"scale": 0.25},
    "pp_lcnet_v4": {"stem_channels": [3, 48, 96]},
    "regnet": {"depths": [1] * 4},
    "swin": WINDOWS,
    "swin2sr": {"embed_dim": 16, "depths": [2], "num_heads": [2], "window_size": 4},
    "swinv2": WINDOWS,
    "table-transformer": DETR,
    "uvdoc_backbone": {"resnet_head": [[3, 32], [32, 32]]},
}

# Types that do not run on text alone, and why.
NOT_ALONE = {
    "gemma4_assistant": "drafts for a Gemma 4 model, whose hidden states and keys it is given",
    "gemma4_unified_assistant": "drafts for a Gemma 4 model, whose hidden states and keys it is given",
    "voxtral_realtime": "adds an audio frame to every token",
    "cohere2_vision": "reads text beside its images",
    "mllama": "reads tiles of images, with the shape that they make together",
    "shieldgemma2": "reads text beside its images",
}


class CannotBuild(Exception):
    """A model type that has no instance here; the message is the reason."""


def model_types(task: str) -> list[str]:
    """The model types that have a class for `task`, sorted."""
    return sorted(classes(task))


def classes(task: str) -> dict[str, str]:
    """Model type -> name of the class that transformers maps it to for a task."""
    return OWN[task] if task in OWN else getattr(modeling_auto, TASKS[task])


def of_images() -> dict[str, str]:
    """The same of all that reads images or videos."""
    every = modeling_auto.MODEL_MAPPING_NAMES
    found = {model_type: every[model_type] for model_type in TOWERS if model_type in every}
    for name in reversed(PICTURES):
        found |= getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES")
    return {model_type: names if isinstance(names, str) else names[0] for model_type, names in found.items()}


OWN = {"document": DOCUMENTS, "image": of_images()}  # of the tasks that no one mapping is about


def build(model_type: str, task: str, **fixed: Any) -> PreTrainedModel:
    """A tiny random model of the type, the same at every call, float32, on the CPU, in eval mode; `fixed` is said so in
    its config.
    """
    if model_type in NOT_ALONE:
        raise CannotBuild(NOT_ALONE[model_type])
    try:
        model_class = getattr(transformers, classes(task)[model_type])
        config_class = config_class_for(model_class, model_type)
        decoder = {"is_decoder": True} if task == "causal-lm" and "is_decoder" in field_names(config_class) else {}
        config = tiny_config(config_class, **decoder, **fixed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = model_class._from_config(config, dtype=torch.float32).eval()
            stir(model)
            return model
    except Exception as error:
        raise CannotBuild(reason(error)) from error


@torch.no_grad()
def stir(model: PreTrainedModel) -> None:
    """Give a value to every parameter that starts at zero: a gate at zero would hide the part behind it."""
    for parameter in model.parameters():
        if not parameter.any():
            parameter.normal_(std=0.1)


def config_class_for(model_class: type[PreTrainedModel], model_type: str) -> type[PreTrainedConfig]:
    """The config class of the type or, of a composite config, of the part that `model_class` is built from."""
    whole = CONFIG_MAPPING[model_type]
    parts = [part for part in whole.sub_configs.values() if issubclass(part, model_class.config_class)]
    return whole if issubclass(whole, model_class.config_class) or not parts else parts[0]


def reason(error: Exception) -> str:
    """One line that says why a model could not be built."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:300]}"


def inputs(model: PreTrainedModel, length: int = 16, seed: int = 0) -> dict[str, Tensor]:
    """Random text (1, length), also for the decoder; models that read codebooks get it once for each. An image, or a
    video, for what reads no text, of the size that the config says.
    """
    if "input_ids" not in inspect.signature(model.forward).parameters:
        return pictures(model, size_of(text_config(model)), seed)
    generator = torch.Generator().manual_seed(seed)
    rows = getattr(model.config, "num_codebooks", 1)
    stop = min(WORDS.stop, getattr(model.config.get_text_config(), "vocab_size", VOCAB))
    ids = torch.randint(WORDS.start, stop, (1, length), generator=generator).expand(rows, -1)
    decoder = {"decoder_input_ids": ids.flip(-1)} if model.config.is_encoder_decoder else {}
    return with_image(model, {"input_ids": ids}) | decoder


def with_image(model: PreTrainedModel, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Inputs with boxes and an image of the size that the model reads, where it does."""
    sides = (getattr(model.config, name, None) for name in ("input_size", "image_size"))
    return with_page(model, inputs, next((side for side in sides if isinstance(side, int)), LARGEST))


def size_of(config: PreTrainedConfig) -> tuple[int, int]:
    """(height, width) in pixels of what a model reads."""
    size = next((value for value in (vars(config).get(name) for name in SIDES) if value), LARGEST)
    return (size, size) if isinstance(size, int) else tuple(size)


def pictures(model: PreTrainedModel, size: tuple[int, int], seed: int = 0) -> dict[str, Tensor]:
    """One random image (1, C, *size), or video (1, frames, C, *size); MAE's order of patches is given too."""
    config, names = text_config(model), inspect.signature(model.forward).parameters
    video = config.model_type in modeling_auto.MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES
    frames = [vars(config)[name] for name in FRAMES if video and name in vars(config)]
    shape = (1, *frames, getattr(config, "num_channels", 3), *size)
    pixels = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if "spatial_shapes" in names:
        return cut(pixels, config.patch_size)
    found = {next(name for name in names if name.startswith(("pixel", "inputs"))): pixels}
    if "noise" in names:
        found["noise"] = torch.arange(float(size[0] * size[1] // config.patch_size**2))[None]
    return found


def cut(pixels: Tensor, patch: int) -> dict[str, Tensor]:
    """What SigLIP 2 is given of images (B, C, height, width): patches (B, N, patch * patch * C), and how many."""
    rows, columns = (side // patch for side in pixels.shape[-2:])
    patches = pixels.unflatten(3, (columns, patch)).unflatten(2, (rows, patch)).permute(0, 2, 4, 3, 5, 1)
    patches = patches.flatten(3).flatten(1, 2)
    shapes = torch.tensor([[rows, columns]]).expand(len(pixels), -1)
    return {"pixel_values": patches, "pixel_attention_mask": torch.ones(patches.shape[:2]), "spatial_shapes": shapes}


def forward(model: PreTrainedModel, length: int = 16) -> Tensor:
    """Logits of random text, (1, length, vocabulary); of an image, what its model gives first."""
    return run(model, inputs(model, length))


def run(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return first(model(**inputs))


# --- tiny configs


def field_names(config_class: type[PreTrainedConfig]) -> set[str]:
    """The names of the fields of a config class."""
    return {f.name for f in dataclasses.fields(config_class)}


def tiny_config(config_class: type[PreTrainedConfig], **fixed: Any) -> PreTrainedConfig:
    """A config of the class with every size capped and one layer of each kind, and with the values in `fixed`."""
    overrides = deepcopy(OVERRIDES.get(config_class.model_type, {})) | fixed
    default = config_class(**{name: dict(value) for name, value in overrides.items() if isinstance(value, dict)})
    fields = {f.name: f.default for f in dataclasses.fields(config_class) if f.default is not dataclasses.MISSING}
    fields |= {name: value for name, value in vars(default).items() if name.endswith("_id") and name in fields}

    values = {name: shrink(name, value, fields) for name, value in fields.items()}
    values |= kept_layers(default, overrides.get("num_hidden_layers")) | overrides
    parts_as_dicts = getattr(config_class, "has_no_defaults_at_init", False)
    for name, part in vars(default).items():
        if isinstance(part, PreTrainedConfig):
            tiny = tiny_config(type(part), **overrides.get(name, {}))
            values[name] = tiny.to_dict() if parts_as_dicts else tiny
    config = config_class(**values)
    shorten_pretraining(getattr(config, "rope_parameters", None))
    return config


def shrink(name: str, value: Any, siblings: dict[str, Any]) -> Any:
    """The value of a field, capped by what the field means; `siblings` are the fields beside it."""
    if isinstance(value, dict):
        return {key: shrink(key, entry, value) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(shrink(name, entry, siblings) for entry in value)
    if name in ("initializer_range", "initializer_factor", "init_std") and value is not None:
        return max(value, 0.2)  # about 1 / sqrt(hidden size), so that what attention does is seen in the logits
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if name.endswith(("_id", "_index")):
        return value if value < VOCAB else WORDS.stop + value % (VOCAB - WORDS.stop)
    if name.endswith("key_value_heads"):
        all_heads = siblings.get(name.replace("key_value", "attention"))
        return HEADS if value == all_heads else min(value, HEADS // 2)
    cap = next((cap for pattern, cap in CAPS.items() if re.fullmatch(pattern, name)), LARGEST)
    return min(value, cap)


def kept_layers(default: PreTrainedConfig, depth: int | None) -> dict[str, Any]:
    """The depth and the per-layer fields of `default`, cut to one layer of each kind or to the first `depth`."""
    fields = field_names(type(default))
    depth_field = default.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    if depth_field not in fields:
        return {}
    lists = per_layer_lists(default, vars(default)[depth_field])
    kinds = [repr(kind) for kind in zip(*lists.values(), strict=True)]
    layers = [i for i, kind in enumerate(kinds) if kind not in kinds[:i]]
    if depth is not None or len(layers) < 2:
        layers = list(range(depth or min(2, vars(default)[depth_field])))
    kept = {name: [entries[i] for i in layers] for name, entries in lists.items() if name in fields}
    if "per_layer_config" in lists:
        kept["per_layer_config"] = {n: lists["per_layer_config"][i] for n, i in enumerate(layers)}
    return {depth_field: len(layers), **kept}


def per_layer_lists(config: PreTrainedConfig, depth: int) -> dict[str, list]:
    """Every list of the config that says something of each layer: not the lists of layers, whose entries differ."""
    lists = {}
    for name, value in vars(config).items():
        if isinstance(value, (list, tuple)) and len(value) == depth and len(set(map(str, value))) < depth:
            lists[name] = [shrink(name, entry, vars(config)) for entry in value]
    if "_heterogeneity_spec" in vars(config):
        spec = vars(config)["_heterogeneity_spec"].per_layer_overrides
        lists["per_layer_config"] = [shrink("", spec.get(i, {}), {}) for i in range(depth)]
    return lists


def shorten_pretraining(rope: dict[str, Any] | None) -> None:
    """Make every rotary scaling in `rope`, nested or not, one of a model first trained on a few positions."""
    for name, value in (rope or {}).items():
        if name == "original_max_position_embeddings":
            rope[name] = 16
        elif isinstance(value, dict):
            shorten_pretraining(value)


# --- what was built


def rotary_modules(model: PreTrainedModel) -> dict[str, str]:
    """The modules that follow transformers' shared rotary contract: path -> `flat` or `nested` (per layer type)."""
    found = {}
    for path, module in model.named_modules():
        parameters = getattr(getattr(module, "config", None), "rope_parameters", None)
        if not parameters or not hasattr(module, "compute_default_rope_parameters"):
            continue
        buffers = {name for name, _ in module.named_buffers(recurse=False)}
        if {"inv_freq", "original_inv_freq"} <= buffers:
            found[path] = "flat"
        elif any(name.replace("_original_inv_freq", "_inv_freq") in buffers - {name} for name in buffers):
            found[path] = "nested"
    return found


def census(task: str, model_type: str) -> dict[str, Any]:
    """What became of one type: a record for the JSON file."""
    record = {"task": task, "type": model_type}
    try:
        model = build(model_type, task)
        finite = bool(forward(model).isfinite().all())
    except CannotBuild as error:
        return record | {"built": False, "reason": str(error)}
    except Exception as error:
        return record | {"built": False, "reason": f"does not run: {reason(error)}"}
    size = sum(p.numel() for p in model.parameters())
    return record | {"built": True, "finite": finite, "parameters": size, "rotary": rotary_modules(model)}


def line(record: dict[str, Any]) -> str:
    """One record as a line of text."""
    start = f"{record['task']:<11} {record['type']:<26}"
    if not record["built"]:
        return f"{start} cannot be built: {record['reason']}"
    rotary = ", ".join(f"{path} ({kind})" for path, kind in record["rotary"].items()) or "no rotary contract"
    return f"{start} built{'' if record['finite'] else ', logits not finite'}; {rotary}"


def summary(records: list[dict[str, Any]], task: str) -> str:
    """The counts of one task as a line of text."""
    mine = [record for record in records if record["task"] == task]
    kinds = [set(record["rotary"].values()) for record in mine if record["built"]]
    flat, nested = sum("flat" in kind for kind in kinds), sum("nested" in kind for kind in kinds)
    return f"{task}: {len(kinds)} of {len(mine)} built; rotary contract flat in {flat}, nested in {nested}"


def main(arguments: list[str] | None = None) -> None:
    """Build everything, print a line for each type and the counts, and write the records."""
    parser = argparse.ArgumentParser(
        description="Build a tiny instance of every text and image model type.", allow_abbrev=False
    )
    parser.add_argument("--output", type=Path, help="where to write the records, as JSON")
    parser.add_argument("--task", choices=list(TASKS), action="append", help="only this task; may be repeated")
    options = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()

    tasks = options.task or list(TASKS)
    records = []
    pairs = [(task, model_type) for task in tasks for model_type in model_types(task)]
    for pair in tqdm(pairs, unit="model"):
        records.append(census(*pair))
        tqdm.write(line(records[-1]))
    for task in tasks:
        print(summary(records, task))
    if options.output:
        report = {"transformers": transformers.__version__, "torch": torch.__version__, "types": records}
        options.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
