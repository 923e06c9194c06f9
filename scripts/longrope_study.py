"""LongRoPE's factors searched on the demo's own base model, and measured beside YaRN, both before any training.

python scripts/longrope_study.py --demo runs/demo --output_dir docs/longrope

The search reads the demo's training text, the measurement its held-out text under the protocol strict. About ten
minutes on one core; a search that was stopped goes on. Writes results.json and table.md.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hf_posswap.arguments import parse, run
from hf_posswap.errors import PosSwapError


@dataclass
class StudyArguments:
    """The demo, and the size of the search."""

    output_dir: str = field(metadata={"help": "Folder for results.json and table.md."})
    demo: str = field(
        default="runs/demo",
        metadata={"help": "Folder of scripts/demo.py; its base is trained where it has none."},
    )
    samples: int = field(default=5, metadata={"help": "Training texts that the search reads (the paper's 5)."})
    population: int = field(default=40, metadata={"help": "Candidates at the start."})
    parents: int = field(default=16, metadata={"help": "Candidates that live on."})
    mutations: int = field(default=10, metadata={"help": "Mutations per generation."})
    crossovers: int = field(default=10, metadata={"help": "Crossovers per generation."})
    generations: int = field(default=12, metadata={"help": "Generations."})
    seed: int = field(default=0, metadata={"help": "Of every draw."})


def main() -> None:
    (given,) = parse(StudyArguments, description=__doc__.splitlines()[0])
    import demo as demos
    import transformers
    from tqdm import tqdm

    from hf_posswap import from_pretrained, patch_model, runs
    from hf_posswap.evaluation.report import comparison
    from hf_posswap.longrope_search import Evolution, search_factors

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    names = ("population", "parents", "mutations", "crossovers", "generations", "seed")
    settings = Evolution(**{name: getattr(given, name) for name in names})
    demo = demos.Demo(demos.DemoArguments(output_dir=given.demo))
    output, factor, base = Path(given.output_dir), demo.arguments.factor, demo.base()
    output.mkdir(parents=True, exist_ok=True)
    found = search_factors(
        from_pretrained(base),
        training_text(demo, given.samples),
        factor=factor,
        settings=settings,
        state_file=demo.folder / "longrope.state.json",
        progress=lambda generations: tqdm(generations, unit="generation"),
    )
    demo.measure(from_pretrained(base), "base", None)
    for scheme, params in (("yarn", {}), ("longrope", {"long_factor": found.factors})):
        demo.measure(patch_model(from_pretrained(base), scheme, factor=factor, **params), scheme, "before")
    verdict, table = compare(demo.series, demo.lengths[-1]), comparison(demo.series, demo.arguments.length)
    study = {
        "arguments": asdict(given),
        "search": asdict(found),
        "searched_on": "training text",
        "protocol": "strict",
        "original_length": demo.arguments.length,
        "series": demo.series,
        "verdict": verdict,
        "held_out": demo.fingerprint(),
        "command": runs.command(),
        "hardware": runs.hardware("cpu"),
        "versions": runs.versions(),
    }
    runs.write_json(output / "results.json", study)
    page = f"{table}\n\n{verdict} Factors: {', '.join(f'{f:g}' for f in found.factors)}.\n"
    (output / "table.md").write_text(page, encoding="utf-8")
    print(page, end="")


def training_text(demo: Any, samples: int) -> Any:
    """Ids (samples, longest length) of the first training files that are long enough."""
    import torch

    length, rows = demo.lengths[-1], []
    for path in demo.train:
        ids = demo.tokenizer(path.read_text("utf-8", "ignore"), verbose=False)["input_ids"]
        rows += [ids[:length]] if len(ids) >= length else []
        if len(rows) == samples:
            return torch.tensor(rows)
    raise PosSwapError(f"samples={samples}: the demo's training text has {len(rows)} files of {length} tokens")


def compare(series: list[dict[str, Any]], length: int) -> str:
    """One sentence: whether the searched factors beat YaRN's at the longest length."""
    at = {one["name"]: next(p["perplexity"] for p in one["points"] if p["length"] == length) for one in series}
    beats = "beat" if at["longrope"] < at["yarn"] else "did not beat"
    return (
        f"At {length:,} tokens the searched factors {beats} YaRN: perplexity {at['longrope']:.3f} against "
        f"{at['yarn']:.3f}, neither fine-tuned."
    )


if __name__ == "__main__":
    run(main)
