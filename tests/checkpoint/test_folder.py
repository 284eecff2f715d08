"""toolkit/checkpoint/folder.py: which checkpoints are complete, and which are removed."""

import errno
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from toolkit.checkpoint import folder as folders
from toolkit.errors import UserError


def save(checkpoints: Path, step: int, at: float | None = None, **more: Any) -> Path:
    folder = folders.step_folder(checkpoints, step)
    folders.create_empty(folder)
    (folder / "model").mkdir()
    (folder / "weights").write_bytes(bytes(range(100)))
    (folder / "model" / "config.json").write_text("{}")
    files = folders.manifest_entries(folder, ["weights", "model/config.json"])
    saved_at = folders.next_save_time(checkpoints) if at is None else at
    folders.publish(folder, {"format": 1, "step": step, "saved_at": saved_at, "files": files, **more})
    return folder


def names_in(checkpoints: Path) -> list[str]:
    return sorted(path.name for path in checkpoints.iterdir())


def test_any_flipped_bit_of_the_manifest_is_seen_or_harmless(tmp_path: Path) -> None:
    folder = save(tmp_path, 123456)
    path = folder / "manifest.json"
    before, manifest = path.read_bytes(), folders.read_manifest(folder)
    refused, _ = 0, manifest.pop("crc32")
    for place in range(len(before)):
        for bit in range(8):
            path.write_bytes(before[:place] + bytes([before[place] ^ 1 << bit]) + before[place + 1 :])
            try:
                actual = folders.read_manifest(folder)
            except UserError as error:
                assert str(path) in str(error)  # noqa: PT017
                refused += 1
            else:
                assert {key: actual.get(key) for key in manifest} == manifest
    assert refused > 0.9 * 8 * len(before)


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "null", '{"format": 2, "files": {}}', '{"format": 1}', "\x00" * 50, "[" * 100_000),
        '{"format": 1, "files": {"../../.ssh/key": {"bytes": 1, "crc32": "00000000"}}}',
        '{"format": 1, "files": {"a": {"bytes": "1"}}}',
        '{"format": 1, "files": {}, "note": "\\ud800", "crc32": "00000000"}',
    ],
)
@pytest.mark.usefixtures("no_garbage_collection")
def test_what_is_no_manifest(tmp_path: Path, content: str) -> None:
    folder = folders.step_folder(tmp_path, 1)
    folder.mkdir()
    (folder / "manifest.json").write_text(content)
    assert "manifest" in folders.find_fault(folder)
    assert folders.find_resumable(tmp_path)[0] == []


@pytest.mark.parametrize("name", ["weights", "model/config.json", "manifest.json"])
def test_a_link_out_of_the_folder_is_not_resumed(tmp_path: Path, name: str) -> None:
    older, folder = save(tmp_path / "run", 1), save(tmp_path / "run", 2)
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    good, skipped = folders.find_resumable(tmp_path / "run")
    assert good == [older]
    assert f"{folder / name} is a link to {tmp_path / 'elsewhere'}, outside" in skipped[0]


def test_a_folder_that_is_a_link_is_read_and_never_emptied(tmp_path: Path) -> None:
    """The user has moved it to another disk."""
    folder = save(tmp_path / "run", 1)
    there = folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(there)
    assert folders.find_resumable(tmp_path / "run") == ([folder], [])
    folders.remove(folder)
    assert names_in(tmp_path / "run") == []
    assert folders.find_fault(there) == ""


def test_newest_is_by_time_not_by_step(tmp_path: Path) -> None:
    """A run that resumed step 2 continues from what it saved then, not from step 8, which was saved in 2096."""
    old, new = save(tmp_path, 8, at=4e9), save(tmp_path, 4)
    assert folders.find_resumable(tmp_path)[0] == folders.list_newest_first(tmp_path) == [new, old]


@pytest.mark.parametrize("code", [None, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_the_best_is_never_removed(code: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `code` on a disk without symbolic links: Google Drive, exFAT, SMB."""
    if code:
        monkeypatch.setattr(Path, "symlink_to", Mock(side_effect=OSError(code, "Operation not permitted")))
    for step in range(1, 6):
        save(tmp_path, step, at=float(step))
    folders.set_links(tmp_path, best_step=2)
    folders.prune(tmp_path, keep=2, best_step=2)
    links = [] if code else ["best", "last"]
    assert names_in(tmp_path) == [*links, *(f"step-{step:08d}" for step in (2, 4, 5))]


def test_a_run_copied_with_its_links_followed_gets_them_again(tmp_path: Path) -> None:
    best, last = save(tmp_path, 1), save(tmp_path, 2)
    for name, folder in (("best", best), ("last", last)):
        shutil.copytree(folder, tmp_path / name)
    folders.set_links(tmp_path, best_step=1)
    assert [(tmp_path / name).readlink().name for name in ("best", "last")] == [best.name, last.name]
    (tmp_path / "best").unlink()
    (tmp_path / "best").mkdir()  # the copy was interrupted: no manifest
    with pytest.raises(IsADirectoryError):
        folders.set_links(tmp_path, best_step=1)
    (tmp_path / "best").rmdir()
    (tmp_path / "last").unlink()
    last.rename(tmp_path / "last")  # no other folder has it
    with pytest.raises(IsADirectoryError):
        folders.set_links(tmp_path, best_step=1)
    assert not folders.find_fault(tmp_path / "last")


def test_files_of_killed_saves_are_removed(tmp_path: Path) -> None:
    whole = save(tmp_path, 1)
    half = folders.step_folder(tmp_path, 2)
    half.mkdir()
    (half / "weights").write_bytes(b"half")
    (half / ".manifest.json.77").write_text("{")
    (tmp_path / ".last.123").symlink_to("step-00000002")
    (tmp_path / "step-1").mkdir()
    (tmp_path / "notes").mkdir()  # not of a run
    folders.prune(tmp_path, keep=3, best_step=2)
    assert names_in(tmp_path) == ["notes", "step-00000001", "step-1"]
    assert folders.find_resumable(tmp_path) == ([whole], [])


def test_a_checkpoint_is_removed_manifest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(tmp_path, 1)
    seen = []
    monkeypatch.setattr(folders.shutil, "rmtree", lambda path, **_: seen.append((path / "manifest.json").exists()))
    folders.remove(folder)
    assert seen == [False]
    monkeypatch.undo()
    folders.create_empty(folder)
    assert list(folder.iterdir()) == []


def test_the_links_of_a_resumed_run(tmp_path: Path) -> None:
    """It may have been killed before it set `last`."""
    older, newer = save(tmp_path, 4), save(tmp_path, 8)
    folders.set_link(tmp_path, "best", newer)
    folders.set_link(tmp_path, "last", older)
    folders.set_links(tmp_path, best_step=4)
    assert ((tmp_path / "best").resolve(), (tmp_path / "last").resolve()) == (older, newer)
    folders.set_links(tmp_path, best_step=5)
    assert not (tmp_path / "best").is_symlink()


def test_a_checkpoint_that_cannot_be_removed_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only one; the run continues."""
    older, newer = save(tmp_path, 1), save(tmp_path, 2)
    monkeypatch.setattr(folders, "remove", Mock(side_effect=PermissionError(13, "Permission denied")))
    folders.prune(tmp_path, keep=1, best_step=2)
    assert folders.complete(tmp_path) == [newer, older]
