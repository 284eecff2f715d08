"""What `--resume` means for the checkpoints that are there: which one a run continues, and which it refuses; a run that
is moved aside. (Promises 3 and 5.) A checkpoint of another job: tests/test_resume.py."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.test_folder import flip, save
from tests.faults import refusal
from toolkit.checkpoint import folder as folders
from toolkit.config import TrainingSettings
from toolkit.training.resume import choose_origin, digest_of_model
from toolkit.training.run_folder import create_run_folder

FACTS: dict[str, Any] = {
    "identity": {"recipe": "cls", "model": "bert", "data": "0a1b"},
    "settings": {"train_file": "a.csv", "learning_rate": 1e-3},
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (2, 4, 6):
        folder = save(tmp_path / "run" / "checkpoints", step, **FACTS)
    folders.set_links(folder.parent, best_step=4)
    return tmp_path / "run"


def step_of(origin: Path | None) -> int | None:
    return folders.step_number(origin) if origin else None


PATHS = {"": 6, "checkpoints": 6, "checkpoints/step-00000002": 2, "checkpoints/best": 4}


def test_auto_no_and_a_path(run: Path, tmp_path: Path) -> None:
    """Other settings may differ. A damaged checkpoint that is named is an error; otherwise it is skipped:
    tests/test_resume.py."""
    other = {
        "settings": {"train_file": "a.csv", "learning_rate": 1.0, "new_setting": 3},
        "identity": {**FACTS["identity"], "new": 1},
    }
    for facts in (FACTS, other):
        assert step_of(choose_origin("auto", run / "checkpoints", facts)) == 6
    assert choose_origin("auto", tmp_path / "new" / "checkpoints", FACTS) is None
    assert choose_origin("no", run / "checkpoints", FACTS) is None
    for path, step in PATHS.items():
        assert step_of(choose_origin(str(run / path), tmp_path / "new", FACTS)) == step
    folder = run / "checkpoints" / "step-00000006"
    flip(folder / folders.WEIGHTS_FILE)
    message = "^--resume .*: there is no whole checkpoint"
    refusal(choose_origin, str(folder), run / "checkpoints", FACTS, match=message)


AFRESH = {"overwrite_output_dir": True}


@pytest.mark.parametrize(
    ("options", "saved_at", "expected"),
    [(AFRESH, 1.0, None), (AFRESH, None, 8), ({"resume": "no"}, None, 8)],
)
def test_a_restart_resumes_only_what_its_job_has_saved(
    options: Any, saved_at: Any, expected: int | None, run: Path, monkeypatch: Any
) -> None:
    for step in (2, 4, 6):
        save(run / "checkpoints", step, 1.0, **FACTS)
    save(run / "checkpoints", 8, saved_at, **FACTS)
    settings = TrainingSettings(output_dir=str(run), checkpoint_every=2, **options)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert step_of(create_run_folder(settings, "cls", FACTS).origin) == expected


def test_only_a_run_that_ended_before_its_first_checkpoint_is_moved_aside(run: Path) -> None:
    settings = TrainingSettings(output_dir=str(run))
    shutil.rmtree(run / "checkpoints")
    (run / "model").mkdir()
    (run / "config.json").write_text('{"identity": {}}')
    create_run_folder(settings, "cls", FACTS)
    (aside,) = run.parent.glob("run.old-*")
    assert (aside / "model").is_dir()
    assert not (run / "model").exists()
    shutil.copy(aside / "config.json", run)
    (run / "report.html").touch()  # it has finished
    refusal(create_run_folder, settings, "cls", FACTS, match="already contains a run")


def test_the_old_run_is_moved_aside(run: Path, tmp_path: Path, monkeypatch: Any) -> None:
    (link := tmp_path / "link").symlink_to(run)  # to another disk
    settings = TrainingSettings(output_dir=str(link), checkpoint_every=2, **AFRESH)
    create_run_folder(settings, "cls", FACTS)
    assert link.is_symlink()
    (aside,) = run.parent.glob("run.old-*")
    assert not (run / "checkpoints").exists()
    assert (aside / "checkpoints").exists()
    monkeypatch.chdir(run)
    (run / "model").mkdir()
    here = TrainingSettings(output_dir=".", **AFRESH)
    refusal(create_run_folder, here, "cls", FACTS, match="current folder")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_another_model_is_noticed(name: str, tmp_path: Path) -> None:
    digests = set()
    for content in ("a", "b"):
        (tmp_path / name).write_text(content)
        digests.add(digest_of_model(tmp_path))
    assert len(digests) == 2
