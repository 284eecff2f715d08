"""toolkit/report/log.py: how trackers are started, and closed after a failure."""

import sqlite3
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from tests.faults import refusal
from toolkit.config import TrainingSettings
from toolkit.evaluation import Evaluation
from toolkit.report.log import TRACKERS, RunLog, _mark_failed, start_trackers


class Tracker:
    def __init__(self, **options: Any) -> None:
        self.options, self.stored = options, None

    def start(self) -> None:
        if self.options.get("run_name") == "refused":
            raise sqlite3.OperationalError("no login\nand more")

    def store_init_configuration(self, settings: Any) -> None:
        self.stored = settings


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    for name in TRACKERS:
        monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, name, Tracker)
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: True)
    stores: list[str] = []
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(set_tracking_uri=stores.append))  # type: ignore[arg-type]
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    def start(
        step: int = 0, **settings: Any
    ) -> tuple[dict[str, dict[str, Any]], list[Any], list[str]]:
        accelerator: Any = SimpleNamespace(is_main_process=True, trackers=[])
        training = TrainingSettings(report_to=",".join(TRACKERS), **settings)
        start_trackers(accelerator, training, tmp_path, "cls", {"seed": 3}, step)
        options = dict(
            zip(TRACKERS, (tracker.options for tracker in accelerator.trackers), strict=True)
        )
        return options, [tracker.stored for tracker in accelerator.trackers], stores

    return start


@pytest.mark.parametrize("settings", [{}, {"run_name": "first try", "project": "reviews"}])
def test_each_tracker_gets_the_run_project_and_folder(
    settings: dict[str, str], started: Any, tmp_path: Path
) -> None:
    run, project = settings.get("run_name", tmp_path.name), settings.get("project", "cls")
    options, stored, stores = started(**settings)
    assert options["wandb"] == {"run_name": project, "name": run, "dir": str(tmp_path)}
    assert options["swanlab"] == {
        "run_name": project,
        "experiment_name": run,
        "logdir": f"{tmp_path}/swanlab",
    }
    assert options["trackio"] == {"run_name": project, "name": run}
    folder = f"file://{tmp_path}/mlflow"
    assert options["mlflow"] == {"experiment_name": project, "run_name": run, "logging_dir": folder}
    assert stores == [f"sqlite:///{tmp_path}/mlflow/mlflow.db"]
    place = {"run_name": settings.get("run_name", ""), "logging_dir": f"{tmp_path}/tensorboard"}
    assert options["tensorboard"] == {**place, "purge_step": None}
    assert stored == [None, *[{"seed": 3}] * 4]
    assert started(step=7)[0]["tensorboard"]["purge_step"] == 8


def test_the_users_mlflow_store_and_a_tracker_that_cannot_start(
    started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://somewhere")
    options, _, stores = started()
    assert (options["mlflow"]["logging_dir"], stores) == (None, [])
    refusal(
        started,
        project="refused",
        match=r"^--report_to wandb cannot start \(OperationalError: no login\): ",
    )


def test_a_run_continues_without_a_tracker_that_fails(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("the server is gone\nand more")

    steps: list[int] = []
    trackers = [SimpleNamespace(name="mlflow", log=refuse, finish=lambda: steps.append(-1)),
                SimpleNamespace(name="trackio", log=lambda _, step: steps.append(step), finish=refuse)]  # fmt: skip
    accelerator: Any = SimpleNamespace(trackers=trackers, is_main_process=True)
    files: Any = SimpleNamespace(
        writes=True, append_evaluation=lambda *_: None, write_predictions=lambda _: None
    )
    log = RunLog(accelerator, files, 3, 2)
    for split, step in (
        ("validation", 1),
        ("validation", 2),
        ("test", 1),
    ):  # W&B drops a step before the last
        log.log_evaluation(Evaluation(split, {"loss": 0.5}, None), step)
    log.close()
    assert steps == [1, 2, 2]
    warnings = [
        line
        for line in capsys.readouterr().err.splitlines()
        if "ConnectionError: the server is gone" in line
    ]
    assert [line.split()[1] for line in warnings] == ["mlflow", "trackio"]


def test_a_failed_run_is_marked_as_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the signatures of wandb 0.31, mlflow 3.17, swanlab 0.10; a tracker that raises does not stop the others."""
    ends: list[Any] = []
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(end_run=ends.append))  # type: ignore[arg-type]
    wandb = SimpleNamespace(
        name="wandb", run=SimpleNamespace(finish=lambda exit_code: ends.append(exit_code))
    )
    swanlab = SimpleNamespace(
        name="swanlab", run=SimpleNamespace(finish=lambda state, error: ends.append(state))
    )
    tensorboard = SimpleNamespace(name="tensorboard", finish=lambda: ends.append("closed"))
    _mark_failed(
        [
            SimpleNamespace(name="trackio"),
            wandb,
            SimpleNamespace(name="mlflow"),
            swanlab,
            tensorboard,
        ]
    )
    assert ends == [1, "FAILED", "crashed", "closed"]
