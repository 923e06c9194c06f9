"""Model cards: everything on one comes from the model's record and from files that runs wrote; nothing is typed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import PosSwapError
from .profile import Fit
from .record import DIGEST, FIT, KEY, NATIVE, Record, digest
from .runs import replacing
from .scheme import Scheme, scheme_of
from .serving import serving

EVALUATION, TRAINING, RECOVERY = "evaluation.json", "train_log.json", "recovery.json"


@dataclass(frozen=True)
class Facts:
    """What a card is made of: the folder's files as they were read, and the names that the caller knows."""

    name: str
    config: dict[str, Any]
    record: Record
    training: dict[str, Any] | None
    evaluation: dict[str, Any] | None
    recovery: dict[str, Any] | None
    base_model: str | None
    license: str | None

    @property
    def text_config(self) -> dict[str, Any]:
        return self.config.get("text_config") or self.config

    @property
    def scheme(self) -> Scheme:
        return scheme_of(self.record)

    @property
    def architecture(self) -> str:
        return self.config["architectures"][0]


def write_card(
    folder: str | os.PathLike,
    *,
    base_model: str | None = None,
    license: str | None = None,
    repo_id: str | None = None,
) -> Path:
    """Write `README.md` into a patched checkpoint's folder and return its path.

    The folder's config gives the swap; `evaluation.json`, `train_log.json` and `recovery.json`, where they are there,
    the numbers and what made them. base_model: the base's name on the hub, where the swap was made on a local copy.
    license: the base's. repo_id: the name the checkpoint will have on the hub, for the examples.

    Raises:
        PosSwapError: the folder holds no patched checkpoint, or one of the files is not what it should be.
    """
    path = Path(folder) / "README.md"
    text = card(folder, base_model=base_model, license=license, repo_id=repo_id)
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path


def card(
    folder: str | os.PathLike,
    *,
    base_model: str | None = None,
    license: str | None = None,
    repo_id: str | None = None,
) -> str:
    """The text of the card; see `write_card`."""
    folder = Path(folder)
    record = record_in(folder)
    facts = Facts(
        name=repo_id or folder.resolve().name,
        config=_read(folder / "config.json"),
        record=record,
        training=_read(folder / TRAINING),
        evaluation=_read(folder / EVALUATION),
        recovery=_read(folder / RECOVERY),
        base_model=base_model or _hub_name(record.source),
        license=license,
    )
    _refuse_others_numbers(facts)
    sections = [
        _backed("config.json", _header, facts),
        _backed("config.json", _what, facts),
        _backed(TRAINING, _training, facts),
        _backed(EVALUATION, _evaluation, facts),
        *([] if facts.recovery is None else [_backed(RECOVERY, _recovery, facts)]),
        _limits(facts),
        _use(facts),
    ]
    return "\n\n".join(sections) + "\n"


def record_in(folder: str | os.PathLike) -> Record:
    """The record of a checkpoint's folder. Raises PosSwapError where it holds no patched checkpoint."""
    config = _read(Path(folder) / "config.json")
    if config is None:
        raise PosSwapError(f"folder={str(folder)!r} holds no config.json; give the folder of a checkpoint")
    if config.get(KEY) is None:
        raise PosSwapError(f"folder={str(folder)!r} holds no patched checkpoint: its config.json has no {KEY!r}")
    return Record.from_dict(config[KEY])


