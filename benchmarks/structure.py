"""Lines per folder of the package, and which folder imports which, at two commits.

    python benchmarks/structure.py d459579 HEAD --write

`--write` puts the table and both pictures (Mermaid, which GitHub and most editors draw) into benchmarks/results.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import tarfile
from collections import Counter
from pathlib import Path

import networkx

ROOT = Path(__file__).resolve().parent.parent
EVERYWHERE = ("errors", "utils")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commits", nargs=2, metavar=("BEFORE", "AFTER"))
    parser.add_argument(
        "--write", action="store_true", help="write benchmarks/results/structure.md"
    )
    options = parser.parse_args()
    sources = [read(commit) for commit in options.commits]
    command = f"python benchmarks/structure.py {' '.join(options.commits)} --write"
    lines = ["# The package's folders and their imports", "", f"`{command}`", ""]
    lines += [
        "Lines of Python, comments and empty lines included.",
        "",
        *table(*map(lines_per_folder, sources)),
    ]
    for commit, source in zip(options.commits, sources, strict=True):
        graph = imports(source)
        lines += ["", f"## At {commit}", "", f"{graph.number_of_edges()} pairs of folders (or single files) import; "
                  f"all import {' and '.join(EVERYWHERE)}. Arrows that follow from others are left out.", "",
                  *picture(graph)]  # fmt: skip
    print("\n".join(lines))
    if options.write:
        Path(ROOT, "benchmarks/results/structure.md").write_text(
            "\n".join(lines) + "\n", encoding="utf-8"
        )


def read(commit: str) -> dict[str, str]:
    """{path below `toolkit/` or `tests/`, with it: text} of a commit's Python files."""
    archive = subprocess.run(
        ["git", "archive", commit, "toolkit", "tests"], cwd=ROOT, check=True, capture_output=True
    )
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        python = [file for file in files if file.isfile() and file.name.endswith(".py")]
        return {file.name: files.extractfile(file).read().decode() for file in python}  # type: ignore[union-attr]


def folder_of(path: str) -> str:
    """`toolkit/data/read.py` -> `data`; `toolkit/run.py` -> `run`."""
    return path.split("/")[1].removesuffix(".py")


def lines_per_folder(source: dict[str, str]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for path, text in source.items():
        top, folder = path.split("/")[:2]
        row = (
            "tests"
            if top == "tests"
            else f"toolkit/{folder}"
            if "/" in path.removeprefix("toolkit/")
            else "toolkit"
        )
        counts[row] += text.count("\n")
    counts["the package"] = counts.total() - counts["tests"]
    counts["the package without features and commands"] = (
        counts["the package"] - counts["toolkit/features"] - counts["toolkit/commands"]
    )
    return counts


def table(before: Counter[str], after: Counter[str]) -> list[str]:
    rows = [
        f"| {row} | {before[row]:,} | {after[row]:,} |"
        for row in sorted({*before, *after}, reverse=True)
    ]
    return ["| | before | after |", "|---|---|---|", *rows]


def imports(source: dict[str, str]) -> networkx.DiGraph:
    """An edge from each folder, or file that lies in none, to those that it imports."""
    graph, folders = (
        networkx.DiGraph(),
        {folder_of(path) for path in source if path.startswith("toolkit/")},
    )
    for path, text in source.items():
        if not path.startswith("toolkit/"):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "toolkit":
                module = (node.module or "").split(".")[1:]
                for name in [module[0]] if module else [alias.name for alias in node.names]:
                    graph.add_edge(folder_of(path), name if name in folders else "__init__")
    graph.remove_edges_from(list(networkx.selfloop_edges(graph)))
    graph.remove_nodes_from([*EVERYWHERE, "__init__", "__main__"])
    return graph


def picture(graph: networkx.DiGraph) -> list[str]:
    arrows = [
        f"    {above} --> {below}"
        for above, below in sorted(networkx.transitive_reduction(graph).edges)
    ]
    return ["```mermaid", "graph TD", *arrows, "```"]


if __name__ == "__main__":
    main()
