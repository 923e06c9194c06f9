"""Attention dilution of a model on text, without and with a temperature: one plot.

python scripts/dilution.py --output_dir docs/dilution
python scripts/dilution.py --model MODEL --factor 4 --eval_dir TEXTS --output_dir out/dilution

Four lines: the model, with `logn`; scaled without a temperature (`ntk-by-parts`) and with it (`yarn`). Without --model
it is the base of scripts/demo.py on the text that was held out, a minute on one core. Writes results.json and
dilution.png.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hf_posswap.arguments import parse, run
from hf_posswap.errors import PosSwapError


@dataclass
class DilutionArguments:
    """Which model, on what text."""

    output_dir: str = field(metadata={"help": "Folder for results.json and dilution.png."})
    model: str | None = field(
        default=None, metadata={"help": "Checkpoint folder or hub name of a causal rotary model."}
    )
    demo: str = field(default="runs/demo", metadata={"help": "Without --model: folder of scripts/demo.py."})
    factor: float = field(default=8, metadata={"help": "How far beyond the trained length."})
    eval_dir: str | None = field(default=None, metadata={"help": "Folder of text files, each one document."})
    eval_file: str | None = field(default=None, metadata={"help": "One text file."})
    texts: int = field(default=8, metadata={"help": "Documents that are read."})


def main() -> None:
    (given,) = parse(DilutionArguments, description=__doc__.splitlines()[0])
    if given.texts < 1:
        raise PosSwapError(f"texts={given.texts} is too small; the least value is 1")
    if given.factor <= 1:
        raise PosSwapError(f"factor={given.factor:g} is too small; it must be greater than 1")
    import torch
    import transformers
    from tqdm import tqdm

    from hf_posswap import from_pretrained, patch_model, runs
    from hf_posswap.evaluation.diagnostics import attention
    from hf_posswap.evaluation.plots import DIAGNOSTICS, plot_panels, require_matplotlib
    from hf_posswap.evaluation.subjects import trained_length

    require_matplotlib()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    folder, documents = source(given)
    trained = trained_length(from_pretrained(folder))
    longest = int(trained * given.factor)
    lengths = [n for n in (round(trained * 2 ** (k / 2)) for k in range(-8, 64)) if 8 <= n <= longest]
    rows = [ids[:longest] for ids in documents if len(ids) >= longest][: given.texts]
    if not rows:
        raise PosSwapError(f"no text has the {longest} tokens that factor={given.factor:g} asks for")
    scaled = {"factor": given.factor}
    series = []
    for name, params in tqdm([("base", {}), ("logn", {}), ("ntk-by-parts", scaled), ("yarn", scaled)], unit="model"):
        model = from_pretrained(folder)
        if name != "base":
            patch_model(model, name, **params)
        points = attention(model, torch.tensor(rows), lengths)
        series.append({"name": name, "params": params, "points": points})
    results = {
        "arguments": asdict(given),
        "original_length": trained,
        "texts": len(rows),
        "series": series,
        "command": runs.command(),
        "hardware": runs.hardware("cpu"),
        "versions": runs.versions(),
    }
    output = Path(given.output_dir)
    runs.write_json(output / "results.json", results)
    title = f"Attention dilution, mean of {len(rows)} texts"
    plot_panels(series, output / "dilution.png", DIAGNOSTICS[:2], original_length=trained, title=title)
    for one in series:
        at = {point["length"]: point for point in one["points"]}
        figures = [f"{n}: entropy {at[n]['entropy']:.3f}, weight {at[n]['weight']:.4f}" for n in (trained, lengths[-1])]
        print(f"{one['name']:13}", "; ".join(figures))


def source(given: DilutionArguments) -> tuple[Any, Any]:
    """(folder of the model, documents as lists of token ids)."""
    if given.model is None:
        import demo as demos

        if given.eval_dir or given.eval_file:
            raise PosSwapError("eval_dir and eval_file go with --model; without it the demo's own text is read")
        demo = demos.Demo(demos.DemoArguments(output_dir=given.demo))
        return demo.base(), demo.documents
    from transformers import AutoTokenizer

    from hf_posswap.evaluation.data import read_texts, tokenize

    texts, _ = read_texts(eval_dir=given.eval_dir, eval_file=given.eval_file)
    return given.model, tokenize(texts, AutoTokenizer.from_pretrained(given.model))


if __name__ == "__main__":
    run(main)
