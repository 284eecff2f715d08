"""toolkit/utils/versions.py: what the processes of a run must have in common, and what to type where
they do not. (Promise 5.)"""

import os
import sys
from pathlib import Path

import pytest

from tests.faults import refusal
from tests.runs import ROOT, start
from toolkit.utils import versions

SAME = {"toolkit": "0.1.0", "python": "3.12", "torch": "2.13.0", "numpy": "2.4.0", "code": "01"}


@pytest.mark.parametrize(("package", "version", "extra", "fault"), [
    ("peft", "0.10.1", "", "peft 0.10.1"),
    ("peft", "0.99", "", None),
    ("torch", "2.13.0a0+5.nv26.3", "", None),  # of NVIDIA's containers
    ("deepspeed", "0.19.6", "deepspeed", "deepspeed 0.19.6"),
    ("deepspeed", "0.19.6", "", None),  # this run may not need it
])  # fmt: skip
def test_an_older_library_is_refused(
    package: str, version: str, extra: str, fault: str | None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / f"{package}-{version}.dist-info").mkdir()
    text = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
    (tmp_path / f"{package}-{version}.dist-info" / "METADATA").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    if not fault:
        versions.check_requirements()
        return
    refusal(versions.check_requirements, extra, says=[fault, f"pip install '{package}<"])
    if not extra:  # before the imports, which would fail
        code = "from toolkit import launch; launch.run(print)"
        path = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
        done = start([sys.executable, "-c", code], env=path)
        assert (done.code, fault in done.err, done.err.count("\n")) == (1, True, 1)


def test_code_digest_changes_with_the_recipe_and_any_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "toolkit"
    (package / "launch").mkdir(parents=True)
    (package / "a.py").write_text("a = 1\n")
    (package / "launch" / "b.py").write_text("b = 2\n")
    monkeypatch.setattr(versions, "_ROOT", package)
    digests = [versions.code_digest()]
    (package / "launch" / "b.py").write_text("b = 2\r\n")
    digests.append(versions.code_digest())
    (package / "empty.py").touch()
    digests.append(versions.code_digest())
    for text in ("x = 1\n", "x = 2\n"):
        (tmp_path / "recipe.py").write_text(text)
        digests.append(versions.code_digest(tmp_path / "recipe.py"))
    assert len(set(digests)) == len(digests)
    for script in ("", "-c", "/usr/bin/env", "."):  # no recipe
        assert versions.code_digest(script) == digests[2]


def test_describe_differences() -> None:
    other = SAME | {"torch": "2.12.1"}
    several = [("A", SAME), ("A", SAME), ("B", other), ("B", other)]  # ranks of one host
    assert versions.describe_differences(several) == "torch is 2.13.0 on A and 2.12.1 on B"
    lists = [("A", {"labels": ["a"]}), ("B", {"labels": ["b"]})]
    assert versions.describe_differences(lists) == "labels is ['a'] on A and ['b'] on B"
    assert versions.describe_differences([("A", SAME), ("B", SAME)]) == ""
