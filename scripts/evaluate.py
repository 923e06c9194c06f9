"""What positions do to a model, by length, beside the model that it came from: numbers, plots and a page.

python scripts/evaluate.py --model out/yarn --base out/base --lengths 256 512 1024 \
    --eval_dir texts --output_dir out/evaluation
python scripts/evaluate.py --model out/base --scheme yarn --scheme linear --factor 4 --lengths 256 512 1024 \
    --curve 16 --retrieval passkey multikey --diagnostics 4 --eval_dir texts --output_dir out/evaluation

Causal models: perplexity, and what is asked for beside it. Masked models and text encoders: pseudo-perplexity, a
sentence found, short texts. Image models: features, and right classes, by size (--image_dir, --lengths in pixels). An
interrupted run goes on where it was when it is started again. Several processes:
ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 scripts/evaluate.py ...
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from hf_posswap.arguments import PictureArguments, parse, run, scheme_arguments, schemes_from
from hf_posswap.errors import PosSwapError, nearest

DTYPES = ("auto", "float32", "bfloat16", "float16")
JOURNAL = "unfinished.jsonl"
SEVERAL = {"action": "extend", "nargs": "+"}  # --flag a --flag b, and --flag a b


def option(text: str, default: Any = None) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class Models:
    model: list[str] = field(
        metadata={"help": "Checkpoint folders or hub names; with --scheme and no --base, what is patched.", **SEVERAL}
    )
    base: str | None = option("The model before its swap. Needed unless --scheme is given.")
    tokenizer_name: str | None = option("Where the tokenizer is, if not with the first --model.")
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
    output_dir: str = field(metadata={"help": "Folder for evaluation.json, .csv, .md and pictures."})
    protocol: str = option("strict or yarn.", "strict")
    original_length: int | None = option("Length the base was trained at, in tokens; from its config if not given.")
    batch_size: int = option("Windows per forward.", 1)


@dataclass
class More:
    """What is measured beside perplexity."""

    curve: int = option("Rows of text for the loss by position, at the greatest length; 0: none.", 0)
    key_tokens: bool = option("Perplexity on the tokens that need a long context.", False)
    evaluator: str | None = option("The model that chooses them, by its name in the report; the last, if not given.")
    retrieval: list[str] | None = field(
        default=None,
        metadata={"help": "passkey, multikey, multivalue, variables, common_words, association", **SEVERAL},
    )
    retrieval_lengths: list[int] | None = field(
        default=None, metadata={"help": "Tokens of the prompts; --lengths if not given."}
    )
    retrieval_protocol: str = option("strict (length by depth), or yarn (its authors' passkey).", "strict")
    retrieval_samples: int = option("Prompts for each length and depth.", 4)
    chat: bool = option("Ask with the tokenizer's chat template; a base model goes on with the answer instead.", False)
    diagnostics: int = option("Documents on which attention and shift are looked at; 0: none.", 0)
    tasks: list[str] | None = field(default=None, metadata={"help": "Tasks of lm-eval.", **SEVERAL})
    task_lengths: list[int] | None = field(default=None, metadata={"help": "Tokens of RULER's tasks."})
    limit: int | None = option("Documents of each task.")
    num_fewshot: int | None = option("Examples before each request of a task.")
    download: bool = option("Tasks may fetch their data; offline otherwise.", False)
    mask_targets: int = option("Tokens that a masked model predicts, one by one.", 64)
    image_dir: str | None = option("Folder of pictures, for image models; a subfolder for each class, for classifiers.")
    seed: int = option("Of the prompts and tasks.", 0)


def load(flag: str, path: str, dtype: str, scheme: Any = None, **picture: Any) -> Any:
    """Any checkpoint, patched or not; patched here with `scheme`, of a picture as `patch_model` takes it."""
    from hf_posswap import from_pretrained, patch_model

    try:
        model = from_pretrained(path, dtype=dtype)
    except OSError as error:
        reason = str(error).split("\n")[0]
        raise PosSwapError(f"no model can be loaded from --{flag}={path!r}: {reason}") from error
    return model if scheme is None else patch_model(model, scheme, **picture)


def entries_of(models: Models, schemes: list[Any], picture: dict[str, Any]) -> list[Any]:
    """Every model of the comparison, the unpatched ones first; a scheme is put on each of those, with the picture."""
    from hf_posswap.evaluation.compare import Entry
    from hf_posswap.evaluation.subjects import scheme_name

    patched = models.model if models.base is not None else []
    bases = [models.base] if models.base is not None else models.model
    flag = "base" if models.base is not None else "model"
    alone = len(bases) == 1
    named = {path: "base" if alone else Path(path).name for path in bases}
    found = [Entry(named[path], partial(load, flag, path, models.dtype)) for path in bases]
    for path in patched:
        name = scheme_name(load("model", path, models.dtype))
        several = len(patched) > 1 or name in {str(scheme).removesuffix("()") for scheme in schemes}
        name = f"{Path(path).name}: {name}" if several else name
        found.append(Entry(name, partial(load, "model", path, models.dtype), "base"))
    for path in bases:
        for scheme in schemes:
            name = str(scheme).removesuffix("()")
            name = name if alone else f"{named[path]}: {name}"
            found.append(Entry(name, partial(load, flag, path, models.dtype, scheme, **picture), named[path]))
    return found


def main() -> None:
    models, data, chosen, evaluation, more, picture, scheme = parse(
        Models,
        Data,
        Protocol,
        Evaluation,
        More,
        PictureArguments,
        scheme_arguments(several=True),
        description=__doc__.split("\n")[0],
    )
    schemes, picture = schemes_from(scheme), picture.given()
    if picture and not schemes:
        raise PosSwapError(f"--{next(iter(picture))} was given without --scheme")
    if models.dtype not in DTYPES:
        raise PosSwapError(f"--dtype={models.dtype!r} is unknown; {nearest(models.dtype, DTYPES)}")
    if not schemes and models.base is None:
        raise PosSwapError("--base is missing: a report says what the swap costs; give the model before its swap")
    if more.tasks is not None and not more.download:
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}  # before anything reads them

    from hf_posswap import evaluation as package
    from hf_posswap.evaluation.plots import require_matplotlib

    require_matplotlib()
    parameters = {f.name: getattr(chosen, f.name) for f in fields(chosen)}
    parameters = {name: value for name, value in parameters.items() if value is not None}
    package.make_protocol(evaluation.protocol, evaluation.lengths, **parameters)  # fail before any loading
    with processes() as device:
        work = package.Work(Path(evaluation.output_dir) / JOURNAL, progress=True)
        device = models.device or device
        entries = entries_of(models, schemes, picture)
        report = measure(models, data, evaluation, more, entries, parameters, device, work)
        if work.main:
            paths = package.write_report(report, evaluation.output_dir)
            work.forget()
            print(package.table(report))
            print("written:", ", ".join(map(str, paths.values())))


def measure(
    models: Models,
    data: Data,
    evaluation: Evaluation,
    more: More,
    entries: list[Any],
    parameters: dict[str, Any],
    device: str,
    work: Any,
) -> dict[str, Any]:
    """The report: the first model's kind says of what."""
    from hf_posswap import evaluation as package
    from hf_posswap.evaluation import compare
    from hf_posswap.evaluation.subjects import CAUSAL, IMAGE, kind_of

    if more.image_dir is None:
        texts, source = package.read_texts(**vars(data))
    kind = kind_of(entries[0].load())
    common = {"device": device, "work": work}
    if (kind == IMAGE) != (more.image_dir is not None):
        raise PosSwapError(f"image_dir={more.image_dir!r}: pictures are for image models, and text for all others")
    if kind == IMAGE:
        from transformers import AutoImageProcessor

        from hf_posswap.evaluation.images import read_images, read_labels
        from hf_posswap.record import published

        where = models.tokenizer_name or models.base or models.model[0]
        pictures = read_images(more.image_dir, AutoImageProcessor.from_pretrained(where))
        source = {"image_dir": published(more.image_dir)}
        labels = read_labels(more.image_dir, entries[0].load().config.label2id)
        return compare.compare_images(entries, pictures, evaluation.lengths, labels=labels, source=source, **common)
    tokenizer = tokenizer_of(models)
    tokens = package.tokenize(texts, tokenizer)
    common |= {
        "original_length": evaluation.original_length,
        "batch_size": evaluation.batch_size,
        "source": source,
    }
    if kind != CAUSAL:
        refuse_causal(evaluation, more, parameters, kind)
        return compare.compare_encoders(
            entries, tokens, evaluation.lengths, tokenizer, targets=more.mask_targets, **common
        )
    return package.compare_causal(
        entries,
        tokens,
        evaluation.lengths,
        protocol=evaluation.protocol,
        bos_token_id=package.window_bos(tokenizer, evaluation.protocol),
        extras=extras_of(models, evaluation, more, entries, tokenizer),
        **common,
        **parameters,
    )


