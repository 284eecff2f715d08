"""recipes/cls.py for many jobs: a job that is refused leaves its line in FOLDER.refused."""

import sys
from pathlib import Path

from recipes import cls
from toolkit.errors import UserError


def main() -> None:
    folder = sys.argv[sys.argv.index("--output_dir") + 1]
    try:
        cls.main()
    except UserError as error:
        Path(f"{folder}.refused").write_text(str(error), encoding="utf-8")
