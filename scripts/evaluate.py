"""Perplexity by length of a patched model, beside the model it came from.

python scripts/evaluate.py --model out/yarn --base out/base --lengths 256 512 1024 \
    --eval_dir texts --output_dir out/evaluation
python scripts/evaluate.py --model out/base --scheme yarn --factor 4 --lengths 256 512 1024 \
    --eval_dir texts --output_dir out/evaluation
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from hf_posswap.arguments import parse, run, scheme_arguments, scheme_from
from hf_posswap.errors import PosSwapError, nearest

DTYPES = ("auto", "float32", "bfloat16", "float16")


def option(text: str, default: Any = None) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class Models:
    model: str = field(metadata={"help": "Checkpoint folder or hub name; with --scheme, the base that is patched."})
    base: str | None = option("The model before its swap. Needed unless --scheme is given.")
    tokenizer_name: str | None = option("Where the tokenizer is, if not with --model.")
    dtype: str = option(f"One of: {', '.join(DTYPES)} (auto: as stored).", "auto")
    device: str | None = option("Such as cpu or cuda; cuda where there is one, if not given.")


@dataclass
class Data:
    eval_dir: str | None = option("Folder of text files, each one document.")
    eval_file: str | None = option("One text file, one document.")
    file_pattern: str = option("Which files of --eval_dir, subfolders included.", "*.txt")
    dataset_name: str | None = option(
        "Dataset of the hub, or a local folder that `datasets` reads; a row is a document."
    )
    dataset_config_name: str | None = option("Configuration of the dataset.")
    split: str = option("Split of the dataset.", "test")
    text_column: str = option("Column of the dataset.", "text")


@dataclass
class Protocol:
    """Parameters of the protocols, under their names there; None leaves the protocol's default."""

    stride: int | None = option("Tokens from one window to the next (strict, yarn).")
    max_documents: int | None = option("Use the first so many documents that are long enough (strict).")
    max_targets: int | None = option("Score so many tokens at most, spread over the documents (strict).")
    samples: int | None = option("Use the first so many documents (yarn).")
    dataset_min_tokens: int | None = option("Leave out documents with fewer tokens (yarn).")
    truncate_documents: bool | None = option("Cut each document to the length measured, one window each (yarn).")


@dataclass
class Evaluation:
    lengths: list[int] = field(metadata={"help": "Window lengths in tokens; the original length is always added."})
    output_dir: str = field(metadata={"help": "Folder for evaluation.json, evaluation.csv and evaluation.png."})
    protocol: str = option("strict or yarn.", "strict")
    original_length: int | None = option("Length the base was trained at, in tokens; from its config if not given.")
    batch_size: int = option("Windows per forward.", 1)


def load(flag: str, path: str, dtype: str) -> Any:
    """Any checkpoint, patched or not."""
    from hf_posswap import from_pretrained

    try:
        return from_pretrained(path, dtype=dtype)
    except OSError as error:
        reason = str(error).split("\n")[0]
        raise PosSwapError(f"no model can be loaded from --{flag}={path!r}: {reason}") from error


def main() -> None:
    models, data, chosen, evaluation, scheme = parse(
        Models, Data, Protocol, Evaluation, scheme_arguments(), description=__doc__.split("\n")[0]
    )
    scheme = scheme_from(scheme)
    if models.dtype not in DTYPES:
        raise PosSwapError(f"--dtype={models.dtype!r} is unknown; {nearest(models.dtype, DTYPES)}")
    if scheme is None and models.base is None:
        raise PosSwapError("--base is missing: a report says what the swap costs; give the model before its swap")
    if scheme is not None and models.base is not None:
        raise PosSwapError(
            f"--base={models.base!r} was given with --scheme; then --model is the base, leave --base out"
        )

    import torch
    from transformers import AutoTokenizer

    from hf_posswap import evaluation as package
    from hf_posswap import patch_model
    from hf_posswap.evaluation.plots import require_matplotlib

    require_matplotlib()
    parameters = {f.name: getattr(chosen, f.name) for f in fields(chosen)}
    parameters = {name: value for name, value in parameters.items() if value is not None}
    package.make_protocol(evaluation.protocol, evaluation.lengths, **parameters)  # fail before any loading
    texts, source = package.read_texts(**vars(data))
    where = models.tokenizer_name or models.model
    try:
        tokenizer = AutoTokenizer.from_pretrained(where)
    except (OSError, ValueError) as error:
        raise PosSwapError(f"no tokenizer can be loaded from {where!r}; give --tokenizer_name") from error
    base = load("base" if models.base else "model", models.base or models.model, models.dtype)
    model = load("model", models.model, models.dtype)
    if scheme is not None:
        patch_model(model, scheme)
    report = package.evaluate(
        model,
        base,
        package.tokenize(texts, tokenizer),
        evaluation.lengths,
        protocol=evaluation.protocol,
        original_length=evaluation.original_length,
        bos_token_id=package.window_bos(tokenizer, evaluation.protocol),
        batch_size=evaluation.batch_size,
        device=models.device or ("cuda" if torch.cuda.is_available() else "cpu"),
        source=source,
        progress=True,
        **parameters,
    )
    paths = package.write_report(report, evaluation.output_dir)
    print(package.table(report))
    print("written:", ", ".join(map(str, paths.values())))


if __name__ == "__main__":
    run(main)
