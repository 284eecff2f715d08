"""`make docs`: the parts of the site that are made from the code, and its pages in both languages without a warning."""

import importlib.util
import runpy
import sys
import types
from pathlib import Path

import pytest

from tests.runs import ROOT, start


@pytest.mark.slow
def test_the_parts_that_are_made_from_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Sphinx, of which docs/conf.py needs a class and a table."""
    search = types.SimpleNamespace(SearchLanguage=object, languages={})
    monkeypatch.setitem(sys.modules, "sphinx", types.ModuleType("sphinx"))
    monkeypatch.setitem(sys.modules, "sphinx.search", search)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name, value in (("COLUMNS", "100"), ("HF_HUB_OFFLINE", "1")):  # which it sets
        monkeypatch.setenv(name, value)
    tags = types.SimpleNamespace(has=lambda tag: False)
    conf = runpy.run_path(str(ROOT / "docs" / "conf.py"), init_globals={"tags": tags})
    pages = {}
    for name in ("api", "settings"):
        pages[name] = conf["markdown"](f"docs/{name}", (ROOT / f"docs/{name}.md").read_text())
    assert "### Run\n" in pages["api"]
    assert "| `--global_batch_size` |" in pages["settings"]
    assert "usage: toolkit predict" in pages["settings"]
    assert "made here" not in "".join(pages.values())


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("furo"), reason="the docs extra is not installed")
@pytest.mark.parametrize("tags", [[], ["-t", "zh"]])
def test_the_site_has_every_page(tags: list[str], tmp_path: Path) -> None:
    """Of a link to a page or a heading that does not exist Sphinx warns, and a warning is an error."""
    build = [sys.executable, *"-m sphinx -q -W --keep-going -c".split(), ROOT / "docs", *tags]
    command = [*build, "-d", tmp_path / "trees", ROOT, tmp_path / "site"]
    start(command, env={"PYTHONPATH": str(ROOT)}).succeeded()
    pages = [page for page in (ROOT / "docs").glob("*.md") if (".zh." in page.name) == bool(tags)]
    assert len(list((tmp_path / "site").rglob("*.html"))) > len(pages)
