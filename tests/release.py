"""Builds the distributions, checks their contents, and tags the version.

    pip install build twine
    python tests/release.py [--tag] [--out dist]

The wheel must contain every module and template that git tracks, and nothing else; `twine check` must pass. (That
`toolkit init` and recipes run from a wheel: tests/commands/test_init.py.) With --tag the working tree must be clean and
CHANGELOG.md must name the version with a date; then the tag vVERSION is created (not pushed).
"""

import argparse
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


def check_before_a_tag() -> None:
    if run("git", "status", "--porcelain"):
        sys.exit("the working tree is not clean: commit first")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## .*$", changelog, re.MULTILINE)
    dated = rf"## {re.escape(__version__)} \(\d{{4}}-\d\d-\d\d\)"
    if newest is None or not re.fullmatch(dated, newest[0]):
        sys.exit(f"the newest entry of CHANGELOG.md is not `## {__version__} (DATE)`")
    if f"v{__version__}" in run("git", "tag").split():
        sys.exit(f"the tag v{__version__} exists: increase toolkit.__version__")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tag", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    options = parser.parse_args()
    if options.tag:
        check_before_a_tag()
    run(sys.executable, "-m", "build", "--outdir", options.out, ROOT)
    (wheel,) = options.out.glob(f"*-{__version__}-*.whl")
    (source,) = options.out.glob(f"*-{__version__}.tar.gz")
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, source)
    manifest = (ROOT / "MANIFEST.in").read_text(encoding="utf-8").splitlines()
    templates = [line.removeprefix("include ") for line in manifest if not line.startswith("#")]
    wanted = expected(run("git", "ls-files").splitlines(), templates)
    if faults := wheel_faults(zipfile.ZipFile(wheel).namelist(), wanted):
        sys.exit("the files of the wheel differ from git's:\n  " + "\n  ".join(faults))
    if options.tag:
        version = f"v{__version__}"
        run("git", "tag", "--annotate", version, "--message", f"finetune-toolkit {__version__}")
        print(
            f"tagged {version}: `git push origin {version}`, then `twine upload {wheel} {source}`"
        )


if __name__ == "__main__":
    main()
