"""Runs of one recipe that a command starts one after another, each in a folder of its own."""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from toolkit import config
from toolkit.errors import UserError
from toolkit.launch.options import split_arguments
from toolkit.report.files import dumps, write_atomically
from toolkit.utils.cache import digest_of_file
from toolkit.utils.children import run_child

_STOP_SECONDS = 60.0


class RecipeRuns:
    """Starts, continues and skips the runs of a recipe. `NAME.json` next to the folder NAME of a
    run holds its command and its status, `NAME.log` its output."""

    def __init__(self, recipe: str, words: Sequence[str], folder: Path) -> None:
        """`words`: the command line of all runs. Raises UserError for a missing recipe or an
        unknown setting."""
        if not Path(recipe).is_file() or Path(recipe).suffix != ".py":
            raise UserError(
                f"there is no recipe {recipe}: name recipes/cls.py, for example"
            )
        self.recipe = recipe
        self.words = [word for word in words if word != "--"]
        self.folder = folder
        self.settings = self.parse([])
        """Setting -> value; empty for a recipe that is not ours."""

    def parse(self, words: Sequence[str]) -> dict[str, Any]:
        """The settings of a shipped recipe with further words; {} for others, which check their
        own. Raises UserError."""
        task = Path(self.recipe).stem
        classes = config.tasks()
        if task not in classes:
            return {}
        demo = Path(self.recipe).with_name(f"{task}_demo.yaml")
        _, own_words = split_arguments(self.words)
        arguments = [*own_words, *words]
        settings = config.parse(classes[task], arguments, demo if demo.is_file() else None)
        return config.flat(settings)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other commands out of the folder. A stop signal then ends this command, and its
        run with a checkpoint. Raises UserError if another command writes there."""
        for number in (signal.SIGTERM, signal.SIGHUP):  # Ctrl-C does so by itself
            if signal.getsignal(number) != signal.SIG_IGN:  # as SIGHUP under nohup
                signal.signal(number, lambda number, frame: sys.exit(128 + number))
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(self.folder / ".lock", timeout=0):
                yield
        except Timeout:
            remedy = "name another --output_dir, or stop that one"
            raise UserError(
                f"another command is writing to {self.folder}: {remedy}"
            ) from None

    def command(self, settings: Mapping[str, Any]) -> list[str]:
        """The words after `python` of a run with these settings."""
        return [self.recipe, *self.words, *_options(settings)]

    def status(self, name: str) -> str:
        """`running`, `finished` or what `set_status` has set; "" for a run that never started."""
        return self._record(name)["status"]

    def set_status(self, name: str, status: str) -> None:
        """Sets the status of a run, which is not started again unless it is `running`."""
        self._write_record(name, self._record(name)["command"], status)

    def run(self, name: str, settings: Mapping[str, Any]) -> None:
        """Runs the recipe in the folder `name`, unless this command has ended there already;
        continues a run that was stopped, and moves that of another command aside. A stop signal
        stops it with a checkpoint. Raises UserError if it fails."""
        folder = self.folder / name
        command = self._identity(settings)
        record = self._record(name)
        if folder.exists() and record["command"] not in ("", command):
            stamp = time.strftime("%Y%m%d-%H%M%S")
            folder.rename(folder.with_name(f"{name}.old-{stamp}"))
        elif folder.exists() and record["status"] not in ("", "running"):
            return
        self._write_record(name, command, "running")
        print(f"{name}:", *_options(settings), flush=True)
        _wait_for_last_checkpoint(folder)
        words = self.command({**settings, "output_dir": folder})
        if folder.exists() and not any(folder.glob("checkpoints/step-*/state.json")):
            words.append("--overwrite_output_dir=true")
        error = run_child(words, self.folder / f"{name}.log")
        if error:
            raise UserError(f"{name} failed: {error}")
        self.set_status(name, "finished")

    def _identity(self, settings: Mapping[str, Any]) -> str:
        """The command, with the content of the files that it names: another makes another run."""
        words = self.command(settings)
        paths = [Path(word.rpartition("=")[2]) for word in words[1:]]
        files = [
            f"# {path.name} {digest_of_file(path)}" for path in paths if path.is_file()
        ]
        return " ".join([shlex.join(words), *files])

    def _record(self, name: str) -> dict[str, str]:
        path = self.folder / f"{name}.json"
        if not path.is_file():
            return {"command": "", "status": ""}
        return dict(json.loads(path.read_text(encoding="utf-8")))

    def _write_record(self, name: str, command: str, status: str) -> None:
        record = {"command": command, "status": status}
        write_atomically(self.folder / f"{name}.json", [dumps(record)])


def _wait_for_last_checkpoint(folder: Path) -> None:
    """The run of a killed command gets a stop signal, and may still be writing a checkpoint."""
    lock = FileLock(folder / ".lock", timeout=_STOP_SECONDS)
    if (folder / ".lock").exists():
        with contextlib.suppress(Timeout, OSError, NotImplementedError), lock:
            pass


def _options(settings: Mapping[str, Any]) -> list[str]:
    return [f"--{name}={value}" for name, value in settings.items()]
