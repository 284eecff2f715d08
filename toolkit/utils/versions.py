"""The versions of the code and of the libraries it runs on: what the processes of one run must have in common."""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit import __version__

PACKAGES = ("torch", "accelerate", "deepspeed", "transformers", "datasets", "peft", "numpy")
ALL_PACKAGES = (*PACKAGES, "tokenizers", "safetensors")
_ROOT = Path(__file__).resolve().parent.parent  # the package
_MOST_NAMED = 6
_VERSION = re.compile(r"\d[\w.+!]{0,40}", re.ASCII)


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str | None]:
    """Of this toolkit, Python and the libraries; None for one that is not installed."""
    found: dict[str, str | None] = {"toolkit": __version__, "python": sys.version.split()[0]}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def comparable(script: str | Path | None = None) -> dict[str, str | None]:
    """Name -> value, to be compared between machines. `script` is the recipe, which counts as code."""
    found = versions(ALL_PACKAGES)
    found["python"] = str(found["python"]).rpartition(".")[0]  # patch releases read each other's data
    found["code"] = code_digest(script)
    return found


def code_digest(script: str | Path | None = None) -> str:
    """12 hexadecimal digits over this package's modules and the script."""
    digest = hashlib.sha256()
    for path in sorted(set(_ROOT.rglob("*.py")) - set((_ROOT / "templates").rglob("*.py"))):  # a wheel's copies
        digest.update(str(path.relative_to(_ROOT)).encode() + b"\0" + path.read_bytes())
    if script is not None and Path(script).suffix == ".py" and Path(script).is_file():
        digest.update(Path(script).read_bytes())
    return digest.hexdigest()[:12]


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The names under which two do not hold the same."""
    return [name for name in {**one, **other} if one.get(name) != other.get(name)]


def differences(found: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """(who, what they have) of several -> what is not the same, or nothing: `torch is 2.13.0 on A and 2.12.1 on B`."""
    said = []
    for name in dict.fromkeys(name for _, values in found for name in values):
        holders: dict[str, list[str]] = {}
        for who, values in found:
            where = holders.setdefault(str(values.get(name)), [])
            if who not in where:
                where.append(who)
        if len(holders) > 1:
            said.append(f"{name} is " + " and ".join(f"{value} on {', '.join(who)}" for value, who in holders.items()))
    rest = len(said) - _MOST_NAMED
    return "; ".join(said[:_MOST_NAMED]) + (f"; and {rest} more" if rest > 0 else "")


def remedy(found: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """What to type for libraries that are not the same: rank 0's count."""
    _, first = found[0]
    wrong = {name for _, values in found[1:] for name in differing(first, values)}
    libraries = [name for name in ALL_PACKAGES if name in wrong]
    # another machine may send anything, and this becomes a command
    pins = [f"{name}=={first[name]}" for name in libraries if _VERSION.fullmatch(str(first.get(name)))]
    lines = [f"`pip install {' '.join(pins)}` on the others"] if pins else []
    others = {name: next(v[name] for _, v in found if v.get(name)) for name in libraries if not first.get(name)}
    lacking = [f"{name}=={version}" for name, version in others.items() if _VERSION.fullmatch(str(version))]
    lines += [f"`pip install {' '.join(lacking)}` on {found[0][0]}"] if lacking else []
    if "code" in wrong or "toolkit" in wrong:
        lines.append("bring the same code to all (`git pull`, or rsync the folder)")
    if "python" in wrong:
        lines.append("make their environments with the same Python")
    return ", and ".join(lines)
