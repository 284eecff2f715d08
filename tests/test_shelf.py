"""Workflows, versions and the release: files and commands that they name exist."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.runs import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
NAMES = ("AGENTS.md", "CONTRIBUTING.md", "README.md", "Makefile", "docs/compatibility.md",
         ".github/pull_request_template.md")  # fmt: skip
PAGES = [*WORKFLOWS, *(ROOT / name for name in NAMES)]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PHONY = re.findall(r"^\.PHONY: (.*)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_make_targets_and_files_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert path not in WORKFLOWS or "\npermissions:\n  contents: read\n" in text
    targets = set(re.findall(r"(?:`|run: |^\s*)make ([a-z][\w-]*)", text, re.M))
    assert targets <= {*" ".join(PHONY).split(), "it"}
    files = re.findall(r"\b(?:tests|benchmarks|recipes)/[\w/]+\.py", text)
    assert [name for name in files if not (ROOT / name).is_file()] == []


def test_constraints_are_within_the_ranges_and_every_dependency_has_a_lower_bound() -> None:
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    lines = re.findall(r"^([\w.-]+)==(\S+)", text, re.M)
    pins = {canonicalize_name(name): pin for name, pin in lines}
    needed = PROJECT["project"]["dependencies"]
    assert [line for line in needed if ">=" not in line] == []
    extras = PROJECT["project"]["optional-dependencies"].values()
    for line in [*needed, *(line for extra in extras for line in extra)]:
        one = Requirement(line)
        if one.name != PROJECT["project"]["name"]:
            assert one.specifier.contains(pins[canonicalize_name(one.name)]), line
