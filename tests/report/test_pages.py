"""The layout of the pages in a browser at the widths of a phone, a tablet and a desktop."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.features.compare.test_compare import made, predictions
from tests.report.made import DECISIONS, add_comparison, make_run
from tests.report.test_html import NASTY, single
from toolkit.data.labels import Labels
from toolkit.evaluation import Evaluation
from toolkit.features.compare.command import write_page
from toolkit.report.comparison import compare
from toolkit.report.html import write_report

WIDTHS = (375, 768, 1280)
NAMES = (
    "Computers and Electronics",
    "Clothing, Shoes and Jewelry",
    "Office_Products_and_Stationery",
    "surprise",
    "书",
)
LABELS = Labels("single_label_classification", NAMES, ("label",))
Measured = dict[tuple[str, int], dict[str, Any]]
"""(page, width) -> the result of the script `MEASURE`."""
TEXT = (
    f"{NASTY} https://example.com/a/very/long/address/without/any/space/in/it?and=query&more=things"
)
MEASURE = """<script>
onload = () => {
  document.body.textContent = JSON.stringify([...document.querySelectorAll("iframe")].map(frame => {
    const page = frame.contentDocument, root = page.documentElement;
    const tables = [...page.querySelectorAll("table")].filter(table => table.offsetParent).map(table => {
      const box = table.closest(".scroll, .inner");
      const { overflowX, backgroundAttachment } = getComputedStyle(box);
      return { wider: table.offsetWidth > box.clientWidth, overflowX, backgroundAttachment };
    });
    const broken = [];
    for (const cell of page.querySelectorAll("h1, h2, h3, th, td.name, dt")) {
      const walker = page.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
      for (let node; node = walker.nextNode();)
        for (const word of node.data.matchAll(/[A-Za-z0-9]+/g)) {
          const range = page.createRange();
          range.setStart(node, word.index), range.setEnd(node, word.index + word[0].length);
          // a word that an ellipsis truncates has several, too, on one line
          const line = getComputedStyle(node.parentNode).writingMode.startsWith("vertical") ? "left" : "top";
          if (new Set([...range.getClientRects()].map(box => box[line])).size > 1) broken.push(word[0]);
        }
    }
    const bars = [...page.querySelectorAll("td.bar")].map(cell => {
      const range = page.createRange(), box = cell.getBoundingClientRect();
      range.selectNodeContents(cell);
      const number = range.getBoundingClientRect(), style = getComputedStyle(cell);
      const [x, y] = style.backgroundPosition.split(/ (?=\\S+$)/);
      return { x, top: parseFloat(y), number_left: box.right - number.left, number_bottom: number.bottom - box.top,
               size: style.backgroundSize };
    });
    return { seen: root.clientWidth, whole: root.scrollWidth, tables, broken, bars };
  }));
};
</script>"""


def report(folder: Path) -> Path:
    chances = np.random.default_rng(0).dirichlet(np.ones(5), 60)
    lines, numbers = single(NAMES, chances, [place % 5 for place in range(60)])
    last = make_run(
        folder, LABELS, [line | {"prediction": None} for line in lines[:20]] + lines[20:], numbers
    )
    add_comparison(folder)
    groups = {"来源": ["web" if line["label"] == line["prediction"] else NASTY for line in lines]}
    whole = Evaluation(last.split, last.numbers | {"decisions": DECISIONS}, None)
    write_report(folder, whole, [TEXT] * 60, groups=groups)
    return folder / "report.html"


def comparison(folder: Path) -> Path:
    folder.mkdir()
    runs = []
    for place, rate in enumerate((1e-5, 1e-5, 3e-5)):
        run, lines = (
            folder / f"learning_rate_{rate}_warmup_{place}",
            predictions(0.1 + 0.05 * place, place),
        )
        runs.append(made(run, lines, seed=place, data_seed=1, learning_rate=rate))
    write_page(folder / "compare.html", *compare(runs))
    return folder / "compare.html"


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no browser")
    folder = tmp_path_factory.mktemp("pages")
    pages = {
        "report": report(folder / "run"),
        "compare": comparison(folder / "runs"),
    }
    keys = [(name, width) for name in pages for width in WIDTHS]
    frames = "".join(
        f'<iframe style="width:{width}px;height:900px;border:0" srcdoc="{html.escape(pages[name].read_text())}">'
        "</iframe>"
        for name, width in keys
    )
    (folder / "all.html").write_text(f"<!DOCTYPE html><body>{frames}{MEASURE}</body>")
    shown = subprocess.run([browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--dump-dom",
                            f"--user-data-dir={folder / 'browser'}", f"file://{folder / 'all.html'}"],
                           capture_output=True, text=True, timeout=120, check=True).stdout  # fmt: skip
    body = re.search(r"<body>(.*)</body>", shown, re.DOTALL)
    assert body
    return dict(zip(keys, json.loads(html.unescape(body[1])), strict=True))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("page", ["report", "compare"])
def test_a_page_is_as_wide_as_its_window(page: str, width: int, measured: Measured) -> None:
    """A wider table scrolls within its frame, which shows a shade."""
    measures = measured[page, width]
    assert measures["seen"] == measures["whole"] == width
    assert measures["broken"] == []
    assert len(measures["tables"]) > 1
    for table in measures["tables"]:
        if table["wider"]:
            assert table["overflowX"] == "auto"
            assert table["backgroundAttachment"].startswith("local, local, scroll")


@pytest.mark.parametrize("width", WIDTHS)
def test_bars_do_not_cover_their_numbers(width: int, measured: Measured) -> None:
    bars = measured["report", width]["bars"]
    assert len(bars) >= 5
    for bar in bars:
        if calc := re.match(
            r"calc\(100% - ([\d.]+)px\)", bar["size"]
        ):  # it starts at x, and ends at x + 100 % - this
            assert bar["number_left"] < float(calc[1]) - float(bar["x"].removesuffix("px"))
        else:
            assert bar["number_bottom"] <= bar["top"]
