"""What runs on this GPU, and how fast, on one page: 12 minutes on one card.

    make gpu-report                                  writes benchmarks/results/gpu-NAME.md
    python benchmarks/gpu_report.py --minutes 9      a part of it; the same command goes on
    python benchmarks/gpu_report.py --rehearse       every part with small sizes, also on a CPU

The parts are listed below, the most important first. Each is a process with its own time limit,
and starts only if that limit fits into what is left of `--minutes`. The page is written after each
part. Finished parts of the same commit, device and versions are not run again
(OUTPUT_DIR/state.json); parts that failed are, after the others. All output is in
OUTPUT_DIR/log.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from machine import cores, gpu, processor

from toolkit.utils.children import run_child
from toolkit.utils.files import replace_file
from toolkit.utils.versions import versions

ROOT = Path(__file__).resolve().parent.parent
FIGURES = "GPU_REPORT_FIGURES"


@dataclass(frozen=True)
class Part:
    section: str
    """Of the page; the rows of its parts are one table."""
    name: str
    command: str
    """Of a Python program, which writes its figures to {figures}, a JSON object a line."""
    seconds: float
    """Its limit."""
    passes: int = 0
    """Products with each weight for a token (3 in training, 1 without), for the share of the peak."""


# How large the parts are; with --rehearse as in SMALL
FULL = {
    "layers": "12", "large": "24 --hidden 1024", "data": "demo:imdb", "batch": "64",
    "large_batch": "256", "steps": "46", "texts": "long", "rows": "16384", "start": "512",
    "tokens": "4096", "some": "",
}  # fmt: skip
SMALL = {
    "layers": "1", "large": "2", "data": "demo:rotten-tomatoes", "batch": "4", "large_batch": "8",
    "steps": "2", "texts": "short", "rows": "200", "start": "8", "tokens": "768", "some": " and ddp",
}  # fmt: skip
TEST = "-m pytest -m gpu -p gpu_report -p no:cacheprovider -n {workers} tests/test_gpu.py -k"
TRAIN = "benchmarks/against_trainer.py --json {figures} --rounds 1 --layers {layers} --data {data}"
TRAIN += " --steps {steps}"
PREDICT = "benchmarks/predict.py --json {figures} --rounds 1 --layers {layers} --texts {texts}"
PREDICT += " --rows {rows} --without_start {start}"
SAVE = "benchmarks/checkpoints.py --json {figures} --processes 1 --together"
BIGBIRD = "benchmarks/bigbird.py --json {figures} --rounds 1 --repeats 5 --layers {layers}"
TESTS, SAVING = "Tests for GPUs", "Saving and resuming, {} million weights"
STRATEGIES = ("zero3", "fsdp2", "single", "zero2", "ddp")
PARTS = [
    Part(TESTS, "a run, its resume and its conversion under each strategy", f"{TEST} 'a_strategy{{some}}'", 180),
    Part("Training, texts of up to 512 tokens", "", f"{TRAIN} --length 512 --batch {{batch}} "
         "--contestants 'ours, padding-free' Trainer", 150, 3),
    Part("Training, texts of 128 tokens", "",
         f"{TRAIN} --length 128 --batch {{large_batch}} --contestants Trainer", 90, 3),
    Part("Pretraining, texts of 128 tokens", "",
         f"{TRAIN} --task mlm --length 128 --batch {{large_batch}} --contestants Trainer", 100),
    Part("Prediction and evaluation, texts of up to 512 tokens", "",
         f"{PREDICT} --contestants 'Trainer, tuned' 'torch bf16' 'evaluate bf16'", 180, 1),
    *(Part(SAVING.format(110), name, f"{SAVE} --layers {{layers}} --strategies {name}", 75) for name in STRATEGIES),
    *(Part(SAVING.format(330), name, f"{SAVE} --layers {{large}} --strategies {name}", 150) for name in STRATEGIES),
    Part("BigBird: a training step on one text", "", f"{BIGBIRD} --tokens {{tokens}} --device {{device}}", 150),
    Part(TESTS, "gradients in bf16 and fp16, the precision of auto",
         f"{TEST} '(gradients or this_hardware){{some}}'", 240),
    Part(TESTS, "other recipes and techniques, kernels",
         f"{TEST} '(techniques or packed or half_precision){{some}}'", 240),
    Part(TESTS, "BigBird at 159 shapes", f"{TEST} many_widths", 300),
]  # fmt: skip
NOTE = """Each figure is of one run, in bf16 unless a table says otherwise; weights are random. The
contestants of a part ran one after the other; each `Trainer` is tuned, as its benchmark says. The
share of the peak counts the products with the weights of the layers, and those of attention at the
mean length. Runs that were saved and resumed are in float32; the difference is the largest relative
one of a step's loss after the resume."""
PEAKS = {
    "NVIDIA H200": 989e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12, "NVIDIA A100 80GB PCIe": 312e12, "NVIDIA L40S": 362e12,
    "NVIDIA L4": 121e12,
}  # fmt: skip
"""Dense bf16 operations a second, from NVIDIA's data sheets."""


