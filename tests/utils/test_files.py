"""toolkit/utils/files.py: files and folders are written completely or not at all."""

import errno
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.checkpoint.test_folder import names_in
from tests.faults import refusal
from toolkit.errors import UserError, size_text
from toolkit.utils import files
from toolkit.utils.files import draft_path, explain_write_errors, replace_file, replace_folder


@pytest.mark.parametrize("existing", ["file", "link", "dangling link"])
def test_write_new_refuses_existing_paths(tmp_path: Path, existing: str) -> None:
    path, target = tmp_path / "new", tmp_path / "other"
    if existing != "dangling link":
        (path if existing == "file" else target).write_text("kept")
    if existing != "file":
        path.symlink_to(target)
    with pytest.raises(FileExistsError):
        files.write_new(path, "x")
    assert not target.exists() or target.read_text() == "kept"


@pytest.mark.parametrize("flush", [True, False])
def test_replace_file(tmp_path: Path, flush: bool) -> None:
    path = tmp_path / "new" / "a.txt"
    for text in ("first", "second"):
        with replace_file(path, flush) as draft:
            draft.write_text(text)
            assert not path.exists() or path.read_text() == "first"
        assert path.read_text() == text
    with pytest.raises(TypeError), replace_file(path) as draft:
        draft.open("w").writelines(["half", 2])  # type: ignore[list-item]
    assert (path.read_text(), names_in(path.parent)) == ("second", ["a.txt"])
    for target in ("a", "b"):  # of a link
        (tmp_path / target).mkdir()
        with replace_file(tmp_path / "last") as draft:
            draft.symlink_to(target)
    assert (tmp_path / "last").readlink() == Path("b")


def test_a_disk_that_cannot_flush_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an SMB share before Linux 6.1; that a file cannot be flushed remains an error."""
    invalid = OSError(errno.EINVAL, "Invalid argument")
    monkeypatch.setattr(files.os, "fsync", Mock(side_effect=[None, invalid, invalid]))
    with replace_file(tmp_path / "a") as draft:
        draft.touch()
    with pytest.raises(OSError, match="Invalid"):
        files.flush_path(tmp_path / "a")


def test_replace_folder(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out"
    with pytest.raises(FileNotFoundError), replace_folder(path) as draft:
        (draft / "x" / "y").touch()
    assert names_in(path.parent) == []
    for text in ("first", "second"):
        with replace_folder(path, overwrite=True) as draft:
            (draft / "x").write_text(text)
    message = f"cannot write {path}: Directory not empty; nothing was left behind"
    with (
        pytest.raises(UserError, match=message),
        explain_write_errors(path),
        replace_folder(path) as draft,
    ):
        (draft / "x").write_text("third")
    assert ((path / "x").read_text(), names_in(path.parent)) == ("second", ["out"])


@pytest.mark.parametrize(
    ("message", "raised", "match"),
    [("No space left on device (os error 28)", UserError, r"\(os error 28\); nothing was left behind"),
     ("another error", RuntimeError, "another error")],
)  # fmt: skip
def test_disk_errors_of_libraries(
    tmp_path: Path, message: str, raised: type[Exception], match: str
) -> None:
    """tokenizers and safetensors do not raise OSError."""
    with pytest.raises(raised, match=match), explain_write_errors(tmp_path / "out"):
        raise RuntimeError(message)


def test_spare(tmp_path: Path) -> None:
    def check_old(old: Path) -> None:
        raise UserError(f"it holds {names_in(old)}")

    (tmp_path / "out").mkdir()
    with (
        pytest.raises(UserError, match="thesis"),
        replace_folder(tmp_path / "out", True, check_old=check_old),
    ):
        (tmp_path / "out" / "thesis.txt").touch()
    assert (names_in(tmp_path), names_in(tmp_path / "out")) == (["out"], ["thesis.txt"])


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not JSON"), ("[1]", "holds a list"), ('{"n": "3"}', 'n is "3" and should be a whole number')],
)  # fmt: skip
def test_malformed_table(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    kinds = {"n": (lambda value: type(value) is int, "a whole number")}
    refusal(files.read_table, path, kinds, says=[str(path), message])


def test_remove_drafts(tmp_path: Path) -> None:
    for name in ("model", "adapter"):
        draft_path(tmp_path / name, "old").mkdir()
        draft_path(tmp_path / name).mkdir()
    draft_path(tmp_path / "config.json").touch()
    (tmp_path / "adapter").mkdir()
    (tmp_path / ".hidden").touch()
    files.remove_drafts(tmp_path)
    assert names_in(tmp_path) == [".hidden", "adapter", "model"]


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1 kB"), (12_540_000, "12.5 MB"), (999_999_999, "1 GB"),
     (1_340_000_000, "1.34 GB"), (2.5e15, "2500 TB")],
)  # fmt: skip
def test_size_text(size: float, text: str) -> None:
    assert size_text(size) == text
