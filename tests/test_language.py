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
RETURNS = (ast.Return, ast.Yield, ast.YieldFrom)


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
        is_maker = MAKERS.fullmatch(function.name)
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and LOGS.fullmatch(ast.unparse(node.func)):
                yield from node.args
            is_list = isinstance(node, ast.Assign) and ast.unparse(node.targets) in (
                "notes",
                "lines",
            )
            if is_list or (is_maker and isinstance(node, RETURNS) and node.value):
                yield node.value

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
            return self.assigned(node, function) or ["1"]
        callee = self.functions.get(ast.unparse(node).partition("(")[0].removeprefix("self."))
        if not isinstance(node, ast.Call) or callee in (None, function):
            return ["1"]
        returned = [
            each.value for each in ast.walk(callee) if isinstance(each, RETURNS) and each.value
        ]
        found = [text for value in returned for text in self.texts(value, callee)]
        return list(filter(None, found)) or ["1"]

    def assigned(self, name: ast.Name, function: ast.FunctionDef) -> list[str]:
        """What was last assigned to a name: in each branch, and before them."""
        before = [
            node
            for node in ast.walk(function)
            if isinstance(node, ast.stmt) and node.lineno <= name.lineno
        ]
        before.sort(key=lambda node: -node.lineno)
        found: list[str] = []
        for node in before:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets) == name.id:
                found += self.texts(node.value, function)
                if node.col_offset <= before[0].col_offset:
                    break
        for node in before:
            if isinstance(node, ast.AugAssign) and ast.unparse(node.target) == name.id:
                found += [
                    text + more for text in found for more in self.texts(node.value, function)
                ]
        return found


def test_every_line_of_a_run_has_its_chinese() -> None:
    paths = [ROOT / "toolkit" / name for name in FOLDERS.split()]
    missing = set()
    for path in itertools.chain(
        *(path.rglob("*.py") if path.is_dir() else [path] for path in paths)
    ):
        sentences = {text for text in Lines(path).found if re.search("[a-z]{2,} [a-z]{2,}", text)}
        missing |= {f"{path}: {text}" for text in sentences if ZH.line(text) == text}
    assert missing == set()


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
