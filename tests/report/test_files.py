"""The rows of a run's files: written whole or not at all, and read as a killed run left them. How
trackers that fail are left, and those of a failed run closed. Lines of what a run leaves idle."""

import re
import resource
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.report.made import make_run
from toolkit.data.labels import Labels
from toolkit.errors import UserError
from toolkit.evaluation import Evaluation
from toolkit.features.predict.parts import Parts
from toolkit.report import summary
from toolkit.report.card import write_card
from toolkit.report.files import RunFiles, read_lines
from toolkit.report.html import write_report_of_folder
from toolkit.report.log import RunLog, close_failed

MAIN: Any = SimpleNamespace(is_main_process=True)
LABELS = Labels("single_label_classification", ("a", "b"), ("label",))
LINES = [{"id": "x" * 5000}]
EVALUATION = Evaluation("validation", {"loss": 0.5, "note": "x" * 5000}, lambda: iter(LINES))
WRITERS: dict[str, Callable[[Path], object]] = {
    "config.json": lambda run: RunFiles(MAIN, run).mark_stopped(command="x" * 5000),
    "metrics.jsonl": lambda run: RunFiles(MAIN, run).append("metrics.jsonl", {"step": "x" * 5000}),
    "eval.jsonl": lambda run: RunFiles(MAIN, run).append_evaluation(EVALUATION, 50),
    "predictions.jsonl": lambda run: RunFiles(MAIN, run).write_predictions(EVALUATION),
    "report.html": write_report_of_folder,
    "README.md": lambda run: write_card(run, run),
    "out.csv": lambda run: Parts(run / "out.csv", {}).write("part", {"text": ["x" * 90] * 99}),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_is_an_error_and_leaves_no_draft(name: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    make_run(run, LABELS, [], {"loss": 0.5, "accuracy": 0.75, "f1_macro": 0.7})
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before.get(name, "")) + 100, limits[1]))
    try:
        with pytest.raises(UserError, match=f"cannot write {run / name}: .*File too large"):
            WRITERS[name](run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    files = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    if name == "eval.jsonl":  # the predictions of the evaluation before are gone
        del before["predictions.jsonl"]
    if name in ("metrics.jsonl", "eval.jsonl"):  # a line may be cut off: `read_lines` skips it
        before[name] = files[name]
    assert files == before
    assert not list(run.glob("*.parts/*"))


def test_read_lines(tmp_path: Path, capsys: Any) -> None:
    """After a kill, and after a power cut, which leaves blocks of NULs."""
    path = tmp_path / "lines.jsonl"
    assert list(read_lines(path)) == []
    path.write_text('{"a": 1}\n{"a": 2}\n{"a"')
    assert list(read_lines(path)) == [{"a": 1}, {"a": 2}]
    assert capsys.readouterr().err == ""
    path.write_bytes(b'{"a": 1}\n{"a"\n3\n\xff\n\0\0\0\n{"a": 3}\n\0\0\0')
    assert list(read_lines(path)) == [{"a": 1}, {"a": 3}]
    warnings = capsys.readouterr().err.splitlines()
    assert [re.findall(r"line (\d+)", line) for line in warnings] == [["2"], ["3"], ["4"], ["5"]]


def test_a_tracker_that_fails_stops_nothing(capsys: Any) -> None:
    """Not the run, nor that the others are closed, with an exit code where the run has failed."""
    refuse = Mock(side_effect=ConnectionError("the server is gone\nand more"))
    calls: list[Any] = []
    gone = SimpleNamespace(name="mlflow", log=refuse, finish=refuse)
    late = SimpleNamespace(name="trackio", log=lambda _, step: calls.append(step), finish=refuse)
    accelerator: Any = SimpleNamespace(trackers=[gone, late], is_main_process=True)
    log = RunLog(accelerator, Mock(), 3, 2)
    log.log_evaluation(Evaluation("validation", {"loss": 0.5}, None), 2)
    # W&B drops what comes before its last step
    log.log_evaluation(Evaluation("test", {"loss": 0.5}, None), 1)
    log.close_trackers()
    assert calls == [2, 2]
    lines = capsys.readouterr().err.splitlines()
    warnings = [line for line in lines if "ConnectionError: the server is gone" in line]
    assert [line.split()[1] for line in warnings] == ["mlflow", "trackio"]
    run = SimpleNamespace(finish=lambda exit_code: calls.append(exit_code))
    last = SimpleNamespace(name="tensorboard", finish=lambda: calls.append("closed"))
    accelerator.trackers = [gone, SimpleNamespace(name="wandb", run=run), last]
    close_failed(accelerator)
    assert calls[2:] == [1, "closed"]


def test_gpus_or_tasks_of_slurm_that_are_idle(monkeypatch: Any) -> None:
    """The line has the words that use them all."""
    ddp = "3 of 4 GPUs are idle: --config_file accelerate_configs/ddp.yaml --num_processes 4"
    for processes, device, gpus, tasks, says in (
        (1, "cuda", 4, "1", ddp),
        (1, "cuda", 1, "1", ""),
        (4, "cuda", 4, "4", ""),
        (1, "cpu", 0, "2", "one process of 2 (SLURM_NTASKS): srun"),
    ):
        monkeypatch.setattr(torch.accelerator, "device_count", Mock(return_value=gpus))
        monkeypatch.setenv("SLURM_NTASKS", tasks)
        accelerator: Any = SimpleNamespace(num_processes=processes, device=torch.device(device))
        lines = summary._idle_lines(accelerator)
        assert (len(lines), says in "".join(lines)) == (bool(says), True)
