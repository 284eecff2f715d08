"""The logger of this package, `logging.getLogger("toolkit")`, which writes to stderr.

An application that configures logging before it imports `toolkit` keeps its handlers, formats and
levels. Otherwise lines are printed without a prefix; `--log_level`, or the logger's methods, change
that."""

from __future__ import annotations

import logging
import sys
from typing import Any

logger = logging.getLogger("toolkit")


class _StandardError(logging.StreamHandler):
    """Writes to the current `sys.stderr` (a notebook or a test may replace it), above a progress
    bar."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stderr

    def emit(self, record: logging.LogRecord) -> None:
        if (tqdm := sys.modules.get("tqdm")) is None:
            super().emit(record)
        else:
            with tqdm.tqdm.external_write_mode(file=sys.stderr):
                super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # logging's name
        """A closed terminal must not end a run."""


def configure() -> None:
    """Called when the package is imported."""
    if not logger.handlers and not logging.getLogger().handlers:
        add_handler()


def add_handler() -> None:
    logger.addHandler(_StandardError())
    logger.setLevel(logging.INFO)
    logger.propagate = False  # `logging.info` of a library adds a root handler: lines printed twice
