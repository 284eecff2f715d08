"""The same folder a second time: what goes on, what is refused, and that nothing is touched then."""

from __future__ import annotations

import json
import re
import shlex
import signal
import sys
from pathlib import Path
from unittest.mock import ANY

import pytest

from tests.faults import Fault
from tests.runs import begin, digests, failed, lines_of, recipe, run_of, train, wait_for_steps
from toolkit.utils.units import size_text


@pytest.fixture(scope="module")
def settings(tiny_model: Path, reviews: Path) -> list[str]:
    return ["--model_name_or_path", str(tiny_model), "--train_file", str(reviews), "--dropout", "0",
            "--mixed_precision", "no", "--report_to", "none", "--global_batch_size", "12",
            "--eval_every", "4"]  # fmt: skip


@pytest.fixture(scope="module")
def finished(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 4 steps with checkpoints of steps 2 and 4."""
    more = ["--max_steps", "4", "--checkpoint_every", "2"]
    return run_of([*settings, *more], tmp_path_factory.mktemp("finished") / "run")


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (["--max_steps", "4", "--learning_rate", "3e-3"], "is a finished run, and the changed settings would "
         "have no effect (learning_rate was 5e-05 and is 0.003)"),
        (["--max_steps", "3"], "has taken 4 steps, but the settings ask for 3 in total"),
        (["--max_steps", "4", "--max_length", "64"], "belongs to another job: max_length was "),
        (["--max_steps", "8", "--resume", "no"], "already holds a run"),
    ],
)  # fmt: skip
def test_refused(changed: list[str], told: str, settings: list[str], finished: Path) -> None:
    before = digests(finished)
    assert told in failed(*settings, "--checkpoint_every", "2", *changed, "--output_dir", finished)
    assert digests(finished) == before


def test_two_at_once(settings: list[str], tmp_path: Path, fault: Fault) -> None:
    """The second is refused, and says which process is there; the first is not disturbed."""
    folder = tmp_path / "run"
    command = [sys.executable, "recipes/cls.py", *settings, "--max_steps", "30", "--checkpoint_every", "15"]
    first = begin([*command, "--output_dir", folder])
    wait_for_steps(folder)
    first.send_signal(signal.SIGSTOP)  # it shall still be there when the second one comes
    try:
        second = recipe(*settings, "--max_steps", "30", "--checkpoint_every", "15", "--output_dir", folder)
    finally:
        first.send_signal(signal.SIGCONT)
    assert second.code == 1
    assert f"another run is writing to it (process {first.pid} on " in second.err
    first.finish(120).succeeded()
    assert [line["step"] for line in lines_of(folder / "metrics.jsonl")] == list(range(1, 31))
    fault("a second run into the same folder", second.err)


def test_a_start_that_failed_blocks_no_other(settings: list[str], tmp_path: Path) -> None:
    """A loss that is not finite: nothing was trained; a config.json that is not a run's stays what it was."""
    rows, options = tmp_path / "rows.csv", [*settings, "--max_steps", "2", "--output_dir", tmp_path / "run"]
    rows.write_text("text,label\n" + "".join(f"word {i},{i}.5\n" for i in range(11)) + "huge,1e30\n")
    regression = ["--train_file", rows, "--validation_file", rows]
    recipe(*options, *regression).says_in_one_line("step 1", "loss of rows 12 is not finite", "--learning_rate")
    assert (tmp_path / "run" / "config.json").is_file()
    assert not (tmp_path / "run" / "model").exists()
    train(*options)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    told = failed(*settings, "--max_steps", "2", "--output_dir", tmp_path / "other")
    assert "already holds a run (config.json)" in told


def test_a_full_disk_while_the_model_is_written(
    settings: list[str], finished: Path, tmp_path: Path, fault: Fault
) -> None:
    run = tmp_path / "run"
    largest = (finished / "model" / "model.safetensors").stat().st_size - 10
    words = [*settings, "--max_steps", "4", "--overwrite_output_dir", "--output_dir", run]
    said = failed(*words, largest_file=largest)
    assert re.fullmatch(rf"cannot write {run}/model: .*File too large.*; nothing was left behind", said), said
    assert sorted(path.name for path in run.iterdir()) == [".lock", "config.json", "metrics.jsonl"]
    fault("a full disk while the model is written", said, "the training: pass --checkpoint_every to lose less")


def test_the_summary_is_about_this_run(settings: list[str], tmp_path: Path) -> None:
    run = tmp_path / "my run"
    words = [*settings, "--max_steps", "4", "--checkpoint_every", "4", "--log_level", "warning", "--output_dir", run]
    finished = recipe(*words).succeeded()
    said, summary = finished.out, finished.out.splitlines()
    assert "done in" not in finished.err
    size = sum(path.stat().st_size for path in (run / "checkpoints").rglob("*") if path.is_file())
    (line,) = [line for line in summary if "checkpoints/" in line]
    assert line.startswith(f"  '{run}'/checkpoints/      {size_text(size)}, ")
    assert line.endswith(f"; `toolkit clean '{run}'` removes them")
    assert [line.split()[:2] for line in summary if line.startswith("  F1 ")] == [["F1", ANY]] * 2
    assert any(f"toolkit predict '{run}'/model YOUR_FILE.csv" in line for line in summary)
    (again,) = summary[summary.index("next:") + 1 :]
    words = shlex.split(again, comments=True)
    assert words[1:] == ["recipes/cls.py", *settings, "--max_steps", "4", "--checkpoint_every", "4", "--log_level",
                         "warning", "--output_dir", f"{run}-2", "--seed", "43"]  # fmt: skip
    assert "f1_micro" not in said


def test_ended_before_its_first_checkpoint(settings: list[str], tmp_path: Path) -> None:
    """It starts again where nothing would be lost; without checkpoints a folder that holds a run is an error."""
    folder = tmp_path / "run"
    folder.mkdir()
    options = ["--max_steps", "3", "--checkpoint_every", "2", "--output_dir", folder]
    train(*settings, *options)
    for path in sorted((folder / "checkpoints").rglob("manifest.json")):
        path.unlink()
    (folder / "report.html").unlink()
    assert "no manifest.json" in train(*settings, *options)
    assert [line["step"] for line in lines_of(folder / "metrics.jsonl")] == [1, 2, 3]
    assert json.loads((folder / "config.json").read_text())["resumed_from"] is None
