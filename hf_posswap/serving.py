"""Serving: which inference servers read a patched checkpoint as transformers does, and the command that serves it.

A checkpoint is read natively where a server knows its rotary type and looks at every parameter of it: one that it
does not look at changes nothing there, in silence. `READ` was taken from the servers' sources; none of them was run.
A server must know the model's architecture too, which is not asked here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .record import NATIVE, Record
from .scheme import registry
from .sites import ROTARY

YARN = frozenset({"factor", "original_max_position_embeddings", "beta_fast", "beta_slow"})
LLAMA3 = frozenset({"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"})
LONGROPE = frozenset({"factor", "original_max_position_embeddings", "short_factor", "long_factor"})


@dataclass(frozen=True)
class Server:
    """An inference server. `command` has the fields {name}, {length}. `sources`: the files looked at, with commits.

    `reads`: rotary type -> the parameters of it that reach the frequencies. `quirks`: rotary type -> what else to
    know of one that is read, or why one that looks read is not.
    """

    name: str
    command: str
    sources: tuple[str, ...]
    reads: Mapping[str, frozenset[str]]
    quirks: Mapping[str, str]


SERVERS = (
    Server(
        "vLLM",
        "vllm serve {name} --max-model-len {length}",
        (
            "vllm-project/vllm@0cd5784803d8:vllm/model_executor/layers/rotary_embedding/__init__.py",
            "vllm-project/vllm@0cd5784803d8:vllm/model_executor/layers/rotary_embedding/yarn_scaling_rope.py",
            "vllm-project/vllm@17d618b0f944:vllm/model_executor/layers/rotary_embedding/phi3_long_rope_scaled_rope.py",
            "vllm-project/vllm@3cfbaf333d80:vllm/model_executor/layers/rotary_embedding/dynamic_ntk_scaling_rope.py",
            "vllm-project/vllm@41c5903d049b:vllm/model_executor/layers/rotary_embedding/gemma4_rope.py",
        ),
        {
            "default": frozenset({"partial_rotary_factor", "mrope_section"}),
            "linear": frozenset({"factor"}),
            "yarn": YARN | {"mscale", "mscale_all_dim", "attention_factor", "truncate", "mrope_section"},
            "llama3": LLAMA3,
            "longrope": LONGROPE,
            "proportional": frozenset({"partial_rotary_factor"}),
        },
        {
            "dynamic": "it has one frequency for all lengths, where transformers changes it with the length",
            "longrope": "with the long factors at every length once --max-model-len is above the trained one",
        },
    ),
    Server(
        "SGLang",
        "python -m sglang.launch_server --model-path {name} --context-length {length}",
        (
            "sgl-project/sglang@108c36c00829:python/sglang/srt/layers/rotary_embedding/factory.py",
            "sgl-project/sglang@0b1fd02d56f0:python/sglang/srt/layers/rotary_embedding/yarn.py",
        ),
        {
            "default": frozenset({"mrope_section"}),
            "linear": frozenset({"factor"}),
            "yarn": YARN | {"mscale", "mscale_all_dim", "truncate", "mrope_section"},
            "llama3": LLAMA3,
        },
        {
            "dynamic": "it has one frequency for all lengths, where transformers changes it with the length",
            "longrope": "when it takes the long factors was not looked at",
            "proportional": "whether partial_rotary_factor reaches it was not looked at",
        },
    ),
    Server(
        "llama.cpp",
        "python convert_hf_to_gguf.py {name} --outfile model.gguf && llama-server -m model.gguf -c {length}",
        (
            "ggml-org/llama.cpp@00bd27a621f9:conversion/base.py",
            "ggml-org/llama.cpp@0274f0fc7d7f:conversion/llama.py",
        ),
        {
            "default": frozenset(),
            "linear": frozenset({"factor"}),
            "yarn": YARN,  # attention_factor it multiplies with its own, instead of taking it for the whole
            "llama3": LLAMA3 - {"original_max_position_embeddings"},  # looked for beside the dict; 8192 where it is not
        },
        {"longrope": "its converter writes the factors for Phi-3 models alone"},
    ),
)


@dataclass(frozen=True)
class Served:
    """What one server makes of a checkpoint. `native` is None where the sources looked at do not say."""

    server: str
    native: bool | None
    reason: str
    command: str

    def __str__(self) -> str:
        if not self.native:
            return f"{self.server}: {'no' if self.native is False else 'not known'}, {self.reason}"
        return f"{self.server}: yes{', ' + self.reason if self.reason else ''}: {self.command}"


def serving(config: Mapping[str, Any], record: Record, name: str) -> tuple[Served, ...]:
    """What each server makes of a checkpoint called `name`, from its `config.json` and its record.

    `config` is that of the stack that was patched (`text_config`, where there is one).
    """
    return tuple(_serve(server, config, record, name) for server in SERVERS)


def _serve(server: Server, config: Mapping[str, Any], record: Record, name: str) -> Served:
    native, reason = _reading(server, config, record)
    return Served(server.name, native, reason, server.command.format(name=name, length=record.length))


def _reading(server: Server, config: Mapping[str, Any], record: Record) -> tuple[bool | None, str]:
    if record.storage != NATIVE:
        return False, f"{record.scheme} is stored portable, for transformers alone"
    parameters = config.get("rope_parameters")
    if not any(path.endswith("rope_parameters") for path in record.original):
        if "pairing" in record.original or ROTARY not in registry()[record.scheme].sites:
            return True, ""  # other weights in the places that the model always had
        return None, "where this model keeps its rotary parameters was not looked at"
    if any(isinstance(value, dict) for value in parameters.values()):
        return None, "parameters for each layer type were not looked at"
    rope_type = parameters["rope_type"]
    if rope_type not in server.reads:
        return False, server.quirks.get(rope_type, f"it does not know the rotary type {rope_type!r}")
    if rope_type == "proportional" and not parameters["partial_rotary_factor"]:
        return False, "it refuses partial_rotary_factor=0, which is how a rotation is silenced"
    given = {key for key, value in parameters.items() if value is not None} - {"rope_type", "rope_theta"}
    unread = sorted(given - server.reads[rope_type])
    if unread:
        return False, f"it does not look at {', '.join(unread)}"
    return True, server.quirks.get(rope_type, "")
