"""toolkit/launch/facts.py: what the processes of a run must have in common, and what to type where they do not."""

from __future__ import annotations

import importlib.metadata
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from toolkit import __version__
from toolkit.launch import facts

SAME = {"toolkit": "0.1.0", "python": "3.12", "torch": "2.13.0", "numpy": "2.4.0", "code": "0123456789ab"}


# --- versions


def test_versions_are_those_of_the_installed_libraries() -> None:
    found = facts.versions()
    assert list(found) == ["toolkit", "python", *facts.PACKAGES]
    assert found["toolkit"] == __version__
    assert found["python"] == sys.version.split()[0]
    assert found["torch"] == importlib.metadata.version("torch")


def test_a_library_that_is_not_installed_has_no_version() -> None:
    assert facts.versions(["torch", "no-such-library"])["no-such-library"] is None


def test_facts_hold_what_reads_each_others_data(tmp_path: Path) -> None:
    found = facts.facts()
    assert found["python"] == f"{sys.version_info.major}.{sys.version_info.minor}"  # patch releases may differ
    assert {*facts.PACKAGES, "tokenizers", "safetensors", "toolkit", "code"} < set(found)
    assert found["code"] == facts.code_digest()


# --- the code


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small package in the place of this one."""
    root = tmp_path / "toolkit"
    (root / "launch").mkdir(parents=True)
    (root / "a.py").write_text("a = 1\n")
    (root / "launch" / "b.py").write_text("b = 2\n")
    monkeypatch.setattr(facts, "_ROOT", root)
    return root


def test_the_digest_is_twelve_hexadecimal_digits_and_stays() -> None:
    digest = facts.code_digest()
    assert len(digest) == 12
    assert int(digest, 16) >= 0
    assert facts.code_digest() == digest


@pytest.mark.parametrize(
    "change",
    [
        lambda root: (root / "a.py").write_text("a = 2\n"),
        lambda root: (root / "launch" / "b.py").write_text("b = 2\r\n"),
        lambda root: (root / "launch" / "b.py").unlink(),
        lambda root: (root / "launch" / "b.py").rename(root / "launch" / "c.py"),
        lambda root: (root / "empty.py").touch(),
        lambda root: (root / "a.py").rename(root / "launch" / "a.py"),
    ],
    ids=["changed", "line ends", "removed", "renamed", "added", "moved"],
)
def test_any_change_of_a_module_is_another_digest(package: Path, change: Callable[[Path], object]) -> None:
    before = facts.code_digest()
    change(package)
    assert facts.code_digest() != before


def test_what_is_no_code_does_not_count(package: Path) -> None:
    before = facts.code_digest()
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "a.cpython-312.pyc").write_bytes(b"x")
    (package / "report.html").write_text("x")
    assert facts.code_digest() == before


def test_the_folder_it_lies_in_does_not_count(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = facts.code_digest()
    monkeypatch.setattr(facts, "_ROOT", package.rename(package.parent / "elsewhere"))
    assert facts.code_digest() == before


def test_the_recipe_counts_as_code_by_what_it_holds(package: Path, tmp_path: Path) -> None:
    one, other, same = (tmp_path / name for name in ("cls.py", "title.py", "copy.py"))
    one.write_text("x = 1\n")
    other.write_text("x = 2\n")
    same.write_text("x = 1\n")
    digests = [facts.code_digest(path) for path in (None, one, other, same)]
    assert len(set(digests)) == 3
    assert digests[1] == digests[3] == facts.code_digest(str(one))


@pytest.mark.parametrize("script", ["", "-c", "no/such.py", "/usr/bin/env", "."])
def test_what_is_no_recipe_does_not_count(package: Path, script: str) -> None:
    assert facts.code_digest(script) == facts.code_digest()


# --- the machine


def test_all_processes_of_a_machine_name_it_alike() -> None:
    code = "from toolkit.launch.facts import machine; print(machine())"
    there = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert there.stdout.strip() == facts.machine()
    assert "/" not in facts.machine()


def test_a_machine_of_another_name_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    here = facts.machine()
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    assert facts.machine() != here


@pytest.mark.parametrize("what", ["boot_id", "net"])
def test_machines_of_one_name_are_told_apart_by_their_kernel_and_network(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    here = facts.machine()
    read, link = Path.read_text, Path.readlink
    changed = {
        "boot_id": ("read_text", lambda path, **options: "another" if path.name == what else read(path, **options)),
        "net": ("readlink", lambda path: Path("net:[1]") if path.name == what else link(path)),
    }
    monkeypatch.setattr(Path, *changed[what])
    assert facts.machine() != here


def test_a_system_without_proc_has_a_name_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", fail)
    monkeypatch.setattr(Path, "readlink", fail)
    assert len(facts.machine()) == 12


# --- comparisons


def test_names_that_differ_are_those_of_either() -> None:
    assert facts.differing(SAME, dict(SAME)) == []
    assert facts.differing(SAME, SAME | {"torch": "2.12.1"}) == ["torch"]
    assert facts.differing({"a": "1", "b": None}, {"c": "1"}) == ["a", "c"]


def test_what_is_the_same_everywhere_is_not_mentioned() -> None:
    assert facts.unlike([("A", SAME), ("B", dict(SAME)), ("C", dict(SAME))]) == ""
    assert facts.unlike([]) == ""


def test_what_differs_is_said_with_who_has_what() -> None:
    said = facts.unlike([("A", SAME), ("B", SAME | {"torch": "2.12.1"}), ("C", SAME)])
    assert said == "torch is 2.13.0 on A, C and 2.12.1 on B"


def test_a_host_of_several_processes_is_named_once() -> None:
    found = [("A", SAME), ("A", SAME), ("B", SAME | {"torch": "2.12.1"}), ("B", SAME | {"torch": "2.12.1"})]
    assert facts.unlike(found) == "torch is 2.13.0 on A and 2.12.1 on B"


def test_three_versions_are_all_said() -> None:
    found = [(host, SAME | {"numpy": version}) for host, version in (("A", "1"), ("B", "2"), ("C", "3"))]
    assert facts.unlike(found) == "numpy is 1 on A and 2 on B and 3 on C"


def test_a_library_that_one_lacks_differs() -> None:
    assert facts.unlike([("A", SAME), ("B", SAME | {"torch": None})]) == "torch is 2.13.0 on A and None on B"


def test_of_many_differences_the_first_are_said_and_the_rest_counted() -> None:
    one, other = ({f"library{number}": version for number in range(9)} for version in ("1", "2"))
    said = facts.unlike([("A", one), ("B", other)])
    assert said.count("is 1 on A and 2 on B") == 6
    assert said.endswith("; and 3 more")


def test_libraries_are_mended_by_what_rank_0_has() -> None:
    said = facts.mend_versions([("A", SAME), ("B", SAME | {"torch": "2.12.1", "numpy": None}), ("C", SAME)])
    assert "pip install torch==2.13.0 numpy==2.4.0" in said
    assert "git pull" not in said
    assert "Python" not in said


@pytest.mark.parametrize("name", ["code", "toolkit"])
def test_other_code_is_mended_by_bringing_it_and_not_by_pip(name: str) -> None:
    said = facts.mend_versions([("A", SAME), ("B", SAME | {name: "other"})])
    assert "git pull" in said
    assert "pip" not in said


def test_another_python_is_mended_by_another_environment() -> None:
    said = facts.mend_versions([("A", SAME), ("B", SAME | {"python": "3.11"})])
    assert "same Python" in said
    assert "pip" not in said


def test_all_that_differs_is_mended_at_once() -> None:
    said = facts.mend_versions([("A", SAME), ("B", SAME | {"torch": "1", "code": "x"}), ("C", SAME | {"python": "3"})])
    for part in ("torch==2.13.0", "git pull", "same Python"):
        assert part in said


def test_a_library_that_rank_0_lacks_has_a_remedy_too() -> None:
    said = facts.mend_versions([("A", SAME | {"deepspeed": None}), ("B", SAME | {"deepspeed": "0.19.8"})])
    assert "deepspeed" in said
