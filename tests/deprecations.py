"""Hearing what transformers logs of its own future: a use of it that will end is a failure here."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import transformers


class Deprecations(logging.Handler):
    """What transformers logs of its own future."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "deprecat" in record.getMessage().lower():
            self.seen.append(record.getMessage())

    @contextmanager
    def heard(self) -> Iterator[None]:
        """All of transformers' messages come here, and are printed no more."""
        logger, verbosity = logging.getLogger("transformers"), transformers.utils.logging.get_verbosity()
        handlers, logger.handlers = logger.handlers, [self]
        transformers.utils.logging.set_verbosity_warning()
        try:
            yield
        finally:
            logger.handlers = handlers
            transformers.utils.logging.set_verbosity(verbosity)
