"""Versions of the code and its libraries, which all processes of a run must share."""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit import __version__
from toolkit.errors import UserError

OURS = "finetune-toolkit"
PACKAGES = ("torch", "accelerate", "deepspeed", "transformers", "datasets", "peft", "numpy")
ALL_PACKAGES = (*PACKAGES, "tokenizers", "safetensors")
_ROOT = Path(__file__).resolve().parent.parent  # the package
_PROJECT = _ROOT.parent / "pyproject.toml"
_MAX_LISTED = 6
_VERSION = re.compile(r"\d[\w.+!]{0,40}", re.ASCII)


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str | None]:
    """Name -> version of this toolkit, Python and the packages; None if not installed."""
    installed: dict[str, str | None] = {"toolkit": __version__, "python": sys.version.split()[0]}
    for name in packages:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = None
    return installed


def requirements(package: str, extra: str = "") -> list[Any]:
    """What a package requires, or what an extra of it adds, as packaging's `Requirement`s. Empty if it is neither
    installed nor, as ours, in a clone, whose metadata stay those of the day it was installed."""
    from packaging.requirements import Requirement

    if package == OURS and _PROJECT.is_file():
        project = tomllib.loads(_PROJECT.read_text(encoding="utf-8")).get("project", {})
        if project.get("name") == OURS:
            lines = project["optional-dependencies"][extra] if extra else project["dependencies"]
            lines = list(map(Requirement, lines))
            return [line for line in lines if line.marker is None or line.marker.evaluate()]
    try:
        lines = [Requirement(line) for line in importlib.metadata.requires(package) or []]
    except importlib.metadata.PackageNotFoundError:
        return []
    plain = [line for line in lines if line.marker is None or line.marker.evaluate({"extra": ""})]
    added = [line for line in lines if line.marker and line not in plain and line.marker.evaluate({"extra": extra})]
    return added if extra else plain


def check_requirements(extra: str = "", modules: Sequence[str] = ()) -> list[str]:
    """`transformers 5.30.0 (tested: <5.25,>=5.18)` for each library newer than pyproject.toml allows. Raises UserError
    for missing and older ones: they lack what is imported, or compute something else. `modules`: those of an extra."""
    from packaging.version import InvalidVersion, Version

    newer, faults, remedies = [], [], []
    for needed in requirements(OURS, extra):
        version = versions([needed.name])[needed.name]
        if extra and (needed.name.replace("-", "_") not in modules or not version):  # onnxruntime-gpu is imported, too
            continue
        try:
            release = version and Version(version).base_version  # a vendor's 2.13.0a0 is its build of 2.13.0
        except InvalidVersion:
            continue
        if not release or any(part.operator != "<" and not part.contains(release) for part in needed.specifier):
            faults.append(f"{needed.name} {version or 'is missing'}")
            remedies.append(f"'{needed.name}{needed.specifier}'")
        elif not needed.specifier.contains(release):
            newer.append(f"{needed.name} {version} (tested: {needed.specifier})")
    if faults:
        raise UserError(f"unsupported versions: {', '.join(faults)}: pip install {' '.join(remedies)}")
    return newer


def comparable_versions(script: str | Path | None = None) -> dict[str, str | None]:
    """Name -> version for a comparison between machines; `script`, the recipe, counts as code."""
    values = versions(ALL_PACKAGES)
    values["python"] = str(values["python"]).rpartition(".")[0]  # patch releases are compatible
    values["code"] = code_digest(script)
    return values


def code_digest(script: str | Path | None = None) -> str:
    """12 hex digits of a digest of this package's modules and the script."""
    digest = hashlib.sha256()
    for path in sorted(set(_ROOT.rglob("*.py")) - set((_ROOT / "templates").rglob("*.py"))):  # a wheel's copies
        digest.update(str(path.relative_to(_ROOT)).encode() + b"\0" + path.read_bytes())
    if script is not None and Path(script).suffix == ".py" and Path(script).is_file():
        digest.update(Path(script).read_bytes())
    return digest.hexdigest()[:12]


def describe_differences(tables: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """What differs in a list of (host, values), as `torch is 2.13.0 on A and 2.12.1 on B`; empty for nothing."""
    texts = []
    for name in dict.fromkeys(name for _, values in tables for name in values):
        hosts: dict[str, dict[str, None]] = {}  # value -> the hosts that have it, in order
        for host, values in tables:
            hosts.setdefault(str(values.get(name)), {})[host] = None
        if len(hosts) > 1:
            differing = " and ".join(f"{value} on {', '.join(names)}" for value, names in hosts.items())
            texts.append(f"{name} is {differing}")
    rest = len(texts) - _MAX_LISTED
    return "; ".join(texts[:_MAX_LISTED]) + (f"; and {rest} more" if rest > 0 else "")


def remedy(tables: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """The commands that give all machines the versions of rank 0, which comes first."""
    host, first = tables[0]
    names = {name for _, values in tables[1:] for name in {**first, **values} if first.get(name) != values.get(name)}
    libraries = [name for name in ALL_PACKAGES if name in names]
    # checked, since another machine may send anything and this becomes a command
    pins = [f"{name}=={first[name]}" for name in libraries if _VERSION.fullmatch(str(first.get(name)))]
    lines = [f"`pip install {' '.join(pins)}` on the others"] if pins else []
    others = {name: next(v[name] for _, v in tables if v.get(name)) for name in libraries if not first.get(name)}
    missing = [f"{name}=={version}" for name, version in others.items() if _VERSION.fullmatch(str(version))]
    lines += [f"`pip install {' '.join(missing)}` on {host}"] if missing else []
    if "code" in names or "toolkit" in names:
        lines.append("copy the same code to all machines (`git pull`, or rsync the folder)")
    if "device" in names:
        lines.append("`toolkit doctor` on the machine with cpu shows why torch sees no GPU there")
    if "python" in names:
        lines.append("use the same Python on all machines")
    return ", and ".join(lines)
