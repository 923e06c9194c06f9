"""Every text and image model type of transformers against every kind of scheme: works, refused with the reason, or
wrong.

    python -m tests.coverage [--task image] [--shard 1/4] [--only llama bert] [--check]

Each type has a file of its own under `--work`, so that an interrupted run goes on where it stopped; a run of whole
tasks writes docs/coverage.json and docs/coverage.md, with the other tasks as they are there. A cell works where the
laws hold: effect (1), cache (4), padding (5; of images, a batch), round trip in a fresh process (7), undo (8), refusal
(12). A law is asked of a patched model where the model obeys it before it is patched.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from hf_posswap import PosSwapError, anatomies, describe, patch_model, unpatch_model
from hf_posswap.anatomy import find_bias, find_rotary, mixing, text_config
from hf_posswap.patching import record_of

from . import zoo
from .deprecations import Deprecations

ROOT = Path(__file__).resolve().parent.parent
COMMITTED = ROOT / "docs" / "coverage.json"
RELOAD = Path(__file__).with_name("reload.py")
WORKS, REFUSED, WRONG = "works", "refused", "wrong"
TOLERANCE = 2e-4  # of the largest logit: float32 rounding through a few layers in another order
LENGTH = 16
LAYERS = "layer_types"
TWICE = ", x2"  # patched for images of twice the size
PLAIN = "plain"  # the checkpoint of a model that is not patched
BATCH = 22  # types that share the two fresh processes of law 7
SCHEMES = ("nope", "yarn", "rope", "alibi", "sinusoidal", "learned")
INSIDE = {"yarn", "rope", "alibi"}  # what they change is the logit of a query and a key
OF_IMAGES = ("nope", "learned2d", "sincos2d", "rope2d", "bias2d", "alibi")


def attempts(scheme: str, model: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """(scheme, parameters), best first: the first that is not refused fills the cell."""
    rotary = find_rotary(model)
    types = {LAYERS: rotary.layer_types} if rotary is not None and rotary.layer_types else {}
    if scheme == "yarn":
        yield from [("yarn", {"factor": 4}), ("yarn", {"factor": 4} | types)]
        yield from [("ntk", {"factor": 4}), ("ntk", {"factor": 4} | types)]
        yield "yarn", {"factor": 4, "original_max_position_embeddings": 2 * LENGTH}
    elif scheme == "rope":
        yield from [("rope", {"rope_theta": 2e5}), ("rope", {"rope_theta": 2e5} | types)]
    else:
        yield scheme, {"factor": 2, "init": "interpolate"} if scheme == "learned" else {}


def attempts_on_images(scheme: str, model: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The same: first for images of twice the size."""
    twice, one_axis = {"image_size": larger(model)}, {"ndim": 1} if scheme == "alibi" else {}
    if scheme == "learned2d":
        yield scheme, twice | ({"resize": "bilinear"} if find_bias(model) is None else {"relative_bias": "keep"})
    else:
        yield scheme, twice | one_axis
        yield scheme, one_axis


def larger(model: Any) -> tuple[int, int]:
    """(height, width) of twice as much, in whole patches."""
    config = text_config(model)
    patch = getattr(config, "patch_size", None) or getattr(config, "tubelet_size", 1)
    side = patch if isinstance(patch, int) else patch[-1]
    return tuple(2 * size - 2 * size % side for size in zoo.size_of(config))


# --- laws 4 and 5: each takes a model and says how far apart, relative to the largest logit, what should be equal is


def apart(a: Tensor, b: Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max().clamp(min=1.0)).item()


@torch.no_grad()
def cache(model: Any, sizes: list[int]) -> float:
    """Decoding in chunks of `sizes` tokens against one forward."""
    inputs = zoo.inputs(model, LENGTH)
    name = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    full, ids, past, steps = model(**inputs).logits, inputs.pop(name), None, []
    if name != "input_ids":
        inputs = {"encoder_outputs": model.get_encoder()(**inputs)}
    for chunk in ids.split(sizes, dim=-1):
        out = model(**{name: chunk}, **inputs, past_key_values=past, use_cache=True)
        past = out.past_key_values
        steps.append(out.logits)
    return apart(torch.cat(steps, -2), full)


