"""The whole road in about ten minutes on two cores, without hub or GPU: train, swap, measure, fine-tune, reload.

A byte-level LLaMA is trained on Python's own standard library, measured at 1x to 8x of its trained length (it falls
apart), patched with four schemes, measured, fine-tuned at the longer length, measured again, saved, and reloaded by
stock transformers in a fresh process, compared to the bit. Everything goes to one folder:

    python scripts/demo.py --output_dir runs/demo
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import sysconfig
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from hf_posswap.arguments import parse, run
from hf_posswap.errors import PosSwapError

SCHEMES = ("yarn", "linear", "ntk", "dynamic")
ROWS = 8  # of the trained length, in a training step of the base
EVALUATION_BATCH = 4


@dataclass
class DemoArguments:
    """Sizes of the demo. The defaults take about ten minutes on two cores."""

    output_dir: str = field(default="runs/demo", metadata={"help": "Folder for models, results, plot and card."})
    length: int = field(default=256, metadata={"help": "Trained length, in bytes (one byte is one token)."})
    factor: int = field(default=8, metadata={"help": "How far each scheme extends it; a power of two."})
    steps: int = field(default=900, metadata={"help": "Training steps of the base, 8 rows each."})
    tune_steps: int = field(default=24, metadata={"help": "Fine-tuning steps of each scheme, 2 long rows each."})
    targets: int = field(default=4096, metadata={"help": "Held-out tokens that every measurement scores."})
    width: int = field(default=192, metadata={"help": "Hidden size of the model; a multiple of 32."})


def main() -> None:
    (arguments,) = parse(DemoArguments, description=__doc__.splitlines()[0])
    if arguments.factor < 2 or arguments.factor & (arguments.factor - 1):
        raise PosSwapError(f"--factor={arguments.factor} is not a power of two from 2 on")
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    Demo(arguments).run()


class Demo:
    """The steps of the demo over one folder."""

    def __init__(self, arguments: DemoArguments) -> None:
        self.arguments, self.folder = arguments, Path(arguments.output_dir)
        self.lengths = [arguments.length * 2**i for i in range(arguments.factor.bit_length())]
        self.train, held_out = split_by_file(arguments)
        self.tokenizer = byte_tokenizer()
        self.documents = [self.tokenizer(path.read_text("utf-8", "ignore"))["input_ids"] for path in held_out]
        self.series: list[dict[str, Any]] = []
        self.reloads: dict[str, bool] = {}

    def base(self) -> Path:
        """The folder of the base model, for a study of it: the one that a demo left there, or trained now.

        Raises PosSwapError where what is there was trained on other text than this Python's library.
        """
        from hf_posswap.record import published

        folder = self.folder / "base"
        if not (folder / "train_log.json").is_file():
            self.pretrain()
        log = json.loads((folder / "train_log.json").read_text(encoding="utf-8"))["arguments"]
        if ([published(file) for file in log["train_file"]], log["max_steps"]) != (
            [path.name for path in self.train],
            self.arguments.steps,
        ):
            raise PosSwapError(f"demo={str(self.folder)!r} holds a model of another text or length of training")
        return folder

    def run(self) -> None:
        base = self.pretrain()
        self.measure(base, "base", None)
        for scheme in SCHEMES:
            self.swap(scheme)
        self.report()

    def pretrain(self) -> Any:
        say(f"1. Train a byte-level LLaMA at {self.arguments.length} tokens on Python's standard library")
        model = tiny_llama(self.arguments, len(self.tokenizer))
        self.tokenizer.model_max_length = self.arguments.length
        self.tune(model, "base", block_size=self.arguments.length, steps=self.arguments.steps, rows=ROWS, rate=2e-3)
        return model

    def swap(self, scheme: str) -> None:
        from transformers import AutoTokenizer

        from hf_posswap import describe, from_pretrained, patch_model, probe

        say(f"2. Swap: patch_model(model, {scheme!r}, factor={self.arguments.factor})")
        model = from_pretrained(self.folder / "base")
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder / "base")
        patch_model(model, scheme, factor=self.arguments.factor, tokenizer=self.tokenizer)
        print(describe(model))
        faults = probe(model).faults
        if faults:
            raise PosSwapError(f"{scheme}: {faults[0]}")
        self.measure(model, scheme, "before")
        self.tune(model, scheme, block_size=self.lengths[-1], steps=self.arguments.tune_steps, rows=2, rate=5e-4)
        self.measure(model, scheme, "after")
        self.reloads[scheme] = self.reloads_to_the_bit(model, scheme)

    def tune(self, model: Any, name: str, *, block_size: int, steps: int, rows: int, rate: float) -> None:
        """What `scripts/finetune.py` does."""
        from hf_posswap.training.arguments import FinetuneArguments
        from hf_posswap.training.loop import finetune

        finetune(
            model,
            self.tokenizer,
            FinetuneArguments(
                output_dir=str(self.folder / name),
                train_file=[str(path) for path in self.train],
                block_size=block_size,
                max_steps=steps,
                per_device_train_batch_size=rows,
                learning_rate=rate,
                lr_scheduler_type="cosine",
                warmup_steps=max(1, steps // 20),
                save_steps=0,
                logging_steps=max(1, steps // 20),
            ),
        )

    def measure(self, model: Any, name: str, stage: str | None) -> None:
        """What `scripts/evaluate.py` does, protocol strict."""
        import torch

        from hf_posswap.evaluation import measure

        protocol = self.protocol()
        documents, _ = protocol.choose(torch.tensor(document) for document in self.documents)
        model.eval()
        found = measure(model, documents, protocol, name=name, stage=stage, batch_size=EVALUATION_BATCH, progress=True)
        self.series.append(found)

    def protocol(self) -> Any:
        from hf_posswap.evaluation import make_protocol

        return make_protocol("strict", self.lengths, max_targets=self.arguments.targets)

    def reloads_to_the_bit(self, model: Any, name: str) -> bool:
        """Whether stock transformers, in a fresh process that cannot import this package, computes the same logits."""
        import torch
        from safetensors.torch import load_file, save_file

        folder = self.folder / name
        ids = torch.tensor(max(self.documents, key=len)[: self.lengths[-1]])[None]
        with torch.no_grad():
            here = model.eval()(ids).logits
        save_file({"ids": ids}, folder / "check_ids.safetensors")
        subprocess.run([sys.executable, "-c", FRESH_PROCESS, folder, str(torch.get_num_threads())], check=True)
        there = load_file(folder / "check_logits.safetensors")["logits"]
        for file in folder.glob("check_*.safetensors"):
            file.unlink()
        return torch.equal(here, there)

    def report(self) -> None:
        from hf_posswap import runs
        from hf_posswap.card import write_card
        from hf_posswap.evaluation import plot_lengths
        from hf_posswap.evaluation.report import comparison

        say("3. Results")
        results = {
            "arguments": asdict(self.arguments),
            "protocol": "strict",
            "original_length": self.arguments.length,
            "series": self.series,
            "reloaded_to_the_bit": self.reloads,
            "train_files": len(self.train),
            "held_out": self.fingerprint(),
            "command": runs.command(),
            "hardware": runs.hardware("cpu"),
            "versions": runs.versions(),
        }
        with runs.replacing(self.folder / "results.json") as path:
            path.write_text(json.dumps(results, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        table = comparison(self.series, self.arguments.length)
        (self.folder / "table.md").write_text(table + "\n", encoding="utf-8")
        plot_lengths(
            self.series,
            self.folder / "results.png",
            original_length=self.arguments.length,
            title=f"A LLaMA trained at {self.arguments.length} tokens, before and after {self.arguments.tune_steps} "
            f"steps at {self.lengths[-1]}",
        )
        cards = [self.write_evaluation_and_card(scheme, write_card) for scheme in SCHEMES]
        print(table)
        for scheme, same in self.reloads.items():
            verdict = "equal to the bit" if same else "DIFFERS"
            print(f"{scheme:8} reloaded by stock transformers in a fresh process: {verdict}")
        for what, file in (("results", "results.json"), ("table", "table.md"), ("plot", "results.png")):
            print(f"{what:8} {self.folder / file}")
        print("cards   ", *cards)
        if not all(self.reloads.values()):
            raise PosSwapError("a reloaded model differs from the one in memory; see above")

    def write_evaluation_and_card(self, scheme: str, write_card: Any) -> Path:
        """The report of one scheme, as scripts/evaluate.py writes it, beside its checkpoint; and its card."""
        from hf_posswap.evaluation import report, write_report

        mine = [one for one in self.series if one["name"] in ("base", scheme)]
        built = report.build(
            self.protocol(),
            mine,
            {"base": None, scheme: "base"},
            measures=report.Measures(),
            models={"base": {"source": "base"}, scheme: {"source": scheme}},
            original_length=self.arguments.length,
            data=self.fingerprint(),
            batch_size=EVALUATION_BATCH,
            device="cpu",
            seconds=sum(one["seconds"] for one in mine),
            processes=1,
        )
        write_report(built, self.folder / scheme)
        return write_card(self.folder / scheme)

    def fingerprint(self) -> dict[str, Any]:
        """What the held-out text is."""
        joined = hashlib.sha256(json.dumps(self.documents).encode()).hexdigest()
        return {"documents": len(self.documents), "tokens": sum(map(len, self.documents)), "sha256": joined}


# Run by a fresh interpreter: loads with stock transformers; importing hf_posswap is made impossible first.
FRESH_PROCESS = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hf_posswap":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
import torch, transformers
from safetensors.torch import load_file, save_file
transformers.utils.logging.disable_progress_bar()
folder, threads = sys.argv[1:]
torch.set_num_threads(int(threads))
model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
with torch.no_grad():
    logits = model(load_file(folder + "/check_ids.safetensors")["ids"]).logits
save_file({"logits": logits}, folder + "/check_logits.safetensors")
"""


