"""`make test-latest`: the fast tests on the newest version of every dependency, whatever pyproject.toml allows.
`make test-oldest`: on the oldest that it allows.

    python tests/latest.py [--oldest] [--torch torch==2.13.0] [--venv .venv-latest] [PYTEST ARGUMENTS]

The newest torch is as --torch says, since its builds are gigabytes. Prints which versions are not those of
constraints.txt, and what broke; exits as pytest does. Where nothing broke, pyproject.toml's ranges can open as far.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FAST = ["-m", "not slow and not multiprocess and not namespaces and not gpu", "-p", "no:cacheprovider"]


def requirements() -> list[str]:
    """The lines of pyproject.toml, of extras too, but for those that name its own extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    return [line for line in lines if not line.startswith(project["name"])]


def newest(torch: str) -> list[str]:
    """What pip is asked for: every dependency without its range; what is pinned there (data, words) stays."""
    open_lines = [
        line if "==" in line.split(";")[0] else re.sub(r"[<>~=!][^;]*", "", line, count=1) for line in requirements()
    ]
    return [torch, *(line for line in open_lines if not re.match(r"torch\b", line))]


def oldest() -> list[str]:
    """What pip is asked for: of what a run needs the lower bounds, of extras the newest that is allowed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pinned = [re.sub(r">=([\w.]+)[^;]*", r"==\1", line) for line in project["dependencies"]]
    return [*pinned, *(line for line in requirements() if line not in project["dependencies"])]


def changed(python: Path) -> dict[str, tuple[str, str]]:
    """Package -> (version in constraints.txt, version here), where they differ."""
    listed = subprocess.run(
        [python, "-m", "pip", "list", "--format", "json"], stdout=subprocess.PIPE, check=True
    ).stdout
    here = {_name(package["name"]): package["version"].split("+")[0] for package in json.loads(listed)}
    pins = re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), flags=re.M)
    return {name: (pin, here[_name(name)]) for name, pin in pins if here.get(_name(name), pin) != pin}


def _name(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--oldest", action="store_true")
    parser.add_argument("--torch", default="torch")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-latest")
    options, pytest_arguments = parser.parse_known_args()
    venv.create(options.venv, with_pip=True, clear=True)
    python = options.venv / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *(oldest() if options.oldest else newest(options.torch))], check=True)
    subprocess.run([*pip, "--no-deps", "-e", str(ROOT)], check=True)
    done = subprocess.run(
        [python, "-m", "pytest", "-rfE", "--tb=short", *(pytest_arguments or FAST)], cwd=ROOT, check=False
    )
    found = changed(python)
    print("not as in constraints.txt:" if found else "every version is that of constraints.txt")
    for name, (pin, here) in found.items():
        print(f"  {name} {pin} -> {here}")
    print(
        "nothing broke"
        if done.returncode == 0
        else "what broke is listed above; docs/compatibility.md says where to look"
    )
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
