"""report.html opens offline and shows the numbers, for every kind of task."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from tests.inputs import write_jsonl
from tests.report.made import DECISIONS, TITLES, add_comparison, make_run
from tests.runs import lines_of
from toolkit.data.labels import Labels
from toolkit.report.html import write_report, write_report_of_folder
from toolkit.report.record import Record

CHINESE = ("负面", "正面", "中性")
NASTY = "<script>alert('x')</script> 这部电影 & “好”"


class Page:
    """A page's tags, texts, tables by section, and the URLs that it would load; an unclosed tag is an error of XML."""

    def __init__(self, path: Path) -> None:
        self.source = path.read_text(encoding="utf-8")
        plain = re.sub('xlink:| xmlns="[^"]*"', "", self.source)
        closed = re.sub(r"<(meta|link|br|hr|img|input)\b([^>]*?)/?>", r"<\1\2/>", plain)
        root = ElementTree.fromstring(closed)
        self.tags = [(element.tag, element.attrib) for element in root.iter()]
        self.rows: dict[str, list[list[str]]] = {}
        """Section -> the cells of all rows of its tables."""
        section = ""
        for element in root.iter():
            if element.tag == "section":
                section = element.attrib["id"]
            elif element.tag == "tr":
                parts = [[" ".join(text.split()) for text in cell.itertext()] for cell in element]
                self.rows.setdefault(section, []).append(["".join(cell) for cell in parts])
            elif element.tag in ("style", "script"):
                element.text = ""
        self.texts = list(root.itertext())

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def loads(self) -> list[str]:
        """The URLs outside the page that a browser would fetch."""
        start = r"(?:\b(?:src|srcset|href|poster|action)=|url\(|@import )"
        urls = re.findall(rf"{start}\s*['\"]?([^)'\";> ]+)", self.source)
        return [url for url in urls if not url.startswith(("#", "data:"))]


def single(names: Sequence[str], chances: np.ndarray, truths: Sequence[int]) -> tuple[Any, Any]:
    """Predictions and numbers of single-label classification from (N, C) probabilities."""
    predictions = [
        {"id": 3 * place, "label": names[truth], "prediction": names[int(row.argmax())],
         "probabilities": [round(float(chance), 6) for chance in row]}
        for place, (row, truth) in enumerate(zip(chances, truths, strict=True))
    ]  # fmt: skip
    scores = {"precision": 0.5, "recall": 0.25, "f1": 1 / 3, "support": 7}
    numbers = {"loss": 0.5, "accuracy": 0.75, "f1_macro": 0.7}
    return predictions, {**numbers, "per_class": dict.fromkeys(names, scores)}


def page_of(folder: Path, texts: Sequence[str] = ()) -> Page:
    write_report(Record.load(folder), list(texts))
    return Page(folder / "report.html")


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """A run with 60 samples of three Chinese classes."""
    labels = Labels("single_label_classification", CHINESE, ("label",))
    chances = np.random.default_rng(0).dirichlet(np.ones(3), 60)
    predictions, numbers = single(CHINESE, chances, [place % 3 for place in range(60)])
    make_run(tmp_path / "run", labels, predictions, numbers)
    return tmp_path / "run"


