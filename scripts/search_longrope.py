"""Search LongRoPE's factors for a model, a length and a text.

python scripts/search_longrope.py --model out/base --target_length 2048 --eval_dir texts --output out/factors.json
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hf_posswap.arguments import parse, run
from hf_posswap.errors import PosSwapError


@dataclass
class Arguments:
    model: str = field(metadata={"help": "Checkpoint folder or hub name of a causal rotary model."})
    output: str = field(metadata={"help": "JSON file for the factors; NAME.state.json beside it lets a search go on."})
    target_length: int | None = field(default=None, metadata={"help": "Tokens to extend to; this or --factor."})
    factor: float | None = field(default=None, metadata={"help": "Times the trained length."})
    eval_dir: str | None = field(default=None, metadata={"help": "Folder of text files, each one document."})
    eval_file: str | None = field(default=None, metadata={"help": "One text file."})
    samples: int = field(default=5, metadata={"help": "Documents that are read (the paper's 5)."})
    population: int = field(default=64, metadata={"help": "Candidates at the start."})
    parents: int = field(default=32, metadata={"help": "Candidates that live on."})
    mutations: int = field(default=16, metadata={"help": "Mutations per generation."})
    crossovers: int = field(default=16, metadata={"help": "Crossovers per generation."})
    generations: int = field(default=40, metadata={"help": "Generations."})
    seed: int = field(default=0, metadata={"help": "Of every draw."})


def main() -> None:
    (given,) = parse(Arguments, description=__doc__.split("\n")[0])
    import torch
    from tqdm import tqdm
    from transformers import AutoTokenizer

    from hf_posswap import from_pretrained
    from hf_posswap.evaluation.data import read_texts, tokenize
    from hf_posswap.evaluation.subjects import trained_length
    from hf_posswap.longrope_search import Evolution, search_factors
    from hf_posswap.patching import patch_model

    names = ("population", "parents", "mutations", "crossovers", "generations", "seed")
    settings = Evolution(**{name: getattr(given, name) for name in names})
    model = from_pretrained(given.model)
    length = given.target_length or int(trained_length(model) * (given.factor or 1))
    texts, _ = read_texts(eval_dir=given.eval_dir, eval_file=given.eval_file)
    documents = [ids[:length] for ids in tokenize(texts, AutoTokenizer.from_pretrained(given.model))]
    long_enough = [ids for ids in documents if len(ids) == length][: given.samples]
    if not long_enough:
        longest = max(map(len, documents), default=0)
        raise PosSwapError(f"no text has the {length} tokens that are searched for; the longest has {longest}")

    output = Path(given.output)
    found = search_factors(
        model,
        torch.tensor(long_enough),
        factor=given.factor,
        target_length=given.target_length,
        settings=settings,
        state_file=output.with_suffix(".state.json"),
        progress=lambda generations: tqdm(generations, unit="generation"),
    )
    output.write_text(json.dumps(asdict(found), indent=1) + "\n")
    for name, loss in found.starts.items():
        print(f"{name:10} {loss:.4f} nats per token")
    print(f"{'searched':10} {found.loss:.4f} nats per token -> {output}")
    patch_model(model, "longrope", factor=found.factor, long_factor=found.factors)  # what a user does next, tried once


if __name__ == "__main__":
    run(main)
