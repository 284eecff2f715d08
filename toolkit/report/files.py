"""The files that a run writes (docs/run-folder.md), on the main process, and how they are read."""

from __future__ import annotations

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
from toolkit.errors import UserError
from toolkit.evaluation import Evaluation
from toolkit.utils.files import explain_write_errors, nan_to_none, read_table, replace_file
from toolkit.utils.log import logger
from toolkit.utils.versions import versions


class RunFiles:
    """Writes config.json, metrics.jsonl, eval.jsonl and predictions.jsonl on the main process."""

    def __init__(self, accelerator: Accelerator, path: Path) -> None:
        self.accelerator = accelerator
        self.path = path
        self.writes = accelerator.is_main_process

    def write_config(self, settings: Any, data: dict[str, Any], extra: dict[str, Any]) -> None:
        config = {
            "settings": flat(settings),
            "data": data,
            "world": self._world(),
            "launch": launch.launch_info(),
            "versions": versions(),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            **extra,
        }
        self._write_config(config)

    def _world(self) -> dict[str, Any]:
        accelerator = self.accelerator
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
            "pid": os.getpid(),
        }

    def mark_stopped(self, **facts: Any) -> None:
        """Adds to config.json that a stop signal ended the run; the report and the card show it at
        their top."""
        if self.writes:
            config = read_table(self.path / "config.json")
            self._write_config({**config, "stopped": facts})

    def _write_config(self, config: dict[str, Any]) -> None:
        if self.writes:
            write_atomically(self.path / "config.json", [dumps(config, indent=2), "\n"])

    def truncate_to_checkpoint(self, state: Mapping[str, Any] | None) -> None:
        """Truncates metrics.jsonl and eval.jsonl to the step of this run's checkpoint, after which
        the steps are done again, and removes predictions.jsonl if it is of an evaluation after the
        checkpoint. Warns about lines that have been lost since. Without a checkpoint removes
        them."""
        if not self.writes:
            return
        if state is None:
            for name in ("metrics.jsonl", "eval.jsonl"):
                (self.path / name).unlink(missing_ok=True)
            return
        step = state["step"]
        counts = state.get("lines", {})
        lines = read_lines(self.path / "metrics.jsonl")
        steps = {line["step"]: line for line in lines if line["step"] <= step}
        last = steps.pop(step, state["metrics"])  # written after its checkpoint
        self._warn_of_lost_lines("metrics.jsonl", len(steps), counts, step)
        write_lines(self.path / "metrics.jsonl", [*steps.values(), last])
        evaluations = list(read_lines(self.path / "eval.jsonl"))
        count = counts.get("eval.jsonl", 0)
        if len(evaluations) > count:
            (self.path / "predictions.jsonl").unlink(missing_ok=True)
        self._warn_of_lost_lines("eval.jsonl", len(evaluations), counts, step)
        write_lines(self.path / "eval.jsonl", evaluations[:count])

    def _warn_of_lost_lines(
        self, name: str, count: int, counts: Mapping[str, int], step: int
    ) -> None:
        before = counts.get(name, 0)
        if count < before:
            had = f"of the {before} lines that it had at step {step}"
            logger.warning(f"{self.path / name} has {count} {had}")

    def append_evaluation(self, evaluation: Evaluation, step: int, **extra: Any) -> None:
        place = {"step": step, "split": evaluation.split}
        self.append("eval.jsonl", {**place, **extra, **evaluation.numbers})
        if self.writes and not extra:
            # after a kill, those of an earlier evaluation would count as this one's
            (self.path / "predictions.jsonl").unlink(missing_ok=True)

    def write_predictions(self, evaluation: Evaluation) -> None:
        if evaluation.predictions is not None:
            write_lines(self.path / "predictions.jsonl", evaluation.predictions())

    def append(self, name: str, line: dict[str, Any]) -> None:
        if not self.writes:
            return
        path = self.path / name
        with explain_write_errors(path), path.open("a", encoding="utf-8") as file:
            size = file.tell()
            try:
                file.write(dumps(line) + "\n")
                file.flush()
            except OSError:
                os.truncate(path, size)  # no half line if the disk is full
                raise


def write_atomically(path: Path, parts: Iterable[str]) -> None:
    """Writes a file under another name and renames it. Raises UserError if the disk is full."""
    with (
        explain_write_errors(path),
        replace_file(path, flush=False) as draft,
        draft.open("x", encoding="utf-8") as file,
    ):
        file.writelines(parts)


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    write_atomically(path, (dumps(line) + "\n" for line in lines))


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
                yield dict(json.loads(line.strip("\0 \n")))
            except (ValueError, TypeError):
                if line.endswith("\n") or "\0" in line:
                    logger.warning(f"{path}, line {number} is broken and is skipped")


def last_evaluation(folder: Path, step: int | None = None) -> Evaluation:
    """The last evaluation in eval.jsonl (at `step`), those on truncated texts left out; no numbers
    if there is none."""
    last: dict[str, Any] = {}
    for line in read_lines(folder / "eval.jsonl"):
        if "max_length" not in line and step in (None, line["step"]):
            last = line
    last.pop("step", None)
    return Evaluation(last.pop("split", "validation"), last, None)


def run_config(folder: Path) -> dict[str, Any]:
    """config.json of a run. Raises UserError if `folder` holds none."""
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is not a run folder: it has no config.json")
    config = read_table(folder / "config.json")
    if "data" not in config:
        raise UserError(f"{folder} is not a run folder: its config.json is that of a model")
    return config
