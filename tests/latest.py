"""`make test-latest`: the fast tests on the newest version of every dependency, even beyond pyproject.toml's ranges.
`make test-oldest`: on the oldest that the ranges allow.

    python tests/latest.py [--oldest] [--torch torch==2.13.0] [--venv .venv-latest] [PYTEST ARGUMENTS]

torch is the version in --torch, since its builds are gigabytes. Prints the versions that differ from constraints.txt,
and what broke; exits with pytest's exit code. If nothing broke, pyproject.toml's ranges can be widened.
"""

import argparse
import json
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FAST = [
    "-m",
    "not slow and not multiprocess and not namespaces and not gpu",
    "-p",
    "no:cacheprovider",
]


def requirements() -> list[str]:
    """The requirements of pyproject.toml and of its extras, without references to the project's extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    return [line for line in lines if not line.startswith(project["name"])]


def newest(torch: str) -> list[str]:
    """Requirements for pip: every dependency without its range; exact pins (data, jieba) stay."""
    open_lines = [
        line if "==" in line.split(";")[0] else re.sub(r"[<>~=!][^;]*", "", line, count=1)
        for line in requirements()
    ]
    return [torch, *(line for line in open_lines if not re.match(r"torch\b", line))]


def oldest() -> list[str]:
    """Requirements for pip: the lower bounds of the dependencies; for extras the newest allowed version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pinned = [re.sub(r">=([\w.]+)[^;]*", r"==\1", line) for line in project["dependencies"]]
    return [*pinned, *(line for line in requirements() if line not in project["dependencies"])]


def changed_versions(python: Path) -> dict[str, tuple[str, str]]:
    """Package -> (version in constraints.txt, installed version), if they differ."""
    listed = subprocess.check_output([python, "-m", "pip", "list", "--format", "json"])
    installed = {
        _name(package["name"]): package["version"].split("+")[0] for package in json.loads(listed)
    }
    pins = re.findall(
        r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), flags=re.M
    )
    return {
        name: (pin, installed[_name(name)])
        for name, pin in pins
        if installed.get(_name(name), pin) != pin
    }


def _name(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--oldest", action="store_true")
    parser.add_argument("--torch", default="torch")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-latest")
    options, pytest_arguments = parser.parse_known_args()
    venv.create(options.venv, with_pip=True, clear=True)
    python = options.venv / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *(oldest() if options.oldest else newest(options.torch))], check=True)
    subprocess.run([*pip, "--no-deps", "-e", str(ROOT)], check=True)
    pytest = [python, "-m", "pytest", "-rfE", "--tb=short", *(pytest_arguments or FAST)]
    code = subprocess.run(pytest, cwd=ROOT, check=False).returncode
    differing = changed_versions(python)
    print(
        "versions that differ from constraints.txt:"
        if differing
        else "all versions are those of constraints.txt"
    )
    for name, (pin, installed) in differing.items():
        print(f"  {name} {pin} -> {installed}")
    print(
        "what broke is listed above; docs/compatibility.md says where to look"
        if code
        else "nothing broke"
    )
    return code


if __name__ == "__main__":
    sys.exit(main())
