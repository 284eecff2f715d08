"""Builds the distributions, checks their contents, and tags the version.

    pip install build twine
    python tests/release.py [--tag] [--out dist]

The wheel must contain every module and template that git tracks, and nothing else; `twine check` must pass; `toolkit
init` must run from it. With --tag the working tree must be clean and CHANGELOG.md must name the version with a date;
then the tag vVERSION is created (not pushed).
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from toolkit import __version__  # noqa: E402


def run(*command: str | Path, cwd: Path = ROOT, **env: str) -> str:
    """Run the command and return its stdout; exit with an error if it fails."""
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
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
    return [f"missing: {name}" for name in sorted(wanted - present)] + [
        f"extra: {name}" for name in sorted(present - wanted)
    ]


def changelog_fault(text: str, version: str) -> str:
    """Empty if the newest entry is `## VERSION (YYYY-MM-DD)`, else the fault."""
    newest = re.search(r"^## (.*)$", text, re.MULTILINE)
    dated = newest and re.fullmatch(rf"{re.escape(version)} \(\d{{4}}-\d\d-\d\d\)", newest[1])
    return (
        ""
        if dated
        else f"CHANGELOG.md begins with {newest[1] if newest else 'nothing'}, not with {version} (DATE)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tag", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    options = parser.parse_args()
    if options.tag:
        if run("git", "status", "--porcelain"):
            sys.exit("the working tree is not clean: commit first")
        if fault := changelog_fault(
            (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), __version__
        ):
            sys.exit(fault)
        if f"v{__version__}" in run("git", "tag").split():
            sys.exit(f"the tag v{__version__} exists: increase toolkit.__version__")
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "build", "--outdir", folder, ROOT)
        wheel, source = (next(Path(folder).glob(pattern)) for pattern in ("*.whl", "*.tar.gz"))
        run(sys.executable, "-m", "twine", "check", "--strict", wheel, source)
        manifest = (ROOT / "MANIFEST.in").read_text(encoding="utf-8").splitlines()
        templates = [line.removeprefix("include ") for line in manifest if not line.startswith("#")]
        with zipfile.ZipFile(wheel) as archive:
            faults = wheel_faults(
                archive.namelist(), expected(run("git", "ls-files").splitlines(), templates)
            )
        if faults:
            sys.exit("the files of the wheel differ from git's:\n  " + "\n  ".join(faults))
        installed, project = Path(folder) / "installed", Path(folder) / "project"
        run(
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--target",
            installed,
            wheel,
        )
        run(
            sys.executable,
            "-m",
            "toolkit",
            "init",
            project,
            cwd=Path(folder),
            PYTHONPATH=str(installed),
        )
        copied = {
            path.relative_to(project).as_posix() for path in project.rglob("*") if path.is_file()
        }
        if copied != set(templates):
            sys.exit(
                f"the files that `toolkit init` copies from the wheel differ: {sorted(copied ^ set(templates))}"
            )
        options.out.mkdir(exist_ok=True)
        for path in (wheel, source):
            path.replace(options.out / path.name)
            print(f"{path.name}: {(options.out / path.name).stat().st_size:,} bytes")
    if options.tag:
        run(
            "git",
            "tag",
            "--annotate",
            f"v{__version__}",
            "--message",
            f"finetune-toolkit {__version__}",
        )
        print(
            f"tagged v{__version__}: `git push origin v{__version__}`, then `twine upload dist/*{__version__}*`"
        )


if __name__ == "__main__":
    main()
