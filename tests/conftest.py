"""Set-up shared by all tests: no hub, one thread, deprecations of transformers are failures."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
import transformers

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


def by_id(rows):
    """Parametrise a law over rows."""
    return pytest.mark.parametrize("row", rows, ids=lambda row: row.id)


def first_of_each_scheme(rows):
    """Parametrise a slow law: one row of each scheme in every run, the others in `make test-long`."""
    seen = set()
    marked = [
        pytest.param(row, marks=[] if row.scheme not in seen and not seen.add(row.scheme) else pytest.mark.long)
        for row in rows
    ]
    return pytest.mark.parametrize("row", marked, ids=lambda row: row.id)