def _read(path: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise PosSwapError(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise PosSwapError(f"{path} holds no JSON object")
    return data


def _backed(file: str, section: Callable[[Facts], str], facts: Facts) -> str:
    """A section; what it states and the file does not hold is an error, never a gap."""
    try:
        return section(facts)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, PosSwapError):
            raise
        raise PosSwapError(f"{file} does not hold what the card states of it: {error!r}") from error


def _refuse_others_numbers(facts: Facts) -> None:
    """Raise where a file of numbers was made with another swap than this checkpoint's."""
    own = facts.record.scheme, facts.record.params
    for file, numbers in ((TRAINING, facts.training), (RECOVERY, facts.recovery)):
        logged = (numbers or {}).get("scheme")
        if logged is not None and (logged.get("scheme"), logged.get("params")) != own:
            raise PosSwapError(f"{file} is of another swap, {logged.get('scheme')!r}, than the checkpoint it lies with")
    measured = (facts.evaluation or {}).get("models", {}).get("model", {}).get("scheme")
    if measured is not None and measured != str(facts.scheme):
        raise PosSwapError(f"{EVALUATION} is of another swap, {measured!r}, than the checkpoint it lies with")


def _hub_name(source: str) -> str | None:
    """A base's name where it is one of the hub, NAME/MODEL; of a local folder the record holds the last part only."""
    return source if source.count("/") == 1 else None


def _header(facts: Facts) -> str:
    """The metadata that the hub reads, in YAML, and the title."""
    from huggingface_hub import ModelCardData

    data = ModelCardData(
        base_model=facts.base_model,
        base_model_relation="finetune" if facts.base_model else None,
        library_name="transformers",
        pipeline_tag=_pipeline(facts.architecture),
        license=facts.license,
        datasets=_datasets(facts.training),
        tags=["hf_posswap", facts.record.scheme] + (["long-context"] if facts.evaluation else []),
        model_name=facts.name.rpartition("/")[2],
        eval_results=_backed(EVALUATION, _results, facts),
    )
    return f"---\n{data.to_yaml()}\n---\n\n# {facts.name.rpartition('/')[2]}"


def _pipeline(architecture: str) -> str | None:
    kinds = {
        "ForCausalLM": "text-generation",
        "LMHeadModel": "text-generation",
        "ForMaskedLM": "fill-mask",
        "ForImageClassification": "image-classification",
    }
    return next((task for suffix, task in kinds.items() if architecture.endswith(suffix)), None)


def _datasets(training: dict[str, Any] | None) -> list[str] | None:
    name = (training or {}).get("arguments", {}).get("dataset_name")
    return [name] if name else None


def _results(facts: Facts) -> list[Any] | None:
    """The model's own perplexities as the hub's `model-index` has them."""
    from huggingface_hub import EvalResult

    if facts.evaluation is None:
        return None
    data = facts.evaluation["data"]
    source = data.get("source") or {}
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=source.get("dataset_name", "text"),
            dataset_name=source.get("dataset_name", f"{data['documents']} documents"),
            metric_type="perplexity",
            metric_name=f"Perplexity at {point['length']:,} tokens",
            metric_value=round(point["perplexity"], 3),
        )
        for point in facts.evaluation["series"][-1]["points"]
    ]


def _what(facts: Facts) -> str:
    record, scheme = facts.record, facts.scheme
    given = record.params if record.layers is None else record.params | {"layers": record.layers}
    call = ", ".join([repr(record.scheme), *(f"{key}={value!r}" for key, value in given.items())])
    fit = record.measured.get(FIT)
    call += "" if fit is None else ", fit=text"
    had = _length_before(facts)
    aim = (
        f"to read {record.length:,} tokens instead of {had:,}" if had and record.length > had else "at the same length"
    )
    lines = [
        f"A {facts.architecture} whose positions were swapped with hf_posswap: scheme **{record.scheme}** "
        f"([paper]({scheme.paper})), {aim}.",
        "",
        f"```python\nhf_posswap.patch_model(model, {call})\n```",
        "",
        "| config | before | now |",
        "|---|---|---|",
    ]
    for path, before in record.original.items():
        now = _now(facts.config, path) if path != "pairing" else record.params["pairing"]
        lines.append(f"| `{path}` | `{json.dumps(before)}` | `{json.dumps(now)}` |")
    base = (
        f"`{facts.base_model}`"
        if facts.base_model
        else f"a local checkpoint, `{Path(record.source).name or 'unnamed'}`"
    )
    fitted = [] if fit is None else ["", f"Before any training it was fitted to the base: it {Fit(**fit)}."]
    return "\n".join([*lines, *fitted, "", f"Base model: {base}."])


def _length_before(facts: Facts) -> int | None:
    """The trained length in tokens, as the config gave it before the swap."""
    before = {path.rpartition(".")[2]: value for path, value in facts.record.original.items()}
    return before.get("max_position_embeddings", facts.text_config.get("max_position_embeddings"))


