"""Builds the distributions and checks their contents.

    pip install build twine
    python tests/release.py [FOLDER, by default dist]

The wheel must contain every module and template that git tracks, and nothing else; `twine check` must pass. (That
`toolkit init` and recipes run from a wheel: tests/commands/test_init.py.)
"""

import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from toolkit import __version__  # noqa: E402


def run(*command: str | Path) -> str:
    """Run the command and return its stdout; exit with an error if it fails."""
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout}\nfailed: {' '.join(map(str, command))}")
    return done.stdout


def expected(tracked: Iterable[str], templates: Iterable[str]) -> set[str]:
    """The files of the wheel without its metadata: the package, and the templates of `toolkit init`."""
    package = {name for name in tracked if name.startswith("toolkit/")}
    return package | {f"toolkit/templates/{name}" for name in templates}


def wheel_faults(names: Iterable[str], wanted: set[str]) -> list[str]:
    """Missing and extra files of a wheel."""
    present = {name for name in names if ".dist-info/" not in name}
    missing = [f"missing: {name}" for name in sorted(wanted - present)]
    return missing + [f"extra: {name}" for name in sorted(present - wanted)]


def main(out: Path) -> None:
    run(sys.executable, "-m", "build", "--outdir", out, ROOT)
    (wheel,) = out.glob(f"*-{__version__}-*.whl")
    (source,) = out.glob(f"*-{__version__}.tar.gz")
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, source)
    manifest = (ROOT / "MANIFEST.in").read_text(encoding="utf-8")
    templates = re.findall(r"^include (.+)$", manifest, re.MULTILINE)
    wanted = expected(run("git", "ls-files").splitlines(), templates)
    if faults := wheel_faults(zipfile.ZipFile(wheel).namelist(), wanted):
        sys.exit("the files of the wheel differ from git's:\n  " + "\n  ".join(faults))


if __name__ == "__main__":
    main(Path(*sys.argv[1:2] or [ROOT / "dist"]))