def test_a_classification(three: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    config = three / "config.json"
    config.write_text(config.read_text().replace("recipes/", "/home/somebody/"))
    texts = [NASTY if place % 3 == 0 else f"第{place}条 " + "很长" * 400 for place in range(60)]
    page = page_of(three, texts)
    assert page.loads() == []
    assert {"script", "img", "iframe", "object"}.isdisjoint(tag for tag, _ in page.tags)
    assert "somebody" not in page.source
    for shown in ("all-MiniLM-L6-v2 on train<1>.csv", "step 40", "accuracy 0.7500", "2 (zero2), bf16",
                  "7,677 train", "accelerate_configs/zero2.yaml", "~/cls.py --seed 1",
                  "learning_rate 5e-05", "40 of 40", "accuracy (validation)"):  # fmt: skip
        assert shown in page.text
    wrong, counts = [], np.zeros((3, 3), int)
    for line, text in zip(lines_of(three / "predictions.jsonl"), texts, strict=True):
        label, guess = (CHINESE.index(line[key]) for key in ("label", "prediction"))
        counts[label, guess] += 1
        if label != guess:
            shown = text if text == NASTY else text[:299] + "…"  # as text
            row = [str(line["id"] + 1), shown, line["label"], line["prediction"]]
            wrong.append([1 - line["probabilities"][label], *row])
    assert page.rows["mistakes"][0] == ["row", "text", "label", "prediction", "error"]
    expected = sorted(wrong, reverse=True)[:20]
    assert page.rows["mistakes"][1:] == [[*row, f"{error:.4g}"] for error, *row in expected]
    assert page.rows["confusion"][:2] == [["", "predicted", ""], ["true", *CHINESE, "samples"]]
    for name, row, of_name in zip(CHINESE, page.rows["confusion"][2:], counts, strict=True):
        total = of_name.sum()
        cells = [f"{count}{100 * count / total:.0f} %" if count else "·" for count in of_name]
        assert row == [name, *cells, str(total)]


ERRORS = {"loss": 0.1, "mse": 0.1, "mae": 0.3, "pearson": 0.9}
ONE, TWO = (Labels("regression", names, names) for names in (("score",), ("taste", "price")))
MULTI = Labels("multi_label_classification", ("a|b", "长", "c"), ("labels",))
TAGGED = [
    {"label": ["长"], "prediction": ["长"], "probabilities": [0.1, 0.9, 0.2]},
    {"label": ["长"], "prediction": ["c"], "probabilities": [0.1, 0.3, 0.6]},
    {"label": [], "prediction": ["a|b", "c"], "probabilities": [0.999, 0.2, 0.6]},
]
MISTAGGED = [["3", "bad", "none", "a|b,c", "0.999"], ["2", "fine", "长", "c", "0.7"]]
TITLE = {"reference": "a", "prediction": "b", "scores": {"rougeL": 0.35}}
NUMBERS = [{"label": row / 10, "prediction": row / 20} for row in (4, 10)]
FAR_OFF = [["2", "fine", "1.0000", "0.5000", "0.5"], ["1", NASTY, "0.4000", "0.2000", "0.2"]]
PAIR = [{"label": [1, 2.5], "prediction": [2, 2.0]}]
# labels, lines of predictions, numbers -> the worst mistakes
TASKS: list[tuple[Any, list[Any], dict[str, Any], list[list[str]]]] = [
    (None, [TITLE], TITLES, []),
    (ONE, NUMBERS, ERRORS, FAR_OFF),
    (TWO, PAIR, ERRORS, [["1", NASTY, "1,2.5000", "2,2.0000", "0.75"]]),
    (MULTI, TAGGED, {"loss": 0.7, "accuracy": 0.33, "f1_macro": 0.5}, MISTAGGED),
]


@pytest.mark.usefixtures("without_charts")
@pytest.mark.parametrize(("labels", "lines", "numbers", "mistakes"), TASKS)
def test_other_tasks(labels: Any, lines: Any, numbers: Any, mistakes: Any, tmp_path: Path) -> None:
    make_run(tmp_path / "run", labels, [{"id": n} | line for n, line in enumerate(lines)], numbers)
    page = page_of(tmp_path / "run", [NASTY, "fine", "bad"])
    assert page.rows.get("mistakes", [[]])[1:] == mistakes
    assert "confusion" not in page.rows


@pytest.mark.usefixtures("without_charts")
def test_two_thousand_classes_have_pairs_only(tmp_path: Path) -> None:
    names = tuple(f"class {place}" for place in range(2000))
    labels = Labels("single_label_classification", names, ("label",))
    chances = np.full((30, 2000), 1e-4)
    chances[:, 7] = 0.9
    make_run(tmp_path / "run", labels, *single(names, chances, [11] * 20 + list(range(20, 30))))
    rows = page_of(tmp_path / "run").rows
    assert rows["confusion"][1] == ["class 11", "class 7", "20", "100 %"]
    assert (len(rows["confusion"]), len(rows["classes"])) == (12, 2001)


def test_a_diverged_run_and_one_that_was_killed(three: Path) -> None:
    # an evaluation on truncated texts is no result of the run
    add_comparison(three, split="validation")
    (three / "model").mkdir()
    (three / "model" / "trainer_state.json").write_text('{"global_step": 20}')
    text = page_of(three).text
    assert "accuracy 0.7500" in text
    assert "that of step 20" in text  # and not the evaluated one
    lines = lines_of(three / "metrics.jsonl")
    write_jsonl(three / "metrics.jsonl", [line | {"loss": None} for line in lines])
    (three / "eval.jsonl").unlink()
    (three / "predictions.jsonl").unlink()
    with (three / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "lo')
    page = Page(write_report_of_folder(three))
    assert "Not evaluated yet." in page.text
    assert [tag for tag, _ in page.tags].count("svg") == 5


@pytest.mark.usefixtures("without_charts")
def test_abstained_rows_are_not_mistakes(three: Path) -> None:
    lines = lines_of(three / "predictions.jsonl")
    abstained = [line | {"prediction": None} for line in lines[:50]]
    write_jsonl(three / "predictions.jsonl", [*abstained, *lines[50:]])
    tuned = lines_of(three / "eval.jsonl")[-1] | {"decisions": DECISIONS}
    write_jsonl(three / "eval.jsonl", [tuned])
    rows = page_of(three).rows
    assert ["ece", "0.2000", "0.1000"] in rows["decisions"]
    wrong = [line["label"] != line["prediction"] for line in lines[50:]]
    assert len(rows["mistakes"]) - 1 == sum(wrong)
