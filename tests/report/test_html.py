"""report.html opens offline and shows the numbers, for every kind of task."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from tests.report.made import DECISIONS, TITLES, add_comparison, make_run, write_lines
from tests.runs import lines_of
from toolkit.data.labels import Labels
from toolkit.evaluation import Evaluation
from toolkit.report.html import write_report, write_report_of_folder
from toolkit.report.record import Record

CHINESE = ("负面", "正面", "中性")
NASTY = "<script>alert('x')</script> 这部电影 & “好”"
Run = tuple[Path, Evaluation, list[str]]
REGRESSION = {"loss": 0.1, "mse": 0.1, "mae": 0.3, "pearson": 0.9}


VOID = "meta|link|br|hr|img|input"


def regression(*names: str) -> Labels:
    return Labels("regression", names, names)


class Page:
    """A page's tags, texts, tables by section, and the URLs that it would load; an unclosed tag is an error of XML."""

    def __init__(self, path: Path) -> None:
        self.source = path.read_text(encoding="utf-8")
        plain = re.sub('xlink:| xmlns="[^"]*"', "", self.source)
        closed = re.sub(rf"<({VOID})\b([^>]*?)/?>", r"<\1\2/>", plain)
        root = ElementTree.fromstring(closed)
        self.tags = [(element.tag, element.attrib) for element in root.iter()]
        self.rows: dict[str, list[list[str]]] = {}
        """Section -> the cells of all rows of its tables."""
        section = ""
        for element in root.iter():
            if element.tag == "section":
                section = element.attrib["id"]
            elif element.tag == "tr":
                cells = [
                    "".join(" ".join(text.split()) for text in cell.itertext()) for cell in element
                ]
                self.rows.setdefault(section, []).append(cells)
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


def single(
    names: Sequence[str], chances: np.ndarray, truths: Sequence[int]
) -> tuple[list[dict[str, Any]], dict]:
    """Predictions and numbers of single-label classification from (N, C) probabilities."""
    predictions = [
        {"id": 3 * place, "label": names[truth], "prediction": names[int(row.argmax())],
         "probabilities": [round(float(chance), 6) for chance in row]}
        for place, (row, truth) in enumerate(zip(chances, truths, strict=True))
    ]  # fmt: skip
    scores = {"precision": 0.5, "recall": 0.25, "f1": 1 / 3, "support": 7}
    numbers = {"loss": 0.5, "accuracy": 0.75, "f1_macro": 0.7}
    return predictions, {**numbers, "per_class": dict.fromkeys(names, scores)}


@pytest.fixture
def three(tmp_path: Path) -> Run:
    """60 samples of three Chinese classes; every third text is nasty."""
    labels = Labels("single_label_classification", CHINESE, ("label",))
    chances = np.random.default_rng(0).dirichlet(np.ones(3), 60)
    predictions, numbers = single(CHINESE, chances, [place % 3 for place in range(60)])
    texts = [NASTY if place % 3 == 0 else f"第{place}条 " + "很长" * 400 for place in range(60)]
    return tmp_path / "run", make_run(tmp_path / "run", labels, predictions, numbers), texts


def written(run: Run) -> Page:
    folder, _, texts = run
    write_report(Record.load(folder), texts)
    return Page(folder / "report.html")


def new_page(
    folder: Path, labels: Labels | None, lines: list[Any], numbers: Any, texts: Sequence[str] = ()
) -> Page:
    return written((folder, make_run(folder, labels, lines, numbers), list(texts)))


def page_of(folder: Path) -> Page:
    return Page(write_report_of_folder(folder))


def test_a_classification(three: Run) -> None:
    folder = three[0]
    page = written(three)
    assert page.loads() == []
    assert {"script", "img", "iframe", "object"}.isdisjoint(tag for tag, _ in page.tags)
    for shown in ("all-MiniLM-L6-v2 on train<1>.csv", "step 40", "accuracy 0.7500", "2 (zero2), bf16",
                  "7,677 train", "accelerate_configs/zero2.yaml", "recipes/cls.py --seed 1",
                  "learning_rate 5e-05", "40 of 40", "accuracy (validation)"):  # fmt: skip
        assert shown in page.text
    predictions = lines_of(folder / "predictions.jsonl")
    wrong = []
    for line, text in zip(predictions, three[2], strict=True):
        if line["label"] != line["prediction"]:
            error = 1 - line["probabilities"][CHINESE.index(line["label"])]
            shown = text if text == NASTY else text[:299] + "…"  # as text
            wrong.append([error, str(line["id"] + 1), shown, line["label"], line["prediction"]])
    head, *rows = page.rows["mistakes"]
    assert head == ["row", "text", "label", "prediction", "error"]
    expected = sorted(wrong, reverse=True)[:20]
    assert rows == [[*row, f"{error:.4g}"] for error, *row in expected]
    axis, head, *rows = page.rows["confusion"]
    assert [*axis, *head] == ["", "predicted", "", "true", *CHINESE, "samples"]
    for name, row in zip(CHINESE, rows, strict=True):
        guesses = [line["prediction"] for line in predictions if line["label"] == name]
        counts = [guesses.count(guess) for guess in CHINESE]
        cells = [f"{count}{100 * count / len(guesses):.0f} %" if count else "·" for count in counts]
        assert row == [name, *cells, str(len(guesses))]