@torch.no_grad()
def padding(model: Any, before: int, after: int, positions: bool) -> float:
    """A padded row, beside a longer one, against the row alone."""
    length, total = 10, 10 + before + after
    inputs, other = zoo.inputs(model, length), zoo.inputs(model, total, seed=1)
    pad = getattr(model.config.get_text_config(), "pad_token_id", None) or 0
    padded = torch.nn.functional.pad(inputs["input_ids"], (before, after), value=pad)
    mask = torch.nn.functional.pad(torch.ones(1, length, dtype=torch.long), (before, after))
    mask = torch.cat([mask, torch.ones(1, total, dtype=torch.long)])
    both = {"input_ids": torch.cat([padded, other["input_ids"]]), "attention_mask": mask}
    if positions:
        both["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    if "decoder_input_ids" in inputs:
        both["decoder_input_ids"] = inputs["decoder_input_ids"].expand(2, -1)
    alone, together = model(**inputs).logits, model(**zoo.with_image(model, both)).logits[:1]
    if "decoder_input_ids" not in inputs:
        together = together[:, before : before + length]
    return apart(together, alone)


def batch_of_images(model: Any) -> float:
    """An image beside another against the image alone."""
    inputs, other = zoo.inputs(model), zoo.inputs(model, seed=1)
    together = zoo.run(model, {name: torch.cat([value, other[name]]) for name, value in inputs.items()})
    return apart(together[:1], zoo.run(model, inputs))


def other_sizes(model: Any) -> float:
    """Whether an image of another shape, and more patches, is taken as it comes: 0, or what it gives is no number."""
    height, width = larger(model)
    return (zoo.run(model, zoo.pictures(model, (height, width // 2))) * 0).abs().max().item()


Laws = Mapping[str, Callable[[Any], float]]
LAWS: Laws = {
    "decode": lambda model: cache(model, [6] + [1] * 10),
    "chunks": lambda model: cache(model, [5, 5, 6]),
    "right padding": lambda model: padding(model, 0, 4, False),
    "left padding": lambda model: padding(model, 4, 0, False),
    "left padding, positions given": lambda model: padding(model, 4, 0, True),
}


@dataclass(frozen=True)
class Trial:
    """What is tried on the types of a task, each scheme in a column, by its `attempts`; and `laws` asked of it beside
    those of every cell.
    """

    laws: Laws
    schemes: tuple[str, ...] = SCHEMES
    attempts: Callable[[str, Any], Iterator[tuple[str, dict[str, Any]]]] = attempts


OF_TEXT = Trial(dict(list(LAWS.items())[2:]))
TRIALS = {
    "causal-lm": Trial(LAWS),
    "masked-lm": OF_TEXT,
    "seq2seq-lm": Trial(dict(list(LAWS.items())[:4])),
    "document": OF_TEXT,
    "image": Trial({"batch": batch_of_images, "other sizes": other_sizes}, OF_IMAGES, attempts_on_images),
}


def measure(model: Any, laws: Laws) -> dict[str, float | str]:
    """Law -> how far apart, or the exception that it ends in."""
    found: dict[str, float | str] = {}
    for name, law in laws.items():
        try:
            found[name] = law(model)
        except Exception as error:
            found[name] = zoo.reason(error)
    return found


def broken(found: dict[str, float | str]) -> dict[str, float | str]:
    return {name: value for name, value in found.items() if isinstance(value, str) or not value <= TOLERANCE}


# --- one cell


class Wrong(Exception):
    """A law broke; the message says which."""


def state(model: Any) -> tuple[Any, ...]:
    """What a refused patch, or an undone one, must leave as it was, beside the logits."""
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    names = [name for name, _ in model.named_modules()]
    trained = [(name, parameter.requires_grad) for name, parameter in model.named_parameters()]
    return list(model.state_dict()), names, trained, hooks, model.config.to_dict()


def unchanged(model: Any, logits: Tensor, before: tuple[Any, ...], when: str) -> None:
    if not torch.equal(zoo.forward(model), logits) or state(model) != before:
        raise Wrong(f"{when} left the model changed")


def try_patch(
    model: Any, attempts: Iterable[tuple[str, dict[str, Any]]], logits: Tensor, before: tuple[Any, ...]
) -> str | tuple[str, dict[str, Any]]:
    """The attempt that took, with the model patched, or why the last was refused."""
    reason = None
    for name, params in attempts:
        try:
            patch_model(model, name, tokenizer=object(), **params)
        except PosSwapError as error:
            unchanged(model, logits, before, f"a refused {name}")
            if "is not a tokenizer" in str(error):  # the last thing that a patch can fail at
                patch_model(model, name, **params)
                return name, params
            reason = str(error)
        else:
            raise Wrong(f"law 12: {name} took object() for a tokenizer")
    return reason


def without_effect(model: Any, inputs: dict[str, Tensor], patched: Tensor, sizes: list[torch.Size]) -> bool:
    """Whether a model gives what it gave when it was patched, for inputs that it may not take now, and holds tensors of
    the same sizes: some resize their table at every call as `learned2d` does once.
    """
    try:
        plain = zoo.run(model, inputs)
    except Exception:  # whatever the model raises at a size that it was not built for: the patch had an effect then
        return False
    same = plain.shape == patched.shape and apart(patched, plain) < 1e-5
    return same and sizes_of(model) == sizes


def sizes_of(model: Any) -> list[torch.Size]:
    return [value.shape for value in model.state_dict().values()]


def cell(model: Any, scheme: str, trial: Trial, laws: Laws, folder: Path) -> str:
    """One outcome; where the patch took, a checkpoint and its logits under `folder`, for law 7."""
    logits, before = zoo.forward(model), state(model)
    taken = try_patch(model, trial.attempts(scheme, model), logits, before)
    if isinstance(taken, str):
        return f"{REFUSED}: {taken}"
    name, params = taken
    inputs = zoo.inputs(model, LENGTH)
    patched, sizes = zoo.run(model, inputs), sizes_of(model)
    if not patched.isfinite().all():
        raise Wrong("law 1: not finite")
    if scheme == "learned":
        zoo.forward(model, zoo.LARGEST + LENGTH)
    faults = broken(measure(model, laws))
    if faults:
        found = (f"{law}: {value if isinstance(value, str) else f'{value:.1e}'}" for law, value in faults.items())
        raise Wrong("; ".join(found))
    save(model, patched, folder)
    storage = record_of(model).storage
    unchanged(unpatch_model(model), logits, before, "law 8: patch and undo")
    if without_effect(model, inputs, patched, sizes):
        raise Wrong("law 1: no effect")
    how = "" if name == scheme else f", as {name}"
    how += f" of {', '.join(params[LAYERS])}" if LAYERS in params else ""
    return f"{WORKS}: {storage}{how}" + (TWICE if "image_size" in params else "")


def save(model: Any, logits: Tensor, folder: Path) -> None:
    """A checkpoint, the inputs that a fresh process is to run it on, and the logits that it must find."""
    model.save_pretrained(folder)
    save_file({key: value.contiguous() for key, value in zoo.inputs(model, LENGTH).items()}, folder / "inputs.st")
    save_file({"logits": logits.contiguous()}, folder / "memory.st")


def survey(task: str, model_type: str, root: Path, deprecations: Deprecations) -> dict[str, Any]:
    """The record of one type; checkpoints of the cells that hold so far under `root`."""
    record: dict[str, Any] = {"task": task, "type": model_type}
    try:
        model = zoo.build(model_type, task)
        zoo.forward(model)
    except zoo.CannotBuild as error:
        return record | {"not built": str(error)}
    except Exception as error:
        return record | {"not built": f"does not run: {zoo.reason(error)}"}
    try:
        sites = [f"{site.site} {site.had}" for site in describe(model).sites]
    except Exception as error:  # one that is no PosSwapError breaks every cell below
        sites = [f"none: {error}"]
    record["mixing"] = mixing(model)
    save(model, zoo.forward(model), root / f"{task}.{model_type}.{PLAIN}")
    trial = TRIALS[task]
    exempt = broken(measure(model, trial.laws))
    laws = {name: law for name, law in trial.laws.items() if name not in exempt}
    cells = {}
    deprecations.seen.clear()
    for scheme in trial.schemes:
        try:
            cells[scheme] = cell(model, scheme, trial, laws, root / f"{task}.{model_type}.{scheme}")
        except Exception as error:
            text = str(error) if isinstance(error, Wrong) else zoo.reason(error)
            cells[scheme] = f"{WRONG}: {text}"
            model = zoo.build(model_type, task)
            save(model, zoo.forward(model), root / f"{task}.{model_type}.{PLAIN}")
        if deprecations.seen:
            cells[scheme] = f"{WRONG}: transformers says: {deprecations.seen.pop()}"
    return record | {"sites": sites, "exempt": list(exempt), "cells": cells}


# --- many types


def batch(pairs: list[tuple[str, str]], work: Path) -> list[dict[str, Any]]:
    """Survey some types, reload everything in two fresh processes, and write a file for each type."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    deprecations = Deprecations()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), deprecations.heard():
        warnings.simplefilter("ignore")
        root = Path(folder)
        shutil.copy(Path(__file__).with_name("detectron.py"), root / "before.py")
        records = [survey(task, model_type, root, deprecations) for task, model_type in pairs]
        environment = os.environ | {"HF_MODULES_CACHE": str(root.parent / f"{root.name}-modules")}
        for mode in ("stock", "package"):
            subprocess.run(
                [sys.executable, RELOAD, mode, root], check=True, env=environment, cwd=ROOT, capture_output=True
            )
        for record in records:
            checkpoint = f"{record['task']}.{record['type']}"
            if "cells" in record and round_trip(root / f"{checkpoint}.{PLAIN}", native=True):
                record["exempt"].append("round trip")
                continue
            for scheme, outcome in record.get("cells", {}).items():
                if outcome.startswith(WORKS):
                    fault = round_trip(root / f"{checkpoint}.{scheme}", native="native" in outcome)
                    record["cells"][scheme] = f"{WRONG}: law 7: {fault}" if fault else outcome
    for record in records:
        (work / f"{record['task']}.{record['type']}.json").write_text(json.dumps(record, indent=1))
    return records


def round_trip(folder: Path, native: bool) -> str | None:
    """What is wrong with a checkpoint, as fresh processes with and without this package read it; None: nothing."""
    memory = load_file(folder / "memory.st")["logits"]
    for mode in ("stock", "package"):
        error = folder / f"{mode}.error"
        refused_by_name = error.exists() and "hf_posswap.from_pretrained" in error.read_text()
        if mode == "stock" and not native:
            if not refused_by_name:
                return "stock transformers does not stop at it"
        elif error.exists():
            return f"{mode}: {error.read_text()[:300]}"
        elif not torch.equal(again := load_file(folder / f"{mode}.st")["logits"], memory):
            return f"{mode}: logits {apart(again, memory):.1e} apart"
    return None


# --- the table


def every() -> list[tuple[str, str]]:
    """(task, type) of all that transformers maps."""
    return [(task, model_type) for task in zoo.TASKS for model_type in zoo.model_types(task)]


def sensible(record: dict[str, Any]) -> list[str]:
    """The schemes that have a meaning on a type: a table is needed to be made longer or filled, a logit of a query and
    a key for what acts on it, and none swaps what is there.
    """
    sites = record.get("sites", [])
    if not sites or sites[0].startswith("none"):
        return []
    none = {"learned": "embed learned" not in sites, "sinusoidal": "embed sinusoidal" in sites}
    none["alibi"] = "bias alibi" in sites
    none["sincos2d"] = not any(site.startswith("embed") for site in sites)
    none["learned2d"] = none["sincos2d"] and "bias bias2d" not in sites
    none |= dict.fromkeys(INSIDE, True) if record.get("mixing") else {}
    return [scheme for scheme in record["cells"] if not none.get(scheme, False)]


def verdict(record: dict[str, Any]) -> str:
    """`works` (every sensible scheme), `partly`, `refused` (all), `wrong` (any) or `not built`."""
    if "not built" in record:
        return "not built"
    kinds = {scheme: outcome.split(":")[0] for scheme, outcome in record["cells"].items()}
    if WRONG in kinds.values():
        return WRONG
    asked = sensible(record)
    if asked and all(kinds[scheme] == WORKS for scheme in asked):
        return WORKS
    return "partly" if WORKS in kinds.values() else REFUSED


def lost(committed: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """What worked when the table was committed and does not now; types that are gone are not lost."""
    return [
        f"{name} {scheme}: {found[name]['cells'][scheme]}" if "cells" in found[name] else f"{name}: not built"
        for name, record in committed.items()
        for scheme, outcome in record.get("cells", {}).items()
        if name in found and outcome.startswith(WORKS)
        if not found[name].get("cells", {}).get(scheme, "").startswith(WORKS)
    ]


def beside(committed: dict[str, Any], records: dict[str, Any], tasks: list[str]) -> dict[str, Any]:
    """The records of `tasks`, and the others as they were committed; ValueError for those of another transformers."""
    kept = {name: record for name, record in committed["types"].items() if record["task"] not in tasks}
    if kept and committed["transformers"] != transformers.__version__:
        raise ValueError(f"the table is of transformers {committed['transformers']}; run all tasks with this one")
    names = (f"{task}/{model_type}" for task, model_type in every())
    return {name: record for name in names for record in [(kept | records).get(name)] if record is not None}


def declarations() -> dict[str, int]:
    """Lines of code, without blank ones, of every declaration that a family needs."""
    return {
        path.stem: sum(bool(line.strip()) for line in path.read_text(encoding="utf-8").splitlines())
        for path in sorted(Path(anatomies.__file__).parent.glob("[a-z]*.py"))
    }


def table(records: dict[str, Any]) -> dict[str, Any]:
    """What docs/coverage.json holds."""
    counts = {
        task: dict(sorted(Counter(verdict(r) for name, r in records.items() if name.startswith(f"{task}/")).items()))
        for task in zoo.TASKS
    }
    versions = {"transformers": transformers.__version__, "torch": torch.__version__.partition("+")[0]}
    return versions | {"summary": counts, "declarations": declarations(), "types": records}


HEAD = """# Every text and image model type of transformers {transformers}

Generated by `make coverage`. For each type of transformers' own mappings a tiny random model is built, and each kind of
scheme is tried on it. **native** and **portable** cells obey the laws: effect, decoding with a cache, decoding in
chunks, left and right padding, a bit-equal reload in a fresh process (native ones without this package), a bit-equal
undo, and refusals that leave the model as it was; of images, instead of those of tokens: a batch, and images of other
sizes. A law is asked of a patched model where the model obeys it before; the last column names those it does not. `-`
is a `PosSwapError`, with its reason below. There is no third outcome. `x2`: patched for images of twice the size, which
the model then takes with no flag.

{counts}

*works*: every scheme that has a meaning on the type; *partly*: some; *refused*: all, by name. A scheme has no meaning,
and its cell is empty, where nothing is there for it: `learned` makes a table longer, and the type has none;
`learned2d` and `sincos2d` resize or fill a table of patches (`learned2d` a bias between them too), and the type has
none; the type has that very scheme; or `yarn`, `rope` and `alibi` change the logit of a query and a key, and the type
computes none (a Fourier transform, hashes or averages of blocks instead of attention). Those last are refused too, with
the reason below. BigBird is built with `attention_type="original_full"`; with its sparse attention all that acts on
logits is refused. `nope` takes the positions; a convolution (ConvBERT, Nyströmformer, the depth-wise layers of
state-space hybrids, padded patches), windows and a Fourier transform still tell order.
"""


def page(report: dict[str, Any]) -> str:
    """docs/coverage.md."""
    records = report["types"]
    verdicts = (WORKS, "partly", REFUSED, "not built")
    counts = [f"| | types | {' | '.join(verdicts)} |", "|---|" + "---:|" * (1 + len(verdicts))]
    for task, count in report["summary"].items():
        counts.append(f"| {task} | {sum(count.values())} | {' | '.join(str(count.get(v, 0)) for v in verdicts)} |")
    lines = [HEAD.format(transformers=report["transformers"], counts="\n".join(counts))]
    for task in report["summary"]:
        schemes = TRIALS[task].schemes
        lines += [f"## {task}\n", f"| | sites | {' | '.join(schemes)} | laws not asked |"]
        lines.append("|---|---|" + "---|" * (1 + len(schemes)))
        lines += [row(r) for r in records.values() if r["task"] == task and "cells" in r]
        lines += ["", "### Refused, and why\n"]
        lines += [one for r in records.values() if r["task"] == task for one in reasons(r)]
        lines.append("")
    lines += [
        "## Declarations\n",
        "What structure alone does not tell, in lines of code.\n",
        "| file | lines |",
        "|---|---:|",
    ]
    lines += [f"| `anatomies/{name}.py` | {count} |" for name, count in report["declarations"].items()]
    return "\n".join(lines) + f"\n| all | {sum(report['declarations'].values())} |\n"


def row(record: dict[str, Any]) -> str:
    asked, cells = sensible(record), []
    for scheme, outcome in record["cells"].items():
        kind, _, rest = outcome.partition(": ")
        refused = "-" if scheme in asked or not asked else ""
        cells.append({WORKS: rest, REFUSED: refused, WRONG: "**wrong**"}[kind])
    sites = "none" if not asked else "; ".join(dict.fromkeys(record["sites"]))
    return f"| {record['type']} | {sites} | {' | '.join(cells)} | {', '.join(record['exempt'])} |"


def reasons(record: dict[str, Any]) -> list[str]:
    if "not built" in record:
        return [f"- {record['type']}: cannot be built: {record['not built']}"]
    by_reason: dict[str, list[str]] = {}
    for scheme, outcome in record["cells"].items():
        told = scheme in sensible(record) or not sensible(record) or (scheme in INSIDE and record.get("mixing"))
        if told and not outcome.startswith(WORKS):
            by_reason.setdefault(outcome.partition(": ")[2], []).append(scheme)
    whole = len(record["cells"])
    return [
        f"- {record['type']}{'' if len(schemes) == whole else f' ({chr(44).join(schemes)})'}: {reason}".replace(
            "|", "/"
        )
        for reason, schemes in by_reason.items()
    ]


def run(pairs: list[tuple[str, str]], work: Path, processes: int) -> dict[str, Any]:
    """The records of `pairs`; those that `work` holds from an earlier run are not made again."""
    work.mkdir(parents=True, exist_ok=True)
    files = {pair: work / f"{pair[0]}.{pair[1]}.json" for pair in pairs}
    todo = [pair for pair, file in files.items() if not file.exists()]
    batches = [todo[i : i + BATCH] for i in range(0, len(todo), BATCH)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool, tqdm(total=len(todo), unit="type") as bar:
        for future in as_completed([pool.submit(batch, some, work) for some in batches]):
            for record in future.result():
                bar.update()
                for scheme, outcome in record.get("cells", {}).items():
                    if outcome.startswith(WRONG):
                        bar.write(f"{record['task']} {record['type']} {scheme}: {outcome}")
    return {f"{task}/{model_type}": json.loads(file.read_text()) for (task, model_type), file in files.items()}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "coverage", help="a file for each type")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--task", nargs="+", choices=list(zoo.TASKS), default=list(zoo.TASKS), help="all, else")
    parser.add_argument("--only", nargs="+", help="model types")
    parser.add_argument("--shard", default="1/1", help="n/m: every m-th type, from the n-th")
    parser.add_argument("--check", action="store_true", help="write no page; fail where a type was lost")
    options = parser.parse_args(arguments)
    n, m = map(int, options.shard.split("/"))
    whole = [pair for pair in every() if pair[0] in options.task]
    pairs = [pair for pair in whole if not options.only or pair[1] in options.only][n - 1 :: m]
    records = run(pairs, options.work / transformers.__version__, options.processes)
    committed = json.loads(COMMITTED.read_text()) if COMMITTED.exists() else {"types": {}}
    gone = lost(committed["types"], records)
    print(json.dumps(table(records)["summary"], indent=1))
    print("\n".join(f"lost: {one}" for one in gone))
    if len(records) == len(whole) and not options.check:
        report = table(beside(committed, records, options.task))
        COMMITTED.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        COMMITTED.with_suffix(".md").write_text(page(report), encoding="utf-8")
    return int(bool(gone) or any(verdict(record) == WRONG for record in records.values()))


if __name__ == "__main__":
    sys.exit(main())