def _now(config: dict[str, Any], path: str) -> Any:
    for part in path.split("."):
        config = config[part]
    return config


def _training(facts: Facts) -> str:
    log = facts.training
    if log is None:
        return "## Training\n\nNot fine-tuned after the swap."
    arguments, hardware = log["arguments"], log["hardware"]
    ends = [f"{entry['loss']:.4f}" for entry in (log["entries"][0], log["entries"][-1])]
    rows = {
        "objective": log["objective"],
        "data": arguments.get("dataset_name") or f"{log['corpus_tokens']:,} tokens of local text",
        "steps": f"{log['steps']:,}",
        "tokens": f"{log['tokens']:,}",
        "row": f"{log['block_size']:,} tokens",
        "rows per step": log["global_batch_size"],
        **_ways(log),
        "learning rate": f"{arguments['learning_rate']:g}, {arguments['lr_scheduler_type']}",
        "first and last loss": f"{', '.join(ends)} {log.get('unit', 'nats per token')}",
        "time": f"{log['wall_seconds'] / 60:.1f} minutes",
        "hardware": f"{hardware['device']}, {hardware['processes']} process(es)",
        "precision": {"no": "as the weights"}.get(hardware["mixed_precision"], hardware["mixed_precision"]),
        "versions": ", ".join(f"{k} {v}" for k, v in log["versions"].items()),
        "command": f"`{log['command']}`",
    }
    return "## Training\n\n| | |\n|---|---|\n" + "\n".join(f"| {key} | {value} |" for key, value in rows.items())


def _ways(log: dict[str, Any]) -> dict[str, str]:
    """What of the ways to train was not the ordinary one; older logs know of none."""
    arguments, ways = log["arguments"], {}
    if arguments.get("train", "all") != "all":
        chosen = {"lora": f"LoRA of rank {arguments['lora_rank']}, merged", "positions": "positions alone"}
        of = f"{log['trained_parameters']:,} of {log['parameters']:,} parameters"
        ways["trained"] = f"{chosen[arguments['train']]}: {of}"
    if arguments.get("distil"):
        ends = [
            f"{entry['task_loss']:.4f}" for entry in (log["entries"][0], log["entries"][-1]) if "task_loss" in entry
        ]
        ways["distilled"] = f"{arguments['distil']:g} of the loss" + (
            f"; the task's was {', '.join(ends)}" if ends else ""
        )
    if arguments.get("pose_length"):
        ways["positions"] = f"spread below {arguments['pose_length']:,}"
    if arguments.get("curriculum"):
        lengths = [f"{length:,}" for length in arguments["curriculum"]]
        ways["curriculum"] = f"{', '.join(lengths)} tokens, {arguments['curriculum_steps']:,} steps each"
    if log.get("start"):
        start = log["start"]
        ways["first rows"] = f"{start['unpatched']:.4f} before the swap, {start['swapped']:.4f} with it, untrained"
    if log.get("peak_memory_gib"):
        ways["peak memory"] = f"{log['peak_memory_gib']:.2f} GiB in a process"
    return ways


def _evaluation(facts: Facts) -> str:
    from .evaluation.report import short_cost

    report = facts.evaluation
    if report is None and facts.recovery is None:
        return "## Evaluation\n\nNot evaluated: no number is claimed."
    if report is None:
        return "## Evaluation\n\nNot evaluated but for the losses below."
    series = report["series"]
    heads = [one["name"] + (f" ({one['stage']} fine-tuning)" if one["stage"] else "") for one in series]
    lengths = sorted({point["length"] for one in series for point in one["points"]})
    lines = [
        "## Evaluation",
        "",
        f"Perplexity by length, protocol `{report['protocol']}`: {report['summary']}.",
        "",
        "| length | " + " | ".join(heads) + " |",
        "|---:|" + "---:|" * len(heads),
    ]
    for length in lengths:
        found = [next((p for p in one["points"] if p["length"] == length), None) for one in series]
        mark = " (trained)" if length == report["original_length"] else ""
        lines.append(
            f"| {length:,}{mark} | " + " | ".join(f"{p['perplexity']:.3f}" if p else "-" for p in found) + " |"
        )
    short, data = report["short"], report["data"]
    if short_cost(series[0], series[-1], short["length"])["delta"] != short["delta"]:
        raise ValueError(f"short.delta={short['delta']} is not the difference of the losses in it")
    lines += [
        "",
        f"At the original length of {short['length']:,} tokens the swap changes the loss by {short['delta']:+.4f} "
        f"{short['unit']} against the unpatched base.",
        "",
        f"Data: {data['documents']} documents, {data['tokens']:,} tokens, sha256 `{data['sha256'][:16]}`. "
        f"Hardware: {report['hardware']['device']}. Command: `{report['command']}`.",
    ]
    return "\n".join(lines)


