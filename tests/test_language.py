"""`--language zh`: a run's lines and pages are Chinese, with the numbers and names of the English ones, and no sentence
lacks its Chinese."""

import ast
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path

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
MODULES = [
    path
    for folder in ("data", "evaluation", "models", "objective", "report", "training",
                   *(f"features/{name}" for name in ("baselines", "decisions", "distillation", "padding_free",
                                                     "pretraining", "titles")))
    for path in (ROOT / "toolkit" / folder).rglob("*.py")
] + [ROOT / "toolkit" / name for name in ("run.py", "pretrained.py", "launch/world.py")]  # fmt: skip
MAKERS = {"describe", "save", "results", "doubts", "command_to_continue"}
LOGS = {"log_on_main", "log_on_rank_0", "say", "_log", "info", "warning"}


def test_both_languages_have_the_same_values_settings_and_numbers() -> None:
    for english, chinese in [*TABLE["pages"].items(), *TABLE["lines"].items()]:
        assert english != chinese
        assert sorted(re.findall(r"{\w*}", english)) == sorted(re.findall(r"{\w*}", chinese))
        kept = re.findall(r"--\w+|`[^`]+`|\d+(?:,\d+)*|\w+\.jsonl?", english)
        assert [word for word in kept if word not in chinese] == [], english


def test_every_sentence_of_a_page_has_its_chinese() -> None:
    sentences = {
        comparison.LEGEND,
        baselines.LARGEST,
        baselines.LINEAR,
        baselines.MODEL,
        "Decisions",
        "Loss",
    }
    for path in (ROOT / "toolkit").rglob("*.*"):
        if path.suffix in (".html", ".jinja", ".md"):
            template = Environment().parse(path.read_text(encoding="utf-8"))
            for call in template.find_all(nodes.Call):
                if isinstance(call.node, nodes.Name) and call.node.name == "t":
                    assert isinstance(call.args[0], nodes.Const), path
                    sentences.add(call.args[0].value)
    assert sentences - {*TABLE["pages"]} == set()


class Lines(ast.NodeVisitor):
    """The templates of the lines that a module makes, with X for each value: what is logged, or is put into `lines` or
    `notes`, also by functions of the module that are called there."""

    def __init__(self, path: Path) -> None:
        self.module = ast.parse(path.read_text(encoding="utf-8"))
        self.functions = {
            node.name: node for node in ast.walk(self.module) if isinstance(node, ast.FunctionDef)
        }
        self.found: set[str] = set()
        for function in self.functions.values():
            self.function = function
            self.visit_all(function)

    def visit_all(self, function: ast.FunctionDef) -> None:
        if function.name in MAKERS or "note" in function.name:
            self.found.update(self.of_function(function))
        for node in ast.walk(function):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                owner = ast.unparse(node.func).split(".")[0]
                if name in LOGS or (owner in ("notes", "lines") and name in ("append", "extend")):
                    self.add(node.args)
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in (
                "notes",
                "lines",
            ):
                self.add([node.value])

    def add(self, values: list[ast.expr]) -> None:
        for value in values:
            self.found.update(self.texts(value))

    def of_function(self, function: ast.FunctionDef) -> Iterator[str]:
        outer, self.function = self.function, function
        for node in ast.walk(function):
            if isinstance(node, ast.Return | ast.Yield | ast.YieldFrom) and node.value:
                yield from self.texts(node.value)
        self.function = outer

    def texts(self, node: ast.AST) -> list[str]:
        """All values that a text may have; X for what is not known."""
        if isinstance(node, ast.Constant):
            return [str(node.value)]
        if isinstance(node, ast.JoinedStr):
            return ["".join(parts) for parts in itertools.product(*map(self.texts, node.values))]
        if isinstance(node, ast.FormattedValue):
            return self.texts(node.value)
        if isinstance(node, ast.IfExp):
            return [*self.texts(node.body), *self.texts(node.orelse)]
        if isinstance(node, ast.List | ast.Tuple):
            return [text for part in node.elts for text in self.texts(part)]
        if isinstance(node, ast.Starred):
            return self.texts(node.value)
        if isinstance(node, ast.Name):
            return self.of_name(node)
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).removeprefix("self.")
            if name in self.functions and self.functions[name] is not self.function:
                return [*self.of_function(self.functions[name])] or ["X"]
        return ["X"]

    def of_name(self, node: ast.Name) -> list[str]:
        """What was last assigned to it before: in each branch, and where there is none."""
        before = [
            each
            for each in ast.walk(self.function)
            if isinstance(each, ast.stmt) and each.lineno <= node.lineno
        ]
        statement = max(before, key=lambda each: each.lineno)
        found: list[str] = []
        for each in sorted(before, key=lambda each: -each.lineno):
            if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == node.id:
                found += self.texts(each.value)
                if each.col_offset <= statement.col_offset:
                    break
        for each in before:
            if isinstance(each, ast.AugAssign) and ast.unparse(each.target) == node.id:
                found += [text + more for text in found for more in self.texts(each.value)]
        return found or ["X"]


def test_every_line_of_a_run_has_its_chinese() -> None:
    missing = {}
    for path in MODULES:
        sentences = {text for text in Lines(path).found if re.search("[a-z]{2,} [a-z]{2,}", text)}
        english = {text for text in sentences if ZH.line(text) == text} - {"X was X and is X"}
        if english:
            missing[path.relative_to(ROOT)] = english
    assert missing == {}


NAMES = ("负面", "run", "text")  # as words of the page
NOTE = "validation: 3 of 250 texts are also in the training data: its scores will be too high (rows 4, 9 and 12 more)"


def pages(folder: Path, language: str) -> tuple[str, str]:
    """The texts of a run's page and of its card."""
    labels = Labels("single_label_classification", NAMES, ("label",))
    chances = np.random.default_rng(0).dirichlet(np.ones(3), 60)
    predictions, numbers = single(NAMES, chances, [place % 3 for place in range(60)])
    columns = {"text_column": "text", "text_pair": "reply", "label_columns": ["label"]}
    settings = {**SETTINGS, "language": language}
    make_run(
        folder,
        labels,
        predictions,
        numbers | {"decisions": DECISIONS},
        settings,
        notes=[NOTE],
        **columns,
    )
    interval = {"value": 0.75, "low": 0.7, "high": 0.8}
    models = {
        key: {"accuracy": interval, "f1_macro": interval}
        for key in (baselines.LINEAR, baselines.MODEL)
    }
    content = {"split": "validation", "num_samples": 60, "models": models}
    (folder / "baselines.json").write_text(json.dumps(content))
    (folder / "model").mkdir()
    write_card(folder / "model", folder)
    write_report(Record.load(folder), ["好"] * 60)
    return Page(folder / "report.html").text, (folder / "model" / "README.md").read_text(
        encoding="utf-8"
    )


def test_the_page_and_the_card_of_a_run(tmp_path: Path) -> None:
    for english, chinese in zip(
        pages(tmp_path / "en", "en"), pages(tmp_path / "zh", "zh"), strict=True
    ):
        assert sorted(re.findall(r"\d+(?:[.,]\d+)*", english)) == sorted(
            re.findall(r"\d+(?:[.,]\d+)*", chinese)
        )
        for name in (*NAMES, "reply", "accuracy", "validation", "train"):
            assert name in chinese
        assert re.findall(r"\b[a-z]+ [a-z]+ [a-z]+\b", chinese) == []
