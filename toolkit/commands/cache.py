"""`toolkit cache`: lists or prunes the cache of tokens and models."""

from __future__ import annotations

import argparse
import contextlib
import json
import time

from toolkit.errors import size_text
from toolkit.utils.cache import FILES, files_of, remove, verified_marker
from toolkit.utils.features import Command
from toolkit.utils.files import cache_folder

_DAY_SECONDS = 24 * 3600


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", choices=("list", "prune"), default="list")
    days = "prune removes folders unused for DAYS [30]"
    parser.add_argument("--unused_days", type=float, default=30.0, metavar="DAYS", help=days)


def run(options: argparse.Namespace) -> None:
    folders, lines = sorted(path for path in cache_folder().glob("*/[!.]*") if path.is_dir()), []
    for folder in folders:
        checked, source = verified_marker(folder), ""
        days = (time.time() - (checked if checked.exists() else folder).stat().st_mtime) / _DAY_SECONDS
        size = sum(path.stat().st_size for path in files_of(folder).values())
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            source = json.loads((folder / FILES).read_bytes())["source"]
        removed = options.action == "prune" and days >= options.unused_days and remove(folder)
        if removed or options.action == "list":
            name = folder.relative_to(cache_folder())
            lines.append(f"{'removed ' * removed}{name}  {size_text(size)}  used {days:.0f} days ago  {source}")
    contents = f"has no folder unused for {options.unused_days:g} days" if folders else "is empty"
    print("\n".join(lines) or f"{cache_folder()} {contents}")


COMMAND = Command(
    "cache", "list the cached tokens and models, or remove unused ones", run, add_arguments,
    description=f"Lists or prunes the cache in {cache_folder()} ($TOOLKIT_CACHE).",
)  # fmt: skip
