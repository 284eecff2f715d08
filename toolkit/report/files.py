"""The files of a run, written by the main process only (docs/run-folder.md lists them)."""

from __future__ import annotations

import itertools
import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from toolkit import launch
from toolkit.config import flat
from toolkit.evaluation import Evaluation
from toolkit.utils.files import finite, replace_file, writing
from toolkit.utils.versions import versions


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
                "precision_trial_ms": getattr(accelerator.state, "precision_trial", None),
                "device": _device_name(accelerator.device),
                "host": platform.node(),
                "pid": os.getpid(),
            },
            "launch": launch.how_launched(),
            "versions": versions(),
            "started": now,
            **more,
        }
        write_whole(self.path / "config.json", [dumps(config, indent=2), "\n"])

    def go_on_from(self, manifest: Mapping[str, Any] | None, ours: bool) -> None:
        """metrics.jsonl and eval.jsonl as they were at a checkpoint: what came after it is done again.

        Says where lines are gone that were there when it was saved. None: the run begins; `ours`: the checkpoint is
        of this run, whose files begin anew with one of another.
        """
        if not self.writes:
            return
        step, had = manifest["step"] if manifest else 0, (manifest or {}).get("lines", {}) if ours else {}
        found = by_step(read_lines(self.path / "metrics.jsonl"))
        lines = [line for line in found if line["step"] < step]
        # the step's own line is written after its checkpoint
        own = [line for line in found if line["step"] == step] or ([manifest["metrics"]] if manifest and ours else [])
        evaluated = list(read_lines(self.path / "eval.jsonl", had.get("eval.jsonl", 0)))
        for name, kept, more in (("metrics.jsonl", lines, own), ("eval.jsonl", evaluated, [])):
            if (count := had.get(name, 0)) > len(kept):
                _say(f"{self.path / name} has {len(kept)} of the {count} lines that it had at step {step}")
            if kept or more:
                write_whole(self.path / name, (dumps(line) + "\n" for line in [*kept, *more]))
            else:
                (self.path / name).unlink(missing_ok=True)

    def mark_stopped(self, **how: Any) -> None:
        """Notes in config.json that a stop signal ended the run: the report and the card say so on top."""
        if self.writes:
            path = self.path / "config.json"
            config = json.loads(path.read_text(encoding="utf-8"))
            write_whole(path, [dumps({**config, "stopped": how}, indent=2), "\n"])

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
        if not self.writes:
            return
        path = self.path / name
        before = path.stat().st_size if path.exists() else 0
        with writing(path):
            try:
                with path.open("a", encoding="utf-8") as file:
                    file.write(dumps(line) + "\n")
            except OSError:
                os.truncate(path, before)  # of a full disk: no half of a line
                raise


def write_whole(path: Path, parts: Iterable[str]) -> None:
    """Writes a file, part after part, beside its name and puts it in place: nobody finds half of it.

    Raises UserError where the disk does not take it.
    """
    with writing(path), replace_file(path, flush=False) as draft, draft.open("x", encoding="utf-8") as file:
        file.writelines(parts)


def dumps(content: Any, indent: int | None = None) -> str:
    """JSON, with null for numbers that are not finite."""
    return json.dumps(finite(content), ensure_ascii=False, indent=indent, default=str)


def read_lines(path: Path, most: int | None = None) -> Iterator[dict[str, Any]]:
    """The objects of the first `most` lines of a .jsonl file; none where there is no file.

    A line that is no object, as a power cut leaves it, is named and left out; one without its end, which a killed run
    leaves, is left out.
    """
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for place, line in enumerate(itertools.islice(file, most), 1):
            try:
                yield dict(json.loads(line.strip("\0 \n")))
            except (ValueError, TypeError, RecursionError):
                if line.endswith("\n") or "\0" in line:
                    _say(f"{path}, line {place} is broken and is skipped")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def by_step(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """A resumed run does the steps after its checkpoint again: the last line of a step is the one that counts."""
    found = {line["step"]: line for line in lines if isinstance(line.get("step"), int)}
    return [found[step] for step in sorted(found)]


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} ({platform.machine()})"