@pytest.mark.usefixtures("without_charts")
def test_the_home_folder_becomes_a_tilde(three: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    path = three[0] / "config.json"
    path.write_text(path.read_text().replace("recipes/", "/home/somebody/"))
    source = written(three).source
    assert "~/cls.py --seed 1" in source
    assert "somebody" not in source


@pytest.mark.usefixtures("without_charts")
def test_other_tasks(tmp_path: Path) -> None:
    lines = [{"id": 0, "reference": "a", "prediction": "b", "scores": {"rougeL": 0.35}}]
    page = new_page(tmp_path / "titles", None, lines, TITLES)
    assert "rougeL 0.3500" in page.text
    assert "mistakes" not in page.rows
    lines = [{"id": row, "label": row / 10, "prediction": row / 10 - row / 50} for row in range(30)]
    texts = [f"text {row}" for row in range(30)]
    page = new_page(tmp_path / "one", regression("score"), lines, REGRESSION, texts)
    rows = page.rows["mistakes"][1:]
    assert [int(row[0]) for row in rows] == list(range(30, 10, -1))
    assert rows[0] == ["30", "text 29", "2.9000", "2.3200", "0.58"]
    lines = [{"id": row, "label": [row, 2.5], "prediction": [row + 1, 2.0]} for row in range(3)]
    page = new_page(tmp_path / "two", regression("taste", "price"), lines, REGRESSION)
    assert page.rows["mistakes"][1] == ["1", "0,2.5000", "1,2.0000", "0.75"]
    labels = Labels("multi_label_classification", ("a|b", "长", "c"), ("labels",))
    lines = [
        {"id": 0, "label": ["长"], "prediction": ["长"], "probabilities": [0.1, 0.9, 0.2]},
        {"id": 5, "label": ["长"], "prediction": ["c"], "probabilities": [0.1, 0.3, 0.6]},
        {"id": 9, "label": [], "prediction": ["a|b", "c"], "probabilities": [0.999, 0.2, 0.6]},
    ]
    numbers = {"loss": 0.7, "accuracy": 0.33, "f1_macro": 0.5, "f1_micro": 0.5}
    page = new_page(tmp_path / "labels", labels, lines, numbers, ["fine", "mixed", NASTY])
    assert page.rows["mistakes"][1:] == [
        ["10", NASTY, "none", "a|b,c", "0.999"],
        ["6", "mixed", "长", "c", "0.7"],
    ]
    assert "confusion" not in page.rows


@pytest.mark.usefixtures("without_charts")
def test_two_thousand_classes_have_pairs_only(tmp_path: Path) -> None:
    names = tuple(f"class {place}" for place in range(2000))
    labels = Labels("single_label_classification", names, ("label",))
    chances = np.full((30, 2000), 1e-4)
    chances[:, 7] = 0.9
    predictions, numbers = single(names, chances, [11] * 20 + list(range(20, 30)))
    page = new_page(tmp_path / "run", labels, predictions, numbers)
    assert page.rows["confusion"][1] == ["class 11", "class 7", "20", "100 %"]
    assert (len(page.rows["confusion"]), len(page.rows["classes"])) == (12, 2001)


@pytest.mark.usefixtures("without_charts")
def test_the_report_of_a_folder(three: Run) -> None:
    folder, last, _ = three
    before = written((folder, last, [])).source
    # an evaluation on truncated texts is no result of the run
    add_comparison(folder, split="validation")
    assert page_of(folder).source == before
    # a killed run, whose last evaluation is not of the saved model
    (folder / "model").mkdir()
    (folder / "model" / "trainer_state.json").write_text('{"global_step": 20}')
    text = page_of(folder).text
    assert "The model at step 40" in text
    assert "that of step 20" in text


def test_a_diverged_run_and_one_that_was_not_evaluated(three: Run) -> None:
    folder = three[0]
    for name in ("metrics.jsonl", "eval.jsonl"):
        lines = lines_of(folder / name)
        write_lines(folder / name, [line | {"loss": None} for line in lines])
    assert "loss –" in written(three).text
    # killed before its first evaluation, in the middle of a line
    (folder / "eval.jsonl").unlink()
    (folder / "predictions.jsonl").unlink()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "lo')
    page = page_of(folder)
    assert "Not evaluated yet." in page.text
    assert [tag for tag, _ in page.tags].count("svg") == 5


@pytest.mark.usefixtures("without_charts")
def test_abstained_rows_are_not_mistakes(three: Run) -> None:
    folder = three[0]
    lines = lines_of(folder / "predictions.jsonl")
    abstained = [line | {"prediction": None} for line in lines[:50]]
    write_lines(folder / "predictions.jsonl", [*abstained, *lines[50:]])
    tuned = lines_of(folder / "eval.jsonl")[-1] | {"decisions": DECISIONS}
    write_lines(folder / "eval.jsonl", [tuned])
    page = written(three)
    assert ["ece", "0.2000", "0.1000"] in page.rows["decisions"]
    wrong = [line["label"] != line["prediction"] for line in lines]
    assert len(page.rows["mistakes"]) - 1 == sum(wrong[50:])
    assert "The 50 samples without an answer" in page.text
