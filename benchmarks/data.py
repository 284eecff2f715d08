"""Time and memory of preparing data, and of a start and a step afterwards, by the number of rows.

    python benchmarks/data.py                       # writes benchmarks/results/data.md

Rows are short English reviews of the `demo` extra, about 120 bytes of CSV each, each with another number. `toolkit
prepare` is compared with the tokenizer alone: `encode_batch_fast` of the same texts in memory, on all cores, measured
before and after, since the machine may be busy.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from machine import processor, write_page

from toolkit.config import ModelSettings
from toolkit.data.batches import Collator, epoch_order, micro_batches
from toolkit.data.read import read_demo
from toolkit.data.token_files import append_to_npy, load_split
from toolkit.data.tokenizer import load_tokenizer
from toolkit.demo import model_path

MODEL = "demo:minilm"
RESULTS = Path(__file__).parent / "results" / "data.md"
STEPS, BATCH = 500, 32


def write_rows(path: Path, rows: int) -> None:
    texts = itertools.cycle(read_demo("demo:rotten-tomatoes")["train"].rows["text"])
    with path.open("w") as file:
        file.write("text,label\n")
        for number, text in zip(range(rows), texts, strict=False):
            doubled = text.replace('"', '""')
            file.write(f'"{number} {doubled}",{"pos" if number % 3 else "neg"}\n')


def tokenizer_rate(path: Path, rows: int) -> float:
    """Texts per second of the tokenizer, for 40,000 texts from the whole file (later row numbers take more tokens)."""
    texts = [
        line.rsplit(",", 1)[0]
        for line in itertools.islice(path.open(), 1, None, max(1, rows // 40_000))
    ]
    tokenizer = load_tokenizer(ModelSettings(model_name_or_path=MODEL)).backend_tokenizer
    tokenizer.enable_truncation(128)
    tokenizer.no_padding()
    started = time.perf_counter()
    for start in range(0, len(texts), 2048):
        tokenizer.encode_batch_fast(texts[start : start + 2048])
    return len(texts) / (time.perf_counter() - started)


def prepare(path: Path, cache: Path) -> tuple[float, float]:
    """(seconds, peak resident GB) of the command `toolkit prepare`."""
    words = [
        "prepare",
        "--train_file",
        path,
        "--model_name_or_path",
        model_path(MODEL),
        "--max_length",
        "128",
    ]
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "toolkit", *map(str, words)],
        env=os.environ | {"TOOLKIT_CACHE": str(cache)},
        stdout=subprocess.DEVNULL,
    )
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"toolkit prepare failed: {words}")
    return time.perf_counter() - started, used.ru_maxrss / 1e6


def steps(folder: Path) -> dict[str, float]:
    """Run in a new process: the start from the cache, and the time and memory of data in a step."""
    import torch

    tokenizer = load_tokenizer(ModelSettings(model_name_or_path=MODEL))
    before, started, computed = resident(), time.perf_counter(), time.process_time()
    split = load_split(folder, "train")
    order = epoch_order(split.lengths, BATCH, seed=1, epoch=0)
    collate, ready = Collator(split, tokenizer, torch.device("cpu")), time.perf_counter()
    computed = time.process_time() - computed
    starts = itertools.cycle(range(0, len(order), BATCH))
    for start in itertools.islice(starts, STEPS):
        for mine in micro_batches(split, order[start : start + BATCH], BATCH, 1):
            collate(mine)
    done = time.perf_counter()
    anonymous, mapped = (now - then for now, then in zip(resident(), before, strict=True))
    return {
        "start": ready - started,
        "computed": computed,
        "step": (done - ready) / STEPS,
        "anonymous": anonymous,
        "mapped": mapped,
    }


def resident() -> tuple[float, float]:
    """(GB of anonymous memory, GB of mapped files, whose pages the kernel can drop)."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) / 1e6, int(status["RssFile"].split()[0]) / 1e6


def make_split(folder: Path, rows: int) -> None:
    """Writes random tokens with lengths like the reviews'."""
    (folder / "train").mkdir(parents=True)
    generator, end = np.random.default_rng(1), 0
    with (
        append_to_npy(folder / "train" / "input_ids.npy", np.int32) as ids,
        append_to_npy(folder / "train" / "offsets.npy", np.int64) as offsets,
    ):
        offsets(np.zeros(1, np.int64))
        for start in range(0, rows, 100_000):
            lengths = generator.integers(6, 50, min(100_000, rows - start))
            ids(generator.integers(1000, 30_000, lengths.sum()))
            offsets(end + np.cumsum(lengths))
            end += int(lengths.sum())
    np.save(folder / "train" / "rows.npy", np.arange(rows))
    np.save(folder / "train" / "labels.npy", np.zeros(rows, np.int64))


