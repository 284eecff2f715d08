"""What `--resume` means for the checkpoints that are there: which one a run continues, and which it refuses (promises 3
and 5)."""

from pathlib import Path
from typing import Any

import pytest
from filelock import SoftFileLock

from tests.checkpoint.test_folder import save
from tests.faults import refusal
from toolkit.checkpoint import folder as folders
from toolkit.config import TrainingSettings
from toolkit.training import run_folder
from toolkit.training.resume import Origin, choose_origin, digest_of_model, precision_of
from toolkit.training.run_folder import create_run_folder

IDENTITY = {"recipe": "cls", "model": "bert", "labels": ["neg", "pos"], "data": "0a1b", "max_length": 128,
            "global_batch_size": 32, "group_by_length": True, "seed": 42, "lora_r": None}  # fmt: skip
SETTINGS = {"train_file": "a.csv", "text_column": None, "learning_rate": 1e-3, "max_length": None}
FACTS: dict[str, Any] = {"identity": IDENTITY, "settings": SETTINGS}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (2, 4, 6):
        folder = save(tmp_path / "run" / "checkpoints", step, **FACTS, mixed_precision="bf16")
    folders.set_links(folder.parent, best_step=4)
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "auto"),  # a new folder
        ({"output_dir": "new"}, "auto"),
        ({"output_dir": "run"}, "fp16"),
        ({"output_dir": "run", "mixed_precision": "no"}, "no"),
        ({"output_dir": "run", "resume": "no"}, "auto"),
        ({"output_dir": "run", "overwrite_output_dir": True}, "auto"),
        ({"output_dir": "new", "resume": "run"}, "fp16"),
        ({"output_dir": "run", "resume": "step-00000008"}, "fp16"),
        ({"output_dir": "run", "resume": "step-00000002"}, "bf16"),
        ({"output_dir": "run", "resume": "nothing"}, "auto"),
    ],
)
def test_a_resumed_runs_precision(
    options: Any, expected: str, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(run / "checkpoints", 8, **FACTS, mixed_precision="fp16")
    monkeypatch.chdir(run.parent)
    assert precision_of(TrainingSettings(**options)) == expected
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    other = precision_of(TrainingSettings(**options))  # whose disk may hold an older run
    assert other == options.get("mixed_precision", "auto")


def step_of(origin: Origin) -> int | None:
    return folders.step_number(origin.folder) if origin.folder else None


def test_auto_and_no(run: Path, tmp_path: Path) -> None:
    other = {
        "settings": {**SETTINGS, "learning_rate": 1.0, "new_setting": 3},
        "identity": {**IDENTITY, "new": 1},
    }
    for facts in (FACTS, other):  # other settings may differ
        assert step_of(choose_origin("auto", run / "checkpoints", facts)) == 6
    assert choose_origin("auto", tmp_path / "new" / "checkpoints", FACTS) == Origin()
    assert choose_origin("no", run / "checkpoints", FACTS) == Origin()


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("", 6),
        ("checkpoints", 6),
        ("checkpoints/step-00000002", 2),
        ("checkpoints/best", 4),
        ("checkpoints/last", 6),
    ],
)
def test_a_path(path: str, expected: int, run: Path, tmp_path: Path) -> None:
    assert step_of(choose_origin(str(run / path), tmp_path / "elsewhere", FACTS)) == expected


def test_a_damaged_checkpoint_is_an_error_if_it_is_named(run: Path) -> None:
    """Otherwise it is skipped: tests/test_resume.py."""
    folder = run / "checkpoints" / "step-00000006"
    (folder / folders.WEIGHTS_FILE).write_bytes(b"0")
    message = "^--resume .*: every checkpoint is damaged"
    refusal(choose_origin, str(folder), run / "checkpoints", FACTS, match=message, lines=2)


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
    save(run / "checkpoints", 8, saved_at, **FACTS, mixed_precision="fp16")
    settings = TrainingSettings(output_dir=str(run), checkpoint_every=2, **options)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert precision_of(settings) == ("fp16" if expected else "auto")
    assert step_of(create_run_folder(settings, "cls", FACTS).origin) == expected


def test_a_path_without_checkpoints(run: Path, tmp_path: Path) -> None:
    refusal(
        choose_origin, str(run / "checkpoint"), run / "checkpoints", FACTS, match="no such folder"
    )
    (tmp_path / "empty").mkdir()
    refusal(
        choose_origin,
        str(tmp_path / "empty"),
        run / "checkpoints",
        FACTS,
        match="there is no checkpoint",
    )


def test_a_different_identity_names_the_changed_setting(run: Path) -> None:
    identity = {**IDENTITY, "data": "ffff"}
    other = {"identity": identity, "settings": {**SETTINGS, "train_file": "b.csv"}}
    error = refusal(
        choose_origin,
        "auto",
        run / "checkpoints",
        other,
        match=r"train_file was a.csv and is b.csv",
    )
    assert "ffff" not in error
    facts = {"identity": identity, "settings": SETTINGS}
    message = "the content of the files, or the tokenizer, has changed"
    refusal(choose_origin, "auto", run / "checkpoints", facts, match=message)
    facts = {"identity": {**identity, "max_length": 40}, "settings": {**SETTINGS, "max_length": 40}}
    error = refusal(
        choose_origin, "auto", run / "checkpoints", facts, match="max_length was 128 and is 40"
    )
    assert error.count("max_length was") == 1
    assert message not in error


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
    refusal(
        create_run_folder, settings, "cls", FACTS, match=f"if it has ended, remove {link}/.lock"
    )
    (run / ".lock").unlink()
    monkeypatch.chdir(run)
    (run / "model").mkdir()
    here = TrainingSettings(output_dir=".", overwrite_output_dir=True)
    refusal(create_run_folder, here, "cls", FACTS, match="would move the current folder")


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "model.onnx", "openvino_model.xml"]
)
def test_another_model_or_exported_teacher_is_noticed(name: str, tmp_path: Path) -> None:
    checksums = set()
    for content in ("a", "b"):
        (tmp_path / name).write_text(content)
        checksums.add(digest_of_model(tmp_path))
    assert len(checksums) == 2
