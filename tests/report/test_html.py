"""toolkit/report/html.py and curves.py: one self-contained page, for every kind of task."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from tests.faults import refusal
from tests.report.made import DECISIONS, TITLES, add_comparison, make_run, write_lines
from tests.runs import lines_of
from toolkit.data.labels import Labels
from toolkit.evaluation import Evaluation
from toolkit.report import curves, html
from toolkit.report.files import Record
from toolkit.report.html import write_report, write_report_of_folder
from toolkit.utils.features import Feature, PagePart

CHINESE = ("负面", "正面", "中性")
NASTY = "<script>alert('x')</script> 这部电影 & “好”"
Run = tuple[Path, Evaluation, list[str]]
REGRESSION = {"loss": 0.1, "mse": 0.1, "mae": 0.3, "pearson": 0.9}
VOID = "meta|link|br|hr|img|input"


class Page:
    """A page's tags, texts, tables by section, and the URLs that it would load; an unclosed tag is an error of XML."""

    def __init__(self, path: Path) -> None:
        self.source = path.read_text(encoding="utf-8")
        closed = re.sub(
            rf"<({VOID})\b([^>]*?)/?>", r"<\1\2/>", re.sub("<wbr>|xlink:", "", self.source)
        )
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
        names = {"src", "srcset", "href", "data", "poster", "action"}
        urls = [
            attributes[name]
            for tag, attributes in self.tags
            if tag != "a"
            for name in names & {*attributes}
        ]
        urls += re.findall(r"url\(\s*['\"]?([^)'\"]*)|(@import[^;]*)", self.source)
        return [url for url in map("".join, urls) if url and not url.startswith(("#", "data:"))]


def single(
    names: Sequence[str], chances: np.ndarray, truths: Sequence[int]
) -> tuple[list[dict[str, Any]], dict]:
    """Predictions and numbers of single-label classification from (N, C) probabilities."""
    predictions = [
        {"id": 3 * place, "label": names[truth], "prediction": names[int(row.argmax())],
         "probabilities": [round(float(chance), 6) for chance in row]}
        for place, (row, truth) in enumerate(zip(chances, truths, strict=True))
    ]  # fmt: skip
    per_class = {
        name: {"precision": 0.5, "recall": 0.25, "f1": 1 / 3, "support": 7} for name in names
    }
    return predictions, {
        "loss": 0.5,
        "accuracy": 0.75,
        "f1_macro": 0.7,
        "f1_micro": 0.75,
        "per_class": per_class,
    }


@pytest.fixture
def three(tmp_path: Path) -> Run:
    """60 samples of three Chinese classes; every third text is nasty."""
    labels = Labels("single_label_classification", CHINESE, ("label",))
    chances = np.random.default_rng(0).dirichlet(np.ones(3), 60)
    predictions, numbers = single(CHINESE, chances, [place % 3 for place in range(60)])
    texts = [NASTY if place % 3 == 0 else f"第{place}条 " + "很长" * 400 for place in range(60)]
    return tmp_path / "run", make_run(tmp_path / "run", labels, predictions, numbers), texts


def written(run: Run) -> Page:
    folder, last, texts = run
    write_report(folder, last, texts)
    return Page(folder / "report.html")


def page_for(
    folder: Path, labels: Labels | None, lines: list[Any], numbers: Any, texts: Sequence[str] = ()
) -> Page:
    return written((folder, make_run(folder, labels, lines, numbers), list(texts)))


def page_of(folder: Path) -> Page:
    return Page(write_report_of_folder(folder))


def test_a_classification(three: Run) -> None:
    folder, last, texts = three
    with pytest.raises(ValueError, match="60 rows, and there are 59 texts"):
        write_report(folder, last, texts[1:])
    assert not (folder / "report.html").exists()
    page = written(three)
    assert page.loads() == []
    assert not re.search("https?://", page.source)
    assert {"script", "img", "iframe", "object"}.isdisjoint(tag for tag, _ in page.tags)
    shown = [row[1] for row in page.rows["mistakes"][1:]]
    assert NASTY in shown  # as text
    assert max(len(text) for text in shown) == html.MAX_CHARACTERS + 1
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json", "eval.jsonl", "metrics.jsonl", "predictions.jsonl", "report.html"
    ]  # fmt: skip
    for shown in ("all-MiniLM-L6-v2 on train<1>.csv", "step 40, on the 60 samples of validation", "Accuracy 0.7500",
                  "2 x ZeRO-2, bf16 mixed precision", "7,677 train", "accelerate_configs/zero2.yaml",
                  "1.00 GiB", "recipes/cls.py --seed 1", "learning_rate 5e-05", "40 of 40"):  # fmt: skip
        assert shown in page.text
    assert "F1 (micro)" not in page.text  # it equals the accuracy
    predictions = lines_of(folder / "predictions.jsonl")
    wrong = [line for line in predictions if line["label"] != line["prediction"]]
    surest = sorted(wrong, key=lambda line: -max(line["probabilities"]))[:20]
    head, *rows = page.rows["mistakes"]
    assert head == ["row", "text", "true", "predicted"]
    assert [[int(row[0]), *row[2:]] for row in rows] == [
        [line["id"] + 1, f"{line['label']}{line['probabilities'][CHINESE.index(line['label'])]:.3f}",
         f"{line['prediction']}{max(line['probabilities']):.3f}"] for line in surest
    ]  # fmt: skip
    head, *rows = page.rows["confusion"]
    assert head == ["", *CHINESE, "samples"]
    for name, row in zip(CHINESE, rows, strict=True):
        guesses = [line["prediction"] for line in predictions if line["label"] == name]
        counts = [guesses.count(guess) for guess in CHINESE]
        cells = [f"{count}{100 * count / len(guesses):.0f} %" if count else "·" for count in counts]
        assert row == [name, *cells, str(len(guesses))]


