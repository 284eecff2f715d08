"""`toolkit clean` removes the checkpoints of finished runs; a run reports the size of its checkpoints at its start."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tests.checkpoint.test_folder import names_in, save
from tests.faults import refusal
from toolkit.checkpoint import folder as folders
from toolkit.commands.clean import clean
from toolkit.errors import UserError, size_text


def finished_run(path: Path, steps: int = 6, waited: int = 0, **config: Any) -> Path:
    for step in (3, 6):
        folder = save(path / "checkpoints", step, best={"waited": waited})
        folders.set_link(path / "checkpoints", "last", folder)
    folders.set_link(path / "checkpoints", "best", folder)
    (path / "config.json").write_text(json.dumps({"data": {"total_steps": 6}, "settings": {}, **config}))
    (path / "metrics.jsonl").write_text("".join(f'{{"step": {step + 1}}}\n' for step in range(steps)))
    for name in ("eval.jsonl", "report.html", "model"):
        (path / name).touch()
    return path


def test_clean_removes_only_checkpoints(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run")
    rest = [name for name in names_in(run) if name != "checkpoints"]
    size = sum(path.stat().st_size for path in (run / "checkpoints").glob("step-*/**/*") if path.is_file())
    message = clean(run)
    assert message == f"{run}: freed {size_text(size)} (step-00000006, step-00000003)"
    assert [name for name in names_in(run) if name != ".lock"] == rest
    assert "there were no checkpoints" in clean(run)
    run = finished_run(tmp_path / "other")
    (run / "checkpoints" / "notes.txt").touch()
    there = (run / "checkpoints" / "step-00000003").rename(tmp_path / "elsewhere")
    (run / "checkpoints" / "step-00000003").symlink_to(there)
    size = sum(path.stat().st_size for path in (run / "checkpoints" / "step-00000006").rglob("*") if path.is_file())
    assert f"freed {size_text(size)} (" in clean(run)
    assert names_in(run / "checkpoints") == ["notes.txt"]
    assert folders.find_fault(there) == ""


def test_clean_refuses_unfinished_runs(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run")
    with FileLock(run / ".lock"), pytest.raises(UserError, match="a run is writing to it"):
        clean(run)
    for path, message in (
        (finished_run(tmp_path / "stopped", stopped={"step": 3}), "was stopped"),
        (finished_run(tmp_path / "killed", steps=4), "has taken 4 of 6 steps"),
        (tmp_path / "none", "does not exist"),
    ):
        refusal(clean, path, match=message)
    (run / "report.html").unlink()
    refusal(clean, run, match=r"is not finished: the same command resumes it")
    (run / "report.html").touch()
    os.utime(run / "report.html", (1, 1))  # of before it went on
    refusal(clean, run, match="is not finished")
    assert len(folders.complete(run / "checkpoints")) == 2
    patience = {"early_stopping_patience": 2}
    killed = finished_run(tmp_path / "patient", steps=4, waited=1, settings=patience)  # and then `toolkit report`
    refusal(clean, killed, match="has taken 4 of 6 steps")
    stopped_early = finished_run(tmp_path / "early", steps=4, waited=2, settings=patience)
    assert "freed" in clean(stopped_early)
    assert "there were no checkpoints" in clean(stopped_early)


def test_checkpoint_size_is_compared_with_free_space(tmp_path: Path) -> None:
    save(tmp_path / "checkpoints", 3)
    (size,), free = folders.disk_usage(tmp_path / "checkpoints")
    assert size == 102
    assert folders.disk_usage(tmp_path / "not" / "there")[0] == []
    assert free > 0
    note = folders.size_note(tmp_path, 10**9, 3, 5 * 10**9)
    assert note == f"checkpoints: about 1 GB each, at most 3 at a time, 3 GB; 5 GB free at {tmp_path}"
    assert "--keep_checkpoints" in folders.size_note(tmp_path, 10**9, 3, 2 * 10**9)
    with pytest.raises(UserError, match=r"about 1 GB each, .*; 999 MB free at .*, too little for one: .*--output_dir"):
        folders.size_note(tmp_path, 10**9, 3, 999 * 10**6)