def main() -> int:
    options = parse()
    os.chdir(ROOT)
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    device = gpu()
    if not device and not options.rehearse:
        print("error: torch sees no GPU here; `python benchmarks/gpu_report.py --rehearse` runs "
              "all parts with small sizes on the CPU", file=sys.stderr)  # fmt: skip
        return 1
    sizes = SMALL if options.rehearse else FULL
    sizes = sizes | {"device": "cuda" if device else "cpu", "workers": str(min(14, cores()))}
    facts = conditions(device, options)
    report = Report(PARTS, sizes, options.output_dir, options.results, facts)
    try:
        report.run(60 * options.minutes)
    finally:
        shutil.rmtree(temporary_folder(options.output_dir), ignore_errors=True)
    print(report.page)
    return int(any(result["error"] for result in report.results.values()))


def parse() -> Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=float, default=12)
    add("--rehearse", action="store_true", help="small sizes; the page goes to OUTPUT_DIR")
    add("--output_dir", type=Path, default=ROOT / "build" / "gpu-report")
    add("--results", type=Path, help="the page's folder [benchmarks/results]")
    add("--commit", help="where there is no git")
    options = parser.parse_args()
    options.output_dir = options.output_dir.resolve()
    if options.results is None:
        options.results = ROOT / "benchmarks" / "results"
        if options.rehearse:
            options.results = options.output_dir
    options.results = options.results.resolve()
    return options


def conditions(device: str, options: Namespace) -> dict[str, Any]:
    """What figures must share to stand on one page."""
    return {
        "device": device or "CPU",
        "rehearsal": options.rehearse,
        "commit": options.commit or output_of("git", "describe", "--always", "--dirty"),
        "driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "processor": processor(),
        **versions(),
    }


def output_of(*command: str) -> str:
    """The first line; empty if there is no such program."""
    if shutil.which(command[0]) is None:
        return ""
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    return next(iter(run.stdout.splitlines()), "")


class Report:
    """The results of parts, on the disk after each."""

    def __init__(
        self,
        parts: Sequence[Part],
        sizes: Mapping[str, str],
        folder: Path,
        pages: Path,
        conditions: Mapping[str, Any],
    ) -> None:
        self.parts = parts
        self.sizes = sizes
        self.folder = folder
        self.conditions = conditions
        self.page = free_page(pages, conditions["device"])
        self.results: dict[str, Any] = {}
        folder.mkdir(parents=True, exist_ok=True)
        state = folder / "state.json"
        if state.is_file():
            before = json.loads(state.read_text(encoding="utf-8"))
            if before["conditions"] == conditions:
                self.page = pages / before["page"]
                self.results = before["results"]

    def run(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for part in self._pending():
            if time.monotonic() + part.seconds > deadline:
                print(f"{key_of(part)}: not now, it may take {part.seconds:.0f} s", flush=True)
                continue
            result = run_part(part, self.sizes, self.folder)
            self.results[key_of(part)] = result
            self._write()
            outcome = result["error"] or "done"
            print(f"{key_of(part)}: {outcome} ({result['seconds']:.0f} s)", flush=True)

    def _pending(self) -> list[Part]:
        """The parts that have not run, then those that failed."""
        new = [part for part in self.parts if key_of(part) not in self.results]
        failed = [part for part in self.parts if self.results.get(key_of(part), {}).get("error")]
        return [*new, *failed]

    def _write(self) -> None:
        state = {"conditions": self.conditions, "page": self.page.name, "results": self.results}
        with replace_file(self.folder / "state.json") as draft:
            draft.write_text(json.dumps(state, indent=1), encoding="utf-8")
        with replace_file(self.page) as draft:
            draft.write_text(text_of(self), encoding="utf-8")


def free_page(folder: Path, device: str) -> Path:
    """A new one: no page of an earlier report is overwritten."""
    name = f"gpu-{device.lower().replace(' ', '-')}"
    path = folder / f"{name}.md"
    number = 1
    while path.exists():
        tail = f"-{number}" if number > 1 else ""
        path = folder / f"{name}-{date.today()}{tail}.md"
        number += 1
    return path


def key_of(part: Part) -> str:
    return f"{part.section}: {part.name}" if part.name else part.section


def temporary_folder(folder: Path) -> Path:
    """Of the reports in this folder. Its path is short, as those of sockets must be."""
    digest = zlib.crc32(str(folder).encode())
    return Path(tempfile.gettempdir()) / f"gpu-report-{digest:08x}"


def run_part(part: Part, sizes: Mapping[str, str], folder: Path) -> dict[str, Any]:
    """Its seconds, error (empty if it ended well) and rows."""
    figures = folder / "figures.jsonl"
    figures.unlink(missing_ok=True)
    temporary = temporary_folder(folder)
    scratch = temporary / "scratch"
    # a part that was killed left its files there
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    environment = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]),
        "TMPDIR": str(scratch),
        "BENCHMARK_FOLDER": str(temporary / "models"),
        FIGURES: str(figures),
    }  # fmt: skip
    if sizes["device"] == "cpu":
        environment["TOOLKIT_REHEARSE_GPU_TESTS"] = "1"
    words = shlex.split(part.command.format(figures=figures, **sizes))
    started = time.monotonic()
    log = folder / "log.txt"
    error = run_child(words, log, environment, part.seconds).removesuffix(f" ({log})")
    seconds = time.monotonic() - started
    if error and seconds >= part.seconds:
        error = f"not done after {part.seconds:.0f} s"
    shutil.rmtree(scratch, ignore_errors=True)
    rows = []
    if figures.is_file():
        rows = [json.loads(line) for line in figures.read_text(encoding="utf-8").splitlines()]
    if part.section == TESTS:
        rows = [count_tests(part, rows)]
    return {"seconds": seconds, "error": error, "rows": rows}


