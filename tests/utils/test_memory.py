"""toolkit/utils/memory.py: out-of-memory errors name the settings that help. (Promise 5.)"""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.runs import Finished, recipe
from tests.splits import of_lengths
from toolkit.data.batches import micro_batches
from toolkit.utils import memory

ABSURD = 1 << 50
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="limits a process, or is glibc's")


def batch_of(samples: int, width: int) -> SimpleNamespace:
    inputs = {"input_ids": torch.zeros(samples, width, dtype=torch.int64)}
    return SimpleNamespace(inputs=inputs, ids=torch.arange(samples))


ALLOCATIONS: dict[str, Callable[[], object]] = {
    "torch": lambda: torch.empty(ABSURD),
    "torch, in use": lambda: torch.zeros(1000, 1) @ torch.zeros(1, 1).expand(1, ABSURD),
    "numpy": lambda: np.empty(ABSURD),
    "python": lambda: bytearray(ABSURD),
}
MESSAGES: list[Exception] = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    MemoryError("std::bad_alloc"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("NCCL error: unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'"),
    RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"),
    RuntimeError("unable to mmap 4224 bytes from file <f>: Cannot allocate memory (12)"),
    RuntimeError("could not create a primitive"),  # oneDNN's matrix products and activations
    OSError(12, "Cannot allocate memory"),
    ImportError("_odepack.so: failed to map segment from shared object"),
]
OTHERS: list[Exception] = [
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)"),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("could not create a primitive descriptor for a matmul primitive"),
    OSError(28, "No space left on device"),
    ValueError("out of memory"),  # no allocation raises it
    KeyError("memory"),
]


@pytest.mark.parametrize("what", ALLOCATIONS)
def test_an_allocation_that_fails_is_recognised(what: str) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        ALLOCATIONS[what]()
    assert memory.explain(batch_of(2, 8), None, caught.value), repr(caught.value)


@pytest.mark.parametrize("error", [*MESSAGES, *OTHERS], ids=repr)
def test_messages_of_libraries(error: Exception) -> None:
    answer = memory.explain(batch_of(2, 8), False, error)
    assert (answer is not None) == (error in MESSAGES)
    assert "\n" not in (answer or "")


@pytest.mark.parametrize("width", [2, 7, 8, 13, 64, 131, 512])
def test_suggested_settings_give_smaller_micro_batches(width: int) -> None:
    for samples in (2, 3, 5, 8, 31, 64):
        answer = memory.explain(batch_of(samples, width), False, MemoryError())
        assert answer is not None
        names = ("per_device_batch_size", "max_tokens_per_batch")
        fewer, tokens = (int(re.findall(rf"--{name} (\d+)", answer)[0]) for name in names)
        lengths = np.full(4 * samples, width)
        assert tokens >= width  # otherwise it would be refused
        for per_device, max_tokens in ((fewer, None), (samples, tokens)):
            rows = np.arange(len(lengths))
            batches = micro_batches(of_lengths(lengths), rows, per_device, 0, 1, max_tokens)
            assert max(map(len, batches)) <= max(1, samples // 2)


ROWS = 3000
SAMPLES = 1500
"""The hidden states of one micro-batch are larger than what a process may still allocate."""


@pytest.fixture(scope="module")
def csv_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A file of many texts of 131 tokens, and one of a few."""
    folder = tmp_path_factory.mktemp("memory")
    rows = [f"{'good film ' * 70}{number},{'ab'[number % 2]}\n" for number in range(ROWS)]
    files = {}
    for name, count in {"many": ROWS, "few": 8}.items():
        files[name] = folder / f"{name}.csv"
        files[name].write_text("text,label\n" + "".join(rows[:count]), encoding="utf-8")
    return files


def run_out(train: Path, validation: Path, *arguments: Any, limited_rank: str) -> Finished:
    """recipes/cls.py, whose processes may allocate 16 MiB more once they train."""
    words = ["--train_file", train, "--validation_file", validation, "--report_to", "none"]
    words += ["--max_steps", 2, "--mixed_precision", "no", "--max_tokens_per_batch", 1_000_000]
    limit = {"LIMITED_RANK": limited_rank}
    return recipe(*words, *arguments, script="tests/memory_worker.py", seconds=90, env=limit)


LARGE = ["--global_batch_size", ROWS, "--per_device_batch_size", SAMPLES]
SMALL = ["--global_batch_size", 2, "--per_device_batch_size", 2]
SMALL += ["--per_device_eval_batch_size", SAMPLES]


@LINUX
@pytest.mark.parametrize("when", ["training", "evaluation"])
def test_too_large_a_batch(
    when: str, csv_files: dict[str, Path], tiny_model: Path, tmp_path: Path
) -> None:
    files, sizes, setting = ["many", "few"], LARGE, "--per_device_batch_size"
    if when == "evaluation":
        files, sizes, setting = ["few", "many"], SMALL, "--per_device_eval_batch_size"
    run = ["--model_name_or_path", tiny_model, "--output_dir", tmp_path / "run"]
    finished = run_out(*(csv_files[name] for name in files), *sizes, *run, limited_rank="0")
    assert finished.code == 1
    tokens = f"--max_tokens_per_batch {SAMPLES * 131 // 2}"
    finished.says_in_one_line(f"{setting} {SAMPLES // 2}", tokens, "--max_length 65")
    assert ("step 2/2" in finished.err) == (when == "evaluation")


@LINUX
@pytest.mark.multiprocess
@pytest.mark.parametrize("rank", ["all", "1"])
def test_one_rank_reports_for_all(
    csv_files: dict[str, Path], tiny_model: Path, tmp_path: Path, rank: str
) -> None:
    """Also if the others have enough memory, and wait for the one that has not."""
    run = ["--model_name_or_path", tiny_model, "--output_dir", tmp_path / "run"]
    run += ["--config_file", "accelerate_configs/ddp.yaml"]
    files = (csv_files["many"], csv_files["few"])
    finished = run_out(*files, *LARGE, *run, limited_rank=rank)
    assert finished.code not in (-6, -9, -11)
    finished.says_in_one_line(f"--per_device_batch_size {SAMPLES // 2}")
    expected = r"\[rank [01] on" if rank == "all" else r"\[rank 1 on"
    assert re.match(expected, finished.error_lines[0])
