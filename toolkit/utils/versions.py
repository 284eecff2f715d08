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
HostValues = tuple[str, Mapping[str, Any]]
"""(host, its {name: version})."""
_ROOT = Path(__file__).resolve().parent.parent  # the package


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str | None]:
    """Name -> version of this toolkit, Python and the packages; None if not installed."""
    installed: dict[str, str | None] = {
        "toolkit": __version__,
        "python": sys.version.split()[0],
    }
    for name in packages:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = None
    return installed


def check_requirements(extra: str = "") -> None:
    """Raises UserError for libraries older than pyproject.toml allows: they lack what is imported,
    or compute something else. With an extra: for those of it that are installed, too."""
    from packaging.requirements import Requirement

    faults, remedies = [], []
    for text in importlib.metadata.requires(OURS) or []:
        needed = Requirement(text)
        if needed.marker and not needed.marker.evaluate({"extra": extra}):
            continue
        version = versions([needed.name])[needed.name]
        if version is not None and _is_older(version, needed.specifier):
            faults.append(f"{needed.name} {version}")
            remedies.append(f"'{needed.name}{needed.specifier}'")
    if faults:
        raise UserError(
            f"unsupported versions: {', '.join(faults)}: pip install {' '.join(remedies)}"
        )


def _is_older(version: str, specifier: Any) -> bool:
    from packaging.version import Version

    release = Version(version).base_version  # a vendor's 2.13.0a0 is its build of 2.13.0
    return any(part.operator == ">=" and not part.contains(release) for part in specifier)


def comparable_versions(script: str | Path | None = None) -> dict[str, str | None]:
    """Name -> version for a comparison between machines; `script`, the recipe, counts as code."""
    values = versions(ALL_PACKAGES)
    # patch releases are compatible
    values["python"] = str(values["python"]).rpartition(".")[0]
    values["code"] = code_digest(script)
    return values


def code_digest(script: str | Path | None = None) -> str:
    """12 hex digits of a digest of this package's modules and the script."""
    paths = sorted(_ROOT.rglob("*.py"))
    if script and Path(script).suffix == ".py" and Path(script).is_file():
        paths.append(Path(script))
    contents = b"".join(path.name.encode() + path.read_bytes() for path in paths)
    return hashlib.sha256(contents).hexdigest()[:12]


def describe_differences(tables: Sequence[HostValues]) -> str:
    """What differs from the first table, as `torch is 2.13.0 on A and 2.12.1 on B`; empty for
    nothing."""
    first_host, first = tables[0]
    texts = []
    for name, value in first.items():
        for host, values in tables[1:]:
            if str(values.get(name)) != str(value):
                texts.append(
                    f"{name} is {value} on {first_host} and {values.get(name)} on {host}"
                )
                break
    return listing(texts, 6)
