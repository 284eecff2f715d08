"""The logger of this package, `logging.getLogger("toolkit")`: what it reports beside its results goes to stderr.

An application that configures logging before it imports `toolkit` keeps its handlers, formats and levels. In any other
process the lines are printed as they are; `--log_level`, or the logger's own methods, change that.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

logger = logging.getLogger("toolkit")


class _StandardError(logging.StreamHandler):
    """Writes to `sys.stderr` as it is at the time (a notebook or a test may replace it), above a progress bar."""

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

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # the name that logging calls
        """A terminal that is gone ends no run."""


def configure() -> None:
    """Called when the package is imported."""
    if not logger.handlers and not logging.getLogger().handlers:
        add_handler()


def add_handler() -> None:
    logger.addHandler(_StandardError())
    logger.setLevel(logging.INFO)
    logger.propagate = False  # a library that calls `logging.info` adds a handler to the root: no line twice


def set_level(name: str) -> None:
    """`debug`, `info`, `warning` or `error`: the least that is reported."""
    logger.setLevel(name.upper())
