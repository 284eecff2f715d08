"""`toolkit convert` against a copy of the same bytes and against DeepSpeed's zero_to_fp32.py.

    python benchmarks/convert.py --write      (about 4 minutes on 2 cores; 16 GB of memory, 20 GB of disk)

Four processes on gloo make a BERT-like model of 2.5 GB in fp32 under DeepSpeed's ZeRO-3 in bf16, with AdamW's states
but without a step, and save it. Then each program converts it in turn: seconds of the whole process, imports included,
those of all its threads on a processor, and the peak of its anonymous memory (RssAnon: mapped files do not count). The
outputs must be equal.
"""

from __future__ import annotations

import argparse
import importlib
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from machine import processor

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "convert.md"
WIDTH, WORDS, RANKS = 1024, 30522, 4
_THEIRS = (
    "import sys; from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict as convert; "
    "convert(sys.argv[1], sys.argv[2], safe_serialization=True)"
)
_COPY = "import os, shutil, sys; shutil.copyfile(*sys.argv[1:]); os.fsync(os.open(sys.argv[2], os.O_RDONLY))"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=2.5, help="of fp32 weights [2.5]")
    parser.add_argument("--repeats", type=int, default=3, help="of each program, in turns [3]")
    parser.add_argument("--folder", default=None, help="for temporary files")
    parser.add_argument(
        "--saved", type=Path, default=None, help="the checkpoint, made there once [temporary]"
    )
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--make", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        make(Path(options.make), int(options.gigabytes * 1e9))
        return
    with tempfile.TemporaryDirectory(prefix="convert-", dir=options.folder) as folder:
        page = measure_all(Path(folder), options)
    print(page)
    if options.write:
        RESULTS.write_text(page, encoding="utf-8")


def make(folder: Path, size: int) -> None:
    """One rank: saves the model."""
    import torch

    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    import deepspeed

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", verbose=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": True},
    }
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = bert(size)
    optimizer = torch.optim.AdamW(model.parameters())
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    for master in engine.optimizer.fp32_partitioned_groups_flat:  # what a step would leave there
        moments = {name: torch.full_like(master, 1e-4) for name in ("exp_avg", "exp_avg_sq")}
        engine.optimizer.optimizer.state[master] = {"step": torch.tensor(0.0), **moments}
    engine.save_checkpoint(str(folder))
    os._exit(0)


def bert(size: int) -> object:
    """Layers as BERT-large's, of at least `size` bytes in fp32."""
    from torch import nn

    layer = {"query": (WIDTH, WIDTH), "key": (WIDTH, WIDTH), "value": (WIDTH, WIDTH), "output": (WIDTH, WIDTH),
             "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}  # fmt: skip
    elements = sum((rows + 1) * columns for rows, columns in layer.values())
    count = -(-(size // 4 - WORDS * WIDTH) // elements)
    layers = (
        nn.ModuleDict({name: nn.Linear(*shape) for name, shape in layer.items()})
        for _ in range(count)
    )
    return nn.ModuleDict(
        {"embeddings": nn.Embedding(WORDS, WIDTH), "layers": nn.ModuleList(layers)}
    )


def measure_all(folder: Path, options: argparse.Namespace) -> str:
    out, theirs, copy = (folder / name for name in ("out", "theirs", "copy"))
    saved = options.saved or folder / "saved"
    env = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "LOG_LEVEL": "error", **os.environ}
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        str(RANKS),
    ]
    words = [__file__, "--make", str(saved), "--gigabytes", str(options.gigabytes)]
    if not saved.exists():
        subprocess.run([*torchrun, *words], env=env, check=True)
    programs = {
        "a copy of the same bytes, flushed": [
            sys.executable,
            "-c",
            _COPY,
            str(out / "model.safetensors"),
            str(copy),
        ],
        "`toolkit convert`": [sys.executable, "-m", "toolkit", "convert", str(saved), str(out)],
        "`zero_to_fp32.py`": [sys.executable, "-c", _THEIRS, str(saved), str(theirs)],
    }
    convert = programs["`toolkit convert`"]
    measure(convert)  # into the page cache
    figures: dict[str, list[Figures]] = {name: [] for name in programs}
    for _ in range(options.repeats):
        for name, command in programs.items():
            for path in (copy, theirs, *([out] if command is convert else [])):
                shutil.rmtree(path, ignore_errors=True)
                path.unlink(missing_ok=True)
            figures[name].append(measure(command))
    require_equal(out, theirs)
    size = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
    return table(figures, options, size)


@dataclass
class Figures:
    """Of a program."""

    seconds: float
    processor_seconds: float
    peak: int
    """Of RssAnon, in bytes."""


def measure(command: list[str]) -> Figures:
    started, peak = time.perf_counter(), 0
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "LOG_LEVEL": "error"}
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                peak = max(peak, int(line.split()[1]) * 1024)
        time.sleep(0.02)
    if process.returncode:
        raise SystemExit(f"{command} failed")
    seconds = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Figures(
        seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, peak
    )


def require_equal(out: Path, theirs: Path) -> None:
    import torch
    from safetensors import safe_open

    with safe_open(out / "model.safetensors", "pt") as ours:
        names = set(ours.keys())
        for path in theirs.glob("*.safetensors"):
            with safe_open(path, "pt") as other:
                for name in other.keys():  # noqa: SIM118
                    assert torch.equal(ours.get_tensor(name), other.get_tensor(name)), name
                    names.remove(name)
    assert not names, names


def table(figures: dict[str, list[Figures]], options: argparse.Namespace, size: int) -> str:
    rows = []
    base: list[float] = []
    for name, runs in figures.items():
        seconds = [run.seconds for run in runs]
        numbers = [min(seconds), statistics.median(seconds)]
        base = base or numbers
        ratios = [each / first for each, first in zip(numbers, base, strict=True)]
        processor_seconds = min(run.processor_seconds for run in runs)
        cells = [*(f"{number:.2f}" for number in (*numbers, *ratios, processor_seconds))]
        rows.append(
            f"| {name} | {' | '.join(cells)} | {max(run.peak for run in runs) / 1e9:.2f} GB |"
        )
    return f"""# Conversion

A model of {options.gigabytes:g} GB in fp32, saved by DeepSpeed's ZeRO-3 on {RANKS} processes, {size / 1e9:.1f} GB
on disk. Each row is a whole process, imports included, {options.repeats} times in turns; load average
{os.getloadavg()[0]:.1f} at the end. {processor()}. `python benchmarks/convert.py --write`

| | seconds, least | median | least, of the copy's | median, of the copy's | least on a processor | peak RssAnon |
|---|---|---|---|---|---|---|
{chr(10).join(rows)}
"""


if __name__ == "__main__":
    main()
