"""A second run in the same folder: what resumes, and what is refused without touching a file."""

import json
import shutil
import signal
from pathlib import Path

import pytest

from tests.runs import digests, failed, fork, lines_of, recipe, run_of, train, wait_until_stopped


@pytest.fixture(scope="module")
def settings(tiny_job: list[str]) -> list[str]:
    return [*tiny_job, "--global_batch_size", "12", "--eval_every", "4"]


@pytest.fixture(scope="module")
def finished(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = ["--max_steps", "4", "--checkpoint_every", "2"]
    return run_of([*settings, *options], tmp_path_factory.mktemp("finished") / "run")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["--max_steps", "4", "--learning_rate", "3e-3"], "(learning_rate was 5e-05 and is 0.003)"),
        (["--max_steps", "3"], "has taken 4 of 3 steps"),
        (["--max_steps", "8", "--resume", "no"], "already contains a run"),
    ],
)  # fmt: skip
def test_refused(changed: list[str], message: str, settings: list[str], finished: Path) -> None:
    before = digests(finished)
    assert message in failed(
        *settings, "--checkpoint_every", "2", *changed, "--output_dir", finished
    )
    assert digests(finished) == before


def test_two_at_once(settings: list[str], tmp_path: Path) -> None:
    """The second is refused with the first one's process id; the first continues."""
    folder = tmp_path / "run"
    words = [*settings, "--max_steps", "30", "--checkpoint_every", "15", "--output_dir", folder]
    with fork(
        ["tests/failing_worker.py", "stands still", "0", *words], {"TESTS_WITHOUT_PAGES": ""}
    ) as first:
        wait_until_stopped(first)
        second = recipe(*words)
        first.send_signal(signal.SIGCONT)
        first.finish(120).succeeded()
    assert second.code == 1
    assert "another run is writing to it" in second.err
    assert [line["step"] for line in lines_of(folder / "metrics.jsonl")] == list(range(1, 31))


def test_a_run_that_failed_before_its_first_step_is_replaced(
    settings: list[str], tmp_path: Path
) -> None:
    """A loss that is not finite; a config.json that is not a run's is not overwritten."""
    rows = tmp_path / "rows.csv"
    options = [*settings, "--max_steps", "2", "--output_dir", tmp_path / "run"]
    rows.write_text(
        "text,label\n" + "".join(f"word {i},{i}.5\n" for i in range(11)) + "huge,1e30\n"
    )
    regression = ["--train_file", rows, "--validation_file", rows]
    recipe(*options, *regression).says_in_one_line(
        "step 1", "loss of rows 12 is not finite", "--learning_rate"
    )
    assert (tmp_path / "run" / "config.json").is_file()
    assert not (tmp_path / "run" / "model").exists()
    train(*options)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    message = failed(*settings, "--max_steps", "2", "--output_dir", tmp_path / "other")
    assert "already contains a run (config.json)" in message


def test_ended_before_its_first_checkpoint(settings: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    options = ["--max_steps", "3", "--checkpoint_every", "2", "--output_dir", folder]
    train(*settings, *options)
    for path in (folder / "checkpoints").glob("step-*"):
        shutil.rmtree(path)
    (folder / "report.html").unlink()
    assert "resuming" not in train(*settings, *options)
    assert [line["step"] for line in lines_of(folder / "metrics.jsonl")] == [1, 2, 3]
    assert json.loads((folder / "config.json").read_text())["resumed_from"] is None
