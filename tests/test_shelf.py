"""Workflows, versions and the release: files and commands that they name exist."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from tests import release
from tests.runs import ROOT
from toolkit import __version__

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
OTHERS = [
    ROOT / "CITATION.cff",
    ROOT / ".pre-commit-config.yaml",
    *(ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"),
]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LINES = re.findall(
    r"^([a-z][\w-]*(?: [a-z][\w-]*)*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M
)
TARGETS = set(" ".join(LINES).split())


def loaded(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_has_read_permission_only_and_its_files_exist(path: Path) -> None:
    workflow = loaded(path)
    assert workflow[True]  # YAML 1.1 parses `on` as true
    assert workflow["permissions"] == {"contents": "read"}
    for step in [step for job in workflow["jobs"].values() for step in job["steps"]]:
        assert ("run" in step) != ("uses" in step)
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)", step["uses"])
        files = re.findall(r"(?:tests|benchmarks|recipes)/[\w/]+\.py", step.get("run", ""))
        assert [name for name in files if not (ROOT / name).is_file()] == []
    needed = {need for job in workflow["jobs"].values() for need in [job.get("needs")] if need}
    assert needed <= set(workflow["jobs"])


@pytest.mark.parametrize(
    "path", [*WORKFLOWS, ROOT / "AGENTS.md", ROOT / "CONTRIBUTING.md", ROOT / "README.md", ROOT / "Makefile",
             ROOT / ".github" / "pull_request_template.md", ROOT / "docs" / "compatibility.md"],
    ids=lambda path: path.name)  # fmt: skip
def test_make_targets_exist(path: Path) -> None:
    named = set(
        re.findall(r"(?:`|run: |^\s*)make ([a-z][\w-]*)", path.read_text(encoding="utf-8"), re.M)
    )
    assert named - TARGETS - {"it"} == set()


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.name)
def test_other_files_are_yaml(path: Path) -> None:
    assert isinstance(loaded(path), dict)


def test_the_version_is_defined_once() -> None:
    assert "version" in PROJECT["project"]["dynamic"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "toolkit.__version__"}
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert newest is not None
    assert newest[1] == __version__


def test_constraints_are_within_the_ranges_and_every_dependency_has_a_lower_bound() -> None:
    pins = dict(
        re.findall(
            r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), flags=re.M
        )
    )
    by_name = {re.sub(r"[-_.]+", "-", name).lower(): pin for name, pin in pins.items()}
    extras = PROJECT["project"]["optional-dependencies"].values()
    lines = [*PROJECT["project"]["dependencies"], *(line for extra in extras for line in extra)]
    for line in lines:
        needed = Requirement(line)
        if needed.name == PROJECT["project"]["name"]:
            continue
        pin = by_name[re.sub(r"[-_.]+", "-", needed.name).lower()]
        assert needed.specifier.contains(pin), f"{line}: constraints.txt has {pin}"
        if line in PROJECT["project"]["dependencies"]:
            assert ">=" in line, f"{line} has no lower bound"


def test_a_wheel_with_missing_or_extra_files_is_refused() -> None:
    wanted = release.expected(["toolkit/run.py", "tests/runs.py"], ["recipes/cls.py"])
    assert wanted == {"toolkit/run.py", "toolkit/templates/recipes/cls.py"}
    names = ["toolkit/run.py", "toolkit/secret.txt", "finetune_toolkit-1.dist-info/METADATA"]
    assert release.wheel_faults(names, wanted) == ["missing: toolkit/templates/recipes/cls.py",
                                                   "extra: toolkit/secret.txt"]  # fmt: skip
    assert release.wheel_faults([*wanted], wanted) == []


@pytest.mark.parametrize(("entry", "released"), [("1.2.0 (2026-01-31)", True), ("1.2.0 (unreleased)", False),
                                              ("1.1.0 (2026-01-31)", False)])  # fmt: skip
def test_only_a_dated_entry_of_this_version_is_released(entry: str, released: bool) -> None:
    assert (release.changelog_fault(f"# Changelog\n\n## {entry}\n- x\n", "1.2.0") == "") == released
