"""The time of a run of one optimizer step, by phase and import.

    python benchmarks/start.py                                   about 3 minutes on two cores
    python benchmarks/start.py --before ../main --rounds 5 --write

240 film reviews from a CSV file (those of demo:rotten-tomatoes), the weights of demo:minilm, one step of 32 samples,
an evaluation, the saved model, the model card and report.html: `recipes/cls.py` from the command to its end. `--before`
names another checkout of this repository, whose runs take turns with these; so does a Python that only imports
torch, accelerate, transformers and datasets.

Phases are sampled in one more run of each kind: every 5 ms a thread looks at which line of the recipe's `main` runs,
and which package is being imported.
"""

from __future__ import annotations

import argparse
import json
import linecache
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from machine import processor

ROOT = Path(__file__).resolve().parent.parent
ROWS, ROWS_FILE, TRACE = 240, "reviews.csv", "TOOLKIT_START_TRACE"
IMPORTS = "import torch, accelerate, transformers, datasets"
FILES = ("recipes/cls.py", "--config_file")
# kind of run -> command
KINDS: dict[str, tuple[str, ...]] = {
    "one process, tokens made": ("python", "recipes/cls.py"),
    "one process, tokens cached": ("python", "recipes/cls.py"),
    "two processes, DDP": ("python", *FILES, "accelerate_configs/ddp.yaml", "--num_processes", "2"),
    "two processes, ZeRO-2": ("python", *FILES, "accelerate_configs/zero2.yaml", "--num_processes", "2"),
    "two processes, DDP, by accelerate launch": (
        "accelerate", "launch", *FILES, "accelerate_configs/ddp.yaml", "--num_processes", "2"),
}  # fmt: skip
COMMANDS = {
    "toolkit --help": ("-m", "toolkit", "--help"),
    "toolkit convert --help": ("-m", "toolkit", "convert", "--help"),
    "python recipes/cls.py --help": ("recipes/cls.py", "--help"),
}
# function on the stack -> phase; the first match counts, before LINES
FUNCTIONS = {
    "write_pages": "pages",
    "write_results": "results of features",
    "save_model": "save",
    "evaluate": "evaluation",
}
# part of the current line of the recipe's `main` -> phase; the first match counts
LINES = {
    "run.finish": "evaluation",
    "config.parse": "settings",
    "start_accelerator": "accelerator",
    "load_data": "data",
    "load_classifier": "model",
    "toolkit.": "prepare",
    "run.resume": "prepare",
    "": "first step",
}
BEFORE_MAIN, LAUNCHER, REST = "Python, imports of the recipe", "launcher", "end"
ORDER = (LAUNCHER, BEFORE_MAIN, "settings", "accelerator", "data", "model", "prepare", "first step", "evaluation",
         "save", "results of features", "pages", REST)  # fmt: skip


# ---- in the sampled process


def trace() -> None:
    """Called by sitecustomize.py: writes a sample every 5 ms until the process ends."""
    main = threading.main_thread().ident
    born = (
        time.time()
        - time.clock_gettime(time.CLOCK_BOOTTIME)
        + _start_ticks() / os.sysconf("SC_CLK_TCK")
    )
    out = Path(os.environ[TRACE], f"{os.getpid()}.jsonl").open("w", buffering=1, encoding="utf-8")  # noqa: SIM115
    out.write(json.dumps([born, born, BEFORE_MAIN, "Python"]) + "\n")

    def sample() -> None:
        before = born
        while True:
            time.sleep(0.005)
            phase, package, now = *phase_of(sys._current_frames().get(main)), time.time()  # type: ignore[arg-type]
            out.write(json.dumps([before, now, phase, package]) + "\n")
            before = now

    threading.Thread(target=sample, daemon=True).start()


