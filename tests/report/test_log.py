"""Trackers: how they are started, what they get, and how a failed run ends them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from toolkit.config import TrainingSettings
from toolkit.evaluation import Evaluation
from toolkit.report.log import TRACKERS, RunLog, close_failed, start_trackers


class Tracker:
    requires_logging_directory = False

    def __init__(self, project: str, *place: str, **options: Any) -> None:
        self.name = "fake"
        self.calls: list[Any] = [project, *place, options]

    def start(self) -> None:
        pass

    def store_init_configuration(self, settings: Any) -> None:
        self.calls.append(settings)


def test_each_tracker_gets_the_run_project_and_folder(tmp_path: Path, monkeypatch: Any) -> None:
    for name in TRACKERS:
        monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, name, Tracker)
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: True)
    accelerator = Accelerator(cpu=True)
    training = TrainingSettings(report_to="wandb,mlflow,swanlab,trackio", run_name="first try")
    start_trackers(accelerator, training, tmp_path, "cls", {"seed": 3}, 0)
    run, project = "first try", "cls"
    trackers: list[Any] = accelerator.trackers
    assert [tracker.calls for tracker in trackers] == [
        [project, {"name": run, "dir": str(tmp_path)}, {"seed": 3}],
        [project, {"run_name": run}, {"seed": 3}],
        [project, {"experiment_name": run, "logdir": f"{tmp_path}/swanlab"}, {"seed": 3}],
        [project, {"name": run}, {"seed": 3}],
    ]


def test_a_run_continues_without_a_tracker_that_fails(capsys: Any) -> None:
    refuse = Mock(side_effect=ConnectionError("the server is gone\nand more"))
    steps: list[int] = []
    gone = SimpleNamespace(name="mlflow", log=refuse, finish=lambda: steps.append(-1))
    late = SimpleNamespace(name="trackio", log=lambda _, step: steps.append(step), finish=refuse)
    accelerator: Any = SimpleNamespace(trackers=[gone, late], is_main_process=True)
    files: Any = SimpleNamespace(
        append_evaluation=lambda *_: None, write_predictions=lambda _: None
    )
    log = RunLog(accelerator, files, 3, 2)
    log.log_evaluation(Evaluation("validation", {"loss": 0.5}, None), 2)
    # W&B drops what comes before its last step
    log.log_evaluation(Evaluation("test", {"loss": 0.5}, None), 1)
    log.close_trackers()
    assert steps == [2, 2]
    lines = capsys.readouterr().err.splitlines()
    warnings = [line for line in lines if "ConnectionError: the server is gone" in line]
    assert [line.split()[1] for line in warnings] == ["mlflow", "trackio"]


def test_the_trackers_of_a_failed_run_are_closed() -> None:
    """One that raises does not stop the others."""
    ends: list[Any] = []
    run = SimpleNamespace(finish=lambda exit_code: ends.append(exit_code))
    failing = SimpleNamespace(name="mlflow", finish=Mock(side_effect=ConnectionError))
    wandb = SimpleNamespace(name="wandb", run=run)
    last = SimpleNamespace(name="tensorboard", finish=lambda: ends.append("closed"))
    accelerator: Any = SimpleNamespace(trackers=[failing, wandb, last])
    close_failed(accelerator)
    assert ends == [1, "closed"]
