"""`--language zh`: a run's lines and pages are Chinese, with the numbers and names of English."""

import ast
import json
import re
from pathlib import Path

import numpy as np
import pytest
from jinja2 import Environment, nodes

from tests.matrix import JOBS, runs
from tests.report.made import DECISIONS, SETTINGS, make_run
from tests.report.test_html import Page, single
from tests.runs import ROOT
from toolkit.data.labels import Labels
from toolkit.features.baselines import baselines
from toolkit.report import comparison
from toolkit.report.card import write_card
from toolkit.report.html import write_report
from toolkit.report.record import Record

TABLE = json.loads((ROOT / "toolkit/utils/zh.json").read_text(encoding="utf-8"))


def test_both_languages_have_the_same_values_settings_and_numbers() -> None:
    for english, chinese in [*TABLE["pages"].items(), *TABLE["lines"].items()]:
        assert english != chinese
        assert sorted(re.findall(r"{\w*}", english)) == sorted(re.findall(r"{\w*}", chinese))
        kept = re.findall(r"--\w+|`[^`]+`|\d+(?:,\d+)*|\w+\.jsonl?", english)
        assert [word for word in kept if word not in chinese] == [], english


def test_every_sentence_of_a_page_has_its_chinese() -> None:
    models = (baselines.LARGEST, baselines.LINEAR, baselines.MODEL)
    sentences = {comparison.LEGEND, "Decisions", "Loss", *models}
    for path in (ROOT / "toolkit").rglob("*.*"):
        if path.suffix in (".html", ".jinja", ".md"):
            template = Environment().parse(path.read_text(encoding="utf-8"))
            for call in template.find_all(nodes.Call):
                if isinstance(call.node, nodes.Name) and call.node.name == "t":
                    assert isinstance(call.args[0], nodes.Const), path
                    sentences.add(call.args[0].value)
    assert sentences - {*TABLE["pages"]} == set()


def test_every_line_of_the_table_is_one_of_the_code() -> None:
    """Pair by pair of words: otherwise the English was changed, and its Chinese is lost."""
    made_of_values = {"is kept", "choose others", "single label", "multi label"}
    code = []
    for path in (ROOT / "toolkit").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and "\n" not in str(node.value):  # no docstring
                code.append(str(node.value))
    texts = "\n".join(code)
    for english in TABLE["lines"]:
        pairs = set(re.findall(r"(?=\b([a-z]+ [a-z]+)\b)", english)) - made_of_values
        assert [pair for pair in pairs if pair not in texts] == [], english


@pytest.mark.parametrize(
    "job",
    [
        "lora best step",
        "teacher",
        "multi-label",
        "regression",
        "long",
        "title",
        "pretraining",
        "spans",
    ],
)
def test_every_line_of_a_run_is_chinese(job: str) -> None:
    name, words = f"{job} in Chinese", [*JOBS[job].words, "--language", "zh"]
    runs("single").run(name, JOBS[job].recipe, words)
    lines = runs("single").log(name).splitlines()
    assert len(lines) > 15
    english = [line for line in lines if re.search("[a-z]+ [a-z]+ [a-z]+", line)]
    assert [line for line in english if not re.search("[一-鿿]", line)] == []


NAMES = ("负面", "run", "text")  # as words of the page
NOTE = "validation: 3 of 250 texts are also in the training data: its scores will be too high (rows 4, 9 and 12 more)"


def pages(folder: Path, language: str) -> tuple[str, str]:
    """The texts of a run's page and of its card."""
    labels = Labels("single_label_classification", NAMES, ("label",))
    chances = np.random.default_rng(0).dirichlet(np.ones(3), 60)
    predictions, numbers = single(NAMES, chances, [place % 3 for place in range(60)])
    numbers = numbers | {"decisions": DECISIONS}
    columns = {"text_column": "TEXT", "text_pair": "REPLY", "label_columns": ["STANCE"]}
    settings = {**SETTINGS, "language": language}
    make_run(folder, labels, predictions, numbers, settings, notes=[NOTE], **columns)
    interval = {"value": 0.75, "low": 0.7, "high": 0.8}
    scores = {"accuracy": interval, "f1_macro": interval}
    models = dict.fromkeys((baselines.LINEAR, baselines.MODEL), scores)
    content = {"split": "validation", "num_samples": 60, "models": models}
    (folder / "baselines.json").write_text(json.dumps(content))
    (folder / "model").mkdir()
    write_card(folder / "model", folder)
    write_report(Record.load(folder), ["好"] * 60)
    card = (folder / "model" / "README.md").read_text(encoding="utf-8")
    return Page(folder / "report.html").text, card


def numbers_in(text: str) -> list[str]:
    return sorted(re.findall(r"\d+(?:[.,]\d+)*", text))


def test_the_page_and_the_card_of_a_run(tmp_path: Path) -> None:
    (page, card), chinese_pages = (pages(tmp_path / each, each) for each in ("en", "zh"))
    for named in ("text: TEXT", "pair: REPLY", "label: STANCE"):
        assert named in page
    for english, chinese in zip((page, card), chinese_pages, strict=True):
        assert numbers_in(english) == numbers_in(chinese)
        for name in (*NAMES, "REPLY", "accuracy", "validation", "train"):
            assert name in chinese
        assert re.findall(r"\b[a-z]+ [a-z]+ [a-z]+\b", chinese) == []
