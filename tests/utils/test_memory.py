"""toolkit/utils/memory.py: out-of-memory errors name the settings that help."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.faults import Fault
from tests.runs import Finished, recipe
from tests.splits import of_lengths
from toolkit.data.batches import micro_batches
from toolkit.utils import memory

ABSURD = 1 << 50


def batch_of(samples: int, width: int) -> SimpleNamespace:
    ids = torch.arange(samples)
    return SimpleNamespace(
        inputs={"input_ids": torch.zeros(samples, width, dtype=torch.int64)}, ids=ids
    )


ALLOCATIONS: dict[str, Callable[[], object]] = {
    "torch": lambda: torch.empty(ABSURD),
    "torch, in use": lambda: torch.zeros(1000, 1) @ torch.zeros(1, 1).expand(1, ABSURD),
    "numpy": lambda: np.empty(ABSURD),
    "python": lambda: bytearray(ABSURD),
}
MESSAGES: list[Exception] = [
    torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 1 GiB"
    ),
    torch.OutOfMemoryError(),
    MemoryError(),
    MemoryError("std::bad_alloc"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("NCCL error: unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'"),
    RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"),
    RuntimeError(
        "unable to mmap 4224 bytes from file <filename not specified>: Cannot allocate memory (12)"
    ),
    RuntimeError("could not create a primitive"),  # oneDNN's matrix products and activations
    OSError(12, "Cannot allocate memory"),
    ImportError(
        "_odepack.cpython-311-x86_64-linux-gnu.so: failed to map segment from shared object"
    ),
]
OTHERS: list[Exception] = [
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)"),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("could not create a primitive descriptor for a matmul primitive"),
    RuntimeError("Storage size calculation overflowed with sizes=[4611686018427387904]"),
    OSError(28, "No space left on device"),
    ImportError("No module named 'flash_attn'"),
    ValueError("out of memory"),  # no allocation raises it
    KeyError("memory"),
]


@pytest.mark.parametrize("what", ALLOCATIONS)
def test_an_allocation_that_fails_is_recognised(what: str) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        ALLOCATIONS[what]()
    assert memory.explain(batch_of(2, 8), None, caught.value), repr(caught.value)


@pytest.mark.parametrize("error", MESSAGES, ids=repr)
def test_library_messages_are_recognised(error: Exception) -> None:
    answer = memory.explain(batch_of(2, 8), False, error)
    assert answer
    assert "\n" not in answer
    assert re.search(r"\[.*(memory|alloc|primitive|segment).*\]$", answer, re.IGNORECASE), answer


@pytest.mark.parametrize("error", OTHERS, ids=repr)
def test_other_errors_are_not_explained(error: Exception) -> None:
    assert memory.explain(batch_of(2, 8), False, error) is None


@pytest.mark.parametrize("recomputes", [False, None], ids=["training", "evaluation"])
def test_a_batch_of_one_text(recomputes: bool | None) -> None:
    answer = memory.explain(batch_of(1, 512), recomputes, MemoryError())
    assert answer is not None
    first = "" if recomputes is None else "--gradient_checkpointing true, or "
    assert f" 1 x 512 tokens: pass {first}--max_length 256 [" in answer  # no smaller batch


@pytest.mark.parametrize("width", [2, 7, 8, 13, 64, 131, 512])
def test_suggested_settings_give_smaller_micro_batches(width: int) -> None:
    for samples in (2, 3, 5, 8, 31, 64):
        answer = memory.explain(batch_of(samples, width), False, MemoryError())
        assert answer is not None
        names = ("per_device_batch_size", "max_tokens_per_batch")
        fewer, tokens = (int(re.search(rf"--{name} (\d+)", answer)[1]) for name in names)
        lengths = np.full(4 * samples, width)
        assert tokens >= width  # otherwise it would be refused
        for per_device, max_tokens in ((fewer, None), (samples, tokens)):
            batches = micro_batches(
                of_lengths(lengths), np.arange(len(lengths)), per_device, 0, 1, max_tokens
            )
            assert max(map(len, batches)) <= max(1, samples // 2)


LIMITED = pytest.mark.skipif(
    sys.platform != "linux", reason="limits the address space of a process"
)
ROWS = 3000
SAMPLES = (
    1500  # the hidden states of one micro-batch are larger than what a process may still allocate
)


@pytest.fixture(scope="module")
def csv_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A file of many texts of 131 tokens, and one of a few."""
    folder = tmp_path_factory.mktemp("memory")
    rows = [f"{'good film ' * 70}{number},{'ab'[number % 2]}\n" for number in range(ROWS)]
    files = {"many": folder / "many.csv", "few": folder / "few.csv"}
    for name, path in files.items():
        path.write_text(
            "text,label\n" + "".join(rows[: ROWS if name == "many" else 8]), encoding="utf-8"
        )
    return files