def _start_ticks() -> int:
    """From boot to the start of this process."""
    return int(Path("/proc/self/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()[19])


def phase_of(frame: Any) -> tuple[str, str]:
    """(phase, package that is being imported or "") of a stack; `frame`: the innermost one."""
    names: list[str] = []
    package, main_line = "", ""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "<module>" and not package and not main_line:
            name = str(frame.f_globals.get("__name__", ""))
            package = "Python" if name == "__main__" else name.split(".")[0]
        if code.co_name == "main" and code.co_filename.endswith("recipes/cls.py"):
            main_line = linecache.getline(code.co_filename, frame.f_lineno).strip()
        names.append(code.co_name)
        frame = frame.f_back
    if not main_line:
        return BEFORE_MAIN, package
    of_functions = [phase for name, phase in FUNCTIONS.items() if name in names]
    of_lines = [phase for part, phase in LINES.items() if part in main_line]
    return [*of_functions, *of_lines][0], package


# ---- in the parent process


@dataclass(frozen=True)
class Took:
    """Wall seconds of a command, and CPU seconds of all its processes."""

    wall: float
    cpu: float


def run(command: Sequence[str], root: Path, cache: Path, **environment: str) -> Took:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env |= {
        "PYTHONPATH": str(root),
        "TOOLKIT_CACHE": str(cache),
        "HF_HUB_OFFLINE": "1",
    } | environment
    started, used = time.perf_counter(), _children()
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return Took(time.perf_counter() - started, _children() - used)


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@dataclass(frozen=True)
class Bench:
    """One checkout, and the folder of data and caches for all checkouts."""

    root: Path
    folder: Path

    def job(self, kind: str, **environment: str) -> Took:
        """One run; kinds that tokenize first remove the cached tokens."""
        starter, *words = KINDS[kind]
        start = (
            [sys.executable]
            if starter == "python"
            else [str(Path(sys.executable).parent / starter)]
        )
        out = self.folder / "out"
        settings = ["--train_file", self.folder / ROWS_FILE, "--model_name_or_path", "demo:minilm", "--max_length", 128,
                    "--max_steps", 1, "--report_to", "none", "--output_dir", out]  # fmt: skip
        shutil.rmtree(out, ignore_errors=True)
        if kind.endswith("made"):
            shutil.rmtree(self.folder / "tokens", ignore_errors=True)
        return run([*start, *words, *map(str, settings)], self.root, self.folder, **environment)

    def phases(self, kind: str) -> tuple[Counter[str], Counter[str]]:
        """(phase -> seconds, package -> seconds of its import) in the first process that trains."""
        with tempfile.TemporaryDirectory() as traces:
            site = Path(traces, "site")
            site.mkdir()
            (site / "start_trace.py").write_text(
                Path(__file__).read_text(encoding="utf-8"), encoding="utf-8"
            )
            (site / "sitecustomize.py").write_text(
                "import start_trace; start_trace.trace()\n", encoding="utf-8"
            )
            started = time.time()
            self.job(kind, PYTHONPATH=f"{site}:{self.root}", **{TRACE: traces})
            ended = time.time()
            texts = [file.read_text(encoding="utf-8") for file in Path(traces).glob("*.jsonl")]
        of_processes = [
            [json.loads(line) for line in text.splitlines() if line.endswith("]")] for text in texts
        ]
        trained = [lines for lines in of_processes if any(line[2] == "pages" for line in lines)]
        if len(trained) != 1:
            raise SystemExit(f"{kind}: {len(trained)} processes wrote the pages, not one")
        phases, imports = Counter({LAUNCHER: max(0.0, trained[0][0][0] - started)}), Counter[str]()
        for before, now, phase, package in trained[0]:
            phases[phase] += now - before
            imports[package] += now - before
        phases[REST] = ended - trained[0][-1][1]
        if absent := [phase for phase in ORDER if phase not in phases]:
            raise SystemExit(
                f"{kind}: nothing was sampled in {', '.join(absent)}: are FUNCTIONS and LINES up to date?"
            )
        del imports[""]
        return phases, imports


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, help="another checkout to compare with")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind [3]")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    parser.add_argument(
        "--write", action="store_true", help="also write benchmarks/results/start.md"
    )
    options = parser.parse_args()
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    with tempfile.TemporaryDirectory() as folder:
        write_rows(Path(folder))
        roots = {"before": options.before.resolve()} if options.before else {}
        benches = {
            name: Bench(root, Path(folder)) for name, root in {**roots, "after": ROOT}.items()
        }
        page = report(benches, options.kinds, options.rounds, load)
    print(page)
    if options.write:
        (ROOT / "benchmarks/results/start.md").write_text(page, encoding="utf-8")


