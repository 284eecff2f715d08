"""toolkit/utils/cache.py: a folder is built once per machine, and rebuilt if it is damaged."""

import argparse
import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import xxhash

from tests.faults import Fault, refusal
from toolkit.commands import cache as cache_command
from toolkit.utils import cache
from toolkit.utils.cache import cached_digest, cached_folder


def build_once(kind: str, digest: str, fill: Callable[[Path], object], source: str = "") -> Path:
    with cached_folder(kind, digest, None, source) as (folder, draft):
        if draft:
            fill(draft)
    return folder


class Tokens:
    """Called, it returns the cache folder tokens/abc, which it fills if needed."""

    def __init__(self) -> None:
        self.drafts: list[Path] = []

    def __call__(self) -> Path:
        return build_once("tokens", "abc", self._fill, "reviews.csv")

    def _fill(self, draft: Path) -> None:
        self.drafts.append(draft)
        (draft / "train").mkdir()
        np.save(draft / "train" / "labels.npy", np.arange(100))
        (draft / "meta.json").write_text("{}")


@pytest.fixture
def tokens(toolkit_cache: Path) -> Tokens:
    return Tokens()


def test_a_long_wait_for_a_lock_is_logged(
    tokens: Tokens, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cache, "_LOG_SECONDS", 0.01)
    (path := cache.cache_folder() / "tokens" / "abc.lock").parent.mkdir(parents=True)
    fcntl.flock(lock := path.open("w"), fcntl.LOCK_EX)
    threading.Timer(0.3, lock.close).start()
    assert tokens().is_dir()
    assert f"remove {path}" in capsys.readouterr().err


def zero(path: Path) -> None:
    """As after a power cut: size and times are kept, the content is zeros."""
    before = path.stat()
    path.write_bytes(bytes(before.st_size))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (zero, "train/labels.npy"),
        (lambda path: path.write_bytes(b""), "train/labels.npy"),
        (lambda path: path.unlink(), "labels.npy is missing"),
        (lambda path: (path.parents[1] / "files.json").unlink(), "files.json is missing"),
        (lambda path: (path.parents[1] / "files.json").write_text('{"files": {"train'), "files.json"),
        (lambda path: (path.parents[1] / "files.json").write_bytes(bytes(20)), "files.json"),
    ],
)
def test_damaged_folder_is_rebuilt(
    tokens: Tokens, damage: Callable[[Path], object], cause: str, capsys: pytest.CaptureFixture[str], fault: Fault
) -> None:
    folder = tokens()
    damage(folder / "train" / "labels.npy")
    assert tokens() == folder
    assert np.load(folder / "train" / "labels.npy").tolist() == list(range(100))
    assert tokens() == folder
    assert len(tokens.drafts) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{folder} is damaged ({cause})")
    fault(f"a damaged token cache ({cause})", line.replace(str(folder.parent), "CACHE"))


def test_checksums_are_compared_once(tokens: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, compared, real = tokens(), [], cache.digest_of_file
    monkeypatch.setattr(cache, "digest_of_file", lambda path: compared.append(path.name) or real(path))
    tokens()
    assert compared == []  # they were compared after the build
    os.utime(folder / "meta.json")  # as after a copy
    tokens()
    assert sorted(compared) == ["labels.npy", "meta.json"]
    tokens()
    assert (len(compared), len(tokens.drafts)) == (2, 1)


def test_flush_comes_before_the_rename(tokens: Tokens, toolkit_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed, final, real = [], toolkit_cache / "tokens" / "abc", os.fsync

    def flush(descriptor: int) -> None:
        flushed.append((Path(f"/proc/self/fd/{descriptor}").readlink().name, final.exists()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", flush)
    tokens()
    assert {(name, False) for name in ("labels.npy", "meta.json", "files.json", "train")} < set(flushed)
    assert ("tokens", True) in flushed  # and then the name itself


def test_full_disk_and_interrupted_build(tokens: Tokens, toolkit_cache: Path) -> None:
    def fill(draft: Path) -> None:
        (draft / "half").write_text("x")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    refusal(build_once, "tokens", "abc", fill, match=r"cannot write .*tokens/abc.*No space left.*TOOLKIT_CACHE")
    assert [path.name for path in (toolkit_cache / "tokens").iterdir()] == ["abc.lock"]

    def die(draft: Path) -> None:
        (draft / "meta.json").write_text("{}")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_once("tokens", "abc", die)
    assert (tokens() / "train" / "labels.npy").is_file()


def test_two_processes_build_once(toolkit_cache: Path) -> None:
    drafts = []

    def fill(draft: Path) -> None:
        drafts.append(draft)
        time.sleep(0.2)

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda _: build_once("tokens", "abc", fill), range(2))
    assert (one, len(drafts)) == (other, 1)


def test_drafts_of_killed_builds_are_removed(tokens: Tokens, toolkit_cache: Path) -> None:
    for kind in ("draft", "old"):
        (toolkit_cache / "tokens" / f".abc.{kind}-0123456789abcdef").mkdir(parents=True)
    folder = tokens()
    assert [path for path in folder.parent.iterdir() if path.is_dir()] == [folder]


def test_list_and_prune(tokens: Tokens, toolkit_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tokens()
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
    assert cache.remove(folder)  # a machine that shares the cache was faster
    tokens()  # is rebuilt
    cache_command.run(argparse.Namespace(action="prune", unused_days=0.0))
    assert not [path for path in toolkit_cache.rglob("*") if path.is_dir() and path.parent != toolkit_cache]


def test_unreadable_cache(tokens: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    denied = Mock(side_effect=PermissionError(errno.EACCES, "Permission denied"))
    monkeypatch.setattr(cache, "find_damage", denied)
    refusal(tokens, match=r"Permission denied.*TOOLKIT_CACHE")


def test_cached_digest(tmp_path: Path, toolkit_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_LARGE_BYTES", 4)
    monkeypatch.setattr(cache, "_SETTLED_SECONDS", 1e9)
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
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # same size and mtime: ctime shows the change
    assert cached_digest(path) == xxhash.xxh3_128(b"other").hexdigest()
