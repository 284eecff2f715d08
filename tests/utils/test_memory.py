"""toolkit/utils/memory.py: out-of-memory errors name the settings that help. (Promise 5.)"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.runs import Finished, recipe
from toolkit.utils import memory

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="limits a process, or is glibc's")


def batch_of(samples: int, width: int) -> SimpleNamespace:
    inputs = {"input_ids": torch.zeros(samples, width, dtype=torch.int64)}
    return SimpleNamespace(inputs=inputs, ids=torch.arange(samples))


MESSAGES: list[Exception] = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("NCCL error: unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'"),
    RuntimeError("unable to mmap 4224 bytes from file <f>: Cannot allocate memory (12)"),
    RuntimeError("could not create a primitive"),  # oneDNN's matrix products and activations
    OSError(12, "Cannot allocate memory"),
]
OTHERS: list[Exception] = [
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)"),
    RuntimeError("could not create a primitive descriptor for a matmul primitive"),
    OSError(28, "No space left on device"),
]


@pytest.mark.parametrize("error", [*MESSAGES, *OTHERS], ids=repr)
def test_messages_of_libraries(error: Exception) -> None:
    answer = memory.explain(batch_of(2, 8), False, error)
    assert (answer is not None) == (error in MESSAGES)
    assert "\n" not in (answer or "")


ROWS = 3000
SAMPLES = 1500
"""The hidden states of one micro-batch are larger than what a process may still allocate."""


@pytest.fixture(scope="module")
def run_out(tmp_path_factory: Any, tiny_model: Path) -> Callable[..., Finished]:
    """recipes/cls.py on many texts of 131 tokens, or a few; its processes may allocate 16 MiB more once they train."""
    folder = tmp_path_factory.mktemp("memory")
    rows = [f"{'good film ' * 70}{number},{'ab'[number % 2]}\n" for number in range(ROWS)]
    for name, count in {"many": ROWS, "few": 8}.items():
        (folder / f"{name}.csv").write_text("".join(["text,label\n", *rows[:count]]))
    common = f"--model_name_or_path {tiny_model} --report_to none --max_steps 2"
    common += " --mixed_precision no --max_tokens_per_batch 1_000_000"

    def run(train: str, validation: str, *words: Any, rank: str = "0") -> Finished:
        files = ["--train_file", folder / f"{train}.csv"]
        files += ["--validation_file", folder / f"{validation}.csv"]
        files += ["--output_dir", folder / f"run{len([*folder.iterdir()])}"]
        job = ["little memory", rank, *common.split(), *files, *words]
        return recipe(*job, script="tests/failing_worker.py", seconds=90)

    return run


LARGE = ["--global_batch_size", ROWS, "--per_device_batch_size", SAMPLES]
SMALL = "--global_batch_size 2 --per_device_batch_size 2 --per_device_eval_batch_size".split()


@LINUX
@pytest.mark.parametrize("when", ["training", "evaluation"])
def test_too_large_a_batch(when: str, run_out: Callable[..., Finished]) -> None:
    if when == "evaluation":
        finished, kind = run_out("few", "many", *SMALL, SAMPLES), "eval_batch_size"
    else:
        finished, kind = run_out("many", "few", *LARGE), "batch_size"
    assert finished.code == 1
    tokens = f"--max_tokens_per_batch {SAMPLES * 131 // 2}"
    finished.says_in_one_line(f"--per_device_{kind} {SAMPLES // 2}", tokens, "--max_length 65")
    assert ("step 2/2" in finished.err) == (when == "evaluation")


@LINUX
@pytest.mark.parametrize("limited", ["all", "1"])
def test_one_rank_reports_for_all(limited: str, run_out: Callable[..., Finished]) -> None:
    """Also if the others have enough memory, and wait for the one that has not."""
    words = [*LARGE, "--config_file", "accelerate_configs/ddp.yaml"]
    finished = run_out("many", "few", *words, rank=limited)
    assert finished.code not in (-6, -9, -11)
    finished.says_in_one_line(f"--per_device_batch_size {SAMPLES // 2}")
    reporters = ("[rank 1 on",) if limited == "1" else ("[rank 0 on", "[rank 1 on")
    assert finished.error_lines[0].startswith(reporters)
