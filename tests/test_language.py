"""`--language zh`: a run's lines and pages are Chinese, with the numbers and names of the English ones, and no sentence
lacks its Chinese."""

import ast
import functools
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, nodes

from tests.report.made import DECISIONS, SETTINGS, make_run
from tests.report.test_html import Page, single
from tests.runs import ROOT
from toolkit.data.labels import Labels
from toolkit.features.baselines import baselines
from toolkit.report import comparison
from toolkit.report.card import write_card
from toolkit.report.html import write_report
from toolkit.report.record import Record
from toolkit.utils.language import Language

ZH = Language("zh")
TABLE = json.loads((ROOT / "toolkit/utils/zh.json").read_text(encoding="utf-8"))
FOLDERS = "data evaluation models objective report training features/baselines features/decisions features/distillation"
FOLDERS += " features/padding_free features/pretraining features/titles run.py pretrained.py launch/world.py"
LOGS = re.compile(r"(.*\.)?(log_on_\w+|say|_log|info|warning)|(notes|lines)\.(append|extend)")
MAKERS = re.compile("describe|save|results|doubts|command_to_continue|.*notes?.*")


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


class Lines:
    """The templates of the lines that a module makes, with 1 for a value that is not known."""

    def __init__(self, path: Path) -> None:
        module = ast.parse(path.read_text(encoding="utf-8"))
        nodes = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)]
        self.functions = {function.name: function for function in nodes}
        self.found: set[str] = set()
        for function in nodes:
            for value in self.lines_of(function):
                self.found.update(self.texts(value, function))

    def lines_of(self, function: ast.FunctionDef) -> Iterator[ast.expr]:
        """What it logs, puts into `lines` or `notes`, or returns as such."""
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and LOGS.fullmatch(ast.unparse(node.func)):
                yield from node.args
            if isinstance(node, ast.Assign) and ast.unparse(node.targets) in ("notes", "lines"):
                yield node.value
        if MAKERS.fullmatch(function.name):
            yield from returned(function)

    def texts(self, node: Any, function: ast.FunctionDef) -> list[str]:
        """All values that a text may have."""
        of = functools.partial(self.texts, function=function)
        if isinstance(node, ast.Constant):
            return [str(node.value)]
        if isinstance(node, ast.JoinedStr):
            return ["".join(parts) for parts in itertools.product(*map(of, node.values))]
        if isinstance(node, ast.FormattedValue | ast.Starred):
            return of(node.value)
        if isinstance(node, ast.IfExp):
            return of(node.body) + of(node.orelse)
        if isinstance(node, ast.List):
            return [text for part in node.elts for text in of(part)]
        if isinstance(node, ast.Name):
            return self.assigned(node.id, function) or ["1"]
        callee = self.functions.get(ast.unparse(node).partition("(")[0].removeprefix("self."))
        if not isinstance(node, ast.Call) or callee in (None, function):
            return ["1"]
        found = [text for value in returned(callee) for text in self.texts(value, callee)]
        return list(filter(None, found)) or ["1"]

    def assigned(self, name: str, function: ast.FunctionDef) -> list[str]:
        """All that is assigned to a name, and these with what is added."""
        first, more = [], []
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets) == name:
                first += self.texts(node.value, function)
            if isinstance(node, ast.AugAssign) and ast.unparse(node.target) == name:
                more += self.texts(node.value, function)
        return first + ["".join(both) for both in itertools.product(first, more)]


def returned(function: Any) -> list[Any]:
    kinds = (ast.Return, ast.Yield, ast.YieldFrom)
    return [node.value for node in ast.walk(function) if isinstance(node, kinds) and node.value]


# no line of a run: the name of the column that is in doubt is assigned twice
NEVER = re.compile("the label is .* has texts, too|the text is .* may be it, too")


def test_every_line_of_a_run_has_its_chinese() -> None:
    paths = [ROOT / "toolkit" / name for name in FOLDERS.split()]
    files = [file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])]
    found = {text for file in files for text in Lines(file).found}
    sentences = {text for text in found if re.search("[a-z]{2,} [a-z]{2,}", text)}
    assert len(sentences) > 50
    assert [text for text in sentences if ZH.line(text) == text and not NEVER.match(text)] == []


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