def write_rows(folder: Path) -> None:
    """Writes 240 of the demo's reviews, in a child process."""
    code = (
        "import sys; from toolkit.data.read import read_demo\n"
        "rows = read_demo('demo:rotten-tomatoes')['train'].rows.to_pandas().drop_duplicates('text')\n"
        f"rows.sample({ROWS}, random_state=7).to_csv(sys.argv[1], index=False)"
    )
    run([sys.executable, "-c", code, str(folder / ROWS_FILE)], ROOT, folder)


def report(benches: dict[str, Bench], kinds: Sequence[str], rounds: int, load: str) -> str:
    took: dict[tuple[str, str], list[Took]] = {}
    bare: list[Took] = []
    for bench in benches.values():  # warm-up: bytecode, and cached measurements
        bench.job("one process, tokens cached")
    for number in range(rounds):
        bare.append(run([sys.executable, "-c", IMPORTS], ROOT, ROOT))
        for kind in kinds:
            for name, bench in benches.items():
                took.setdefault((kind, name), []).append(bench.job(kind))
        for command, words in COMMANDS.items():
            for name, bench in benches.items():
                seconds = run([sys.executable, *words], bench.root, bench.folder)
                took.setdefault((command, name), []).append(seconds)
        print(f"round {number + 1}/{rounds}", file=sys.stderr, flush=True)
    head = ["", *(f"{name}: {what}" for name in benches for what in ("seconds", "CPU seconds"))]
    lines = [row(head), "|---" * len(head) + "|"]
    for what in [IMPORTS, *kinds, *COMMANDS]:
        runs = [bare if what == IMPORTS else took[what, name] for name in benches]
        cells = [
            spread([getattr(each, kind) for each in of]) for of in runs for kind in ("wall", "cpu")
        ]
        lines.append(row([what if what in kinds else f"`{what}`", *cells]))
    return "\n".join([
        "# The time of a run of one step", "",
        (__doc__ or "").split("\n\n", 2)[2].strip(), "",
        *lines, "", "Medians (smallest to largest).", "",
        "## Where the seconds go", "",
        "In the first process that trains; sampling slows it a little.", "",
        *phase_tables(benches, kinds),
        "## Conditions", "",
        f"- {processor()}, Python {platform.python_version()}, "
        + ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "accelerate", "datasets")),
        f"- {rounds} rounds; load average before: {load}",
        f"- `python benchmarks/start.py {' '.join(sys.argv[1:])}`, {date.today()}", "",
    ])  # fmt: skip


def phase_tables(benches: dict[str, Bench], kinds: Sequence[str]) -> list[str]:
    """A table of phases and one of imports, with a column for each kind: "before > after"."""
    sampled = {kind: [bench.phases(kind) for bench in benches.values()] for kind in kinds}
    lines: list[str] = []
    for number, (title, least) in enumerate((("phase", 0.0), ("of these, imports of", 0.05))):
        counters = {kind: [pair[number] for pair in pairs] for kind, pairs in sampled.items()}
        names: list[str] = list(ORDER)
        if number:
            total: Counter[str] = sum(
                (each for pair in counters.values() for each in pair), Counter()
            )
            names = [
                name
                for name, seconds in total.most_common()
                if seconds >= least * len(kinds) * len(benches)
            ]
        lines += [row([title, *kinds]), "|---" * (len(kinds) + 1) + "|"]
        for name in names:
            lines.append(
                row(
                    [
                        name,
                        *(
                            " > ".join(f"{each[name]:.2f}" for each in counters[kind])
                            for kind in kinds
                        ),
                    ]
                )
            )
        lines.append(
            row(
                [
                    "all",
                    *(
                        " > ".join(f"{each.total():.2f}" for each in counters[kind])
                        for kind in kinds
                    ),
                ]
            )
        )
        lines.append("")
    return lines


def row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
