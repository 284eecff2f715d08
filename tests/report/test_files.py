"""toolkit/report/files.py: files are written atomically, and read as a killed run left them."""

import re
import resource
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.report.made import make_run
from tests.runs import lines_of
from toolkit.data.labels import Labels
from toolkit.errors import UserError
from toolkit.evaluation import Evaluation
from toolkit.features.predict.parts import Parts
from toolkit.report.card import write_card
from toolkit.report.files import RunFiles, last_evaluation, latest_per_step, read_lines
from toolkit.report.html import write_report_of_folder

MAIN: Any = SimpleNamespace(is_main_process=True)
LABELS = Labels("single_label_classification", ("a", "b"), ("label",))


EVALUATION = Evaluation(
    "validation", {"loss": 0.5, "note": "x" * 5000}, lambda: iter([{"id": "x" * 5000}])
)
WRITERS: dict[str, Callable[[Path], object]] = {
    "config.json": lambda run: RunFiles(MAIN, run).mark_stopped(command="x" * 5000),
    "metrics.jsonl": lambda run: RunFiles(MAIN, run).append("metrics.jsonl", {"step": "x" * 5000}),
    "eval.jsonl": lambda run: RunFiles(MAIN, run).append_evaluation(EVALUATION, 50),
    "predictions.jsonl": lambda run: RunFiles(MAIN, run).write_predictions(EVALUATION),
    "report.html": write_report_of_folder,
    "README.md": lambda run: write_card(run, run, last_evaluation(run)),
    "out.csv": lambda run: Parts(run / "out.csv", {}).write(0, {"text": ["x" * 90] * 99}),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_is_an_error_and_leaves_no_draft(name: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    make_run(run, LABELS, [], {"loss": 0.5, "accuracy": 0.75, "f1_macro": 0.7})
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    largest = len(before[name]) + 100 if name.endswith(".jsonl") and name in before else 100
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, limits[1]))
    try:
        with pytest.raises(UserError) as caught:
            WRITERS[name](run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    ending = (
        rf"finished parts stay in {run / name}\.parts"
        if "out." in name
        else "nothing was left behind"
    )
    assert re.fullmatch(
        rf"cannot write {run / name}: .*File too large; {ending}", str(caught.value)
    )
    assert not list(run.glob("*.parts/*"))
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()} == before


def test_read_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After a kill, and after a power cut, which leaves blocks of NULs."""
    path = tmp_path / "lines.jsonl"
    assert list(read_lines(path)) == []
    path.write_text('{"a": 1}\n{"a": 2}\n{"a"')
    assert list(read_lines(path)) == [{"a": 1}, {"a": 2}]
    assert capsys.readouterr().err == ""
    path.write_bytes(b'{"a": 1}\n{"a"\n3\n\xff\n\0\0\0{"a": 3}\n\0\0\0')
    assert list(read_lines(path)) == [{"a": 1}, {"a": 3}]
    assert list(read_lines(path, 2)) == [{"a": 1}]
    warnings = [f"{path}, line {place} is broken and is skipped" for place in (2, 3, 4, 6, 2)]
    assert capsys.readouterr().err.splitlines() == warnings


def test_predictions_of_an_evaluation_that_is_done_again_are_removed(tmp_path: Path) -> None:
    make_run(tmp_path / "run", LABELS, [], {"loss": 0.5})  # with 4 evaluations
    for count in (4, 3):
        manifest = {"step": 40, "lines": {"eval.jsonl": count}}
        RunFiles(MAIN, tmp_path / "run").truncate_to_checkpoint(manifest)
        assert len(lines_of(tmp_path / "run" / "eval.jsonl")) == count
        assert (tmp_path / "run" / "predictions.jsonl").exists() == (count == 4)


@pytest.mark.parametrize(
    "truncated", [{}, {"max_length": 8}]
)  # the second is not a result of the run
def test_no_older_predictions_after_a_kill_within_an_evaluation(
    tmp_path: Path, truncated: dict[str, int]
) -> None:
    make_run(tmp_path / "run", LABELS, [], {"loss": 0.5})
    RunFiles(MAIN, tmp_path / "run").append_evaluation(EVALUATION, 50, **truncated)
    assert (tmp_path / "run" / "predictions.jsonl").exists() == bool(truncated)


def test_repeated_steps_count_once() -> None:
    """A run that resumes at step 30 repeats the steps after it."""
    lines = [
        {"step": step, "again": again}
        for again, first in ((False, 1), (True, 31))
        for step in range(first, 41)
    ]
    metrics = latest_per_step(lines)
    assert [line["step"] for line in metrics] == list(range(1, 41))
    assert [line["again"] for line in metrics] == [False] * 30 + [True] * 10
