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
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

TASKS = {
    "causal-lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked-lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq-lm": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
}

VOCAB = 128
WORDS = range(16, 112)  # the ids of running text; special tokens are below and above
HEADS = 4
LARGEST = 64  # of any size that no cap below knows

# The cap of a size, by the first pattern that is the whole name of the field.
CAPS = {
    r".*vocab.*": VOCAB,
    r".*layers?": 2,
    r".*experts_per_tok(en)?|top_k_experts|moe_(top_?)?k": 2,
    r".*experts": 4,
    r"n_group|num_expert_group|topk_group": 1,
    r".*mamba.*heads": 8,
    r".*(heads?|n_head)": HEADS,
    r".*head_?dim|d_head|d_kv|dim_head|kv_channels|attention_head_size|mamba_d_head|query_pre_attn_scalar": 16,
    r".*_d_state|.*state_size|original_max_position_embeddings": 16,
    r"rotary_dim|.*sliding_window|.*attention_window.*|local_attention|local_radius": 8,
}

# What capping cannot guess, by the model type of the config (or of the nested config) that has the fields.
OVERRIDES: dict[str, dict[str, Any]] = {}

# Types that do not run on text alone.
NOT_ALONE = {}


class CannotBuild(Exception):
    """A model type that has no instance here; the message is the reason."""


def model_types(task: str) -> list[str]:
    """The model types that transformers maps to a class for `task`, sorted."""
    return sorted(getattr(modeling_auto, TASKS[task]))


def build(model_type: str, task: str) -> PreTrainedModel:
    """A tiny random model of the type, the same at every call, float32, on the CPU, in eval mode."""
    if model_type in NOT_ALONE:
        raise CannotBuild(NOT_ALONE[model_type])
    try:
        model_class = getattr(transformers, getattr(modeling_auto, TASKS[task])[model_type])
        config = tiny_config(config_class_for(model_class, model_type))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return model_class._from_config(config, dtype=torch.float32).eval()
    except Exception as error:
        raise CannotBuild(reason(error)) from error


def config_class_for(model_class: type[PreTrainedModel], model_type: str) -> type[PreTrainedConfig]:
    """The config class of the type or, of a composite config, of the part that `model_class` is built from."""
    whole = CONFIG_MAPPING[model_type]
    parts = [part for part in whole.sub_configs.values() if issubclass(part, model_class.config_class)]
    return whole if issubclass(whole, model_class.config_class) or not parts else parts[0]


def reason(error: Exception) -> str:
    """One line that says why a model could not be built."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:300]}"


def forward(model: PreTrainedModel, length: int = 16) -> Tensor:
    """Logits of random text, (1, length, vocabulary); models that read codebooks get the text once for each."""
    generator = torch.Generator().manual_seed(0)
    rows = getattr(model.config, "num_codebooks", 1)
    ids = torch.randint(WORDS.start, WORDS.stop, (1, length), generator=generator).expand(rows, -1)
    inputs = {"input_ids": ids}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids.flip(-1)
    with torch.no_grad():
        return model(**inputs).logits


# --- tiny configs


def tiny_config(config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    """A config of the class with every size capped and one layer of each kind."""
    overrides = OVERRIDES.get(config_class.model_type, {})
    default = config_class(**{name: value for name, value in overrides.items() if isinstance(value, dict)})
    meanings = {name: meaning for meaning, name in config_class.attribute_map.items()}
    defaults = {f.name: f.default for f in dataclasses.fields(config_class) if f.default is not dataclasses.MISSING}

    values = {name: shrink(meanings.get(name, name), value, defaults) for name, value in defaults.items()}
    values |= {name: tiny_config(type(v)) for name, v in vars(default).items() if isinstance(v, PreTrainedConfig)}
    values |= kept_layers(default, overrides.get("num_hidden_layers"))
    config = config_class(**(values | overrides))
    shorten_pretraining(getattr(config, "rope_parameters", None))
    return config


def shrink(name: str, value: Any, siblings: dict[str, Any]) -> Any:
    """The value of a field, capped by what the field means; `siblings` are the fields beside it."""
    if isinstance(value, dict):
        return {key: shrink(key, entry, value) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(shrink(name, entry, siblings) for entry in value)
    if name in ("initializer_range", "init_std"):
        return 0.2  # about 1 / sqrt(hidden size), so that what attention does is seen in the logits
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
    fields = {f.name for f in dataclasses.fields(default)}
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
    """What became of one type: a record that goes into the JSON."""
    record: dict[str, Any] = {"task": task, "type": model_type, "built": False}
    try:
        model = build(model_type, task)
    except CannotBuild as error:
        return record | {"reason": str(error)}
    finite = forward(model).isfinite().all().item()
    size = sum(p.numel() for p in model.parameters())
    return record | {"built": True, "finite": finite, "parameters": size, "rotary": rotary_modules(model)}


def main() -> None:
    """Build everything, print a line for each type and the counts, and write the records."""
    parser = argparse.ArgumentParser(description="Build a tiny instance of every text model type.")
    parser.add_argument("--output", type=Path, help="Where to write the records, as JSON.")
    parser.add_argument("--task", choices=list(TASKS), action="append", help="Only this task (may be repeated).")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()

    pairs = [(task, model_type) for task in arguments.task or TASKS for model_type in model_types(task)]
    records = []
    for task, model_type in tqdm(pairs, unit="model"):
        record = census(task, model_type)
        records.append(record)
        tqdm.write(line(record))
    for task, counts in summary(records).items():
        print(f"{task}: {counts}")
    if arguments.output:
        arguments.output.write_text(json.dumps({"transformers": transformers.__version__, "types": records}, indent=1))


if __name__ == "__main__":
    main()
