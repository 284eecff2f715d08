"""toolkit/utils/versions.py: what the processes of a run must have in common, and what to type where they do not."""

import importlib.metadata
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults import refusal
from tests.runs import ROOT, start
from toolkit import __version__
from toolkit.utils import versions

SAME = {
    "toolkit": "0.1.0",
    "python": "3.12",
    "torch": "2.13.0",
    "numpy": "2.4.0",
    "code": "0123456789ab",
}


def test_versions_are_those_of_the_installed_libraries() -> None:
    assert versions.versions(["torch", "no-such-library"]) == {
        "toolkit": __version__, "python": sys.version.split()[0], "torch": importlib.metadata.version("torch"),
        "no-such-library": None,
    }  # fmt: skip
    installed = versions.comparable_versions()
    assert (
        installed["python"] == f"{sys.version_info.major}.{sys.version_info.minor}"
    )  # patch releases may differ
    assert {*versions.PACKAGES, "tokenizers", "safetensors", "toolkit", "code"} < set(installed)
    assert installed["code"] == versions.code_digest()


@pytest.mark.parametrize(("package", "version", "extra", "fault"), [
    ("peft", "0.10.1", "", "peft 0.10.1"),
    ("peft", "0.99", "", None),
    ("torch", "2.13.0a0+5.nv26.3", "", None),  # of NVIDIA's containers
    ("deepspeed", "0.19.6", "deepspeed", "deepspeed 0.19.6"),
    ("deepspeed", "0.19.6", "", None),  # this run may not need it
])  # fmt: skip
def test_a_library_older_than_supported_is_refused_and_a_newer_one_returned(
    package: str,
    version: str,
    extra: str,
    fault: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / f"{package}-{version}.dist-info").mkdir()
    text = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
    (tmp_path / f"{package}-{version}.dist-info" / "METADATA").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    if not fault:
        assert [line.split(" (")[0] for line in versions.check_requirements()] == ["peft 0.99"] * (
            version == "0.99"
        )
        return
    refusal(versions.check_requirements, extra, says=[fault, f"pip install '{package}<"])
    if not extra:  # before the imports, which would fail
        code = "from toolkit import launch; launch.run(print)"
        done = start(
            [sys.executable, "-c", code], env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
        )
        assert (done.code, fault in done.err, done.err.count("\n")) == (1, True, 1)


def test_code_digest_changes_with_the_recipe_and_any_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "toolkit"
    (package / "launch").mkdir(parents=True)
    (package / "a.py").write_text("a = 1\n")
    (package / "launch" / "b.py").write_text("b = 2\n")
    monkeypatch.setattr(versions, "_ROOT", package)
    changes: list[Callable[[], object]] = [
        lambda: (package / "launch" / "b.py").write_text("b = 2\r\n"),
        lambda: (package / "empty.py").touch(),
        lambda: (package / "a.py").rename(package / "launch" / "a.py"),
        lambda: (package / "launch" / "b.py").unlink(),
    ]
    digests = [
        versions.code_digest(),
        *((change(), versions.code_digest())[1] for change in changes),
    ]
    assert len(set(digests)) == 5
    for name, text in (("cls.py", "x = 1\n"), ("title.py", "x = 2\n"), ("copy.py", "x = 1\n")):
        (tmp_path / name).write_text(text)
    digests = [
        versions.code_digest(),
        *(versions.code_digest(tmp_path / f"{name}.py") for name in ("cls", "title")),
    ]
    assert len(set(digests)) == 3
    assert digests[1] == versions.code_digest(str(tmp_path / "copy.py"))
    for script in ("", "-c", "no/such.py", "/usr/bin/env", "."):  # no recipe
        assert versions.code_digest(script) == digests[0]


def test_describe_differences() -> None:
    other = SAME | {"torch": "2.12.1"}
    several = [("A", SAME), ("A", SAME), ("B", other), ("B", other)]  # of one host
    for machines, names in (([("A", SAME), ("B", other), ("C", SAME)], "A, C"), (several, "A")):
        assert (
            versions.describe_differences(machines) == f"torch is 2.13.0 on {names} and 2.12.1 on B"
        )


@pytest.mark.parametrize(
    ("others", "parts", "absent"),
    [
        (
            [{"torch": "2.12.1", "numpy": None}, {}],
            ["pip install torch==2.13.0 numpy==2.4.0"],
            ["git pull", "Python"],
        ),
        ([{"code": "other"}], ["git pull"], ["pip"]),
        ([{"toolkit": "other"}], ["git pull"], ["pip"]),
        ([{"device": "cpu"}], ["toolkit doctor"], ["pip", "git pull"]),
        (
            [{"torch": "1", "code": "x"}, {"python": "3"}],
            ["torch==2.13.0", "git pull", "same Python"],
            [],
        ),
    ],
)
def test_remedy(others: list[dict[str, Any]], parts: list[str], absent: list[str]) -> None:
    advice = versions.remedy(
        [("A", SAME), *((f"B{place}", SAME | other) for place, other in enumerate(others))]
    )
    assert all(part in advice for part in parts)
    assert not any(part in advice for part in absent)
