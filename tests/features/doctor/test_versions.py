"""Libraries with incompatible versions."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from toolkit.features.doctor import versions
from toolkit.features.doctor.finding import Finding


def findings(out: str, monkeypatch: pytest.MonkeyPatch, err: str = "") -> list[Finding]:
    """The findings of `pip check`'s output."""
    result = SimpleNamespace(stdout=out, stderr=err)
    monkeypatch.setattr(versions.subprocess, "run", lambda *_, **__: result)
    python, libraries, *others = versions.check()
    assert python.level == libraries.level == "ok"
    assert "torch 2." in libraries.text
    return others


@pytest.mark.parametrize(("line", "name", "needed"), [
    (f"{versions.OURS} 1.0 has requirement torch<2.14,>=2.13, but you have torch 2.14.1.", "torch",
     "torch<2.14,>=2.13"),
    ("transformers 5.23.0 requires tokenizers, which is not installed.", "tokenizers", "tokenizers"),
    ('accelerate 1.15.0 has requirement numpy>=1.17; python_version > "3", but you have numpy 1.1.', "numpy",
     "numpy>=1.17"),
])  # fmt: skip
def test_an_incompatible_library(line: str, name: str, needed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (fault,) = findings(f"another 1 requires thing, which is not installed.\n{line}\n", monkeypatch)
    assert (fault.level, fault.name, fault.text) == ("fail", name, line)
    assert fault.remedy == f"pip install '{needed}'"


def test_an_environment_without_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    (note,) = findings("", monkeypatch, "/usr/bin/python: No module named pip")
    assert (note.level, "pip check" in note.remedy) == ("note", True)


def test_this_environment_has_compatible_versions() -> None:
    assert [finding for finding in versions.check() if finding.level != "ok"] == []
    assert "'torch>=2" in versions.install_command("torch") or "'torch<2" in versions.install_command("torch")