def predicting(root: Path, rows: int) -> dict[str, float]:
    """Run in a new process: the share of time in which the model computes, from reading the file to the last part,
    without loading the model."""
    from transformers import AutoModelForSequenceClassification

    from toolkit.cli import build_parser
    from toolkit.evaluation.saved_model import SavedModel
    from toolkit.features.predict import command as predict_file

    AutoModelForSequenceClassification.from_pretrained(model_path(MODEL)).save_pretrained(
        root / "model"
    )
    load_tokenizer(ModelSettings(model_name_or_path=MODEL)).save_pretrained(root / "model")
    write_rows(root / "new.csv", rows)
    predict_file.WINDOW_ROWS = 4096
    computed = loading = 0.0
    load, compute_outputs = SavedModel.load, SavedModel.compute_outputs

    def timed_load(self: Any, *arguments: Any) -> None:
        nonlocal loading
        started = time.perf_counter()
        load(self, *arguments)
        loading += time.perf_counter() - started

    def timed_outputs(self: Any, *arguments: Any) -> Any:
        nonlocal computed
        started = time.perf_counter()
        outputs = compute_outputs(self, *arguments)
        computed += time.perf_counter() - started
        return outputs

    SavedModel.load, SavedModel.compute_outputs = timed_load, timed_outputs  # type: ignore[method-assign]
    words = [
        "predict",
        root / "model",
        root / "new.csv",
        "--text_column",
        "text",
        "--max_length",
        "128",
    ]
    started = time.perf_counter()
    predict_file.predict_file(build_parser().parse_args(list(map(str, words))))
    seconds = time.perf_counter() - started - loading
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return {"rate": rows / seconds, "part": computed / seconds, "memory": memory}


def prepared_lines(counts: list[int], root: Path) -> list[str]:
    lines = [
        "| rows | CSV, MB | seconds | again | rows/s | tokenizer alone, before and after | of it | peak GB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for rows in counts:
        path = root / f"{rows}.csv"
        write_rows(path, rows)
        first = tokenizer_rate(path, rows)
        seconds, peak = prepare(path, root / f"cache-{rows}")
        start, _ = prepare(path, root / f"cache-{rows}")  # without tokenizing
        rate = rows / (seconds - start)
        mean = (first + (last := tokenizer_rate(path, rows))) / 2
        lines.append(
            f"| {rows:,} | {path.stat().st_size / 1e6:.0f} | {seconds:.1f} | {start:.1f} | {rate:.0f} | {first:.0f}, "
            f"{last:.0f} | {100 * rate / mean:.0f} % | {peak:.2f} |"
        )
        print(lines[-1], flush=True)
    return lines


def step_lines(counts: list[int], root: Path) -> list[str]:
    lines = [
        "| rows | start, seconds | computing | a step's data, ms | anonymous memory added, GB | mapped files, GB |",
        "|---|---|---|---|---|---|",
    ]
    for rows in counts:
        make_split(root / f"split-{rows}", rows)
        command = [sys.executable, __file__, "--measure_steps", str(root / f"split-{rows}")]
        result: dict[str, Any] = json.loads(
            subprocess.run(command, check=True, capture_output=True).stdout.splitlines()[-1]
        )
        lines.append(
            f"| {rows:,} | {result['start']:.2f} | {result['computed']:.2f} | {1000 * result['step']:.2f} "
            f"| {result['anonymous']:.2f} | {result['mapped']:.2f} |"
        )
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--steps", type=int, nargs="*", default=[10_000, 1_000_000, 10_000_000])
    parser.add_argument("--predicted", type=int, default=12_000)
    parser.add_argument("--measure_steps", type=Path)
    parser.add_argument("--measure_predict", type=Path)
    options = parser.parse_args()
    if options.measure_predict:
        print(json.dumps(predicting(options.measure_predict, options.predicted)))
        return
    if options.measure_steps:
        print(json.dumps(steps(options.measure_steps)))
        return
    with tempfile.TemporaryDirectory() as folder:
        prepared, after = (
            prepared_lines(options.rows, Path(folder)),
            step_lines(options.steps, Path(folder)),
        )
        if not options.predicted:
            return  # an incomplete page is not written
        command = [
            sys.executable,
            __file__,
            "--measure_predict",
            folder,
            "--predicted",
            str(options.predicted),
        ]
        predicted: dict[str, float] = json.loads(
            subprocess.run(command, check=True, capture_output=True).stdout.splitlines()[-1]
        )
        print(predicted, flush=True)
    load = os.getloadavg()[0]
    text = [
        "# Preparing data", "",
        f"`python benchmarks/data.py` on {processor()}, that other work "
        f"shares: load {load:.1f} at the end. MiniLM's tokenizer, at most 128 tokens; a tenth of the rows is held "
        "back. Rows a second leave out what the same command takes again, when tokens are there.", "", *prepared, "",
        "After the cache is made: mapping it and planning the first epoch, what a step of 32 texts takes of the data, "
        "and the memory that this adds to a process, after 500 steps.", "", *after, "",
        f"`toolkit predict` of {options.predicted:,} rows, MiniLM in float32, windows of 4,096 rows: the model "
        f"computes for {100 * predicted['part']:.1f} % of the time from opening the file to the output (loading the "
        f"model left out), {predicted['rate']:.0f} rows a second, peak {predicted['memory']:.2f} GB.", "",
    ]  # fmt: skip
    if not options.rows or not options.steps:
        return
    write_page(RESULTS, "\n".join(text))


if __name__ == "__main__":
    main()
