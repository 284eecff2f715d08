"""The logger of this package, `logging.getLogger("toolkit")`, which writes to stderr.

An application that configures logging before it imports `toolkit` keeps its handlers, formats and
levels. Otherwise lines are printed without a prefix; `--log_level`, or the logger's methods, change
that."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any, TextIO

from tqdm import tqdm

from toolkit.errors import escape_controls
from toolkit.utils.language import Language

logger = logging.getLogger("toolkit")


class _StandardError:
    """Writes to the current `sys.stderr` (a notebook or a test may replace it), above a progress
    bar."""

    def write(self, text: str) -> None:
        tqdm.write(escape_controls(text), file=sys.stderr, end="")

    def flush(self) -> None:
        sys.stderr.flush()


class PlainOutput:
    """A text stream to which what strangers wrote, as class names, cannot send control
    characters."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(escape_controls(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def configure() -> None:
    """Called when the package is imported."""
    if not logger.handlers and not logging.getLogger().handlers:
        add_handler()


def set_language(language: Language) -> None:
    """The language of all later lines."""

    def translate(record: logging.LogRecord) -> bool:
        record.msg = language.line(record.getMessage())
        record.args = None
        return True

    logger.filters[:] = [translate]


def add_handler() -> None:
    logger.addHandler(logging.StreamHandler(_StandardError()))
    logger.setLevel(logging.INFO)
    # `logging.info` of a library adds a root handler: lines printed twice
    logger.propagate = False


def log_on_rank_0(line: str, level: int = logging.INFO) -> None:
    """Logs a line from one process of a launch, also before there is an accelerator."""
    if os.environ.get("RANK", "0") == "0":
        logger.log(level, line)
