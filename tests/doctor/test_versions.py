"""Libraries that do not fit this package or each other."""

from __future__ import annotations

from toolkit.doctor import versions
from toolkit.doctor.finding import Finding

NEEDS = {
    versions.OURS: ["torch>=2.13,<2.14", "deepspeed>=0.19; sys_platform == 'plan9'", "pytest>=9; extra == 'dev'"],
    "transformers": ["numpy>=1.17", "tokenizers<0.24.0,>=0.23.1", "torch>=2.6; extra == 'torch'"],
}
INSTALLED = {"torch": "2.13.0+cpu", "transformers": "5.23.0", "numpy": "2.4.6", "tokenizers": "0.23.3"}


def libraries(installed: dict[str, str], needs: dict[str, list[str]]) -> list[Finding]:
    return versions.check(needs, installed.get)[1:]


def test_versions_that_fit() -> None:
    (only,) = libraries(INSTALLED, NEEDS)
    assert only.level == "ok"
    assert only.text == "torch 2.13.0+cpu, transformers 5.23.0, numpy 2.4.6, tokenizers 0.23.3"


def test_a_library_that_is_too_new_for_this_package() -> None:
    _, fault = libraries({**INSTALLED, "torch": "2.14.1"}, NEEDS)
    assert (fault.level, fault.name) == ("fail", "torch")
    assert "torch 2.14.1 is installed, and this package needs torch>=2.13,<2.14" in fault.text
    assert fault.remedy == "pip install 'torch>=2.13,<2.14'"


def test_a_library_that_is_too_old_for_another_one() -> None:
    _, fault = libraries({**INSTALLED, "numpy": "1.16.0"}, NEEDS)
    assert fault.text == "numpy 1.16.0 is installed, and transformers 5.23.0 needs numpy>=1.17"
    assert fault.remedy == "pip install 'numpy>=1.17'"


def test_one_that_is_missing() -> None:
    without = {name: version for name, version in INSTALLED.items() if name != "tokenizers"}
    _, fault = libraries(without, NEEDS)
    assert fault.text == "tokenizers is missing, and transformers 5.23.0 needs tokenizers>=0.23.1,<0.24.0"


def test_one_fault_that_two_see_is_one_line() -> None:
    needs = {"accelerate": ["numpy>=1.17"], "peft": ["numpy>=1.17"]}
    found = libraries({"numpy": "1.0", "accelerate": "1", "peft": "2"}, needs)
    assert [finding.text for finding in found[1:]] == [
        "numpy 1.0 is installed, and accelerate 1, peft 2 need numpy>=1.17"
    ]


def test_versions_nobody_can_read_are_passed_over() -> None:
    assert [found.level for found in libraries({**INSTALLED, "torch": "2.13.0a0.custom!"}, NEEDS)] == ["ok"]
    assert [found.level for found in libraries(INSTALLED, {"x": ["not a requirement at all ==="]})] == ["ok"]


def test_this_environment_fits() -> None:
    """The tests run where `make install` has been: its own pins hold."""
    assert [finding for finding in versions.check(versions.requirements()) if finding.level == "fail"] == []
    assert any(line.startswith("peft") for line in versions.requirements()[versions.OURS])
