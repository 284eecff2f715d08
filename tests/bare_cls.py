"""recipes/cls.py for many jobs: without its pages, and a job that is refused leaves its line in FOLDER.refused."""

from __future__ import annotations

import sys
from pathlib import Path

from recipes import cls
from toolkit.errors import UserError
from toolkit.run import Run


def main() -> None:
    Run._write_pages = lambda self: None  # type: ignore[method-assign]
    folder = sys.argv[sys.argv.index("--output_dir") + 1]
    try:
        cls.main()
    except UserError as error:
        Path(f"{folder}.refused").write_text(str(error), encoding="utf-8")
