"""toolkit/utils/cache.py: a folder is built once per machine, whole or not at all."""

import errno
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.faults import refusal
from toolkit.utils.cache import cached_folder


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


def test_flush_comes_before_the_rename(
    tokens: Tokens, toolkit_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed, final, real = [], toolkit_cache / "tokens" / "abc", os.fsync

    def flush(descriptor: int) -> None:
        flushed.append((Path(f"/proc/self/fd/{descriptor}").readlink().name, final.exists()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", flush)
    tokens()
    assert {("labels.npy", False), ("meta.json", False), ("train", False)} < set(flushed)
    assert ("tokens", True) in flushed  # and then the name itself


def test_full_disk_and_interrupted_build(tokens: Tokens, toolkit_cache: Path) -> None:
    def fill(draft: Path) -> None:
        (draft / "half").write_text("x")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    says = ["tokens/abc", "No space left", "TOOLKIT_CACHE"]
    refusal(build_once, "tokens", "abc", fill, says=says)
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
