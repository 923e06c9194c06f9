"""Model cards: everything on one comes from the model's record and from files that runs wrote; nothing is typed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from .errors import PosSwapError
from .record import KEY, NATIVE, Record
from .runs import replacing

EVALUATION, TRAINING = "evaluation.json", "train_log.json"


def write_card(folder: str | os.PathLike, *, base_model: str | None = None, license: str | None = None) -> Path:
    """Write `README.md` into a patched checkpoint's folder and return its path.

    The folder's config gives the swap; `evaluation.json` and `train_log.json`, where they are there, the numbers
    and what made them. base_model and license are the base's, from the record where not given.

    Raises:
        PosSwapError: the folder holds no patched checkpoint, or one of the files is not what it should be.
    """
    path = Path(folder) / "README.md"
    with replacing(path) as temporary:
        temporary.write_text(card(folder, base_model=base_model, license=license), encoding="utf-8")
    return path


def card(folder: str | os.PathLike, *, base_model: str | None = None, license: str | None = None) -> str:
    """The text of the card; see `write_card`."""
    from huggingface_hub import ModelCardData

    config = _read(Path(folder) / "config.json")
    if config is None or config.get(KEY) is None:
        raise PosSwapError(f"folder={str(folder)!r} holds no patched checkpoint: its config.json has no {KEY!r}")
    record = Record.from_dict(config[KEY])
    evaluation, training = _read(Path(folder) / EVALUATION), _read(Path(folder) / TRAINING)
    base_model = base_model or record.source or None
    name = Path(folder).resolve().name
    hub_base = base_model if base_model and not Path(base_model).exists() else None  # the hub knows no local folder
    data = ModelCardData(
        base_model=hub_base,
        base_model_relation="finetune" if hub_base else None,
        library_name="transformers",
        pipeline_tag=_pipeline(config),
        license=license,
        tags=["hf_posswap", record.scheme] + (["long-context"] if evaluation else []),
        model_name=name,
        ignore_metadata_errors=True,
    )
    sections = [
        f"---\n{data.to_yaml()}\n---\n\n# {name}",
        _what(config, record, base_model),
        _training(training),
        _evaluation(evaluation),
        _use(name, config["architectures"][0], record),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise PosSwapError(f"{path} is not JSON: {error}") from None


def _pipeline(config: dict[str, Any]) -> str | None:
    name = (config.get("architectures") or [""])[0]
    kinds = {
        "ForCausalLM": "text-generation",
        "LMHeadModel": "text-generation",
        "ForMaskedLM": "fill-mask",
        "ForImageClassification": "image-classification",
    }
    return next((task for suffix, task in kinds.items() if name.endswith(suffix)), None)


def _what(config: dict[str, Any], record: Record, base_model: str | None) -> str:
    given = ", ".join(f"`{key}={value!r}`" for key, value in record.params.items()) or "no parameters"
    layers = "" if record.layers is None else f" in layers {', '.join(map(str, record.layers))}"
    lines = [
        f"A {(config.get('architectures') or ['model'])[0]} whose positions were swapped with hf_posswap: scheme "
        f"**{record.scheme}** ({given}){layers}, meant for sequences of up to {record.length:,} tokens.",
        "",
        "| config | before | now |",
        "|---|---|---|",
    ]
    for path, before in record.original.items():
        now = _now(config, path) if path != "pairing" else record.params["pairing"]
        lines.append(f"| `{path}` | `{json.dumps(before)}` | `{json.dumps(now)}` |")
    if base_model:
        lines += ["", f"Base model: `{Path(base_model).name if Path(base_model).exists() else base_model}`."]
    return "\n".join(lines)


def _now(config: dict[str, Any], path: str) -> Any:
    for part in path.split("."):
        config = config[part]
    return config


def _training(log: dict[str, Any] | None) -> str:
    if log is None:
        return "## Training\n\nNot fine-tuned after the swap."
    arguments, hardware = log["arguments"], log["hardware"]
    rows = {
        "objective": log["objective"],
        "steps": f"{log['steps']:,}",
        "tokens": f"{log['tokens']:,}",
        "row": f"{log['block_size']:,} tokens",
        "rows per step": log["global_batch_size"],
        "learning rate": f"{arguments['learning_rate']:g}, {arguments['lr_scheduler_type']}",
        "first and last loss": f"{log['entries'][0]['loss']:.4f}, {log['entries'][-1]['loss']:.4f} nats per token",
        "time": f"{log['wall_seconds'] / 60:.1f} minutes",
        "hardware": f"{hardware['device']}, {hardware['processes']} process(es)",
        "precision": {"no": "as the weights"}.get(hardware["mixed_precision"], hardware["mixed_precision"]),
        "versions": ", ".join(f"{k} {v}" for k, v in log["versions"].items()),
        "command": f"`{log['command']}`",
    }
    return "## Training\n\n| | |\n|---|---|\n" + "\n".join(f"| {key} | {value} |" for key, value in rows.items())


def _evaluation(report: dict[str, Any] | None) -> str:
    if report is None:
        return "## Evaluation\n\nNot evaluated: no number is claimed."
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
    lines += [
        "",
        f"At the original length of {short['length']:,} tokens the swap changes the loss by {short['delta']:+.4f} "
        f"{short['unit']} against the unpatched base.",
        "",
        f"Data: {data['documents']} documents, {data['tokens']:,} tokens, sha256 `{data['sha256'][:16]}`. "
        f"Hardware: {report['hardware']['device']}. Command: `{report['command']}`.",
    ]
    return "\n".join(lines)


def _use(name: str, architecture: str, record: Record) -> str:
    if record.storage == NATIVE:
        load = "from transformers import {0}\n\nmodel = {0}.from_pretrained({1!r})"
        note = "The swap is stored natively: stock transformers loads it, hf_posswap need not be installed."
    else:
        load = "from hf_posswap import from_pretrained\n\nmodel = from_pretrained({1!r})"
        note = "The swap is portable: load it with hf_posswap; stock transformers refuses it."
    undo = "Undo: `hf_posswap.unpatch_model(model)`; what was trained since stays."
    return f"## Use\n\n```python\n{load.format(architecture, name)}\n```\n\n{note} {undo}"
