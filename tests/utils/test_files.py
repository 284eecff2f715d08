"""Files and folders appear whole or not at all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from toolkit.errors import UserError
from toolkit.utils.files import (
    draft_path,
    explain_write_errors,
    read_table,
    remove_drafts,
    replace_file,
    replace_folder,
    write_new,
)
from toolkit.utils.units import size_text


@pytest.mark.parametrize("there", ["file", "link", "link to nowhere"])
def test_a_new_file_is_never_one_that_is_there(tmp_path: Path, there: str) -> None:
    path, other = tmp_path / "new", tmp_path / "other"
    if there != "link to nowhere":
        (path if there == "file" else other).write_text("kept")
    if there != "file":
        path.symlink_to(other)
    with pytest.raises(FileExistsError):
        write_new(path, "x")
    assert not other.exists() or other.read_text() == "kept"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("flush", [True, False])
def test_a_file_is_replaced_in_one_move(tmp_path: Path, flush: bool) -> None:
    path = tmp_path / "new" / "a.txt"
    for text in ("first", "second"):
        with replace_file(path, flush) as draft:
            draft.write_text(text)
            assert not path.exists() or path.read_text() == "first"
        assert path.read_text() == text
    with pytest.raises(TypeError), replace_file(path) as draft:
        draft.open("w").writelines(["half", 2])  # type: ignore[list-item]
    assert (path.read_text(), names(path.parent)) == ("second", ["a.txt"])


def test_a_link_is_replaced_in_one_move(tmp_path: Path) -> None:
    for target in ("a", "b"):
        (tmp_path / target).mkdir()
        with replace_file(tmp_path / "last") as draft:
            draft.symlink_to(target)
    assert (tmp_path / "last").readlink() == Path("b")


def test_a_folder_appears_whole_and_replaces_only_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out"
    with pytest.raises(FileNotFoundError), replace_folder(path) as draft:
        (draft / "x" / "y").touch()
    assert names(tmp_path) == []
    for text in ("first", "second"):
        with replace_folder(path, overwrite=True) as draft:
            (draft / "x").write_text(text)
    message = f"cannot write {path}: Directory not empty; nothing was left behind"
    with pytest.raises(UserError, match=message), explain_write_errors(path), replace_folder(path) as draft:
        (draft / "x").write_text("third")
    assert ((path / "x").read_text(), names(path.parent)) == ("second", ["out"])


def test_a_full_disk_is_a_line_in_the_words_of_every_library(tmp_path: Path) -> None:
    """tokenizers and safetensors raise no OSError."""
    full = "No space left on device (os error 28)"
    with (
        pytest.raises(UserError, match=f"{re.escape(full)}; nothing was left behind"),
        explain_write_errors(tmp_path / "out"),
    ):
        raise RuntimeError(full)
    with pytest.raises(RuntimeError, match="another fault"), explain_write_errors(tmp_path / "out"):
        raise RuntimeError("another fault")


def test_only_what_was_made_here_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.mkdir

    def mkdir(path: Path) -> None:
        if path.name == "theirs":
            real(path)  # another process is quicker
        real(path)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    for name in ("ours", "theirs"):
        with pytest.raises(FileNotFoundError), replace_folder(tmp_path / name / "deep" / "out") as draft:
            (draft / "x" / "y").touch()
    assert names(tmp_path) == ["theirs"]


def test_what_is_to_be_replaced_can_be_spared(tmp_path: Path) -> None:
    def spare(old: Path) -> None:
        raise UserError(f"it holds {names(old)}")

    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="thesis"), replace_folder(tmp_path / "out", True, spare=spare):
        (tmp_path / "out" / "thesis.txt").touch()
    assert (names(tmp_path), names(tmp_path / "out")) == (["out"], ["thesis.txt"])


@pytest.mark.parametrize(
    ("text", "says"),
    [("{", "is not JSON"), ("[" * 100_000, "is not JSON"), (r'{"a": "\ud800"}', "is not JSON"), ("[1]", "holds a list"),
     ("\0", "is not JSON"), ('{"n": "3"}', 'n is "3" and should be a whole number')],
)  # fmt: skip
def test_a_malformed_table_is_one_line(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UserError, match=says) as caught:
        read_table(tmp_path / "x.json", {"n": (lambda value: type(value) is int, "a whole number")})
    assert str(tmp_path / "x.json") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_a_killed_writer_left_is_put_back_or_removed(tmp_path: Path) -> None:
    for name in ("model", "adapter"):
        draft_path(tmp_path / name, "old").mkdir()
        draft_path(tmp_path / name).mkdir()
    draft_path(tmp_path / "config.json").touch()
    (tmp_path / "adapter").mkdir()
    (tmp_path / ".hidden").touch()
    remove_drafts(tmp_path)
    assert names(tmp_path) == [".hidden", "adapter", "model"]


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1 kB"), (12_540_000, "12.5 MB"), (999_999_999, "1 GB"),
     (1_340_000_000, "1.34 GB"), (2.5e15, "2500 TB")],
)  # fmt: skip
def test_sizes_are_told_in_powers_of_ten(size: float, text: str) -> None:
    assert size_text(size) == text
