"""Libraries that do not fit this package or each other."""

from __future__ import annotations

from typing import Any

import pytest

from toolkit.features.doctor import versions
from toolkit.features.doctor.finding import Finding

NEEDS = {
    versions.OURS: ["torch>=2.13,<2.14", "deepspeed>=0.19; sys_platform == 'plan9'", "pytest>=9; extra == 'dev'"],
    "transformers": ["numpy>=1.17", "tokenizers<0.24.0,>=0.23.1", "torch>=2.6; extra == 'torch'"],
}
INSTALLED = {"torch": "2.13.0+cpu", "transformers": "5.23.0", "numpy": "2.4.6", "tokenizers": "0.23.3"}


def libraries(installed: dict[str, str], needs: dict[str, list[str]]) -> list[Finding]:
    return list(versions.check(needs, installed.get))[1:]


def test_versions_that_fit() -> None:
    (only,) = libraries(INSTALLED, NEEDS)
    assert only.level == "ok"
    assert only.text == "torch 2.13.0+cpu, transformers 5.23.0, numpy 2.4.6, tokenizers 0.23.3"


@pytest.mark.parametrize(("change", "text", "remedy"), [
    ({"torch": "2.14.1"}, "torch 2.14.1 is installed, and this package needs torch>=2.13,<2.14",
     "pip install 'torch>=2.13,<2.14'"),
    ({"numpy": "1.16.0"}, "numpy 1.16.0 is installed, and transformers 5.23.0 needs numpy>=1.17",
     "pip install 'numpy>=1.17'"),
    ({"tokenizers": None}, "tokenizers is missing, and transformers 5.23.0 needs tokenizers>=0.23.1,<0.24.0",
     "pip install 'tokenizers>=0.23.1,<0.24.0'"),
])  # fmt: skip
def test_a_library_that_does_not_fit(change: dict[str, Any], text: str, remedy: str) -> None:
    _, fault = libraries({**INSTALLED, **change}, NEEDS)
    assert (fault.level, fault.text, fault.remedy) == ("fail", text, remedy)


def test_versions_nobody_can_read_are_passed_over() -> None:
    assert [finding.level for finding in libraries({**INSTALLED, "torch": "2.13.0a0.custom!"}, NEEDS)] == ["ok"]
    assert [finding.level for finding in libraries(INSTALLED, {"x": ["not a requirement at all ==="]})] == ["ok"]


def test_this_environment_fits() -> None:
    """The tests run where `make install` has been: its own pins hold."""
    assert [finding for finding in versions.check(versions.requirements()) if finding.level == "fail"] == []
    assert any(line.startswith("peft") for line in versions.requirements()[versions.OURS])
