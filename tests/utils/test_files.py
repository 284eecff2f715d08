"""toolkit/utils/{files,cache}.py: files and folders are written completely or not at all, those of the cache once per
machine. (Promise 3.)"""

import errno
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.checkpoint.test_folder import names_in
from tests.faults import refusal
from toolkit.errors import UserError
from toolkit.utils import files
from toolkit.utils.cache import cached_folder
from toolkit.utils.files import draft_path, explain_write_errors, replace_file, replace_folder


def test_write_new_refuses_existing_paths(tmp_path: Path) -> None:
    target = tmp_path / "other"
    (tmp_path / "file").write_text("kept")
    (tmp_path / "dangling link").symlink_to(target)
    for name in ("file", "dangling link"):
        with pytest.raises(FileExistsError):
            files.write_new(tmp_path / name, "x")
    assert (tmp_path / "file").read_text() == "kept"
    assert not target.exists()


def test_replace_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.txt"
    for text in ("first", "second"):
        with replace_file(path) as draft:
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
    refuses = pytest.raises(UserError, match=str(path))
    with refuses, explain_write_errors(path), replace_folder(path) as draft:
        (draft / "x").write_text("third")
    assert ((path / "x").read_text(), names_in(path.parent)) == ("second", ["out"])


def test_disk_errors_of_libraries(tmp_path: Path) -> None:
    """tokenizers and safetensors do not raise OSError."""
    refuses = pytest.raises(UserError, match=str(tmp_path))
    with refuses, explain_write_errors(tmp_path / "out"):
        raise RuntimeError("No space left on device (os error 28)")
    with pytest.raises(RuntimeError, match="another"), explain_write_errors(tmp_path / "out"):
        raise RuntimeError("another")


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_malformed_table_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    refusal(files.read_json_object, path, says=[str(path)])


def test_remove_drafts(tmp_path: Path) -> None:
    """Of a folder that was being replaced the old one comes back."""
    for name in ("model", "adapter"):
        draft_path(tmp_path / name, "old").mkdir()
        draft_path(tmp_path / name).mkdir()
    draft_path(tmp_path / "config.json").touch()
    (tmp_path / "adapter").mkdir()
    (tmp_path / ".hidden").touch()
    files.remove_drafts(tmp_path)
    assert names_in(tmp_path) == [".hidden", "adapter", "model"]


pytestmark = pytest.mark.usefixtures("toolkit_cache")


def build(fill: Callable[[Path], object]) -> Path:
    """The cache folder tokens/abc, which `fill` fills if needed."""
    with cached_folder("tokens", "abc", None, "reviews.csv") as (folder, draft):
        if draft:
            fill(draft)
    return folder


def fill_well(draft: Path) -> None:
    (draft / "train").mkdir()
    (draft / "train" / "labels.npy").write_text("0")


def test_a_full_disk(toolkit_cache: Path) -> None:
    def fill(draft: Path) -> None:
        (draft / "half").write_text("x")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    refusal(build, fill, says=["tokens/abc", "No space left", "TOOLKIT_CACHE"])
    assert [path.name for path in (toolkit_cache / "tokens").iterdir()] == ["abc.lock"]
    assert not (build(fill_well) / "half").exists()


def test_two_processes_build_once() -> None:
    drafts = []

    def fill(draft: Path) -> None:
        drafts.append(draft)
        time.sleep(0.2)

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(build, [fill, fill])
    assert (one, len(drafts)) == (other, 1)
