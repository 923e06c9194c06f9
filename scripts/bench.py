"""Speed, as ratios measured side by side in one process: runs are interleaved, and the fastest of each side compared.

python scripts/bench.py [--output FILE.json]
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

from hf_posswap.arguments import parse, run


@dataclass
class BenchArguments:
    """How long to measure."""

    pairs: int = field(default=40, metadata={"help": "Interleaved pairs of each measurement."})
    output: str | None = field(default=None, metadata={"help": "JSON file for the numbers."})


def main() -> None:
    (arguments,) = parse(BenchArguments, description=__doc__.splitlines()[0])
    import transformers
    from tqdm import tqdm

    from hf_posswap import runs

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    # a goal of None: a peer, measured for comparison
    measurements: list[tuple[str, str, float | None, Callable[[int], float]]] = [
        ("forward, S = 512, patched : native yarn", "ratio", 1.01, forward),
        ("backward too", "ratio", 1.01, backward),
        ("cached decode at 512, patched : native yarn", "ratio", 1.01, decode),
        ("loading, hf_posswap : transformers", "ratio", 1.05, loading),
        ("patching 32 layers of 7B on meta", "ms", 50.0, patching),
        ("import hf_posswap : import torch, transformers", "ratio", 1.10, importing),
        ("from hf_posswap import patch_model : the same", "ratio", 1.10, importing_patch_model),
        *[
            (
                f"causal ALiBi, {way}, S = {length}, {dtype} : no bias",
                "ratio",
                1.20 if way == "fast" else None,
                partial(attention, length=length, dtype=dtype, way=way),
            )
            for dtype in ("float32", "bfloat16")
            for length in (2048, 4096, 8192)
            for way in ("fast", "dense")
        ],
        *[
            (
                f"causal ALiBi, {way}, S = {length}, float32, forward only : no bias",
                "ratio",
                None,
                partial(attention, length=length, dtype="float32", way=way, backward=False),
            )
            for length in (2048, 4096, 8192)
            for way in ("fast", "dense", "flex")
        ],
        ("peak memory of causal ALiBi, 2k to 16k, exponent", "", 1.10, slope),
        *[
            (f"{scheme} on {family}, forward : unpatched", "ratio", 1.08, partial(turned, **kind, cached=False))
            for family, scheme in (("gpt2", "rope"), ("gpt2", "xpos"), ("bert", "rope"))
            for kind in [{"family": family, "scheme": scheme}]
        ],
        *[
            (
                f"{scheme} on gpt2, cached decode at 4096 : unpatched",
                "ratio",
                1.10,
                partial(turned, family="gpt2", scheme=scheme, cached=True),
            )
            for scheme in ("rope", "xpos")
        ],
        *[
            (
                f"{what} embedded, linear : convolution",
                "ratio",
                None,
                partial(patch_forms, kernel=kernel, pixels=pixels, width=width),
            )
            for what, kernel, pixels, width in (
                ("8 pictures in patches of 16, width 768,", (16, 16), (8, 3, 224, 224), 768),
                ("8 pictures in patches of 4, width 768,", (4, 4), (8, 3, 64, 64), 768),
                ("8 pictures in patches of 4, width 192,", (4, 4), (8, 3, 64, 64), 192),
                ("a video in tubelets of 2 x 16 x 16, width 768,", (2, 16, 16), (1, 3, 16, 224, 224), 768),
            )
        ],
        ("graphs compiled anew when the length changes", "", 0, recompiles),
        ("a step of training, finetune : HF Trainer", "ratio", 1.00, training),
    ]
    results = []
    for what, unit, goal, measure in tqdm(measurements, unit="measurement", leave=False):
        value = measure(arguments.pairs)
        met = goal is None or value <= goal
        results.append({"what": what, "unit": unit, "value": round(value, 4), "goal": goal, "met": met})
    width = max(len(one["what"]) for one in results)
    for one in results:
        goal = "" if one["goal"] is None else f"  goal <= {one['goal']:g}"
        verdict = "" if one["met"] else f"  MISSED by {one['value'] - one['goal']:.3f}"
        print(f"{one['what']:{width}}  {one['value']:8.3f} {one['unit']:5}{goal}{verdict}")
    if arguments.output:
        report = {"results": results, "hardware": runs.hardware("cpu"), "versions": runs.versions()}
        with runs.replacing(arguments.output) as path:
            path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def ratio(ours: Callable[[], Any], theirs: Callable[[], Any], pairs: int) -> float:
    """Fastest time of ours / fastest of theirs: whatever else a machine does only adds. Who goes first alternates."""
    ours(), theirs()
    fastest = {ours: math.inf, theirs: math.inf}
    for i in range(pairs):
        for one in (ours, theirs) if i % 2 else (theirs, ours):
            start = time.perf_counter()
            one()
            fastest[one] = min(fastest[one], time.perf_counter() - start)
    return fastest[ours] / fastest[theirs]


def pair() -> tuple[Any, Any, Any]:
    """(patched, native, ids): the same weights and the same yarn, by this package and from the config alone."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from hf_posswap import patch_model

    torch.manual_seed(0)
    settings = {
        "vocab_size": 1024,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "max_position_embeddings": 256,
    }
    patched = patch_model(LlamaForCausalLM(LlamaConfig(**settings)).eval(), "yarn", factor=4)
    native = LlamaForCausalLM(
        LlamaConfig(**settings | {"max_position_embeddings": 1024, "rope_parameters": patched.config.rope_parameters})
    )
    native.load_state_dict(patched.state_dict(), assign=True)  # the same memory: where it lies makes 2 % on a CPU
    native.eval()
    ids = torch.randint(0, 1024, (1, 512))
    with torch.no_grad():
        assert torch.equal(patched(ids).logits, native(ids).logits)
    return patched, native, ids


