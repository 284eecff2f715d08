"""Where the checks touch the machine: programs that are run, always with a time limit, and small files."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_MOST_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class Output:
    """What a program left; `code` is None where it did not end in time and was ended."""

    code: int | None
    out: str
    err: str

    @property
    def done(self) -> bool:
        return self.code == 0


def run_program(words: Sequence[str], seconds: float = 3.0) -> Output | None:
    """Runs a program that reads nothing and asks nothing; None where it is not installed.

    It takes `seconds` and at most one more, also where the program can not even be killed (a driver that hangs).
    """
    if (found := shutil.which(words[0])) is None:
        return None
    try:
        process = subprocess.Popen(
            [found, *words[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "LC_ALL": "C"},
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return Output(126, "", str(error))
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=1.0)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        return Output(None, "", f"no answer in {seconds:.0f} s")
    return Output(process.returncode, out[:_MOST_CHARACTERS], err[:_MOST_CHARACTERS])


def read_text(path: str | Path, most: int = 1 << 16) -> str | None:
    """The beginning of a small file, stripped; None where it cannot be read."""
    try:
        with Path(path).open(encoding="utf-8", errors="replace") as opened:
            return opened.read(most).strip()
    except OSError:
        return None


def names_in(folder: str | Path) -> list[str]:
    """What a folder holds, sorted; empty where there is none."""
    try:
        return sorted(entry.name for entry in Path(folder).iterdir())
    except OSError:
        return []
