"""What the tests of training share: tiny models, tokenizers of bytes, and real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import datasets
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from hf_posswap.training.arguments import FinetuneArguments
from hf_posswap.training.log import TrainingLog

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "finetune.py"
SHARDED = ROOT / "tests" / "sharded_on_cpu.py"
VOCABULARY = 261  # 256 bytes and five special tokens
BLOCK = 32


def byte_tokenizer(**special: str) -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<eos>", "<cls>", "<sep>", "<mask>", "<pad>"]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(letters + names)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    if "cls_token" in special:
        pair = [("<sep>", 258), ("<cls>", 257)]
        backend.post_processor = processors.BertProcessing(*pair)
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=16, **special)


def llama(**changes) -> LlamaForCausalLM:
    config = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": BLOCK,
        "initializer_range": 0.2,
    }
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**(config | changes)))


def bert(**changes) -> BertForMaskedLM:
    config = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": BLOCK,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    torch.manual_seed(0)
    return BertForMaskedLM(BertConfig(**(config | changes)))


def bart() -> BartForConditionalGeneration:
    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    return BartForConditionalGeneration(BartConfig(vocab_size=VOCABULARY, d_model=32, **layers))


def gpt2(**changes) -> GPT2LMHeadModel:
    config = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 40}
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**(config | changes)))


def gemma2() -> Gemma2ForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
    return Gemma2ForCausalLM(Gemma2Config(vocab_size=VOCABULARY, num_attention_heads=2, num_key_value_heads=1, **sizes))


def flags(arguments: FinetuneArguments) -> list[str]:
    """The command line that parses to `arguments`."""
    pairs = vars(arguments).items()
    return [word for name, value in pairs if value not in (None, False) for word in (f"--{name}", str(value))]


def run(*command: object, expect: int = 0, **environment: str) -> subprocess.CompletedProcess:
    """A real process, on one thread, without a network."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_")}
    variables |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables["HF_DATASETS_CACHE"] = str(datasets.config.HF_DATASETS_CACHE)
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=variables | environment)
    assert done.returncode == expect, done.stderr
    return done


def call(script: str, *arguments: object, env: dict | None = None, **options) -> subprocess.CompletedProcess:
    """A script as a user meets it; how it ended is the caller's to judge."""
    command = [sys.executable, ROOT / "scripts" / script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | (env or {}), **options)


def losses(log: TrainingLog) -> list[float]:
    return [entry["loss"] for entry in log.entries]


def launch(processes: int, arguments: FinetuneArguments, *more: str, config: str = "ddp") -> TrainingLog:
    """scripts/finetune.py on several CPU processes, spread as one of scripts/configs says, by pieces of 10 logits."""
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", ROOT / "scripts" / "configs" / f"{config}.yaml", "--mixed_precision", "no"]
    port = str(20000 + os.getpid() % 20000)
    command += ["--num_processes", processes, "--main_process_port", port, SHARDED, SCRIPT]
    run(*command, *flags(arguments), *more, ACCELERATE_USE_CPU="true")
    log = TrainingLog.read(arguments.output_dir)
    assert log.hardware["processes"] == processes
    return log
