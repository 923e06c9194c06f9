"""Set-up shared by all tests: no hub, one thread, deprecations of transformers are failures."""

import os
import shutil
import sysconfig
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState

from .deprecations import Deprecations

torch.set_num_threads(1)
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def deprecations():
    """No test makes transformers announce that something it does will end. Each message comes once in a process."""
    heard = Deprecations()
    with heard.heard():
        yield
    assert heard.seen == []


@pytest.fixture(autouse=True)
def processes():
    """accelerate keeps one state for a process; the next test may ask for another precision."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def by_id(rows):
    """Parametrise a law over rows."""
    return pytest.mark.parametrize("row", rows, ids=lambda row: row.id)


def first_of_each(*names):
    """Parametrise a slow law: in every run the first row of each scheme (of each of these attributes), the others in
    `make test-long`.
    """

    def parametrised(rows):
        seen, marked = set(), []
        for row in rows:
            found = {(name, getattr(row, name)) for name in names}
            marked.append(pytest.param(row, marks=[pytest.mark.long] if found <= seen else []))
            seen |= found
        return pytest.mark.parametrize("row", marked, ids=lambda row: row.id)

    return parametrised


@pytest.fixture
def checkpoint(tmp_path):
    """A folder with a tiny LLaMA and a byte tokenizer, as scripts/demo.py makes them."""
    import demo

    folder = tmp_path / "model"
    tokenizer = demo.byte_tokenizer()
    tokenizer.model_max_length = 64
    tokenizer.save_pretrained(folder)
    demo.tiny_llama(demo.DemoArguments(length=64, width=32), len(tokenizer)).save_pretrained(folder)
    return folder


# --- what the tests of training and evaluation start from


@pytest.fixture
def own_cache(tmp_path_factory, monkeypatch):
    """Nothing is read from, or left in, the user's cache of data sets."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.getbasetemp() / "datasets")


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """A folder of Python sources."""
    folder = tmp_path_factory.mktemp("texts")
    for name in ("bisect", "heapq", "keyword", "this", "token", "stat"):
        shutil.copy(Path(sysconfig.get_path("stdlib")) / f"{name}.py", folder)
    (folder / "blank.py").write_text("  \n\n")
    return folder


@pytest.fixture(scope="session")
def tokenizer():
    """One token per byte, for causal models: EOS ends a document."""
    from .small import byte_tokenizer

    return byte_tokenizer(eos_token="<eos>")


@pytest.fixture(scope="session")
def bert_tokenizer():
    """One token per byte, for masked models: CLS and SEP around a document."""
    from .small import byte_tokenizer

    return byte_tokenizer(cls_token="<cls>", sep_token="<sep>", mask_token="<mask>", pad_token="<pad>")


@pytest.fixture
def arguments(tmp_path, texts, own_cache):
    """A short run on those sources."""
    from hf_posswap.training.arguments import FinetuneArguments

    from .small import BLOCK

    return FinetuneArguments(
        output_dir=str(tmp_path / "out"),
        train_dir=str(texts),
        file_pattern="*.py",
        block_size=BLOCK,
        max_steps=4,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        warmup_steps=2,
    )


def pytest_make_parametrize_id(config, val, argname):
    """Functions by their name: their address differs between the processes that share the tests."""
    return getattr(val, "__name__", None) if callable(val) else None