def _recovery(facts: Facts) -> str:
    from .evaluation.recovery import table

    study = facts.recovery
    if study[DIGEST] != digest({key: value for key, value in study.items() if key != DIGEST}):
        raise PosSwapError(f"{RECOVERY} was changed after it was written; let the study write it again")
    return (
        "## Recovery\n\nThe same swap brought back in other ways, on the same text with the same optimiser: loss held "
        f"out, in {study['unit']}; means over seeds [lowest, highest]. Before the swap it was {study['loss']:.3f}, at "
        f"the trained length of {study['length']:,} tokens.\n\n{table(study['cells'], study['model'])}\n\n"
        f"![Loss against tokens by recipe]({study['plot']})\n\nHardware: {study['hardware']['device']}. "
        f"Command: `{study['command']}`."
    )


def _limits(facts: Facts) -> str:
    scheme, record = facts.scheme, facts.record
    limits = []
    if facts.training is None and not scheme.keeps_function:
        limits.append("It was not trained with these positions: fine-tune it before use.")
    measured = [point["length"] for one in (facts.evaluation or {"series": []})["series"] for point in one["points"]]
    cells = (facts.recovery or {"cells": []})["cells"]
    measured += [int(length) for cell in cells for length, loss in cell["lengths"].items() if loss is not None]
    if not measured:
        limits.append("What the swap costs was not measured at any length.")
    elif max(measured) < record.length:
        limits.append(f"Nothing was measured beyond {max(measured):,} of its {record.length:,} tokens.")
    if record.scheme == "dynamic" and not record.params.get("freeze_at"):
        limits.append("Its frequencies follow the longest sequence of a batch; keys already in a cache keep theirs.")
    if record.length > (facts.text_config.get("max_position_embeddings") or record.length):
        limits.append(
            "`max_position_embeddings` in the config stays the trained length, as this scheme's readers expect; a tool "
            f"that takes it for the limit must be told {record.length}."
        )
    return "## Limits\n\n" + ("\n".join(f"- {limit}" for limit in limits) or "- None beyond those of the base.")


def _use(facts: Facts) -> str:
    name, record = facts.name, facts.record
    if record.storage == NATIVE:
        load = "from transformers import {0}\n\nmodel = {0}.from_pretrained({1!r})"
        note = "The swap is stored natively: stock transformers loads it, hf_posswap need not be installed."
    else:
        load = "from hf_posswap import from_pretrained\n\nmodel = from_pretrained({1!r})"
        note = "The swap is portable: hf_posswap loads it."
    if "auto_map" in facts.config:
        note += " Without it, transformers does with `trust_remote_code=True`, from the code in this repository."
    lines = "\n".join(f"- {served}" for served in serving(facts.text_config, record, name))
    return (
        f"## Use\n\n```python\n{load.format(facts.architecture, name)}\n```\n\n{note}\n\n"
        f"Servers, as their sources say; not run:\n\n{lines}\n\n{_undo(facts)}"
    )


def _undo(facts: Facts) -> str:
    if facts.scheme.stacks or facts.text_config.get("rope_parameters"):
        return "Undo: `hf_posswap.unpatch_model(hf_posswap.from_pretrained(...))`; what was trained since stays."
    return "Undo: the table of positions that the swap replaced is gone from this checkpoint; load the base."
