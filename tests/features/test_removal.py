"""Each feature can be removed: without its folder recipes/cls.py trains, resumes, evaluates, predicts and reports."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

FEATURES = sorted(path.parent.name for path in (REPOSITORY / "toolkit" / "features").glob("*/__init__.py"))
QUICK = ("titles", "all", "mistakes")
COPIES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in (*FEATURES, *QUICK[1:])]


@pytest.fixture(scope="module")
def copies(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, reviews: Path
) -> Path:
    """Copies of the package: without one feature each, `all` without any, `mistakes` with the one of the docs."""
    root = tmp_path_factory.mktemp("removal")
    names = [item.callspec.params["name"] for item in request.session.items if "without_it_the_core" in item.name]
    for name in names:
        for part in ("toolkit", "recipes"):
            shutil.copytree(REPOSITORY / part, root / name / part, ignore=shutil.ignore_patterns("__pycache__"))
        folder = root / name / "toolkit" / "features"
        if name == "mistakes":
            (folder / name).mkdir()
            (folder / name / "__init__.py").touch()
            page = (REPOSITORY / "docs" / "your-own-feature.md").read_text(encoding="utf-8")
            (folder / name / "feature.py").write_text(page.split("```python\n")[1].split("```")[0], encoding="utf-8")
        for feature in FEATURES if name == "all" else [name] if name in FEATURES else []:
            shutil.rmtree(folder / feature)
    worker = REPOSITORY / "tests" / "features" / "removal_worker.py"
    words = [sys.executable, worker, tiny_model, reviews, *(root / name for name in names)]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(words, cwd=root, env=env, stdin=subprocess.DEVNULL, timeout=500, check=False)
    return root


@pytest.mark.parametrize("name", COPIES)
def test_without_it_the_core_works(name: str, copies: Path) -> None:
    printed = (copies / name / "printed").read_text()
    assert (copies / name / "code").read_text() == "0", printed
