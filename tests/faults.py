"""The fault table: what a user sees, and what is lost, when a run is broken in a way that it must survive.

    make test-faults          # runs every test that breaks something, and writes docs/faults.md

A test that breaks something takes the fixture `fault` and calls `fault(what, saw, lost)` with what it has seen; the
row holds those words and the seconds the test took. A test that fails leaves a row that says so.
"""

import os
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from toolkit.errors import UserError

Fault = Callable[..., None]


def refusal(
    act: Callable[..., Any], *given: Any, says: Sequence[str] = (), match: str | None = None, lines: int = 1,
    **named: Any,
) -> str:  # fmt: skip
    """The line of the UserError that this call ends with; each of `says` stands in it, and so does `match`."""
    with pytest.raises(UserError, match=match) as raised:
        act(*given, **named)
    said = str(raised.value)
    assert said.count("\n") == lines - 1, said
    assert [words for words in says if words not in said] == [], said
    return said


PAGE = """# What happens when something breaks
[中文](faults.zh.md)

Each row is a test that breaks a run or its input in this way; `make test-faults` runs them and writes this page.
Seconds are the duration of the test on {cores} CPU cores, with starting Python and the second run.
{count} faults; {versions}.

| fault | what the user sees | what is lost | seconds |
|---|---|---|---|
{rows}
"""
CHINESE = """# 出故障时会怎样
[English](faults.md)

每一行都是一个测试：它按这种方式弄坏一次运行（或输入）；`make test-faults` 运行它们并写出本页。
秒数是整个测试的时间（{cores} 个 CPU 核），包括启动 Python 和第二次运行。共 {count} 种；{versions}。

| 故障 | 用户看到的 | 丢失的 | 秒 |
|---|---|---|---|
{rows}
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--faults",
        type=Path,
        help="run the tests that break something, and write their table to FILE",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    if config.getoption("--faults"):
        chosen = [item for item in items if "fault" in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen


@pytest.fixture
def fault(request: pytest.FixtureRequest, tmp_path: Path) -> Fault:
    """`fault(what, saw, lost)`: a row of the table. `saw` is the line that the user got, word for word."""

    def add(what: str, saw: str, lost: str = "nothing") -> None:
        lines = saw.strip().splitlines()
        first = next(
            (place for place, line in enumerate(lines) if "error: " in line), len(lines) - 1
        )
        line = " ".join(
            map(str.strip, lines[first:] if lines[first].endswith(":") else [lines[first]])
        )
        for path, name in (
            (str(tmp_path), "DIR"),
            (str(Path.cwd()), "HERE"),
            (platform.node(), "HOST"),
        ):
            line = line.replace(path, name)
        line = re.sub(
            r"[^\s'=]*/pytest-of-[^\s/]*/\S*?(?=/)", "DIR", line
        )  # other folders of the session
        request.node.user_properties.append(
            ("fault", (what, re.sub(r"^.*?(\[rank|error: )", r"\1", line), lost))
        )

    return add


@pytest.hookimpl(hookwrapper=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> Iterator[None]:
    yield
    page = config.getoption("--faults")
    if not page:
        return
    rows = []
    for outcome in ("passed", "failed", "error"):
        for report in terminalreporter.stats.get(outcome, []):
            found = [value for name, value in report.user_properties if name == "fault"]
            if outcome != "passed":
                found = found or [(report.nodeid, "", "")]
                found = [(what, f"**the test {outcome}**", "unknown") for what, *_ in found]
            rows += [(*row, f"{report.duration:.1f}") for row in found]
    rows = list(
        {row[:3]: row for row in rows}.values()
    )  # a fault that two ways of reading meet is one
    packages = [
        f"{name} {version(name)}" for name in ("torch", "accelerate", "deepspeed", "transformers")
    ]
    facts = {"count": len(rows), "cores": os.cpu_count(), "versions": ", ".join(packages),
             "rows": "\n".join(map(_row, sorted(rows)))}  # fmt: skip
    for path, text in ((page, PAGE), (page.with_suffix(".zh.md"), CHINESE)):
        path.write_text(text.format(**facts), encoding="utf-8")
    terminalreporter.write_line(f"{len(rows)} faults: {page}")


def _row(cells: tuple[str, ...]) -> str:
    what, saw, lost, seconds = (cell.replace("|", "\\|") for cell in cells)
    return f"| {what} | {f'`{saw}`' if saw and not saw.startswith('**') else saw} | {lost} | {seconds} |"
