"""The rows of a run's files: written whole or not at all, and read as a killed run left them."""

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
from toolkit.report.files import RunFiles, read_lines
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


@pytest.mark.parametrize("step", [40, 20])
def test_a_resumed_run_drops_what_it_does_again(tmp_path: Path, step: int) -> None:
    run = tmp_path / "run"
    make_run(run, LABELS, [], {"loss": 0.5})  # 40 steps, an evaluation every 10
    state = {"step": step, "lines": {"eval.jsonl": step // 10}}
    RunFiles(MAIN, run).truncate_to_checkpoint(state)
    assert [line["step"] for line in lines_of(run / "metrics.jsonl")] == list(range(1, step + 1))
    assert [line["step"] for line in lines_of(run / "eval.jsonl")] == list(range(10, step + 1, 10))
    assert (run / "predictions.jsonl").exists() == (step == 40)


# the second is not a result of the run
@pytest.mark.parametrize("truncated", [{}, {"max_length": 8}])
def test_no_predictions_of_an_older_evaluation(tmp_path: Path, truncated: dict[str, int]) -> None:
    make_run(tmp_path / "run", LABELS, [], {"loss": 0.5})
    RunFiles(MAIN, tmp_path / "run").append_evaluation(EVALUATION, 50, **truncated)
    assert (tmp_path / "run" / "predictions.jsonl").exists() == bool(truncated)