def extras_of(models: Models, evaluation: Evaluation, more: More, entries: list[Any], tokenizer: Any) -> Any:
    from hf_posswap.evaluation.compare import Extras
    from hf_posswap.evaluation.prompts import Strict, Yarn
    from hf_posswap.evaluation.protocols import PROTOCOLS
    from hf_posswap.evaluation.tasks import Tasks

    if more.retrieval_protocol not in PROTOCOLS:
        value = more.retrieval_protocol
        raise PosSwapError(f"--retrieval_protocol={value!r} is unknown; {nearest(value, PROTOCOLS)}")
    asked = {"samples": more.retrieval_samples, "seed": more.seed}
    asker = Yarn if more.retrieval_protocol == "yarn" else partial(Strict, chat=more.chat)
    tasks = None
    if more.tasks is not None:
        tasks = Tasks(
            names=more.tasks,
            tokenizer=tokenizer,
            tokenizer_name=models.tokenizer_name or models.base or models.model[0],
            max_length=max([*evaluation.lengths, *(more.task_lengths or [])]),
            lengths=more.task_lengths or (),
            limit=more.limit,
            num_fewshot=more.num_fewshot,
            batch_size=evaluation.batch_size,
            seed=more.seed,
        )
    if more.evaluator is not None and not more.key_tokens:
        raise PosSwapError(f"--evaluator={more.evaluator!r} chooses key tokens; give --key_tokens true with it")
    return Extras(
        curve=more.curve,
        evaluator=(more.evaluator or entries[-1].name) if more.key_tokens else None,
        askers=[asker(tokenizer, task, **asked) for task in more.retrieval or ()],
        ask_lengths=more.retrieval_lengths or evaluation.lengths,
        diagnostics=more.diagnostics,
        tasks=tasks,
    )


