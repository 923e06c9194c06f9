"""Write the generated parts of README.md: what is between `<!-- generated: NAME -->` and `<!-- end -->`.

python scripts/readme.py [--check]
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path

from hf_posswap.arguments import parse, run
from hf_posswap.errors import PosSwapError

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"<!-- generated: (\w+) -->\n.*?<!-- end -->", re.DOTALL)

USE = """\
from transformers import AutoModelForCausalLM
from hf_posswap import describe, patch_model, probe

model = AutoModelForCausalLM.from_pretrained("runs/demo/base")
patch_model(model, "yarn", factor=8)
print(describe(model))
print("as the config says:", probe(model).ok)
"""
# scheme -> parameters that suit every family it applies to
TRIED = {
    "nope": {},
    "rope": {"rope_theta": 2e5},
    "linear": {"factor": 4},
    "ntk": {"factor": 4},
    "dynamic": {"factor": 4},
    "yarn": {"factor": 4},
    "ntk-by-parts": {"factor": 4},
    "llama3": {"factor": 4},
    "proportional": {"partial_rotary_factor": 0.5},
    "xpos": {},
    "alibi": {},
    "t5": {},
    "kerple": {},
    "fire": {},
    "sandwich": {},
    "logn": {},
    "sinusoidal": {},
    "learned": {"factor": 4},
}
ONE_AXIS = {"ndim": 1}
TRIED_ON_IMAGES = {
    "nope": {},
    "learned2d": {"image_size": 48},
    "sincos2d": {},
    "rope2d": {},
    "bias2d": {},
    **{scheme: TRIED[scheme] | ONE_AXIS for scheme in ("rope", "linear", "yarn", "alibi", "t5", "kerple", "sandwich")},
}


@dataclass
class ReadmeArguments:
    """What to do."""

    check: bool = field(default=False, metadata={"help": "Change nothing; fail where the page is out of date."})


def main() -> None:
    (arguments,) = parse(ReadmeArguments, description=__doc__.splitlines()[0])
    page = ROOT / "README.md"
    old = page.read_text(encoding="utf-8")
    new = generate(old)
    if arguments.check and new != old:
        raise PosSwapError("README.md is out of date; run: make readme")
    page.write_text(new, encoding="utf-8")


def generate(page: str) -> str:
    """The page with every generated part made anew."""
    parts = {
        "use": use,
        "schemes": schemes,
        "families": families,
        "coverage": coverage,
        "demo": demo,
        "bench": bench,
    }

    def part(match: re.Match) -> str:
        return f"<!-- generated: {match[1]} -->\n{parts[match[1]]().strip()}\n<!-- end -->"

    return BLOCK.sub(part, page)


def use() -> str:
    """The lines at the top of the page, and what they print, run on a model with the demo's config."""
    return f"```python\n{USE}```\n```\n{run_use()}```"


def run_use() -> str:
    """What the lines print."""
    sys.path.insert(0, str(ROOT / "scripts"))
    import demo
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        demo.tiny_llama(demo.DemoArguments(), 258).save_pretrained(folder)
        with contextlib.redirect_stdout(printed):
            exec(USE.replace("runs/demo/base", folder), {})
    return printed.getvalue()


def schemes() -> str:
    """A row per scheme."""
    from hf_posswap.catalogue import scheme_table

    return scheme_table()


def families() -> str:
    """A row per family of the tests, a column per scheme: each pair is tried on a tiny model. One table for those that
    read text, one for those that read images, schemes of one dimension along their rows of patches.
    """
    sys.path.insert(0, str(ROOT))
    from hf_posswap import patch_model
    from hf_posswap.patching import record_of
    from tests.families import FAMILIES
    from tests.rows import ROWS

    proven = {(row.scheme, row.family) for row in ROWS if row.layers is None}
    lines = _head(TRIED)
    for name, family in sorted(FAMILIES.items(), key=lambda item: item[1].vision):
        cells, tried = [], TRIED_ON_IMAGES if family.vision else TRIED
        if family.vision and "" not in lines:
            lines += ["", *_head(tried)]
        for scheme, params in tried.items():
            model = family.build()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    patch_model(model, scheme, **params)
                    cells.append(record_of(model).storage if (scheme, name) in proven else "(accepted)")
                except PosSwapError:
                    cells.append("-")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    note = (
        "Every native or portable pair obeys the laws in `tests/test_laws.py`. native: stock transformers reloads it. "
        "portable: `hf_posswap.from_pretrained` does. (accepted): it patches, and no law row proves it yet. "
        "-: refused, saying why."
    )
    return "\n".join([*lines, "", note])


def _head(tried: dict[str, dict]) -> list[str]:
    return [f"| | {' | '.join(f'`{scheme}`' for scheme in tried)} |", "|---|" + "---|" * len(tried)]


def coverage() -> str:
    report = _read("docs/coverage.json")
    words = {"causal-lm": "causal", "masked-lm": "masked", "seq2seq-lm": "encoder-decoder and speech"}
    words |= {"document": "document", "image": "image and video (half of them convolutions)"}
    counts = []
    for task, count in report["summary"].items():
        some = count["works"] + count.get("partly", 0)
        counts.append(f"{count['works']} of {sum(count.values())} {words[task]} ({some} take some of them)")
    return (
        f"With transformers {report['transformers']}, every scheme that has a meaning works on {'; '.join(counts)} "
        "model types. All others are refused, saying why; there is no third outcome: [the table](docs/coverage.md)."
    )


def demo() -> str:
    from hf_posswap.evaluation.report import comparison

    results = _read("docs/demo/results.json")
    return comparison(results["series"], results["original_length"])


def bench() -> str:
    report = _read("docs/bench.json")
    lines = ["| what | measured | goal |", "|---|---:|---:|"]
    for one in report["results"]:
        mark = "" if one["met"] else " (missed)"
        goal = "-" if one["goal"] is None else f"{one['goal']:g}"
        lines.append(f"| {one['what']} | {one['value']:.3f} {one['unit']}{mark} | {goal} |")
    hardware, versions = report["hardware"], report["versions"]
    return "\n".join(
        [
            *lines,
            "",
            f"On {hardware['cpus']} CPU cores, torch {versions['torch']}, transformers {versions['transformers']}.",
        ]
    )


def _read(path: str) -> dict:
    try:
        return json.loads((ROOT / path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PosSwapError(f"{path} is missing: a run writes it") from None


if __name__ == "__main__":
    run(main)
