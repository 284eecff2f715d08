"""The content of files, told in a few characters."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from toolkit.features.doctor import data


def entry(path: Path, setting: str = "train_file") -> dict[str, Any]:
    return data.checksums({setting: path}, seconds=10)[setting]


def test_the_content_counts_and_not_the_name(tmp_path: Path) -> None:
    for name, text in {"a.csv": "x\n", "b.csv": "x\n", "c.csv": "y\n"}.items():
        (tmp_path / name).write_text(text)
    one, other, third = (entry(tmp_path / name) for name in ("a.csv", "b.csv", "c.csv"))
    assert one["digest"] == other["digest"] != third["digest"]
    assert one["bytes"] == 2


def test_a_models_folder_by_what_a_model_is_loaded_from(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    before = entry(tmp_path, "model_name_or_path")
    (tmp_path / "notes.md").write_text("mine")
    assert entry(tmp_path, "model_name_or_path")["digest"] == before["digest"]
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    after = entry(tmp_path, "model_name_or_path")
    assert after["digest"] != before["digest"]
    changed = [name for name, digest in before["files"].items() if after["files"][name] != digest]
    assert changed == ["model.safetensors"]


def test_there_is_no_time_to_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_text("x")
    monkeypatch.setattr(data, "digest_of_file", lambda path: time.sleep(30))
    found = data.checksums({"train_file": tmp_path / "x"}, seconds=0.05)
    (note,) = data.check(found)
    assert (note.level, "no answer in" in note.text) == ("note", True)


def test_what_is_missing_and_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("x")
    entries = data.checksums({"train_file": tmp_path / "gone", "test_file": tmp_path / "x"}, seconds=10)
    gone, there = data.check(entries)
    assert (gone.level, there.level) == ("fail", "ok")
    assert "gone" in gone.text
    assert str(entries["test_file"]["digest"]) in there.text
