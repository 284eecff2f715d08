"""What `--resume` means for the checkpoints that are there: which one a run continues, and which it refuses (promises 3
and 5)."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from filelock import SoftFileLock

from tests.checkpoint.test_folder import save
from tests.faults import refusal
from toolkit.checkpoint import folder as folders
from toolkit.config import TrainingSettings
from toolkit.training import run_folder
from toolkit.training.resume import choose_origin, digest_of_model
from toolkit.training.run_folder import create_run_folder

IDENTITY = {"recipe": "cls", "model": "bert", "labels": ["neg", "pos"], "data": "0a1b", "max_length": 128,
            "global_batch_size": 32, "group_by_length": True, "seed": 42, "lora_r": None}  # fmt: skip
SETTINGS = {"train_file": "a.csv", "text_column": None, "learning_rate": 1e-3, "max_length": None}
FACTS: dict[str, Any] = {"identity": IDENTITY, "settings": SETTINGS}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (2, 4, 6):
        folder = save(tmp_path / "run" / "checkpoints", step, **FACTS)
    folders.set_links(folder.parent, best_step=4)
    return tmp_path / "run"


def step_of(origin: Path | None) -> int | None:
    return folders.step_number(origin) if origin else None


def test_auto_and_no(run: Path, tmp_path: Path) -> None:
    other = {
        "settings": {**SETTINGS, "learning_rate": 1.0, "new_setting": 3},
        "identity": {**IDENTITY, "new": 1},
    }
    for facts in (FACTS, other):  # other settings may differ
        assert step_of(choose_origin("auto", run / "checkpoints", facts)) == 6
    assert choose_origin("auto", tmp_path / "new" / "checkpoints", FACTS) is None
    assert choose_origin("no", run / "checkpoints", FACTS) is None


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("", 6), ("checkpoints", 6), ("checkpoints/step-00000002", 2), ("checkpoints/best", 4),
        ("checkpoints/last", 6),
    ],
)  # fmt: skip
def test_a_path(path: str, expected: int, run: Path, tmp_path: Path) -> None:
    assert step_of(choose_origin(str(run / path), tmp_path / "elsewhere", FACTS)) == expected


def test_a_damaged_checkpoint_is_an_error_if_it_is_named(run: Path) -> None:
    """Otherwise it is skipped: tests/test_resume.py."""
    folder = run / "checkpoints" / "step-00000006"
    (folder / folders.WEIGHTS_FILE).write_bytes(b"0")
    message = "^--resume .*: there is no whole checkpoint"
    refusal(choose_origin, str(folder), run / "checkpoints", FACTS, match=message)


@pytest.mark.parametrize(
    ("options", "saved_at", "expected"),
    [({"overwrite_output_dir": True}, 1.0, None), ({"overwrite_output_dir": True}, None, 8),
     ({"resume": "no"}, None, 8)],
)  # fmt: skip
def test_a_restart_resumes_only_what_its_job_has_saved(
    options: Any,
    saved_at: float | None,
    expected: int | None,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for step in (2, 4, 6):
        save(run / "checkpoints", step, 1.0, **FACTS)
    save(run / "checkpoints", 8, saved_at, **FACTS)
    settings = TrainingSettings(output_dir=str(run), checkpoint_every=2, **options)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert step_of(create_run_folder(settings, "cls", FACTS).origin) == expected


def test_a_different_identity_names_the_changed_setting(run: Path) -> None:
    identity = {**IDENTITY, "data": "ffff", "max_length": 40}
    settings = {**SETTINGS, "train_file": "b.csv", "max_length": 40}
    error = refusal(
        choose_origin,
        "auto",
        run / "checkpoints",
        {"identity": identity, "settings": settings},
        says=["data was 0a1b and is ffff", "train_file was a.csv and is b.csv"],
    )
    assert error.count("max_length was") == 1


def test_a_run_without_a_checkpoint_is_moved_aside(run: Path) -> None:
    settings = TrainingSettings(output_dir=str(run))
    shutil.rmtree(run / "checkpoints")
    (run / "model").mkdir()
    (run / "config.json").write_text('{"identity": {}}')
    create_run_folder(settings, "cls", FACTS)
    assert not (run / "model").exists()
    (aside,) = run.parent.glob("run.old-*")
    assert (aside / "model").is_dir()


@pytest.mark.parametrize("is_run", [True, False])
def test_a_finished_run_and_a_model_are_not_moved(is_run: bool, run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    (run / "config.json").write_text('{"identity": {}}' if is_run else "{}")
    if is_run:
        (run / "report.html").touch()
    settings = TrainingSettings(output_dir=str(run))
    refusal(create_run_folder, settings, "cls", FACTS, match="already contains a run")


def test_the_old_run_is_moved_aside(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (link := tmp_path / "link").symlink_to(run)
    settings = TrainingSettings(output_dir=str(link), overwrite_output_dir=True, checkpoint_every=2)
    create_run_folder(settings, "cls", FACTS)
    assert link.is_symlink()  # to another disk
    assert [
        (path / "checkpoints").exists() for path in (run, *run.parent.glob(f"{run.name}.old-*"))
    ] == [False, True]
    monkeypatch.setattr(run_folder, "FileLock", SoftFileLock)  # as on a disk without flock
    (run / ".lock").write_text("1\nanother-host\n")
    refusal(create_run_folder, settings, "cls", FACTS, says=["if it has ended", f"{link}/.lock"])
    (run / ".lock").unlink()
    monkeypatch.chdir(run)
    (run / "model").mkdir()
    here = TrainingSettings(output_dir=".", overwrite_output_dir=True)
    refusal(create_run_folder, here, "cls", FACTS, match="current folder")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_another_model_is_noticed(name: str, tmp_path: Path) -> None:
    digests = set()
    for content in ("a", "b"):
        (tmp_path / name).write_text(content)
        digests.add(digest_of_model(tmp_path))
    assert len(digests) == 2
