"""toolkit/utils/cache.py: a folder is built once per machine, whole or not at all."""

import errno
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.faults import refusal
from toolkit.utils.cache import cached_folder

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


def test_full_disk_and_interrupted_build(toolkit_cache: Path) -> None:
    def fill(draft: Path) -> None:
        (draft / "half").write_text("x")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    refusal(build, fill, says=["tokens/abc", "No space left", "TOOLKIT_CACHE"])
    assert [path.name for path in (toolkit_cache / "tokens").iterdir()] == ["abc.lock"]

    def die(draft: Path) -> None:
        (draft / "half").write_text("x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(die)
    assert not (build(fill_well) / "half").exists()


def test_two_processes_build_once() -> None:
    drafts = []

    def fill(draft: Path) -> None:
        drafts.append(draft)
        time.sleep(0.2)

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(build, [fill, fill])
    assert (one, len(drafts)) == (other, 1)
