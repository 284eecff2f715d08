"""`make docs`: the site in both languages, its links, its search, and the Markdown of each page."""

import importlib.util
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.runs import ROOT, start
from toolkit import cli

PAGES = sorted(
    path.name.removesuffix(".md")
    for path in (ROOT / "docs").glob("*.md")
    if ".zh." not in path.name
)


@pytest.mark.parametrize("ending", [".md", ".zh.md"])
def test_the_menu_lists_every_page_once(ending: str) -> None:
    text = (ROOT / "docs" / f"index{ending}").read_text(encoding="utf-8")
    trees = re.findall(r"```\{toctree\}\n((?::.+\n)+)\n((?:.+\n)+)```", text)
    assert (
        len(
            [
                line
                for options, _ in trees
                for line in options.splitlines()
                if line.startswith(":caption:")
            ]
        )
        >= 4
    )
    listed = [line for _, lines in trees for line in lines.split() if not line.startswith("/")]
    assert sorted([*listed, "index"]) == PAGES


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


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("furo") is None:
        pytest.skip("the docs extra is not installed")
    out = tmp_path_factory.mktemp("site")
    for folder, tags in ((out, []), (out / "zh", ["-t", "zh"])):
        build = [
            sys.executable,
            "-m",
            "sphinx",
            "-q",
            "-W",
            "--keep-going",
            "-c",
            ROOT / "docs",
            *tags,
            ROOT,
            folder,
        ]
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


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_each_page_links_to_the_other_language_and_has_markdown(site: Path, page: str) -> None:
    english, chinese = site / "docs" / f"{page}.html", site / "zh" / "docs" / f"{page}.html"
    for page_file, translation in ((english, chinese), (chinese, english)):
        text = page_file.read_text(encoding="utf-8")
        (link,) = re.findall(r'<a class="language" href="([^"]+)"', text)
        assert (page_file.parent / link).resolve() == translation.resolve()
        markdown = page_file.with_suffix(".md").read_text(encoding="utf-8")
        local = re.findall(r"\]\(([\w./-]+\.md)", markdown)
        assert not [name for name in local if not (page_file.parent / name.lstrip("/")).is_file()]
        folder = site if page_file is english else site / "zh"
        assert (
            f"](docs/{page}.md)" in (folder / "llms.txt").read_text(encoding="utf-8")
            or page == "index"
        )


@pytest.mark.slow
def test_the_page_of_commands_has_what_each_prints(site: Path) -> None:
    text = (site / "docs" / "commands.md").read_text(encoding="utf-8")
    parts = re.findall(r"^## toolkit ?([\w-]*)\n\n```text\n(.+?)```", text, re.M | re.S)
    assert [name for name, _ in parts] == ["", *cli.commands()]
    assert all("--" in printed.partition("\n")[2] for _, printed in parts)


@pytest.mark.slow
@pytest.mark.parametrize(("folder", "term", "page"), [("", "checkpoint", "checkpoints"), ("zh", "检查", "checkpoints"),
                                                      ("zh", "采样", "uneven-classes")])  # fmt: skip
def test_the_search_index_has(site: Path, folder: str, term: str, page: str) -> None:
    index = (site / folder / "searchindex.js").read_text(encoding="utf-8")
    table = json.loads(index.removeprefix("Search.setIndex(").removesuffix(")"))
    matches = [
        table[terms].get(term, []) for terms in ("terms", "titleterms")
    ]  # in the text, in the title
    places = {
        place for places in matches for place in ([places] if isinstance(places, int) else places)
    }
    assert f"docs/{page}" in {table["docnames"][place] for place in places}
