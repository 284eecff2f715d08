"""Each feature is a leaf: without its folder the core's own recipe trains, resumes, evaluates, predicts and reports."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

FEATURES = sorted(path.parent.name for path in (REPOSITORY / "toolkit" / "features").glob("*/__init__.py"))


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, reviews: Path) -> Path:
    """A copy of the package for each feature, without it; and one, `all`, without any."""
    root = tmp_path_factory.mktemp("removal")
    for name in [*FEATURES, "all"]:
        for part in ("toolkit", "recipes"):
            shutil.copytree(REPOSITORY / part, root / name / part, ignore=shutil.ignore_patterns("__pycache__"))
        for feature in FEATURES if name == "all" else [name]:
            shutil.rmtree(root / name / "toolkit" / "features" / feature)
    worker = REPOSITORY / "tests" / "features" / "removal_worker.py"
    words = [sys.executable, worker, tiny_model, reviews, *(root / name for name in [*FEATURES, "all"])]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(words, cwd=root, env=env, stdin=subprocess.DEVNULL, timeout=500, check=False)
    return root


@pytest.mark.parametrize("name", [*FEATURES, "all"])
def test_without_it_the_core_works(name: str, copies: Path) -> None:
    printed = (copies / name / "printed").read_text()
    assert (copies / name / "code").read_text() == "0", printed
