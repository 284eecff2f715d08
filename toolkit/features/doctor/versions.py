"""Checks that Python and the libraries have compatible versions."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Iterator

from packaging.requirements import Requirement

from toolkit.features.doctor.finding import Finding
from toolkit.utils.versions import ALL_PACKAGES, versions

OURS = "finetune-toolkit"


def requirements(package: str) -> list[Requirement]:
    """What an installed package requires, without its extras."""
    lines = map(Requirement, importlib.metadata.requires(package) or [])
    return [line for line in lines if line.marker is None or line.marker.evaluate()]


def install_command(name: str) -> str:
    """The command that reinstalls a library in the version that this package needs."""
    needed = next(f"{line.name}{line.specifier}" for line in requirements(OURS) if line.name == name)
    return f"pip install --force-reinstall '{needed}'"


def check() -> Iterator[Finding]:
    """The requirements of this package and of the libraries that it uses; other packages are ignored."""
    python = f"Python {platform.python_version()} ({sys.executable}) on {platform.system()} {platform.machine()}"
    yield Finding("python", "ok", python)
    installed = {name: version for name, version in versions(ALL_PACKAGES).items() if name in ALL_PACKAGES and version}
    yield Finding("libraries", "ok", ", ".join(f"{name} {version}" for name, version in installed.items()))
    for package in (OURS, *installed):
        for needed in requirements(package):
            version = versions([needed.name])[needed.name]
            if version is None or not needed.specifier.contains(version, prereleases=True):
                text = f"{package} needs {needed.name}{needed.specifier}, but you have {version or 'none'}"
                yield Finding(needed.name, "fail", text, f"pip install '{needed.name}{needed.specifier}'")
