"""Files and folders appear whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.errors import UserError
from toolkit.files import draft_of, remove_drafts, replace_file, replace_folder, writing
from toolkit.units import size_text


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
    with pytest.raises(UserError, match=message), writing(path), replace_folder(path) as draft:
        (draft / "x").write_text("third")
    assert ((path / "x").read_text(), names(path.parent)) == ("second", ["out"])


def test_what_a_killed_writer_left_is_put_back_or_removed(tmp_path: Path) -> None:
    for name in ("model", "adapter"):
        draft_of(tmp_path / name, "old").mkdir()
        draft_of(tmp_path / name).mkdir()
    draft_of(tmp_path / "config.json").touch()
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
