"""The zoo: a tiny random instance of every text model type in transformers' own auto mappings.

    python -m tests.zoo --output census.json        # what can be built here, and if not, why

A type's own config class is walked field by field and every size is capped by what the field means; one layer of
each kind the type has is kept. What that cannot guess is declared in `OVERRIDES`.
"""

from __future__ import annotations

import argparse
import dataclasses
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

from .families import with_page

TASKS = {
    "causal-lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked-lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq-lm": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "document": "",
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

VOCAB = 128
WORDS = range(16, 112)  # the ids of running text; special tokens are below and above
HEADS = 4
LARGEST = 64  # of any size that no cap below knows

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
}

# Types that do not run on text alone, and why.
NOT_ALONE = {
    "gemma4_assistant": "drafts for a Gemma 4 model, whose hidden states and keys it is given",
    "gemma4_unified_assistant": "drafts for a Gemma 4 model, whose hidden states and keys it is given",
    "voxtral_realtime": "adds an audio frame to every token",
}


class CannotBuild(Exception):
    """A model type that has no instance here; the message is the reason."""


def model_types(task: str) -> list[str]:
    """The model types that have a class for `task`, sorted."""
    return sorted(classes(task))


def classes(task: str) -> dict[str, str]:
    """Model type -> name of the class that transformers maps it to for a task."""
    return DOCUMENTS if task == "document" else getattr(modeling_auto, TASKS[task])


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
    """Random text (1, length), also for the decoder; models that read codebooks get it once for each."""
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


def forward(model: PreTrainedModel, length: int = 16) -> Tensor:
    """Logits of random text, (1, length, vocabulary)."""
    with torch.no_grad():
        return model(**inputs(model, length)).logits


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
    parser = argparse.ArgumentParser(description="Build a tiny instance of every text model type.", allow_abbrev=False)
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
