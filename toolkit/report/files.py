"""The files that a run writes, on the main process, and how they are read (docs/run-folder.md).

| file | written by | when |
|---|---|---|
| config.json | `RunFiles` | at the start; after a stop signal |
| metrics.jsonl, eval.jsonl, predictions.jsonl | `RunFiles` for `RunLog` | at steps and evaluations |
| report.html, model/README.md | `html`, `card` | at the end, and after a stop signal |
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from toolkit import launch
from toolkit.config import flat
from toolkit.errors import UserError
from toolkit.evaluation import Evaluation
from toolkit.launch.strategy import strategy_name
from toolkit.utils.files import (
    explain_write_errors,
    nan_to_none,
    read_json_object,
    replace_file,
)
from toolkit.utils.log import logger
from toolkit.utils.versions import versions


class RunFiles:
    """Writes config.json, metrics.jsonl, eval.jsonl and predictions.jsonl on the main process; on
    the others the methods do nothing."""

    def __init__(self, accelerator: Accelerator, path: Path) -> None:
        self.accelerator = accelerator
        self.path = path
        self.writes = accelerator.is_main_process

    def write_config(
        self, settings: Any, data: dict[str, Any], sections: dict[str, Any]
    ) -> None:
        """`data`: what is known of the data; `sections`: further ones, or in the place of these."""
        config = {
            "settings": flat(settings),
            "data": data,
            "world": _world(self.accelerator),
            "strategy": strategy_name(self.accelerator),
            "launch": launch.launch_info(),
            "versions": versions(),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            **sections,
        }
        self._replace("config.json", [dumps(config, indent=2), "\n"])

    def mark_stopped(self, **stop: Any) -> None:
        """Adds to config.json that a stop signal ended the run; the report and the card show it at
        their top."""
        if self.writes:
            config = {**read_json_object(self.path / "config.json"), "stopped": stop}
            self._replace("config.json", [dumps(config, indent=2), "\n"])

    def truncate_to_checkpoint(self, state: Mapping[str, Any] | None) -> None:
        """Removes what a run does again that resumes from its checkpoint: the steps and evaluations
        after it, and predictions.jsonl if it is of one of these; without a checkpoint all."""
        if not self.writes:
            return
        names = ("metrics.jsonl", "eval.jsonl", "predictions.jsonl")
        metrics, evals, predictions = [self.path / name for name in names]
        if state is None:
            for path in (metrics, evals, predictions):
                path.unlink(missing_ok=True)
            return
        steps = [line for line in read_lines(metrics) if line["step"] <= state["step"]]
        write_lines(metrics, steps)
        evaluations = list(read_lines(evals))
        count = state["lines"].get("eval.jsonl", 0)
        if len(evaluations) > count:
            predictions.unlink(missing_ok=True)
        write_lines(evals, evaluations[:count])

    def append_evaluation(self, evaluation: Evaluation, step: int, **extra: Any) -> None:
        """Appends to eval.jsonl; `extra`: about an evaluation that is no result of the run."""
        # after a kill here there are none, rather than earlier ones
        if self.writes and not extra:
            (self.path / "predictions.jsonl").unlink(missing_ok=True)
        line = {"step": step, "split": evaluation.split, **extra, **evaluation.numbers}
        self.append("eval.jsonl", line)

    def write_predictions(self, evaluation: Evaluation) -> None:
        """Replaces predictions.jsonl, whole, once all its lines are written."""
        if evaluation.predictions is not None:
            self._replace("predictions.jsonl", map(_line, evaluation.predictions()))

    def append(self, name: str, line: dict[str, Any]) -> None:
        """Appends a line to a .jsonl file. Raises UserError if it cannot be written."""
        if not self.writes:
            return
        path = self.path / name
        with explain_write_errors(path), path.open("a", encoding="utf-8") as file:
            file.write(_line(line))

    def _replace(self, name: str, parts: Iterable[str]) -> None:
        if self.writes:
            write_atomically(self.path / name, parts)


def _world(accelerator: Accelerator) -> dict[str, Any]:
    """What computes the run; `deepspeed`: its config in use."""
    plugin = accelerator.state.deepspeed_plugin
    device = f"{accelerator.device.type} ({platform.machine()})"
    if accelerator.device.type == "cuda":
        device = torch.cuda.get_device_name(accelerator.device)
    return {
        "num_processes": accelerator.num_processes,
        "distributed_type": accelerator.distributed_type.value,
        "deepspeed": plugin.deepspeed_config if plugin else None,
        "mixed_precision": accelerator.mixed_precision,
        "device": device,
        "host": platform.node(),
    }


def write_atomically(path: Path, parts: Iterable[str]) -> None:
    """Writes a file under another name and renames it. Raises UserError if the disk is full."""
    with (
        explain_write_errors(path),
        replace_file(path, flush=False) as draft,
        draft.open("x", encoding="utf-8") as file,
    ):
        file.writelines(parts)


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    write_atomically(path, map(_line, lines))


def _line(content: Mapping[str, Any]) -> str:
    return dumps(content) + "\n"


def dumps(content: Any, indent: int | None = None) -> str:
    """JSON, with null for numbers that are not finite."""
    return json.dumps(nan_to_none(content), ensure_ascii=False, indent=indent, default=str)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the objects of a .jsonl file, or nothing if it does not exist. Skips a broken line
    (after a power cut) with a warning, and an unfinished last line (of a killed run) silently."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                yield dict(json.loads(line))
            except (ValueError, TypeError):
                if line.endswith("\n"):
                    logger.warning(f"{path}, line {number} is broken and is skipped")


def run_config(folder: Path) -> dict[str, Any]:
    """config.json of a run. Raises UserError if `folder` holds none."""
    path = folder / "config.json"
    config = read_json_object(path) if path.is_file() else {}
    if "data" not in config:  # nor in that of a model
        raise UserError(f"{folder} is not a run folder: it has no config.json of a run")
    return config
