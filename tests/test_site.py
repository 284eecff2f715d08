"""`make docs`: the site in both languages, its links, its search, and the Markdown of each page."""

import importlib.util
import re
import runpy
import sys
import types
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.runs import ROOT, start

PAGES = sorted(
    path.name.removesuffix(".md")
    for path in (ROOT / "docs").glob("*.md")
    if ".zh." not in path.name
)


class Page(HTMLParser):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value and not re.match(r"[a-z]+:", value):
                self.links.append(unquote(value))
            if name in ("id", "name") and value:
                self.anchors.add(value)


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
    pages = {
        name: conf["markdown"](f"docs/{name}", (ROOT / "docs" / f"{name}.md").read_text())
        for name in ("api", "settings")
    }
    assert "### Run\n" in pages["api"]
    assert "| `--global_batch_size` |" in pages["settings"]
    assert "usage: toolkit predict" in pages["settings"]
    assert "made here" not in "".join(pages.values())


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("furo") is None:
        pytest.skip("the docs extra is not installed")
    out = tmp_path_factory.mktemp("site")
    for folder, tags in ((out, []), (out / "zh", ["-t", "zh"])):
        build = [sys.executable, *"-m sphinx -q -W --keep-going -c".split(), ROOT / "docs", *tags]
        build += [ROOT, folder]
        start(
            [*build, "-d", tmp_path_factory.mktemp("trees")], env={"PYTHONPATH": str(ROOT)}
        ).succeeded()
    return out


@pytest.mark.slow
def test_no_link_within_the_site_is_broken(site: Path) -> None:
    pages = {path.resolve(): Page(path) for path in site.rglob("*.html")}
    broken = []
    for path, page in pages.items():
        for link in page.links:
            file, _, anchor = link.partition("#")
            target = (path.parent / file.partition("?")[0]).resolve() if file else path
            exists = target.is_file() and (
                not anchor or target not in pages or anchor in pages[target].anchors
            )
            broken += [] if exists else [f"{path.relative_to(site)}: {link}"]
    assert broken == []
    assert len(pages) > 2 * len(PAGES)
