"""`toolkit convert` against a plain copy and against DeepSpeed's zero_to_fp32.py.

    python benchmarks/convert.py --gigabytes 2 --world 2 --stage 2 --write      (about 2 minutes on 2 cores)

Writes a ZeRO checkpoint with that many gigabytes of random fp32 weights in DeepSpeed's layout (3.5 times as large with
the optimizer's moments and the half-precision model), and converts it by each program in turn: seconds and peak memory
of the whole process. zero_to_fp32.py must give the same numbers. The checkpoint is removed at the end.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from machine import processor

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "convert.md"
LAYERS_WIDTH = 1024  # as BERT-large; the number of layers depends on the size
_THEIRS = (
    "import sys; from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict as convert; "
    "convert(sys.argv[1], sys.argv[2], safe_serialization=True)"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of fp32 weights [2]")
    parser.add_argument("--world", type=int, default=2, help="ranks that wrote it [2]")
    parser.add_argument("--stage", type=int, choices=(2, 3), default=2, help="of ZeRO [2]")
    parser.add_argument("--repeats", type=int, default=5, help="of each program, in turns [5]")
    parser.add_argument("--cold", action="store_true", help="drop the files from the page cache before each")
    parser.add_argument("--folder", default=None, help="for temporary files; needs 8 times the gigabytes")
    parser.add_argument("--skip_zero_to_fp32", action="store_true", help="it needs as much memory as the model")
    parser.add_argument("--write", action="store_true", help=f"add the table to {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--make", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        make(Path(options.make), int(options.gigabytes * 1e9), options.world, options.stage)
        return
    with tempfile.TemporaryDirectory(prefix="convert-", dir=options.folder) as folder:
        table = measure_all(Path(folder), options)
    print(table)
    if options.write:
        before = RESULTS.read_text(encoding="utf-8") if RESULTS.is_file() else "# Conversion\n"
        RESULTS.write_text(f"{before}\n{table}", encoding="utf-8")


# ---- writing a checkpoint


def shapes(size: int) -> dict[str, tuple[int, ...]]:
    """Parameters of BERT-like layers of at least `size` bytes in fp32."""
    width = LAYERS_WIDTH
    parameters: dict[str, tuple[int, ...]] = {"bert.embeddings.word_embeddings.weight": (30522, width)}
    layer = {"attention.self.query": (width, width), "attention.self.key": (width, width),
             "attention.self.value": (width, width), "attention.output.dense": (width, width),
             "intermediate.dense": (4 * width, width), "output.dense": (width, 4 * width)}  # fmt: skip
    count, number = 30522 * width, 0
    while count * 4 < size:
        for name, (rows, columns) in layer.items():
            parameters[f"bert.encoder.layer.{number}.{name}.weight"] = (rows, columns)
            parameters[f"bert.encoder.layer.{number}.{name}.bias"] = (rows,)
            count += rows * columns + rows
        number += 1
    return parameters | {"classifier.weight": (3, width), "classifier.bias": (3,)}


def make(folder: Path, size: int, world: int, stage: int) -> None:
    """Writes a checkpoint as DeepSpeed 0.19.8 does after a step of AdamW under bf16."""
    from collections import OrderedDict

    import torch
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    torch.manual_seed(0)
    shape_of = OrderedDict((name, torch.Size(shape)) for name, shape in shapes(size).items())
    counts = [shape.numel() for shape in shape_of.values()]
    part = sum(-(-count // world) for count in counts) if stage == 3 else -(-sum(counts) // (2 * world)) * 2
    paddings = [0] * (world - 1) + [part * world - sum(counts)]
    tag = folder / "global_step1"
    tag.mkdir(parents=True)
    (folder / "latest").write_text("global_step1")
    common = {"loss_scaler": LossScaler(1.0), "dynamic_loss_scale": False, "overflow": False, "ds_version": "0.19.8"}
    for rank in range(world):
        # the last rank's master is saved without the padding, its moments with it
        numbers = torch.randn(part - (paddings[rank] if stage == 2 else 0)).mul_(0.02)
        moments = {name: torch.full((part,), 1e-4) for name in ("exp_avg", "exp_avg_sq")}
        state = {"state": {0: {"step": torch.tensor(1.0), **moments}}, "param_groups": [{"lr": 1e-5, "params": [0]}]}
        if stage == 2:
            content = {"base_optimizer_state": state, "single_partition_of_fp32_groups": [numbers],
                       "zero_stage": ZeroStageEnum.gradients, "group_paddings": [paddings[rank]],
                       "partition_count": [world], "clip_grad": 1.0}  # fmt: skip
        else:
            content = {"zero_stage": ZeroStageEnum.weights, "partition_count": world, "optimizer_state_dict": state,
                       "fp32_flat_groups": [numbers]}  # fmt: skip
        file = {"optimizer_state_dict": {**common, **content}, "ds_config": {}, "ds_version": "0.19.8"}
        torch.save(file, tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        del numbers, moments, state, content, file
    for rank in range(world if stage == 3 else 1):
        name = f"zero_pp_rank_{rank}_mp_rank_00" if stage == 3 else "mp_rank_00"
        torch.save(model_states(shape_of, world, stage), tag / f"{name}_model_states.pt")


def model_states(shape_of: Mapping[str, tuple[int, ...]], world: int, stage: int) -> dict[str, object]:
    from collections import OrderedDict

    import torch

    module = OrderedDict(
        (name, torch.empty(0 if stage == 3 else shape, dtype=torch.bfloat16)) for name, shape in shape_of.items()
    )
    return {"module": module, "buffer_names": [], "optimizer": None, "param_shapes": [shape_of],
            "frozen_param_shapes": OrderedDict(), "shared_params": {}, "frozen_param_fragments": OrderedDict(),
            "lr_scheduler": None, "data_sampler": None, "random_ltd": None, "skipped_steps": 0, "global_steps": 1,
            "global_samples": world, "dp_world_size": world, "mp_world_size": 1, "ds_config": {},
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1}, "ds_version": "0.19.8"}  # fmt: skip


# ---- measuring


def measure_all(folder: Path, options: argparse.Namespace) -> str:
    """Writes the checkpoint, runs all programs in turns, and returns the table with its conditions."""
    checkpoint, out, reference = folder / "checkpoint", folder / "out", folder / "reference"
    arguments = ["--make", str(checkpoint), "--gigabytes", str(options.gigabytes), "--world", str(options.world)]
    run([sys.executable, __file__, *arguments, "--stage", str(options.stage)])
    os.sync()
    convert = [sys.executable, "-m", "toolkit", "convert", str(checkpoint)]
    run([*convert, str(reference), "--verify"])
    ways: dict[str, list[str]] = {
        "`cp` of the same bytes": ["cp", "-r", str(reference), str(out)],
        "`cp`, then `sync`": ["sh", "-c", 'cp -r "$1" "$2" && sync "$2"/*', "sh", str(reference), str(out)],
        "`toolkit convert`": [*convert, str(out)],
        "`toolkit convert --sync`": [*convert, str(out), "--sync"],
        "`toolkit convert --dtype bf16`": [*convert, str(out), "--dtype", "bf16"],
        "`toolkit convert --dtype fp16`": [*convert, str(out), "--dtype", "fp16"],
        "`toolkit convert --verify`": [*convert, str(out), "--verify"],
    }
    if not options.skip_zero_to_fp32:
        theirs = [sys.executable, "-c", _THEIRS, str(checkpoint), str(out)]
        ways["DeepSpeed's `zero_to_fp32.py`"] = theirs
        check_same(theirs, out, reference)
    timings: dict[str, list[tuple[float, int]]] = {way: [] for way in ways}
    for _ in range(options.repeats):
        for way, command in ways.items():
            prepare(out, [*checkpoint.rglob("*.pt"), *reference.iterdir()], options.cold)
            timings[way].append(run(command))
    return report(timings, options, size_of(checkpoint), size_of(reference))


def prepare(out: Path, files: Sequence[Path], cold: bool) -> None:
    """Flushes earlier writes; reads the files into the page cache, or drops them from it."""
    shutil.rmtree(out, ignore_errors=True)
    os.sync()
    for path in files:
        with path.open("rb") as file:
            if cold:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while file.read(1 << 24):
                    pass


def run(command: Sequence[str]) -> tuple[float, int]:
    """(seconds, peak resident memory in bytes) of a process. Exits if it fails."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    began = time.monotonic()
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.monotonic() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(command[:6])} ... failed:\n{output[-3000:]}")
    return seconds, usage.ru_maxrss * 1024


