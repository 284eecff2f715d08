"""Checks that Python and the libraries have compatible versions, by `pip check`."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import subprocess
import sys
from collections.abc import Iterator

from packaging.requirements import Requirement

from toolkit.errors import printable
from toolkit.features.doctor.finding import Finding
from toolkit.utils.versions import ALL_PACKAGES, versions

OURS = "finetune-toolkit"
_SECONDS = 30.0
_MISFIT = re.compile(
    r"(?P<owner>\S+) \S+ "
    r"(has requirement (?P<needed>[^;]+?)(;.*)?, but you have |requires (?P<missing>\S+), which is not installed)"
)


def install_command(name: str) -> str:
    """The command that reinstalls a library in the version that this package needs."""
    lines = map(Requirement, importlib.metadata.requires(OURS) or [])
    needed = next((f"{line.name}{line.specifier}" for line in lines if line.name == name), name)
    return f"pip install --force-reinstall '{needed}'"


def check() -> Iterator[Finding]:
    """The requirements of this package and of the libraries that it uses; other packages are ignored."""
    python = f"Python {platform.python_version()} ({sys.executable}) on {platform.system()} {platform.machine()}"
    yield Finding("python", "ok", python)
    installed = versions(ALL_PACKAGES)
    libraries = ", ".join(f"{name} {installed[name]}" for name in ALL_PACKAGES if installed[name])
    yield Finding("libraries", "ok", libraries)
    command = [sys.executable, "-P", "-m", "pip", "check"]
    result = subprocess.run(
        command, stdin=subprocess.DEVNULL, timeout=_SECONDS, capture_output=True, text=True, check=False
    )
    if "No module named pip" in result.stderr:
        text = "not checked: this environment has no pip"
        yield Finding("requirements", "note", text, f"uv pip check --python {sys.executable}")
    for line in result.stdout.splitlines():
        match = _MISFIT.match(line)
        if match and match["owner"] in (OURS, *ALL_PACKAGES):
            needed = match["needed"] or match["missing"]
            name = re.split(r"[^\w.-]", needed)[0]
            yield Finding(name, "fail", printable(line), f"pip install '{needed}'")
