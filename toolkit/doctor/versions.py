"""Python and the libraries: whether they fit this package and each other."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from toolkit.doctor.finding import Finding
from toolkit.errors import listing

OURS = "finetune-toolkit"
LIBRARIES = (
    "torch",
    "accelerate",
    "deepspeed",
    "transformers",
    "datasets",
    "peft",
    "tokenizers",
    "safetensors",
    "numpy",
)


def check() -> list[Finding]:
    """Checks this environment."""
    text = f"Python {platform.python_version()} ({sys.executable}) on {platform.system()} {platform.machine()}"
    return [Finding("versions", "python", "ok", text), *check_libraries(requirements())]


def installed_version(name: str) -> str | None:
    """The version of an installed package; None where it is missing."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def requirements() -> dict[str, list[str]]:
    """Package -> its requirement lines, of this one and of the libraries that are installed."""
    found = {name: importlib.metadata.requires(name) or [] for name in LIBRARIES if installed_version(name)}
    return {OURS: _own_requirements(), **found}


def _own_requirements() -> list[str]:
    """In a checkout pyproject.toml counts: what was noted when it was installed may be older."""
    with contextlib.suppress(OSError, KeyError, tomllib.TOMLDecodeError):
        project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        if project["name"] == OURS:
            return list(project["dependencies"])
    return (importlib.metadata.requires(OURS) or []) if installed_version(OURS) else []


def check_libraries(
    needs: Mapping[str, Sequence[str]], version_of: Callable[[str], str | None] = installed_version
) -> list[Finding]:
    """Checks installed versions against the requirement lines of each package."""
    owners: dict[tuple[str, str], list[str]] = {}
    for owner, lines in needs.items():
        for line in lines:
            if misfit := _misfit(line, version_of):
                owners.setdefault(misfit, []).append(owner)
    shown = ", ".join(f"{name} {version}" for name in LIBRARIES if (version := version_of(name)))
    found = [Finding("versions", "libraries", "note" if owners else "ok", shown)]
    for (name, wanted), who in owners.items():
        version = version_of(name)
        have = f"{name} {version} is installed" if version else f"{name} is missing"
        by = listing(("this package" if owner == OURS else f"{owner} {version_of(owner)}" for owner in who), 3)
        text = f"{have}, and {by} {'needs' if len(who) == 1 else 'need'} {name}{wanted}"
        found.append(Finding("versions", name, "fail", text, f"pip install '{name}{wanted}'"))
    return found


def _misfit(line: str, version_of: Callable[[str], str | None]) -> tuple[str, str] | None:
    """(package, versions wanted) where a requirement line is not met."""
    with contextlib.suppress(InvalidRequirement, InvalidVersion):  # an image may have `torch 2.13.0a0.custom!`
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            return None
        have = version_of(wanted.name)
        if have is None or not wanted.specifier.contains(Version(have), prereleases=True):
            ordered = sorted(map(str, wanted.specifier), key=lambda part: part.startswith("<"))  # `>=2.13,<2.14`
            return canonicalize_name(wanted.name), ",".join(ordered)
    return None