def refuse_causal(evaluation: Evaluation, more: More, parameters: dict[str, Any], kind: str) -> None:
    """Raise where something was asked for that only causal models have."""
    asked = {name: getattr(more, name) for name in ("curve", "key_tokens", "retrieval", "diagnostics", "tasks")}
    asked |= parameters | ({"protocol": evaluation.protocol} if evaluation.protocol != "strict" else {})
    for name, value in asked.items():
        if value:
            raise PosSwapError(f"--{name}={value!r} is for causal models, and the first one is {kind}; leave it out")


def tokenizer_of(models: Models) -> Any:
    """One tokenizer for all. Raises PosSwapError where another model's has another vocabulary."""
    from transformers import AutoTokenizer

    found = []
    places = [models.tokenizer_name] if models.tokenizer_name else [*models.model, *filter(None, [models.base])]
    for where in places:
        try:
            found.append(AutoTokenizer.from_pretrained(where))
        except (OSError, ValueError) as error:
            raise PosSwapError(f"no tokenizer can be loaded from {where!r}; give --tokenizer_name") from error
        if found[-1].get_vocab() != found[0].get_vocab():
            raise PosSwapError(
                f"--model={where!r} has another vocabulary than {places[0]!r}; their perplexities cannot be compared"
            )
    return found[0]


@contextmanager
def processes() -> Iterator[str]:
    """The device of this process, among those that `accelerate launch` started."""
    from accelerate import PartialState
    from accelerate.utils import parse_flag_from_env

    from hf_posswap.runs import check_processes

    state = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))  # which it does not read by itself
    check_processes(state.num_processes)
    try:
        yield str(state.device)
    finally:
        if state.num_processes > 1:
            state.destroy_process_group()


if __name__ == "__main__":
    run(main)
