"""Text documents in, token documents out. Nothing is cut, joined or reordered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import PosSwapError, nearest
from ..record import published

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def read_texts(
    *,
    eval_dir: str | None = None,
    eval_file: str | None = None,
    file_pattern: str = "*.txt",
    dataset_name: str | None = None,
    dataset_config_name: str | None = None,
    split: str = "test",
    text_column: str = "text",
) -> tuple[Iterable[str], dict[str, Any]]:
    """Documents, and a record of where they came from. Give exactly one of eval_dir, eval_file, dataset_name.

    A file is one document; those of `eval_dir` (and its subfolders) that match `file_pattern` are read in the
    order of their paths. A row of a dataset is one document.
    """
    given = {"eval_dir": eval_dir, "eval_file": eval_file, "dataset_name": dataset_name}
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) != 1:
        raise PosSwapError(f"give exactly one of eval_dir, eval_file, dataset_name; got {given or 'none'}")
    if dataset_name is not None:
        texts = _read_dataset(dataset_name, dataset_config_name, split, text_column)
        source = {"dataset_config_name": dataset_config_name, "split": split, "text_column": text_column}
        return texts, given | source
    if eval_file is not None:
        if not Path(eval_file).is_file():
            raise PosSwapError(f"eval_file={eval_file!r} is not a file")
        return _read_files([Path(eval_file)]), {"eval_file": published(eval_file)}
    files = _find_files(eval_dir, file_pattern)
    return _read_files(files), {"eval_dir": published(eval_dir), "file_pattern": file_pattern, "files": len(files)}


def tokenize(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    """The token ids of each text: no special tokens, no truncation whatever the tokenizer's limit."""
    for text in texts:
        yield tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]


def window_bos(tokenizer: PreTrainedTokenizerBase, protocol: str) -> int | None:
    """The BOS that a protocol puts before every window.

    `yarn` uses the tokenizer's BOS where it has one, as theirs does; `strict` only where the tokenizer itself
    starts a text with it, as that is what the model was trained on.
    """
    bos = tokenizer.bos_token_id
    if bos is None or protocol == "yarn":
        return bos
    return bos if tokenizer("a")["input_ids"][:1] == [bos] else None


def _find_files(folder: str, pattern: str) -> list[Path]:
    if not Path(folder).is_dir():
        raise PosSwapError(f"eval_dir={folder!r} is not a folder")
    files = sorted(path for path in Path(folder).rglob(pattern) if path.is_file())
    if not files:
        suffixes = sorted({path.suffix for path in Path(folder).rglob("*") if path.is_file() and path.suffix})
        found = f"it holds {', '.join('*' + s for s in suffixes)}" if suffixes else "it holds no files"
        raise PosSwapError(f"eval_dir={folder!r} has no file that matches file_pattern={pattern!r}; {found}")
    return files


def _read_files(files: Iterable[Path]) -> Iterator[str]:
    for file in files:
        try:
            yield file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise PosSwapError(f"{file} is not UTF-8 text: {error}") from None


def _read_dataset(name: str, config: str | None, split: str, column: str) -> Iterable[str]:
    from datasets import load_dataset

    try:
        rows = load_dataset(name, config, split=split)
    except (OSError, ValueError) as error:
        raise PosSwapError(f"dataset_name={name!r}, split={split!r} cannot be loaded: {error}") from error
    if column not in rows.column_names:
        raise PosSwapError(f"text_column={column!r} is not a column of {name}; {nearest(column, rows.column_names)}")
    return (row[column] for row in rows)
