"""Versions of the code and its libraries, which all processes of a run must share."""

from __future__ import annotations

import hashlib
import importlib.metadata
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit import __version__
from toolkit.errors import UserError, listing

OURS = "finetune-toolkit"
PACKAGES = ("torch", "accelerate", "deepspeed", "transformers", "datasets", "peft", "numpy")
ALL_PACKAGES = (*PACKAGES, "tokenizers", "safetensors")
Table = tuple[str, Mapping[str, Any]]
"""(host, its {name: version})."""
_OTHER_WAYS = {
    "device": "`toolkit doctor` on the machine with cpu shows why torch sees no GPU there",
    "python": "use the same Python on all machines",
}
_ROOT = Path(__file__).resolve().parent.parent  # the package


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str | None]:
    """Name -> version of this toolkit, Python and the packages; None if not installed."""
    installed: dict[str, str | None] = {"toolkit": __version__, "python": sys.version.split()[0]}
    for name in packages:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = None
    return installed


def requirements(extra: str = "") -> list[Any]:
    """What this toolkit requires, with an extra of it, as packaging's `Requirement`s."""
    from packaging.requirements import Requirement

    lines = [Requirement(text) for text in importlib.metadata.requires(OURS) or []]
    names = {"extra": extra}
    return [line for line in lines if line.marker is None or line.marker.evaluate(names)]


def check_requirements(extra: str = "") -> list[str]:
    """`transformers 5.30.0 (tested: <5.25,>=5.18)` for each library newer than pyproject.toml
    allows. With an extra: of those that are installed.

    Raises UserError for missing and older ones: they lack what is imported, or compute something
    else.
    """
    newer, faults, remedies = [], [], []
    for needed in requirements(extra):
        version = versions([needed.name])[needed.name]
        if version is None and extra:
            continue
        age = _age(version, needed.specifier)
        if age == "older":
            faults.append(f"{needed.name} {version or 'is missing'}")
            remedies.append(f"'{needed.name}{needed.specifier}'")
        elif age == "newer":
            newer.append(f"{needed.name} {version} (tested: {needed.specifier})")
    if faults:
        command = f"pip install {' '.join(remedies)}"
        raise UserError(f"unsupported versions: {', '.join(faults)}: {command}")
    return newer


def _age(version: str | None, specifier: Any) -> str:
    """`older` (or missing), `newer` or `` for a version within the specifier."""
    from packaging.version import Version

    if version is None:
        return "older"
    release = Version(version).base_version  # a vendor's 2.13.0a0 is its build of 2.13.0
    if specifier.contains(release):
        return ""
    is_newer = all(part.operator == "<" or part.contains(release) for part in specifier)
    return "newer" if is_newer else "older"


def comparable_versions(script: str | Path | None = None) -> dict[str, str | None]:
    """Name -> version for a comparison between machines; `script`, the recipe, counts as code."""
    values = versions(ALL_PACKAGES)
    values["python"] = str(values["python"]).rpartition(".")[0]  # patch releases are compatible
    values["code"] = code_digest(script)
    return values


def code_digest(script: str | Path | None = None) -> str:
    """12 hex digits of a digest of this package's modules and the script."""
    digest = hashlib.sha256()
    for path in sorted(_ROOT.rglob("*.py")):
        name = path.relative_to(_ROOT)
        if name.parts[0] != "templates":  # a wheel's copies of the recipes
            digest.update(str(name).encode() + b"\0" + path.read_bytes())
    if script is not None and Path(script).suffix == ".py" and Path(script).is_file():
        digest.update(Path(script).read_bytes())
    return digest.hexdigest()[:12]


def describe_differences(tables: Sequence[Table]) -> str:
    """What differs, as `torch is 2.13.0 on A and 2.12.1 on B`; empty for nothing."""
    texts = []
    for name in dict.fromkeys(name for _, values in tables for name in values):
        hosts: dict[str, list[str]] = {}  # value -> the hosts that have it, in order
        for host, values in tables:
            names = hosts.setdefault(str(values.get(name)), [])
            if host not in names:
                names.append(host)
        if len(hosts) > 1:
            differing = [f"{value} on {', '.join(names)}" for value, names in hosts.items()]
            texts.append(f"{name} is {' and '.join(differing)}")
    return listing(texts, 6)


def remedy(tables: Sequence[Table]) -> str:
    """The commands that give all machines the versions of rank 0, which comes first."""
    _, first = tables[0]
    names = set()
    for _, values in tables[1:]:
        names |= {name for name in {**first, **values} if first.get(name) != values.get(name)}
    ways = []
    pins = [f"{name}=={first[name]}" for name in ALL_PACKAGES if name in names and first.get(name)]
    if pins:
        ways.append(f"`pip install {' '.join(pins)}` on the others")
    if names & {"code", "toolkit"}:
        ways.append("copy the same code to all machines (`git pull`, or rsync the folder)")
    for name, way in _OTHER_WAYS.items():
        if name in names:
            ways.append(way)
    return ", and ".join(ways)