def check_same(theirs: Sequence[str], out: Path, reference: Path) -> None:
    """Checks that DeepSpeed's tool gives the same tensors."""
    run(theirs)
    program = (
        "import sys, torch; from pathlib import Path; from safetensors import safe_open\n"
        "def names(folder):\n"
        "    files = [safe_open(path, 'pt') for path in sorted(Path(folder).glob('*.safetensors'))]\n"
        "    return {name: file for file in files for name in file.keys()}\n"
        "one, other = names(sys.argv[1]), names(sys.argv[2])\n"
        "assert set(one) == set(other), set(one) ^ set(other)\n"
        "for name in one: assert torch.equal(one[name].get_tensor(name), other[name].get_tensor(name)), name\n"
    )
    run([sys.executable, "-c", program, str(out), str(reference)])


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def report(timings: dict[str, list[tuple[float, int]]], options: argparse.Namespace, whole: int, weights: int) -> str:
    plain, flushed = (statistics.median(seconds for seconds, _ in runs) for runs in list(timings.values())[:2])
    lines = [
        "| way | seconds, least | median | of `cp` | of `cp` + `sync` | peak memory |",
        "|---|---|---|---|---|---|",
    ]
    for way, runs in timings.items():
        seconds = [second for second, _ in runs]
        median = statistics.median(seconds)
        memory = max(peak for _, peak in runs) / 2**20
        peak = f"{memory:.0f} MiB" if memory < 1024 else f"{memory / 1024:.1f} GiB"
        if "cp`" in way:
            peak = ""  # ru_maxrss of such a small process is its parent's
        ratios = f"{median / plain:.2f} | {median / flushed:.2f}"
        lines.append(f"| {way} | {min(seconds):.2f} | {median:.2f} | {ratios} | {peak} |")
    state = "not in memory (cold)" if options.cold else "in memory (warm page cache)"
    table = "\n".join(lines)
    return (
        f"## ZeRO-{options.stage}, {options.world} processes, {weights / 1e9:.1f} GB of fp32 weights"
        f"{', cold' if options.cold else ''}\n\n"
        f"A checkpoint of {whole / 1e9:.1f} GB, its files {state}, {options.repeats} repeats in turns, on "
        f"{processor()} with a virtual disk. Each is a whole "
        "process, imports included. `toolkit convert` checks the checksum of every tensor that it copies. Only the "
        f"ways with `sync` wait for the disk.\n\n{table}\n"
    )


if __name__ == "__main__":
    main()
