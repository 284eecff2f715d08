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


def main(out: Path) -> None:
    run(sys.executable, "-m", "build", "--outdir", out, ROOT)
    (wheel,) = out.glob(f"*-{__version__}-*.whl")
    (source,) = out.glob(f"*-{__version__}.tar.gz")
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, source)
    manifest = (ROOT / "MANIFEST.in").read_text(encoding="utf-8")
    templates = re.findall(r"^include (.+)$", manifest, re.MULTILINE)
    tracked = run("git", "ls-files", "toolkit").splitlines()
    expected = {*tracked, *(f"toolkit/templates/{name}" for name in templates)}
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    if names != expected:
        missing, extra = sorted(expected - names), sorted(names - expected)
        sys.exit(f"the wheel lacks {missing} of git's files, and has {extra} more")


if __name__ == "__main__":
    main(Path(*sys.argv[1:2] or [ROOT / "dist"]))
