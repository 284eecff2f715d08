"""The files of a run, written by the main process only (docs/run-folder.md lists them)."""

from __future__ import annotations

import itertools
import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from toolkit import launch
from toolkit.config import flat
from toolkit.evaluation import Evaluation
from toolkit.utils.files import explain_write_errors, nan_to_none, replace_file
from toolkit.utils.log import logger
from toolkit.utils.versions import versions


class RunFiles:
    """Writes config.json, metrics.jsonl, eval.jsonl and predictions.jsonl on the main process."""

    def __init__(self, accelerator: Accelerator, path: Path) -> None:
        self.accelerator, self.path, self.writes = accelerator, path, accelerator.is_main_process

    def write_config(self, settings: Any, data: dict[str, Any], extra: dict[str, Any]) -> None:
        if not self.writes:
            return
        accelerator = self.accelerator
        plugin, device = accelerator.state.deepspeed_plugin, accelerator.device
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
        config = {
            "settings": flat(settings),
            "data": data,
            "world": {
                "num_processes": accelerator.num_processes,
                "distributed_type": accelerator.distributed_type.value,
                "deepspeed": plugin.deepspeed_config if plugin else None,
                "mixed_precision": accelerator.mixed_precision,
                "precision_trial_ms": getattr(accelerator.state, "precision_trial", None),
                "device": gpu or f"{device.type} ({platform.machine()})",
                "host": platform.node(),
                "pid": os.getpid(),
            },
            "launch": launch.launch_info(),
            "versions": versions(),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            **extra,
        }
        write_atomically(self.path / "config.json", [dumps(config, indent=2), "\n"])

    def truncate_to_checkpoint(self, manifest: Mapping[str, Any] | None) -> None:
        """Truncates metrics.jsonl and eval.jsonl to the step of this run's checkpoint, after which the steps are done
        again, and removes predictions.jsonl where it is of an evaluation after the checkpoint. Warns about lines that
        have been lost since. Removes the files where there is no checkpoint."""
        if not self.writes:
            return
        step, counts = (manifest["step"], manifest.get("lines", {})) if manifest else (0, {})
        metrics = [line for line in latest_per_step(read_lines(self.path / "metrics.jsonl")) if line["step"] <= step]
        earlier = [line for line in metrics if line["step"] < step]
        if manifest and len(metrics) == len(earlier):  # the step's line is written after its checkpoint
            metrics.append(manifest["metrics"])
        evaluation_file, num_evaluations = self.path / "eval.jsonl", counts.get("eval.jsonl", 0)
        evaluations = list(read_lines(evaluation_file, num_evaluations))
        if evaluation_file.is_file() and evaluation_file.read_bytes().count(b"\n") > num_evaluations:
            (self.path / "predictions.jsonl").unlink(missing_ok=True)
        for name, lines, count in (("metrics.jsonl", metrics, len(earlier)),
                                   ("eval.jsonl", evaluations, len(evaluations))):  # fmt: skip
            if count < counts.get(name, 0):
                logger.warning(f"{self.path / name} has {count} of the {counts[name]} lines that it had at step {step}")
            if lines:
                write_atomically(self.path / name, (dumps(line) + "\n" for line in lines))
            else:
                (self.path / name).unlink(missing_ok=True)

    def mark_stopped(self, **facts: Any) -> None:
        """Adds to config.json that a stop signal ended the run; the report and the card show it at their top."""
        if self.writes:
            path = self.path / "config.json"
            config = json.loads(path.read_text(encoding="utf-8"))
            write_atomically(path, [dumps({**config, "stopped": facts}, indent=2), "\n"])

    def append_evaluation(self, evaluation: Evaluation, step: int, **extra: Any) -> None:
        self.append("eval.jsonl", {"step": step, "split": evaluation.split, **extra, **evaluation.numbers})

    def write_predictions(self, evaluation: Evaluation) -> None:
        if evaluation.predictions is not None:
            write_atomically(self.path / "predictions.jsonl", (dumps(line) + "\n" for line in evaluation.predictions()))

    def append(self, name: str, line: dict[str, Any]) -> None:
        if not self.writes:
            return
        path = self.path / name
        size = path.stat().st_size if path.exists() else 0
        with explain_write_errors(path):
            try:
                with path.open("a", encoding="utf-8") as file:
                    file.write(dumps(line) + "\n")
            except OSError:
                os.truncate(path, size)  # no half line where the disk is full
                raise


def write_atomically(path: Path, parts: Iterable[str]) -> None:
    """Writes a file under another name and renames it. Raises UserError where the disk is full."""
    with (
        explain_write_errors(path),
        replace_file(path, flush=False) as draft,
        draft.open("x", encoding="utf-8") as file,
    ):
        file.writelines(parts)


def dumps(content: Any, indent: int | None = None) -> str:
    """JSON, with null for numbers that are not finite."""
    return json.dumps(nan_to_none(content), ensure_ascii=False, indent=indent, default=str)


def read_lines(path: Path, most: int | None = None) -> Iterator[dict[str, Any]]:
    """Yields the objects of the first `most` lines of a .jsonl file, or nothing if it does not exist. Skips a broken
    line (after a power cut) with a warning, and an unfinished last line (of a killed run) silently."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(itertools.islice(file, most), 1):
            try:
                yield dict(json.loads(line.strip("\0 \n")))
            except (ValueError, TypeError, RecursionError):
                if line.endswith("\n") or "\0" in line:
                    logger.warning(f"{path}, line {number} is broken and is skipped")


def latest_per_step(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last line of each step, in order: a resumed run repeats the steps after its checkpoint."""
    last = {line["step"]: line for line in lines if isinstance(line.get("step"), int)}
    return [last[step] for step in sorted(last)]