def split_by_file(arguments: DemoArguments) -> tuple[list[Path], list[Path]]:
    """(train, held out) files of the standard library: a file is held out where the hash of its name says so."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = sorted(p for p in root.rglob("*.py") if not skipped & set(p.relative_to(root).parts))
    if not files:
        raise PosSwapError(f"Python's standard library at {root} holds no source files to train on")
    held_out = [p for p in files if hashlib.sha256(str(p.relative_to(root)).encode()).digest()[0] % 10 == 0]
    train = sorted(set(files) - set(held_out), key=lambda p: (hashlib.sha256(p.name.encode()).digest(), p))
    needed, sizes = 2 * arguments.steps * ROWS * arguments.length, accumulate(p.stat().st_size for p in train)
    enough = next((i + 1 for i, size in enumerate(sizes) if size >= needed), len(train))
    longest = (arguments.factor + 1) * arguments.length
    return train[:enough], [p for p in held_out if p.stat().st_size >= longest]


def byte_tokenizer() -> Any:
    """One token per byte: a real fast tokenizer, with no merges to learn."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": 0, "<eos>": 1} | {letter: i + 2 for i, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def tiny_llama(arguments: DemoArguments, vocabulary: int) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=arguments.width,
            intermediate_size=arguments.width * 8 // 3,
            num_hidden_layers=4,
            num_attention_heads=arguments.width // 32,
            max_position_embeddings=arguments.length,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=1,
            tie_word_embeddings=True,
        )
    )


def say(text: str) -> None:
    print(f"\n{text}", flush=True)


if __name__ == "__main__":
    run(main)
