"""Which causal model types of transformers are recognised, and what a yarn patch does on each: the proof by trying.

python -m tests.recognised --output docs/recognised.json
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import torch
import transformers
from tqdm import tqdm

from hf_posswap import PosSwapError, patch_model, unpatch_model
from hf_posswap.anatomy import examine

from .zoo import CannotBuild, build, forward, model_types

WORKS = "works"
ROUNDING = 1e-5  # a reload lays weights out anew in memory, and some kernels then add in another order


def outcome(model_type: str) -> tuple[str, str]:
    """(sites found, what a yarn patch did): works, refused with the reason, or wrong with the law that broke."""
    try:
        model = build(model_type, "causal-lm")
    except CannotBuild as error:
        return "", f"not built: {error}"
    try:
        sites = ", ".join(sorted(examine(model).sites))
    except PosSwapError as error:
        return "", f"refused: {error}"
    before = forward(model)
    try:
        patch_model(model, "yarn", factor=4)
    except PosSwapError as error:
        same = torch.equal(forward(model), before)
        return sites, f"refused: {error}" if same else "wrong: a refused patch changed the model"
    patched = forward(model)
    if torch.equal(patched, before):
        return sites, "wrong: no effect"
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        reloaded = forward(type(model).from_pretrained(folder).eval())
    apart = (reloaded - patched).abs().max().item()
    if apart > ROUNDING:
        return sites, f"wrong: reload differs by {apart:.1e}"
    if not torch.equal(forward(unpatch_model(model)), before):
        return sites, "wrong: undo differs"
    return sites, WORKS if apart == 0 else f"{WORKS}: reload within {apart:.0e}"


def survey(types: list[str], progress: bool = False) -> dict[str, dict[str, str]]:
    found = {}
    for model_type in tqdm(types, unit="type", disable=not progress):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                sites, yarn = outcome(model_type)
            except Exception as error:  # a survey reports what broke and goes on
                sites, yarn = "", f"wrong: {type(error).__name__}: {str(error)[:200]}"
        found[model_type] = {"sites": sites, "yarn": yarn}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    output = parser.parse_args().output
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    types = survey(model_types("causal-lm"), progress=True)
    kinds = Counter(one["yarn"].split(":")[0] for one in types.values())
    summary = {
        "transformers": transformers.__version__,
        "types": len(types),
        "built": len(types) - kinds["not built"],
        "recognised": sum(bool(one["sites"]) for one in types.values()),
        "rotary": sum("rotary" in one["sites"] for one in types.values()),
        "yarn": dict(sorted(kinds.items())),
    }
    output.write_text(json.dumps({"summary": summary, "types": types}, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(summary, indent=1))
    for name, one in types.items():
        if one["yarn"].startswith("wrong"):
            print(name, one["yarn"])


if __name__ == "__main__":
    main()
