"""`make docs`: the parts of the site that are made from the code, and its pages in both languages without a warning."""

import importlib.util
import sys
from pathlib import Path

import pytest

from tests.runs import ROOT, start


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("furo"), reason="the docs extra is not installed")
@pytest.mark.parametrize("tags", [[], ["-t", "zh"]])
def test_the_site_has_every_page(tags: list[str], tmp_path: Path) -> None:
    """Of a link to a page or a heading that does not exist Sphinx warns, and a warning is an error."""
    build = [sys.executable, *"-m sphinx -q -W --keep-going -c".split(), ROOT / "docs", *tags]
    command = [*build, "-d", tmp_path / "trees", ROOT, tmp_path / "site"]
    start(command, env={"PYTHONPATH": str(ROOT)}).succeeded()
    settings = next((tmp_path / "site").rglob("settings*.html")).read_text(encoding="utf-8")
    assert "global_batch_size" in settings
    assert "usage: toolkit predict" in settings  # made from the code
    pages = [page for page in (ROOT / "docs").glob("*.md") if (".zh." in page.name) == bool(tags)]
    assert len(list((tmp_path / "site").rglob("*.html"))) > len(pages)
