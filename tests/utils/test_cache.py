"""toolkit/utils/cache.py: made once per machine, whole and sound or made again."""

from __future__ import annotations

import argparse
import errno
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import xxhash

from tests.faults import Fault
from toolkit.commands import cache as cache_command
from toolkit.errors import UserError
from toolkit.utils import cache
from toolkit.utils.cache import cached_digest, cached_folder


def build_once(kind: str, digest: str, fill: Callable[[Path], object], source: str = "") -> Path:
    with cached_folder(kind, digest, None, source) as (folder, draft):
        if draft:
            fill(draft)
    return folder


@pytest.fixture
def made(toolkit_cache: Path) -> list[Path]:
    """The drafts that were filled."""
    return []


@pytest.fixture
def once(made: list[Path]) -> Callable[[], Path]:
    def make(draft: Path) -> None:
        made.append(draft)
        (draft / "train").mkdir()
        np.save(draft / "train" / "labels.npy", np.arange(100))
        (draft / "meta.json").write_text("{}")

    return lambda: build_once("tokens", "abc", make, "reviews.csv")


def zero(path: Path) -> None:
    """What a power cut leaves: the size, and nothing in it; the times as they were."""
    before = path.stat()
    path.write_bytes(bytes(before.st_size))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (zero, "train/labels.npy"),
        (lambda path: path.write_bytes(b""), "train/labels.npy"),
        (lambda path: path.unlink(), "labels.npy is missing"),
        (lambda path: (path.parents[1] / "files.json").unlink(), "files.json is missing"),
        (lambda path: (path.parents[1] / "files.json").write_text('{"files": {"train'), "files.json"),
        (lambda path: (path.parents[1] / "files.json").write_bytes(bytes(20)), "files.json"),
    ],
)
def test_what_is_damaged_is_made_again_and_said(
    once: Callable[[], Path], made: list[Path], damage: Callable[[Path], object], said: str,
    capsys: pytest.CaptureFixture[str], fault: Fault,
) -> None:  # fmt: skip
    folder = once()
    damage(folder / "train" / "labels.npy")
    assert once() == folder
    assert np.load(folder / "train" / "labels.npy").tolist() == list(range(100))
    assert once() == folder
    assert len(made) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"{folder} is damaged ({said}): rebuilding it"
    fault(f"a damaged token cache ({said})", line.replace(str(folder.parent), "CACHE"))


def test_what_is_sound_is_not_made_again_and_its_checksums_are_compared_once(
    once: Callable[[], Path], made: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, compared, real = once(), [], cache.digest_of_file
    monkeypatch.setattr(cache, "digest_of_file", lambda path: compared.append(path.name) or real(path))
    once()
    assert compared == []  # they were when it was made
    os.utime(folder / "meta.json")  # as after a copy
    once()
    assert sorted(compared) == ["labels.npy", "meta.json"]
    once()
    assert (len(compared), len(made)) == (2, 1)


def test_it_is_flushed_before_it_has_its_name(
    once: Callable[[], Path], toolkit_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed, final, real = [], toolkit_cache / "tokens" / "abc", os.fsync

    def flush(descriptor: int) -> None:
        flushed.append((Path(f"/proc/self/fd/{descriptor}").readlink().name, final.exists()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", flush)
    once()
    assert {(name, False) for name in ("labels.npy", "meta.json", "files.json", "train")} < set(flushed)
    assert ("tokens", True) in flushed  # and then the name itself


def full(draft: Path) -> None:
    (draft / "half").write_text("x")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_one_line_and_leaves_no_draft(toolkit_cache: Path) -> None:
    with pytest.raises(UserError, match=r"cannot write .*tokens/abc.*No space left.*TOOLKIT_CACHE"):
        build_once("tokens", "abc", full)
    assert [path.name for path in (toolkit_cache / "tokens").iterdir()] == ["abc.lock"]


def test_a_build_that_is_killed_leaves_nothing_to_be_taken(once: Callable[[], Path], toolkit_cache: Path) -> None:
    def die(draft: Path) -> None:
        (draft / "meta.json").write_text("{}")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_once("tokens", "abc", die)
    assert (once() / "train" / "labels.npy").is_file()


def test_two_at_once_make_it_once(toolkit_cache: Path) -> None:
    made = []

    def slowly(draft: Path) -> None:
        made.append(draft)
        time.sleep(0.2)

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda _: build_once("tokens", "abc", slowly), range(2))
    assert (one, len(made)) == (other, 1)


def test_drafts_of_killed_builds_are_removed(once: Callable[[], Path], toolkit_cache: Path) -> None:
    for kind in ("draft", "old"):
        (toolkit_cache / "tokens" / f".abc.{kind}-0123456789abcdef").mkdir(parents=True)
    folder = once()
    assert [path for path in folder.parent.iterdir() if path.is_dir()] == [folder]


def test_list_and_prune(once: Callable[[], Path], toolkit_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = once()
    other = build_once("models", "bert-bigbird", lambda draft: None, "bert")
    month_ago = time.time() - 31 * 24 * 3600
    os.utime(folder.with_name(".abc.checked"), (month_ago, month_ago))
    cache_command.run(argparse.Namespace(action="list", unused_days=30.0))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["models/bert-bigbird", "tokens/abc"]
    assert "used 31 days ago  reviews.csv" in lines[1]
    cache_command.run(argparse.Namespace(action="prune", unused_days=30.0))
    assert capsys.readouterr().out.startswith("removed tokens/abc")
    assert (folder.exists(), other.exists()) == (False, True)
    once()  # it is made again when it is needed
    cache_command.run(argparse.Namespace(action="prune", unused_days=0.0))
    assert not [path for path in toolkit_cache.rglob("*") if path.is_dir() and path.parent != toolkit_cache]


def test_a_home_that_may_not_be_looked_into_names_the_setting(
    once: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(folder: Path) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))

    monkeypatch.setattr(cache, "find_damage", denied)
    with pytest.raises(UserError, match=r"Permission denied.*TOOLKIT_CACHE"):
        once()


def test_a_large_file_is_read_once_for_each_state(
    tmp_path: Path, toolkit_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_LARGE_BYTES", 4)
    path, first = tmp_path / "a.csv", xxhash.xxh3_128(b"first").hexdigest()
    path.write_bytes(b"first")
    assert cached_digest(path) == first
    assert not (toolkit_cache / "digests").exists()  # just written: another write might leave the same times
    monkeypatch.setattr(cache, "_SETTLED_SECONDS", 0)
    assert cached_digest(path) == first
    with monkeypatch.context() as closed:
        closed.setattr(cache, "digest_of_file", lambda path: pytest.fail("it was read again"))
        assert cached_digest(path) == first
    times = path.stat()
    path.write_bytes(b"other")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # as large and as old: its change is told by the disk
    assert cached_digest(path) == xxhash.xxh3_128(b"other").hexdigest()
