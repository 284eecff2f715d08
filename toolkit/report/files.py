"""The files of a run, written by the main process only (docs/run-folder.md lists them)."""

from __future__ import annotations

import collections
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from toolkit import __version__, launch
from toolkit.config import flat
from toolkit.data.labels import Labels
from toolkit.errors import UserError
from toolkit.evaluation import Evaluation
from toolkit.evaluation.answers import prediction_lines
from toolkit.training.loop import StepMetrics

_MARKS = (
    "config.json",
    "metrics.jsonl",
    "eval.jsonl",
    "predictions.jsonl",
    "model",
    "checkpoints",
    "report.html",
)
_PACKAGES = ("torch", "accelerate", "deepspeed", "transformers", "datasets", "peft", "numpy")


class RunFolder:
    """Opens the folder of a new run and appends to its files."""

    def __init__(self, accelerator: Accelerator, output_dir: str | None, recipe: str, overwrite: bool) -> None:
        """All processes call this. Raises UserError where the folder already holds a run."""
        answer = [_open_folder(output_dir, recipe, overwrite) if accelerator.is_main_process else None]
        path, fault = broadcast_object_list(answer)[0]
        if fault:
            raise UserError(fault)
        self.path = Path(path)
        self.writes = accelerator.is_main_process

    def write_config(self, settings: Any, accelerator: Accelerator, data: dict[str, Any]) -> None:
        if not self.writes:
            return
        plugin = accelerator.state.deepspeed_plugin
        config = {
            "settings": flat(settings),
            "data": data,
            "world": {
                "num_processes": accelerator.num_processes,
                "distributed_type": accelerator.distributed_type.value,
                "deepspeed": plugin.deepspeed_config if plugin else None,
                "mixed_precision": accelerator.mixed_precision,
                "device": _device_name(accelerator.device),
                "host": platform.node(),
            },
            "launch": launch.how_launched(),
            "versions": _versions(),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        write_json(self.path / "config.json", config)

    def append_metrics(self, metrics: StepMetrics) -> None:
        self._append("metrics.jsonl", asdict(metrics))

    def append_evaluation(self, evaluation: Evaluation, step: int) -> None:
        self._append("eval.jsonl", {"step": step, "split": evaluation.split, **evaluation.numbers})

    def write_predictions(self, evaluation: Evaluation, labels: Labels) -> None:
        """predictions.jsonl, whole or not at all."""
        if evaluation.predictions is None:
            return
        lines = prediction_lines(evaluation.predictions, labels)
        write_whole(self.path / "predictions.jsonl", (dumps(line) + "\n" for line in lines))

    def _append(self, name: str, line: dict[str, Any]) -> None:
        if self.writes:
            with (self.path / name).open("a", encoding="utf-8") as file:
                file.write(dumps(line) + "\n")


def write_json(path: Path, content: Any) -> None:
    write_whole(path, [dumps(content, indent=2), "\n"])


def write_whole(path: Path, parts: Iterable[str]) -> None:
    """Writes a file, part after part, beside its name and puts it in place: nobody finds half of it."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with draft.open("w", encoding="utf-8") as file:
        file.writelines(parts)
    draft.replace(path)


def dumps(content: Any, indent: int | None = None) -> str:
    return json.dumps(content, ensure_ascii=False, indent=indent, default=str)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a .jsonl file; none where there is no file. Raises ValueError for a broken line.

    A last line without its end is what a killed run leaves, and is passed over.
    """
    if not path.is_file():
        return
    with path.open(encoding="utf-8") as file:
        for place, line in enumerate(file, 1):
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                if line.endswith("\n"):
                    raise ValueError(f"{path}, line {place} is not JSON: {error}") from error


def by_step(lines: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """A resumed run does the steps after its checkpoint again: the last line of a step is the one that counts."""
    found = {line["step"]: line for line in lines}
    return [found[step] for step in sorted(found)]


def last_step(path: Path) -> int:
    """The step of the last line of metrics.jsonl or eval.jsonl; 0 where there is none."""
    return max((line["step"] for line in collections.deque(read_lines(path), maxlen=1)), default=0)


def _open_folder(output_dir: str | None, recipe: str, overwrite: bool) -> tuple[str, str]:
    """(folder, fault): an empty fault means that the folder is there and ours."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    path = Path(output_dir) if output_dir else _unused(Path("runs") / f"{recipe}-{stamp}")
    if path.exists() and not path.is_dir():
        return str(path), f"--output_dir {path} is a file"
    held = [mark for mark in _MARKS if (path / mark).exists()]
    if held and not overwrite:
        return str(path), (
            f"--output_dir {path} already holds a run ({', '.join(held)}): choose another, or pass "
            "--overwrite_output_dir to move that run aside"
        )
    try:
        if held:
            path.rename(_unused(path.with_name(f"{path.name}.old-{stamp}")))
        path.mkdir(parents=True, exist_ok=True)
        (path / ".writable").touch()
        (path / ".writable").unlink()
    except OSError as error:
        return str(path), f"--output_dir {path} cannot be written: {error.strerror}"
    return str(path), ""


def _unused(path: Path) -> Path:
    candidate, number = path, 2
    while candidate.exists():
        candidate, number = path.with_name(f"{path.name}-{number}"), number + 1
    return candidate


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"toolkit": __version__, "python": sys.version.split()[0]}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} ({platform.machine()})"
