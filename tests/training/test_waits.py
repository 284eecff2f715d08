"""A training step waits only for its gradients, until a log line is due.

It is a job of tests/matrix.py, too (`main`): recipes/cls.py, which notes what a process waits for. In the run's folder
notes.jsonl has a line per step: part of the step ("computing", "clipping", "logging", "after") -> the collectives and
the numbers read by the host, each as [operator, the bytes that a ring sends from one rank].

And it reduces gradients once, unless `--sync_each_batch`; half as many bytes with `--half_precision_gradients`.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import masking_utils

from recipes import cls
from tests import inputs
from tests.matrix import TINY, runs, words_of
from tests.runs import assert_same_run, lines_of, losses_of, recipe
from toolkit.launch.accelerator import Accelerator
from toolkit.training.steps import Steps

SETTINGS = [*TINY, "--train_file", inputs.reviews, "--max_steps", 10, "--eval_every", 8, "--global_batch_size", 12,
            "--per_device_batch_size", 3, "--learning_rate", "1e-3"]  # fmt: skip


@pytest.mark.parametrize("way", ["ddp x2", "zero2 x2"])
def test_no_synchronization_between_log_lines(way: str) -> None:
    run = runs(way).run("waits", "tests.training.test_waits", [*SETTINGS, "--logging_steps", 3])
    assert "Warning" not in runs(way).log("waits")
    notes = lines_of(run / "notes.jsonl")
    steps = [{part: [name for name, _ in some] for part, some in note.items()} for note in notes]
    assert len(steps) == 10
    if way == "ddp x2":  # accelerate and DeepSpeed read the norm in each step
        assert [step["clipping"] for step in steps if step["clipping"]] == []
        computing = [set(step["computing"]) for step in steps]
        del computing[1]  # where DDP arranges its gradients, once
        assert computing == [{"c10d::allreduce_"}] * 9
    gathered = {number for number, step in enumerate(steps, 1) if step["logging"]}
    assert gathered == {3, 6, 8, 10}  # 8 is evaluated
    for number in gathered:
        (collective,) = {name for name in steps[number - 1]["logging"] if name.startswith("c10d")}
        assert steps[number - 1]["logging"].count(collective) == 2  # sizes, and numbers
    assert [number for number, step in enumerate(steps, 1) if step["after"]] == [8, 10]
    assert_same_run(run, runs("single").run("logs each step", "recipes.cls", SETTINGS))


def test_pending_steps_are_logged_before_an_error(tmp_path: Path) -> None:
    finished = recipe(*words_of(SETTINGS), "--learning_rate", "1e30", "--lr_scheduler_type", "constant",
                      "--logging_steps", "9", "--output_dir", tmp_path / "run")  # fmt: skip
    lines = lines_of(tmp_path / "run" / "metrics.jsonl")
    assert [each["step"] for each in lines] == [*range(1, len(lines) + 1)] != []
    assert all(each["loss"] is not None for each in lines)
    finished.says_in_one_line(f"error: step {len(lines) + 1}: the loss of rows")


class Waits(TorchDispatchMode):
    noted: list[tuple[str, int]]

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        name = function.name()
        if name.startswith("c10d::"):
            self.noted.append((name, sent_bytes(name, arguments)))
        elif "local_scalar_dense" in name:
            self.noted.append((name, 0))
        return function(*arguments, **(options or {}))


def sent_bytes(name: str, arguments: Any) -> int:
    """From one rank of a ring (Patarasu and Yuan 2009)."""
    tensors = [each for each in tree_leaves(arguments) if isinstance(each, torch.Tensor)]
    sizes = [tensor.nbytes for tensor in tensors]
    whole = max(sizes, default=0) if "gather" in name or "scatter" in name else sum(sizes)
    world = torch.distributed.get_world_size()
    return int(whole * (world - 1) / world * (2 if "allreduce" in name else 1))


def main() -> None:
    notes: list[dict[str, list[tuple[str, int]]]] = []
    waits = Waits()
    begin, finish, clip = Steps.__iter__, Steps.finish, Accelerator.clip_grad_norm_

    def noting_begin(steps: Steps) -> Iterator[Any]:
        with waits:
            for step in begin(steps):
                notes.append({"computing": [], "clipping": [], "logging": [], "after": []})
                waits.noted = notes[-1]["computing"]
                yield step

    def noting_clip(*arguments: Any) -> Any:
        waits.noted = notes[-1]["clipping"]
        norm = clip(*arguments)
        waits.noted = notes[-1]["computing"]
        return norm

    def noting_finish(steps: Steps, step: Any) -> Iterator[Any]:
        waits.noted = notes[-1]["logging"]
        yield from finish(steps, step)
        waits.noted = notes[-1]["after"]

    with (
        mock.patch.object(Steps, "__iter__", noting_begin),
        mock.patch.object(Steps, "finish", noting_finish),
        mock.patch.object(Accelerator, "clip_grad_norm_", noting_clip),
        # as on a GPU, where a mask is not looked at
        mock.patch.object(masking_utils, "_ignore_bidirectional_mask_sdpa", return_value=False),
    ):
        cls.main()
    if torch.distributed.get_rank() == 0:
        path = Path(sys.argv[sys.argv.index("--output_dir") + 1]) / "notes.jsonl"
        path.write_text("".join(json.dumps(note) + "\n" for note in notes))


REDUCTIONS = {"ddp x2": "allreduce", "zero1 x2": "allreduce", "zero2 x2": "allreduce",
              "zero3 x2": "reduce_scatter_base", "fsdp2 x2": "reduce_scatter_base"}  # fmt: skip
MICRO_BATCHES = 8
COMMON = [*TINY, "--train_file", inputs.reviews, "--global_batch_size", 16]


@pytest.mark.parametrize("way", ["zero2 x2", "zero3 x2"])
def test_bytes_of_a_step_do_not_grow_with_its_micro_batches(way: str) -> None:
    kinds = {"once": [], "each": ["--sync_each_batch", "true"]}
    settings = ["--max_steps", 2, "--per_device_batch_size", 16 // MICRO_BATCHES // 2]
    losses, reduced = losses_and_bytes(way, settings, kinds)
    assert losses["once"] == pytest.approx(losses["each"], rel=1e-6)
    assert reduced["each"] == pytest.approx(MICRO_BATCHES * reduced["once"], rel=0.01)


@pytest.mark.parametrize("way", REDUCTIONS)
@pytest.mark.parametrize("precision", ["no", pytest.param("bf16", marks=pytest.mark.slow)])
def test_half_precision_gradients(way: str, precision: str) -> None:
    settings = ["--per_device_batch_size", 4, "--max_steps", 4, "--learning_rate", "1e-3", "--warmup_ratio", 0,
                "--mixed_precision", precision]  # fmt: skip
    kinds = {"full": [], "half": ["--half_precision_gradients", "true"]}
    losses, reduced = losses_and_bytes(way, settings, kinds)
    assert reduced["half"] == pytest.approx(reduced["full"] / 2, rel=0.02)
    assert losses["half"] == pytest.approx(losses["full"], rel=1e-2)
    assert losses["half"] != losses["full"]


def losses_and_bytes(
    way: str, settings: list[Any], kinds: dict[str, list[Any]]
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """The losses of a run of each kind, and the bytes of its reductions in a step."""
    losses, reduced = {}, {}
    for kind, more in kinds.items():
        words = [*COMMON, *settings, *more]
        name = f"bytes of {' '.join(map(str, settings + more))}"
        run = runs(way).run(name, "tests.training.test_waits", words)
        losses[kind] = losses_of(run)
        second = [note for part in lines_of(run / "notes.jsonl")[1].values() for note in part]
        reduced[kind] = sum(sent for operator, sent in second if REDUCTIONS[way] in operator)
    return losses, reduced