def forward(pairs: int) -> float:
    import torch

    patched, native, ids = pair()
    with torch.no_grad():
        return ratio(lambda: patched(ids), lambda: native(ids), pairs)


def backward(pairs: int) -> float:
    patched, native, ids = pair()
    return ratio(
        lambda: patched(ids, labels=ids).loss.backward(), lambda: native(ids, labels=ids).loss.backward(), pairs
    )


def decode(pairs: int) -> float:
    import torch

    patched, native, ids = pair()
    caches = {}
    with torch.no_grad():
        for model in (patched, native):
            caches[model] = model(ids, use_cache=True).past_key_values

        def step(model: Any) -> None:
            for _ in range(4):
                model(ids[:, :1], past_key_values=caches[model], use_cache=True)
            caches[model].crop(-4)

        return ratio(lambda: step(patched), lambda: step(native), pairs)


def loading(pairs: int) -> float:
    from transformers import LlamaForCausalLM

    from hf_posswap import from_pretrained

    patched, _, _ = pair()
    with tempfile.TemporaryDirectory() as folder:
        patched.save_pretrained(folder)
        return ratio(lambda: from_pretrained(folder), lambda: LlamaForCausalLM.from_pretrained(folder), pairs)


def patching(pairs: int) -> float:
    """Milliseconds, median, to patch a 7B-shaped LLaMA; it is put back between two measurements."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from hf_posswap import patch_model, unpatch_model

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32))
    times = []
    for _ in range(pairs):
        start = time.perf_counter()
        patch_model(model, "yarn", factor=4)
        times.append(1000 * (time.perf_counter() - start))
        unpatch_model(model)
    return statistics.median(times)


def importing(pairs: int) -> float:
    return _imports("import hf_posswap", pairs)


def importing_patch_model(pairs: int) -> float:
    return _imports("from hf_posswap import patch_model", pairs)


def _imports(ours: str, pairs: int) -> float:
    def fresh(code: str) -> Callable[[], Any]:
        return lambda: subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)

    return ratio(fresh(ours), fresh("import torch, transformers"), max(3, pairs // 8))


# --- attention: each of these against the same without a scheme, one core


def attention(pairs: int, length: int, dtype: str, way: str, backward: bool = True) -> float:
    """Forward and backward of one causal attention (4 heads of 64) with ALiBi on its way, over that without a bias.

    `fast` is the bias in extra dimensions, as patched models compute it; `dense` the (H, S, S) bias built and added
    by the kernel; `flex` compiled FlexAttention that reads it off its diagonals, without a backward on a CPU. Expected:
    64 dimensions become 72 (one more in float32, six in bfloat16, up to a multiple of 8), an eighth of the products
    more, and copies of q, k and v; the dense bias is read from memory instead, twice.
    """
    import torch
    from torch import Tensor
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    from torch.nn.functional import scaled_dot_product_attention

    from hf_posswap.attention import Attached, Diagonals, Places
    from hf_posswap.schemes.alibi import Alibi
    from hf_posswap.sites import BiasGeometry

    attached = Attached(Alibi().bias(BiasGeometry(4, length, causal=True)))
    inputs = {"dtype": getattr(torch, dtype), "requires_grad": backward}
    q, k, v = (torch.randn(1, 4, length, 64, **inputs) for _ in range(3))
    compiled = torch.compile(flex_attention)
    block_mask = (
        create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, "cpu") if way == "flex" else None
    )

    def plain() -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    def fast() -> Tensor:
        extended = attached.extended(q, k, v, 64**-0.5)
        return scaled_dot_product_attention(*extended, scale=64**-0.5, is_causal=True)[..., :64]

    def dense() -> Tensor:
        bias = attached.dense(q, k, Places(), None)
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        return scaled_dot_product_attention(q, k, v, attn_mask=bias.masked_fill(hidden, -torch.inf))

    def flex() -> Tensor:
        bias = Diagonals(attached.by_distance(q, k, Places()), length)
        return compiled(q, k, v, lambda score, *at: score + bias[at], block_mask)

    def trained(compute: Callable[[], Tensor]) -> Callable[[], Any]:
        return (lambda: compute().sum().backward()) if backward else compute

    ours = {"fast": fast, "dense": dense, "flex": flex}[way]
    return ratio(trained(ours), trained(plain), max(2, pairs * 1024 // length // (8 if backward else 2)))


def slope(pairs: int) -> float:
    """Growth of the peak memory of that fast attention from 2k to 16k, as an exponent: 1 is linear, 2 a square.

    Linux's own count of a process: `ru_maxrss` of a child begins at its parent's.
    """
    code = (
        "import re, sys, torch\n"
        "from torch.nn.functional import scaled_dot_product_attention\n"
        "from hf_posswap.attention import Attached\n"
        "from hf_posswap.schemes.alibi import Alibi\n"
        "from hf_posswap.sites import BiasGeometry\n"
        "torch.set_num_threads(1)\n"
        "attached = Attached(Alibi().bias(BiasGeometry(2, 4096, causal=True)))\n"
        "def peak(length):\n"
        "    q, k, v = (torch.randn(1, 2, length, 64, requires_grad=True) for _ in range(3))\n"
        "    inputs = attached.extended(q, k, v, 0.125)\n"
        "    scaled_dot_product_attention(*inputs, scale=0.125, is_causal=True).sum().backward()\n"
        "    return int(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1])\n"
        "first = peak(64)\n"
        "print(peak(int(sys.argv[1])) - first)\n"
    )

    def peak(length: int) -> int:
        run = subprocess.run([sys.executable, "-c", code, str(length)], check=True, capture_output=True, text=True)
        return int(run.stdout)

    return math.log(peak(16384) / peak(2048), 8)


def turned(pairs: int, family: str, scheme: str, cached: bool) -> float:
    """GPT-2's or BERT's forward at 512 tokens (4 layers, width 512) with a rotation in attention, over that without.

    `cached`: a step of one token behind 4096. Expected: a rotation is 6 operations on q and k beside 12 products of
    matrices in a layer; a step's time is launches, about 40 of them in a layer, and a rotated layer has 14 more.
    """
    import copy

    import torch
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

    from hf_posswap import patch_model

    torch.manual_seed(0)
    special = {"bos_token_id": 1, "eos_token_id": 1}
    if family == "gpt2":
        sizes = {"n_layer": 4, "n_embd": 512, "n_head": 8, "n_positions": 4200}
        plain = GPT2LMHeadModel(GPT2Config(vocab_size=1024, **sizes, **special)).eval()
    else:
        sizes = {"num_hidden_layers": 4, "hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8}
        plain = BertForMaskedLM(BertConfig(vocab_size=1024, **sizes)).eval()
    patched = patch_model(copy.deepcopy(plain), scheme)
    ids = torch.randint(2, 1024, (1, 4096 if cached else 512))
    with torch.no_grad():
        if not cached:
            return ratio(lambda: patched(ids), lambda: plain(ids), pairs)
        caches = {m: m(ids, use_cache=True, logits_to_keep=1).past_key_values for m in (patched, plain)}

        def step(model: Any) -> None:
            for _ in range(4):
                model(ids[:, :1], past_key_values=caches[model], use_cache=True)
            caches[model].crop(-4)

        return ratio(lambda: step(patched), lambda: step(plain), pairs)


def patch_forms(pairs: int, kernel: tuple[int, ...], pixels: tuple[int, ...], width: int) -> float:
    """A patch embedding by one product of matrices, over that by a convolution; forward only."""
    import copy

    import torch
    from torch import nn

    from hf_posswap.patches import linear_form

    convolution = {2: nn.Conv2d, 3: nn.Conv3d}[len(kernel)](3, width, kernel, kernel)
    linear, seen = copy.deepcopy(convolution), torch.randn(pixels)
    linear_form(linear).swap()
    with torch.no_grad():
        return ratio(lambda: linear(seen), lambda: convolution(seen), max(2, pairs // 2))


def recompiles(pairs: int) -> float:
    """Graphs that torch.compile adds when the length changes, after the first, dynamic one."""
    import torch

    from hf_posswap import patch_model

    patched, _, ids = pair()
    compiled = torch.compile(patch_model(patched, "alibi"), fullgraph=True, dynamic=True, backend="eager")
    with torch.no_grad():
        compiled(ids)
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        for length in (500, 300, 411):
            compiled(torch.randint(0, 1024, (1, length)))
    return torch._dynamo.utils.counters["stats"]["unique_graphs"] - before


def training(pairs: int) -> float:
    """Seconds per step of `finetune` over those of transformers' Trainer: the same model, rows, AdamW and clipping.

    Median of each run's steps but the first, the fastest of the runs of each side; they alternate. Expected: the same
    products of matrices; here no logits are kept, and no schedule of callbacks runs between two steps.
    """
    with tempfile.TemporaryDirectory() as folder:
        sides = (_finetune_step, _trainer_step)
        fastest = dict.fromkeys(sides, math.inf)
        for i in range(max(2, pairs // 20)):
            for side in sides if i % 2 else reversed(sides):
                fastest[side] = min(fastest[side], side(f"{folder}/{side.__name__}-{i}"))
    return fastest[_finetune_step] / fastest[_trainer_step]


STEPS, ROWS, LENGTH = 8, 4, 512  # of each run of `training`


def _words() -> list[int]:
    import random

    return random.Random(0).choices(range(2, 1024), k=STEPS * ROWS * LENGTH)


def _finetune_step(folder: str) -> float:
    from pathlib import Path

    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    from hf_posswap.training.arguments import FinetuneArguments
    from hf_posswap.training.loop import finetune

    backend = Tokenizer(WordLevel({str(i): i for i in range(1024)}, unk_token="0"))
    backend.pre_tokenizer = WhitespaceSplit()
    Path(folder).mkdir()
    text = Path(folder, "words.txt")
    text.write_text(" ".join(map(str, _words())))
    arguments = FinetuneArguments(
        output_dir=folder,
        train_file=[str(text)],
        block_size=LENGTH,
        max_steps=STEPS,
        per_device_train_batch_size=ROWS,
        save_steps=0,
    )
    log = finetune(pair()[0].train(), PreTrainedTokenizerFast(tokenizer_object=backend), arguments)
    return statistics.median(ROWS * LENGTH / entry["tokens_per_second"] for entry in log.entries[1:])


def _trainer_step(folder: str) -> float:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    words, times = _words(), []
    rows = [words[i * LENGTH : (i + 1) * LENGTH] for i in range(STEPS * ROWS)]

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            times.append(time.perf_counter())

    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=ROWS,
        learning_rate=2e-5,
        warmup_steps=20,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    data = [{"input_ids": row, "labels": row} for row in rows]
    Trainer(pair()[0].train(), arguments, train_dataset=data, callbacks=[Clock()]).train()
    return statistics.median(after - before for before, after in pairwise(times))


if __name__ == "__main__":
    run(main)
