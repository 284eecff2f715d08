"""`toolkit init`: copies the recipes and config files to the user's folder, ready to edit."""

from __future__ import annotations

import argparse
import filecmp
import shlex
import shutil
from pathlib import Path

from toolkit.utils.features import Command
from toolkit.utils.files import templates

# the files to copy
_PATTERNS = (
    "recipes/*.py",
    "recipes/*.yaml",
    "accelerate_configs/*.yaml",
    "ds_configs/*.json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    help_text = "created if it is missing [.]"
    parser.add_argument("folder", nargs="?", default=".", metavar="FOLDER", help=help_text)


def run(options: argparse.Namespace) -> None:
    folder = Path(options.folder)
    new, different = copy_templates(folder)
    print(f"{len(new)} files copied to {folder.resolve()}")
    if different:
        names = ", ".join(different)
        print(
            f"not overwritten, as you changed them: {names} (move a file away to get ours)"
        )
    print(
        f"next: cd {shlex.quote(str(folder.resolve()))}\n"
        "  accelerate launch recipes/cls.py --config_file accelerate_configs/ddp.yaml\n"
        "  deepspeed recipes/bigbird.py\n"
        "  python recipes/title.py --help"
    )


def copy_templates(folder: Path) -> tuple[list[str], list[str]]:
    """Copies the files that `folder` lacks. Returns (copied files, existing files that differ from
    ours). Raises OSError."""
    source = templates()
    ours = [path for pattern in _PATTERNS for path in source.glob(pattern)]
    new, different = [], []
    for path in sorted(ours):
        name = path.relative_to(source)
        target = folder / name
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
            new.append(str(name))
        elif not filecmp.cmp(path, target, shallow=False):
            different.append(str(name))
    return new, different


COMMAND = Command(
    "init",
    "copy the recipes and config files to a folder, ready to edit",
    run,
    add_arguments,
    "Copies recipes/, accelerate_configs/ and ds_configs/ to FOLDER. Never replaces a file.",
)