@pytest.mark.usefixtures("without_charts")
def test_an_undefined_variable_in_a_features_template(
    three: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Forgetful(Feature):
        def page(self, page: Any) -> PagePart:
            return PagePart("{% block section %}{{ worst_of_all }}{% endblock %}", {})

    monkeypatch.setattr(html, "features", lambda: [Forgetful()])
    refusal(written, three, says=["Forgetful.page", "'worst_of_all' is undefined"])


@pytest.mark.usefixtures("without_charts")
def test_the_home_folder_becomes_a_tilde(three: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    path = three[0] / "config.json"
    command = "/home/somebody/cls.py --output_dir /mnt/home/somebody/run --seed"
    path.write_text(path.read_text().replace("recipes/cls.py --seed", command))
    source = written(three).source
    assert "~/cls.py --output_dir /mnt/home/somebody/run --seed 1" in source
    assert source.count("somebody") == 1


@pytest.mark.usefixtures("without_charts")
@pytest.mark.parametrize("run", ["three", "titles"])
def test_predictions_of_another_evaluation_are_left_out(
    run: str, request: pytest.FixtureRequest
) -> None:
    """The run was killed between the numbers of its last evaluation and the predictions."""
    folder, last, texts = request.getfixturevalue(run)
    lines = lines_of(folder / "predictions.jsonl")
    for count in (len(lines) - 1, 0):
        write_lines(folder / "predictions.jsonl", lines[:count])
        page = written((folder, last, texts))
        assert {"mistakes", "confusion", "examples"}.isdisjoint(page.rows)
        assert "on the 60 samples of validation" in page.text


@pytest.mark.usefixtures("without_charts")
def test_two_thousand_classes_have_pairs_only(tmp_path: Path) -> None:
    names = tuple(f"class {place}" for place in range(2000))
    labels = Labels("single_label_classification", names, ("label",))
    chances = np.full((30, 2000), 1e-4)
    chances[:, 7] = 0.9
    predictions, numbers = single(names, chances, [11] * 20 + list(range(20, 30)))
    page = page_for(tmp_path / "run", labels, predictions, numbers)
    assert "these are the 11 most confused of 11 confused pairs" in page.text
    assert page.rows["confusion"][1] == ["class 11", "class 7", "20", "100 %"]
    assert (len(page.rows["confusion"]), len(page.rows["classes"])) == (12, 2001)
    assert len(page.source) < 1_000_000


def test_regression(tmp_path: Path) -> None:
    labels = Labels("regression", ("score",), ("score",))
    predictions = [
        {"id": row, "label": row / 10, "prediction": row / 10 + (-1) ** row * row / 50}
        for row in range(30)
    ]
    page = page_for(
        tmp_path / "run", labels, predictions, REGRESSION, [f"text {place}" for place in range(30)]
    )
    rows = page.rows["mistakes"]
    assert rows[0] == ["row", "text", "true", "predicted", "error"]
    assert [int(row[0]) for row in rows[1:]] == list(range(30, 10, -1))
    assert rows[1] == ["30", "text 29", "2.9000", "2.3200", "-0.58"]
    assert {"Predicted against true", "Pearson correlation on validation"} <= set(page.texts)
    assert "confusion" not in page.rows
    assert page.loads() == []
    labels = Labels("regression", ("taste", "price"), ("taste", "price"))
    predictions = [
        {"id": place, "label": [place, 2.5], "prediction": [place + 1, 2.0]} for place in range(3)
    ]
    page = page_for(tmp_path / "several", labels, predictions, REGRESSION)
    assert page.rows["mistakes"][1] == ["1", "[0, 2.5]", "[1, 2.0]", "0.75"]
    assert "2 numbers" in page.text


@pytest.mark.usefixtures("without_charts")
def test_multi_label(tmp_path: Path) -> None:
    labels = Labels("multi_label_classification", ("a|b", "长", "c"), ("labels",))
    predictions = [
        {"id": 0, "label": ["长"], "prediction": ["长"], "probabilities": [0.1, 0.9, 0.2]},
        {"id": 5, "label": ["长"], "prediction": ["c"], "probabilities": [0.1, 0.3, 0.6]},
        {"id": 9, "label": [], "prediction": ["a|b", "c"], "probabilities": [0.999, 0.2, 0.6]},
    ]
    per_class = {
        name: {"precision": 0.5, "recall": 0.5, "f1": 0.5, "support": 1} for name in labels.names
    }
    numbers = {
        "loss": 0.7,
        "accuracy": 0.33,
        "f1_macro": 0.5,
        "f1_micro": 0.5,
        "per_class": per_class,
    }
    page = page_for(tmp_path / "run", labels, predictions, numbers, ["fine", "mixed", NASTY])
    loss = -(np.log(0.001) + np.log(0.8) + np.log(0.4)) / 3
    assert page.rows["mistakes"][1:] == [
        ["10", NASTY, "none", "–", "a|b0.999c0.600", f"{loss:.3f}"],
        [
            "6",
            "mixed",
            "长",
            "长0.300",
            "c0.600",
            f"{-(np.log(0.9) + np.log(0.3) + np.log(0.4)) / 3:.3f}",
        ],
    ]
    assert "Accuracy (all labels right) 0.3300" in page.text
    assert "confusion" not in page.rows


@pytest.mark.parametrize("split", ["validation_first_16", "validation"])
def test_an_evaluation_on_truncated_texts_has_a_table_and_nothing_else(
    three: Run, split: str
) -> None:
    """It is not the last evaluation, nor the best, nor a point of a curve."""
    before = page_of(three[0])
    add_comparison(three[0], split=split)
    page = page_of(three[0])
    assert page.rows[""][:3] == [
        ["input", "Accuracy", "F1 (macro)", "Loss"],
        ["the first 128 tokens", "0.7500", "0.7000", "0.5000"],
        ["the first 16 tokens", "0.6250", "0.9900", "0.2500"],
    ]
    for shown in (
        "Accuracy 0.7500",
        "The saved model, step 40, on the 60 samples of validation",
        "All 4 evaluations",
    ):
        assert shown in page.text
    assert page.rows["mistakes"] == before.rows["mistakes"]
    charts = [
        source[source.index('id="curves"') :].split("</section>")[0]
        for source in (before.source, page.source)
    ]
    assert charts[0] == charts[1]


ARABIC = "الذكاء الاصطناعي"


def title_lines(count: int) -> list[dict[str, Any]]:
    """ROUGE-L grows with the row; row 1 has an empty title."""
    lines = [
        {"id": 2 * place, "title": f"标题{place}", "reference": f"第{place}条 新闻",
         "scores": {"rouge1": 0.5, "rouge2": 0.25, "rougeL": place / (count - 1)}}
        for place in range(count)
    ]  # fmt: skip
    lines[0]["title"] = "  "
    lines[1] |= {"title": ARABIC, "reference": NASTY}
    lines[-1]["title"] = f"第{count - 1}条新闻"
    return lines


@pytest.fixture
def titles(tmp_path: Path) -> Run:
    """60 titles, mostly Chinese, one Arabic, one with markup."""
    texts = [NASTY if place % 3 == 0 else f"正文{place} " + "很长" * 400 for place in range(60)]
    return tmp_path / "run", make_run(tmp_path / "run", None, title_lines(60), TITLES), texts


def test_titles(titles: Run, tmp_path: Path) -> None:
    page = written(titles)
    for shown in ("ROUGE-1 0.4100", "ROUGE-2 0.2000", "ROUGE-L 0.3500", "Loss (of a title's token) 2.5000",
                  "ROUGE is computed on Chinese words (jieba:", "at most 24 tokens, column 标题",
                  "The saved model, step 40, on the 60 samples of validation", "All 4 evaluations"):  # fmt: skip
        assert shown in page.text
    for word in ("Labels", "classes", "confus", "Confus", "mistake", "wrong", "predicted"):
        assert word not in page.text
    assert {"confusion", "classes", "mistakes"}.isdisjoint(page.rows)
    assert {"ROUGE on validation", "ROUGE-1", "ROUGE-2", "ROUGE-L"} <= set(page.texts)
    assert page.loads() == []
    assert "<script" not in page.source


@pytest.mark.parametrize("written_as", ["NaN", "null"])
def test_diverged_run(three: Run, written_as: str) -> None:
    folder, last, _ = three
    lines = lines_of(folder / "metrics.jsonl")
    for line in lines[10:]:
        line |= (
            {"loss": float("nan"), "grad_norm": float("inf")}
            if written_as == "NaN"
            else {"loss": None}
        )
    write_lines(folder / "metrics.jsonl", lines)
    text = (folder / "predictions.jsonl").read_text()
    (folder / "predictions.jsonl").write_text(
        re.sub(r"\[0\.\d+, 0\.\d+, 0\.\d+\]", f"[{written_as}, 0.5, 0.5]", text)
    )
    last.numbers["loss"] = float("nan") if written_as == "NaN" else None
    assert f"Loss {'nan' if written_as == 'NaN' else '–'}" in written(three).text


def test_the_report_of_a_folder(three: Run) -> None:
    folder, last, _ = three
    before = written((folder, last, [])).source
    (folder / "report.html").unlink()
    assert page_of(folder).source == before
    refusal(write_report_of_folder, folder / "nothing", match="is not a run folder")
    lines = lines_of(
        folder / "eval.jsonl"
    )  # a killed run, whose last evaluation is not of the saved model
    lines[1]["f1_macro"] = 0.9
    write_lines(folder / "eval.jsonl", lines)
    text = page_of(folder).text
    assert "The model at step 40, on the 60 samples of validation" in text
    assert "The saved model is that of step 20." in text
    (
        folder / "eval.jsonl"
    ).unlink()  # one killed before its first evaluation, in the middle of a line
    (folder / "predictions.jsonl").unlink()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "lo')
    page = page_of(folder)
    assert "Not evaluated yet." in page.text
    assert [tag for tag, _ in page.tags].count("svg") == 5


@pytest.mark.usefixtures("without_charts")
def test_slices_with_significantly_more_errors(three: Run) -> None:
    folder, last, texts = three
    predictions = lines_of(folder / "predictions.jsonl")
    wrong = [line["label"] != line["prediction"] for line in predictions]
    groups = {"来源": [NASTY if bad else "web" for bad in wrong], "length": ["1 to 9 tokens"] * 60}
    write_report(folder, last, texts, groups=groups)
    _, *rows = Page(folder / "report.html").rows["slices"]
    assert rows == [["来源", NASTY, str(sum(wrong)), "100.0 %"]]


def test_tuned_decisions_are_drawn_and_abstained_rows_are_not_mistakes(three: Run) -> None:
    folder, last, texts = three
    lines = lines_of(folder / "predictions.jsonl")
    write_lines(
        folder / "predictions.jsonl",
        [line | {"prediction": None} for line in lines[:50]] + lines[50:],
    )
    page = written(
        (folder, Evaluation(last.split, last.numbers | {"decisions": DECISIONS}, None), texts)
    )
    assert ["Expected calibration error", "0.2000", "0.1000"] in page.rows["decisions"]
    assert page.source.count("<svg") > 2
    assert len(page.rows["mistakes"]) - 1 == sum(
        line["label"] != line["prediction"] for line in lines[50:]
    )
    wrong = sum(
        max(zip(line["probabilities"], CHINESE, strict=True))[1] != line["label"]
        for line in lines[:50]
    )
    assert f"The 50 samples without an answer are not listed; for {wrong} of them the" in page.text
    assert "10 of 60 are answered, and of those 90.0 % are right" in page.text


def test_a_long_noisy_curve_is_small_and_its_spike_is_noted(tmp_path: Path) -> None:
    numbers = {"loss": 0.5, "accuracy": 0.75, "f1_macro": 0.7, "custom": 2.0}
    labels = Labels("single_label_classification", ("a", "b"), ("label",))
    last = make_run(tmp_path / "run", labels, [], numbers)
    losses = np.random.default_rng(0).lognormal(size=20_000)
    losses[7], losses[9] = 999.0, np.inf
    write_lines(tmp_path / "run" / "metrics.jsonl", [
        {"step": step, "loss": loss, "learning_rate": 1e-5, "grad_norm": 1.0, "samples_per_second": 9.0,
         "peak_memory_bytes": 2**30} for step, loss in enumerate(losses.tolist(), 1)
    ])  # fmt: skip
    drawn = {chart.title: chart for chart in curves.charts(Record.load(tmp_path / "run", last))}
    assert list(drawn) == ["Loss", "Metrics on validation", "custom on validation", "Learning rate", "Gradient norm",
                           "Samples per second", "Peak memory, GiB"]  # fmt: skip
    assert len(drawn["Loss"].svg) < 60_000
    assert drawn["Loss"].note == "up to 999 at step 8"
    assert drawn["Loss"].legend == (("one", "training"), ("two", "validation"))
