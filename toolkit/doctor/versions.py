"""Python and the libraries: whether they fit this package and each other."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from toolkit.doctor.finding import Finding
from toolkit.errors import listing

AREA = "versions"
OURS = "finetune-toolkit"
CORE = (
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
_OLDEST_PYTHON = (3, 11)


def check() -> list[Finding]:
    """Of this environment."""
    needs, missing_tool = requirements(), _packaging_is_missing()
    if missing_tool:
        return [python(), missing_tool]
    installed = installed_versions(needs)
    return [python(), *libraries(installed, needs), *twice_installed(_folders())]


def python(version: Sequence[int] = sys.version_info[:3], executable: str = sys.executable) -> Finding:
    """The interpreter this was started with."""
    shown = ".".join(map(str, version))
    if tuple(version[:2]) < _OLDEST_PYTHON:
        need = ".".join(map(str, _OLDEST_PYTHON))
        remedy = f"`python{need} -m venv .venv` and install again, or `make install PYTHON=python{need}`"
        return Finding(AREA, "python", "fail", f"Python {shown} is too old: {need} is needed ({executable})", remedy)
    return Finding(AREA, "python", "ok", f"Python {shown} ({executable}) on {platform.system()} {platform.machine()}")


def requirements() -> dict[str, list[str]]:
    """Package -> what it requires, as requirement lines; of this one and of the core libraries that are installed."""
    found = {OURS: _own_requirements()}
    for name in CORE:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.requires(name) or []
    return found


def _own_requirements() -> list[str]:
    """In a checkout pyproject.toml counts: what was noted when it was installed may be older."""
    with contextlib.suppress(OSError, KeyError, tomllib.TOMLDecodeError):
        project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        if project["name"] == OURS:
            return list(project["dependencies"])
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.requires(OURS) or []
    return []


def installed_versions(needs: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Normalised name -> version, of whatever the requirements name and is there."""
    found: dict[str, str] = {}
    for line in [line for lines in needs.values() for line in lines] + list(CORE):
        name = re.split(r"[^A-Za-z0-9._-]", line.strip(), maxsplit=1)[0]
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[_normal(name)] = importlib.metadata.version(name)
    return found


def libraries(installed: Mapping[str, str], needs: Mapping[str, Sequence[str]]) -> list[Finding]:
    """Installed versions (normalised name -> version) against the requirement lines of each package."""
    wrong: dict[tuple[str, str], list[str]] = {}
    for owner, lines in needs.items():
        for line in lines:
            if fault := _misfit(line, installed):
                wrong.setdefault(fault, []).append(owner)
    shown = [f"{name} {installed[name]}" for name in CORE if name in installed]
    if not wrong:
        return [Finding(AREA, "libraries", "ok", ", ".join(shown))]
    return [
        Finding(AREA, "libraries", "note", ", ".join(shown)),
        *(_describe(name, wanted, owners, installed) for (name, wanted), owners in wrong.items()),
    ]


def _misfit(line: str, installed: Mapping[str, str]) -> tuple[str, str] | None:
    """(package, versions wanted) where a requirement line is not met."""
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.version import InvalidVersion, Version

    try:
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            return None
        have = installed.get(_normal(wanted.name))
        if have is not None and wanted.specifier.contains(Version(have), prereleases=True):
            return None
    except (InvalidRequirement, InvalidVersion):  # a version of one's own, as `torch 2.13.0a0.custom!` in an image
        return None
    return _normal(wanted.name), str(wanted.specifier)


def _describe(name: str, wanted: str, owners: Sequence[str], installed: Mapping[str, str]) -> Finding:
    who = listing(("this package" if owner == OURS else f"{owner} {installed.get(owner, '')}" for owner in owners), 3)
    needs = "needs" if len(owners) == 1 else "need"
    have = f"{name} {installed[name]} is installed" if name in installed else f"{name} is missing"
    text = f"{have}, and {who} {needs} {name}{_in_order(wanted)}"
    return Finding(AREA, name, "fail", text, f"pip install '{name}{_in_order(wanted)}'")


def _in_order(specifier: str) -> str:
    """`<2.14,>=2.13` -> `>=2.13,<2.14`."""
    return ",".join(sorted(filter(None, specifier.split(",")), key=lambda part: part.startswith("<")))


def twice_installed(folders: Mapping[str, Sequence[str]]) -> list[Finding]:
    """Package -> the folders that hold an installed version of it: the first one counts, silently."""
    return [
        Finding(
            AREA,
            name,
            "warn",
            f"{name} is installed {len(held)} times, and the first one is used: {', '.join(held)}",
            "`echo $PYTHONPATH` shows what is put before the environment; take the others away",
        )
        for name, held in folders.items()
        if len(held) > 1
    ]


def _folders() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in CORE:
        for held in importlib.metadata.distributions(name=name):
            folder = str(Path(str(held.locate_file(""))).resolve())
            if folder not in found.setdefault(name, []):
                found[name].append(folder)
    return found


def _packaging_is_missing() -> Finding | None:
    try:
        import packaging.requirements  # noqa: F401
    except ImportError:
        return Finding(AREA, "packaging", "fail", "the package `packaging` is missing", "pip install packaging")
    return None


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
