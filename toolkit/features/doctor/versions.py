"""Python and the libraries: whether they fit this package and each other."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from toolkit.features.doctor.finding import Finding
from toolkit.utils.versions import ALL_PACKAGES, versions

OURS = "finetune-toolkit"


def installed_version(name: str) -> str | None:
    """None for a package that is missing."""
    return versions([name])[name]


def requirements() -> dict[str, list[str]]:
    """Package -> its requirement lines, of this one and of the libraries that are installed."""
    return {name: importlib.metadata.requires(name) or [] for name in (OURS, *ALL_PACKAGES) if installed_version(name)}


def install_command(name: str) -> str:
    """The line that installs the version of a library that this package needs, whatever is there."""
    lines = map(Requirement, requirements().get(OURS, []))
    specifier = next((_specifier(line) for line in lines if line.name == name), "")
    return f"pip install --force-reinstall '{name}{specifier}'"


def check(
    needs: Mapping[str, Sequence[str]], version_of: Callable[[str], str | None] = installed_version
) -> Iterator[Finding]:
    """Checks installed versions against the requirement lines of each package."""
    python = f"Python {platform.python_version()} ({sys.executable}) on {platform.system()} {platform.machine()}"
    yield Finding("versions", "python", "ok", python)
    libraries = ", ".join(f"{name} {version}" for name in ALL_PACKAGES if (version := version_of(name)))
    yield Finding("versions", "libraries", "ok", libraries)
    for owner, lines in needs.items():
        who = "this package" if owner == OURS else f"{owner} {version_of(owner)}"
        for needed in filter(None, (_misfit(line, version_of) for line in lines)):
            name, wanted, version = needed.name, _specifier(needed), version_of(needed.name)
            have = f"{name} {version} is installed" if version else f"{name} is missing"
            remedy = f"pip install '{name}{wanted}'"
            yield Finding("versions", name, "fail", f"{have}, and {who} needs {name}{wanted}", remedy)


def _misfit(line: str, version_of: Callable[[str], str | None]) -> Requirement | None:
    """A requirement line that is not met."""
    with contextlib.suppress(InvalidRequirement, InvalidVersion):  # an image may have `torch 2.13.0a0.custom!`
        needed = Requirement(line)
        if needed.marker is None or needed.marker.evaluate({"extra": ""}):
            have = version_of(needed.name)
            if have is None or not needed.specifier.contains(Version(have), prereleases=True):
                return needed
    return None


def _specifier(needed: Requirement) -> str:
    return ",".join(sorted(map(str, needed.specifier), key=lambda part: part.startswith("<")))  # `>=2.13,<2.14`
