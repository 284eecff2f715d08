"""`toolkit cache`: lists or prunes the cache of tokens and models."""

from __future__ import annotations

import argparse
import time

from toolkit.errors import size_text
from toolkit.utils.cache import SOURCE, remove
from toolkit.utils.features import Command
from toolkit.utils.files import cache_folder

_DAY_SECONDS = 24 * 3600


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", choices=("list", "prune"), default="list")
    days = "prune removes folders unused for DAYS [30]"
    parser.add_argument("--unused_days", type=float, default=30.0, metavar="DAYS", help=days)


def run(options: argparse.Namespace) -> None:
    print(f"{cache_folder()} ($TOOLKIT_CACHE):")
    for source in sorted(cache_folder().glob(f"*/[!.]*/{SOURCE}")):
        folder, days = source.parent, (time.time() - source.stat().st_mtime) / _DAY_SECONDS
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        text = source.read_text(encoding="utf-8")
        name = folder.relative_to(cache_folder())
        line = f"{name}  {size_text(size)}  used {days:.0f} days ago  {text}"
        if options.action == "list":
            print(line)
        elif days >= options.unused_days and remove(folder):
            print(f"removed {line}")


COMMAND = Command(
    "cache",
    "list the cached tokens and models, or remove unused ones",
    run,
    add_arguments,
)