def run_out(
    csv_files: dict[str, Path], tiny_model: Path, folder: Path, *arguments: str, limited_rank: str
) -> Finished:
    """recipes/cls.py, whose processes may allocate 16 MiB more once they train."""
    train, validation = (
        ("few", "many") if "--per_device_eval_batch_size" in arguments else ("many", "few")
    )
    return recipe("--train_file", csv_files[train], "--validation_file", csv_files[validation], "--model_name_or_path",
                  tiny_model, "--output_dir", folder / "run", "--report_to", "none", "--max_steps", "2",
                  "--mixed_precision", "no", "--max_tokens_per_batch", "1000000", *arguments,
                  script="tests/memory_worker.py", seconds=90, env={"LIMITED_RANK": limited_rank})  # fmt: skip


LARGE = ["--global_batch_size", str(ROWS), "--per_device_batch_size", str(SAMPLES)]
SMALL = [
    "--global_batch_size",
    "2",
    "--per_device_batch_size",
    "2",
    "--per_device_eval_batch_size",
    str(SAMPLES),
]
TRAINING = [
    f"out of memory in a training step, with a micro-batch of {SAMPLES} x 131 tokens",
    f"--per_device_batch_size {SAMPLES // 2}, or --max_tokens_per_batch {SAMPLES * 131 // 2}",
    "--gradient_checkpointing true",
    "--max_length 65",
]
EVALUATING = [
    f"in an evaluation, with a batch of {SAMPLES} x 131 tokens",
    f"pass --per_device_eval_batch_size {SAMPLES // 2} (toolkit predict: --per_device_batch_size {SAMPLES // 2}), or "
    f"--max_tokens_per_batch {SAMPLES * 131 // 2}, or --max_length 65 [",  # no --gradient_checkpointing
]


@LIMITED
@pytest.mark.parametrize(
    ("when", "arguments", "message"),
    [("training", LARGE, TRAINING), ("an evaluation", SMALL, EVALUATING)],
    ids=["training", "evaluation"],
)
def test_too_large_a_batch(
    when: str, arguments: list[str], message: list[str], csv_files: dict[str, Path], tiny_model: Path, tmp_path: Path,
    fault: Fault,
) -> None:  # fmt: skip
    finished = run_out(csv_files, tiny_model, tmp_path, *arguments, limited_rank="0")
    assert finished.code == 1
    finished.says_in_one_line(*message)
    assert finished.error_lines[0].startswith("error: ")
    assert ("step 2/2" in finished.err) == (when == "an evaluation")
    fault(f"memory runs out in {when}", finished.err)


class Huge(torch.optim.SGD):
    """An optimizer whose state does not fit."""

    def step(self, closure: Any = None) -> None:
        if (
            sum(each.numel() for group in self.param_groups for each in group["params"]) > 10_000
        ):  # not in the trial
            torch.empty(1 << 60)


def test_an_optimizer_state_that_does_not_fit(
    tiny_model: Path, reviews: Path, tmp_path: Path
) -> None:
    """A smaller micro-batch would not help."""
    words = ["--model_name_or_path", tiny_model, "--train_file", reviews, "--optimizer", f"{__name__}.Huge",
             "--max_steps", 2, "--report_to", "none", "--output_dir", tmp_path / "run"]  # fmt: skip
    finished = recipe(*words, "--mixed_precision", "no")
    finished.says_in_one_line("the optimizer's state", "zero2")
    assert "--per_device_batch_size" not in finished.error_lines[0]


@LIMITED
@pytest.mark.multiprocess
@pytest.mark.parametrize("rank", ["all", "1"])
def test_one_rank_reports_for_all(
    csv_files: dict[str, Path], tiny_model: Path, tmp_path: Path, rank: str
) -> None:
    """Also if the others have enough memory, and wait for the one that has not."""
    way = ["--config_file", "accelerate_configs/ddp.yaml"]
    finished = run_out(csv_files, tiny_model, tmp_path, *LARGE, *way, limited_rank=rank)
    assert finished.code not in (-6, -9, -11)
    finished.says_in_one_line(*TRAINING)
    assert re.match(
        r"\[rank [01] on \S+\] error: " if rank == "all" else r"\[rank 1 on ",
        finished.error_lines[0],
    )


_FAULTS = """
import gc, os, resource, torch
from toolkit.utils import memory
gc.disable()  # it would write to the parent's pages, and so copy them

def count(first, limit):
    for step in range(28):
        memory.machine_memory = lambda: first if step < 2 else limit
        if step == 20:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        # 16 MiB, then 64, freed at once: 64 do not fit into a hole of the heap that was kept at first
        torch.ones(2 ** (22 if step < 2 else 24))
        memory.manage_freed_memory()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

for first, limit, variables in [(2**40, 2**40, {}), (2**26, 2**26, {}), (2**40, 2**26, {}),
                                (2**40, 2**40, {"MALLOC_ARENA_MAX": "4"})]:
    if not os.fork():
        os.environ.update(variables)
        print(count(first, limit), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_freed_memory_is_kept_up_to_a_limit() -> None:
    """64 MiB are 16,384 pages, or 32 huge ones. A user's MALLOC_ variables are kept."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")
    }
    command = [sys.executable, "-c", _FAULTS]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout.split()
    assert [int(faults) < 100 for faults in done] == [True, False, False, False], done