def pytest_runtest_logreport(report: Any) -> None:
    """pytest calls this after each phase of a test: this file is its plugin in the parts with tests."""
    # a worker's reports reach the main process, too
    if os.environ.get("PYTEST_XDIST_WORKER"):
        return
    if report.when == "call" or report.outcome != "passed":
        with Path(os.environ[FIGURES]).open("a", encoding="utf-8") as file:
            line = {"test": report.nodeid.partition("::")[2], "outcome": report.outcome}
            print(json.dumps(line), file=file)


def count_tests(part: Part, tests: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    counts = Counter(test["outcome"] for test in tests)
    failed = [test["test"] for test in tests if test["outcome"] == "failed"]
    return {
        "": part.name,
        **{outcome: counts[outcome] for outcome in ("passed", "failed", "skipped")},
        "failed tests": ", ".join(failed),
    }


# --- the page


def text_of(report: Report) -> str:
    facts = dict(report.conditions)
    device, rehearsal = facts.pop("device"), facts.pop("rehearsal")
    lines = [f"# On one {device}", ""]
    if rehearsal:
        lines += ["**A rehearsal with small sizes: its figures say nothing.**", ""]
    known = [f"{name} {value}" for name, value in facts.items() if value]
    lines += [f"`make gpu-report`, {date.today()}: {', '.join(known)}.", "", NOTE, ""]
    lines += table([outcome_of(part, report.results.get(key_of(part))) for part in report.parts])
    sections: dict[str, list[Mapping[str, Any]]] = {part.section: [] for part in report.parts}
    for part in report.parts:
        for row in report.results.get(key_of(part), {"rows": []})["rows"]:
            sections[part.section].append(with_share(row, part, report.sizes, device))
    for section, rows in sections.items():
        if rows:
            lines += ["", f"## {section}", "", *table(rows)]
    return "\n".join([*lines, ""])


def outcome_of(part: Part, result: Mapping[str, Any] | None) -> dict[str, str]:
    if result is None:
        return {"part": key_of(part), "seconds": "", "result": "not run"}
    outcome = result["error"] or "done"
    return {"part": key_of(part), "seconds": f"{result['seconds']:.0f}", "result": outcome}


def with_share(
    row: Mapping[str, Any], part: Part, sizes: Mapping[str, str], device: str
) -> Mapping[str, Any]:
    """The row with its tokens a second, and their share of what the GPU could compute."""
    if "tokens of a text" not in row:
        return row
    tokens = row["tokens of a text"]
    speed = tokens * row.get("samples/s", row.get("rows/s"))
    row = {**row, "tokens/s": speed}
    peak = PEAKS.get(device)
    if part.passes and peak:
        operations = operations_per_token(int(sizes["layers"]), tokens, part.passes)
        row["share of the peak"] = speed * operations / peak
    return row


def operations_per_token(layers: int, tokens: float, passes: int, hidden: int = 768) -> float:
    """Multiplications and additions in a BERT's layers, without embeddings and head."""
    return 2 * passes * layers * (12 * hidden**2 + 2 * tokens * hidden)


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for row in rows:
        lines.append(f"| {' | '.join(cell_of(row.get(name, '')) for name in columns)} |")
    return lines


def cell_of(value: str | float) -> str:
    if isinstance(value, str):
        return " ".join(value.split()).replace("|", "\\|")
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


if __name__ == "__main__":
    sys.exit(main())
