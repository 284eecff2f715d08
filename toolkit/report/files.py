"""The files of a run, written by the main process only (docs/run-folder.md lists them)."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import time
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
        draft = self.path / f".predictions.{os.getpid()}"
        with draft.open("w", encoding="utf-8") as file:
            file.writelines(dumps(line) + "\n" for line in prediction_lines(evaluation.predictions, labels))
        draft.replace(self.path / "predictions.jsonl")

    def _append(self, name: str, line: dict[str, Any]) -> None:
        if self.writes:
            with (self.path / name).open("a", encoding="utf-8") as file:
                file.write(dumps(line) + "\n")


def write_json(path: Path, content: Any) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(dumps(content, indent=2) + "\n", encoding="utf-8")
    draft.replace(path)


def dumps(content: Any, indent: int | None = None) -> str:
    return json.dumps(content, ensure_ascii=False, indent=indent, default=str)


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
