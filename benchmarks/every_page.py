"""Regenerates the pages of benchmarks/results on one machine, from one commit.

    make benchmarks                                      about two hours on two idle cores
    python benchmarks/every_page.py trainer ways         these only

PAGES has the commands of each page; those of LONG are made only by name. benchmarks/results/index.md
lists the commit, the machine and the minutes of each page; a page whose command fails keeps its old
content, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

from machine import processor

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MODEL = "{folder}/run/model"
"""Of the demo job, which the page's first command trains."""
PREDICT = ["predict", MODEL, "--kept", "{folder}/predict"]

ALL_LENGTHS = ["--lengths", "128", "512"]
SPEED = ["--contestants", "torch bf16", "openvino int8"]
LABEL_ERRORS = ["label_errors", "--folds", "3", "--learning_rate", "1e-4"]

PAGES: dict[str, list[list[str]]] = {
    "structure": [["structure", "d459579", "HEAD", "--write"]],
    "start": [["start", "--write"]],
    "ways": [["ways", "--write"]],
    "sameness": [["sameness", "--write"]],
    "collectives": [["collectives", "--write"]],
    "checkpoints": [["checkpoints", "--write"]],
    "convert": [["convert", "--write"]],
    "trainer": [["trainer", *ALL_LENGTHS, "--rounds", "2", "--write"]],
    "micro_batches": [["micro_batches", "--write"]],
    "bigbird": [["bigbird", "--rounds", "2", "--repeats", "3", "--write"]],
    "padding_free": [["padding_free", "--rounds", "2", "--write"]],
    "ranks": [["ranks", "--ranks", "2", "4", "--write"]],
    "data": [["data", "--rows", "1000000", "10000000"]],
    "predict": [
        ["../recipes/cls", "--output_dir", "{folder}/run", "--num_train_epochs", "1"],
        [*PREDICT, "--texts", "short", "--rows", "5000", "--rounds", "1"],
        [*PREDICT, "--texts", "short", "--rows", "200000", "--rounds", "1", *SPEED],
        [*PREDICT, "--layers", "12", "--rows", "300", "--rounds", "1"],
        [*PREDICT, "--texts", "long", "--rows", "200", "--rounds", "1", "--write"],
    ],
    "distillation": [["distillation", "--folder", "{folder}/distillation", "--write"]],
    "label_errors": [
        [*LABEL_ERRORS, "--samples", "3000", "--epochs", "2"],
        [*LABEL_ERRORS, "--dataset", "demo:bbc", "--samples", "1500", "--epochs", "3"],
    ],
    "precision": [["precision", "--write"]],
    "pretrain": [["pretrain", "--steps", "12", "--rounds", "2", "--write"]],
    "models": [["models"]],
}
LONG = {"precision"}
"""Takes hours where the CPU emulates fp16."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "pages",
        nargs="*",
        metavar="PAGE",
        help=f"of {', '.join(PAGES)} [all but {', '.join(LONG)}]",
    )
    options = parser.parse_args()
    if unknown := set(options.pages) - set(PAGES):
        parser.error(
            f"there is no page {', '.join(sorted(unknown))}: name some of {', '.join(PAGES)}"
        )
    failed = [
        page
        for page in options.pages or [page for page in PAGES if page not in LONG]
        if not make(page)
    ]
    if failed:
        print(
            f"failed: {' '.join(failed)}; again: python benchmarks/every_page.py {' '.join(failed)}",
            file=sys.stderr,
        )
    return bool(failed)


def make(page: str) -> bool:
    """Runs a page's commands and adds it to the index. Returns False where one fails."""
    started, load = time.monotonic(), os.getloadavg()[0]
    before = {file: file.read_bytes() for file in RESULTS.glob("*.md")}
    with tempfile.TemporaryDirectory() as folder:
        for script, *words in PAGES[page]:
            command = [f"benchmarks/{script}.py", *(word.format(folder=folder) for word in words)]
            print(f"$ python {' '.join(command)}", flush=True)
            if subprocess.run([sys.executable, *command], cwd=ROOT, check=False).returncode:
                for file, content in before.items():
                    file.write_bytes(content)
                return False
    commit = git("rev-parse", "--short", "HEAD")
    if git(
        "status",
        "--porcelain",
        "--untracked-files=no",
        "--",
        ".",
        ":!benchmarks/results",
        ":!docs/images",
    ):
        commit += "-dirty"  # this program writes results and images itself
    minutes = (time.monotonic() - started) / 60
    machine = f"{processor()}, torch {version('torch')}"
    index(page, f"| {page} | {commit} | {date.today()} | {machine} | {load:.1f} | {minutes:.1f} |")
    return True


def git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def index(page: str, row: str) -> None:
    """Adds or replaces a page's row in the index."""
    file = RESULTS / "index.md"
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    rows = {
        line.split(" | ")[0]: line
        for line in [*lines, row]
        if line.split(" | ")[0].lstrip("| ") in PAGES
    }
    heads = [
        "# Measured pages",
        "",
        "`make benchmarks` makes them again; `benchmarks/every_page.py` has each command.",
        "",
    ]
    table = [
        "| page | commit | date | machine | load before | minutes |",
        "|---|---|---|---|---|---|",
    ]
    file.write_text(
        "\n".join([*heads, *table, *(rows[name] for name in sorted(rows))]) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    sys.exit(main())
