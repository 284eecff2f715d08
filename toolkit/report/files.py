"""The files of a run, written by the main process only (docs/run-folder.md lists them)."""

from __future__ import annotations

import collections
import json
import os
import platform
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from toolkit import launch
from toolkit.config import flat
from toolkit.evaluation import Evaluation
from toolkit.files import replace_file
from toolkit.versions import versions


class RunFiles:
    """Writes config.json, metrics.jsonl, eval.jsonl and predictions.jsonl; nothing where it is not the main process."""

    def __init__(self, accelerator: Accelerator, path: Path) -> None:
        self.path, self.writes = path, accelerator.is_main_process

    def write_config(self, settings: Any, accelerator: Accelerator, data: dict[str, Any], more: dict[str, Any]) -> None:
        if not self.writes:
            return
        plugin = accelerator.state.deepspeed_plugin
        now = datetime.now(UTC).isoformat(timespec="seconds")
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
                "pid": os.getpid(),
            },
            "launch": launch.how_launched(),
            "versions": versions(),
            "started": now,
            **more,
        }
        write_json(self.path / "config.json", config)

    def go_on_from(self, step: int, metrics: dict[str, Any] | None, evaluations: int) -> None:
        """metrics.jsonl and eval.jsonl as they were at a checkpoint: what came after it is done again."""
        if not self.writes:
            return
        lines = [line for line in by_step(read_lines(self.path / "metrics.jsonl")) if line["step"] <= step]
        if lines and metrics is not None and lines[-1]["step"] == step - 1:
            lines.append(metrics)  # it was killed between the checkpoint and the line
        evaluated = list(read_lines(self.path / "eval.jsonl"))[:evaluations]
        for name, kept in (("metrics.jsonl", lines), ("eval.jsonl", evaluated)):
            if kept:
                write_whole(self.path / name, (dumps(line) + "\n" for line in kept))
            else:
                (self.path / name).unlink(missing_ok=True)

    def append_metrics(self, line: dict[str, Any]) -> None:
        self._append("metrics.jsonl", line)

    def append_evaluation(self, evaluation: Evaluation, step: int, **more: Any) -> None:
        self._append("eval.jsonl", {"step": step, "split": evaluation.split, **more, **evaluation.numbers})

    def write_predictions(self, evaluation: Evaluation) -> None:
        """predictions.jsonl, whole or not at all."""
        if evaluation.predictions is None:
            return
        write_whole(self.path / "predictions.jsonl", (dumps(line) + "\n" for line in evaluation.predictions()))

    def _append(self, name: str, line: dict[str, Any]) -> None:
        if self.writes:
            with (self.path / name).open("a", encoding="utf-8") as file:
                file.write(dumps(line) + "\n")


def write_json(path: Path, content: Any) -> None:
    write_whole(path, [dumps(content, indent=2), "\n"])


def write_whole(path: Path, parts: Iterable[str]) -> None:
    """Writes a file, part after part, beside its name and puts it in place: nobody finds half of it."""
    with replace_file(path, flush=False) as draft, draft.open("x", encoding="utf-8") as file:
        file.writelines(parts)


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


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} ({platform.machine()})"
