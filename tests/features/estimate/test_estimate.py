"""toolkit/training/estimate.py and `toolkit estimate`: memory counted before it is taken, and the batch that fits."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForSequenceClassification

from tests.runs import lines_of, train
from tests.splits import of_lengths
from toolkit import cli
from toolkit.config import TrainingSettings
from toolkit.errors import UserError
from toolkit.training import estimate
from toolkit.training.estimate import STRATEGIES, Memory, Trial, fit_batch_size, state
from toolkit.training.steps import make_schedule

LENGTHS = np.array([100] * 10 + [131] * 54)


class Layers(torch.nn.Module):
    """Two linear layers over one-hot rows: every activation can be counted by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 512), torch.nn.Linear(512, 4)

    def forward(self, input_ids: torch.Tensor) -> SimpleNamespace:
        if input_ids.device.type != "meta" and len(input_ids) > 20:
            raise torch.OutOfMemoryError("CUDA out of memory")
        given = torch.nn.functional.one_hot(input_ids % 8, 8).float()  # (B, S, 8)
        return SimpleNamespace(logits=self.second(self.first(given)).mean(1))


@pytest.fixture
def model(tiny_model: Path) -> Any:
    return AutoModelForSequenceClassification.from_pretrained(tiny_model)


def counted(model: Any, samples: int, length: int, precision: str = "no", cast: bool = False) -> int:
    return Trial(model, precision, "cpu", cast).count({"input_ids": (samples, length)})


def test_activations_are_those_that_live_at_a_time() -> None:
    found = counted(Layers(), 3, 1000)
    hidden, given = 4 * 3000 * 512, 4 * 3000 * 8  # float32
    assert hidden + given < found < 2.2 * hidden  # backward holds the hidden states and their gradient
    assert counted(Layers(), 6, 1000) == pytest.approx(2 * found, rel=0.01)


def test_half_precision_and_recomputation_take_less(model: Any) -> None:
    full = counted(model, 64, 128)
    assert counted(model, 64, 128, "bf16") < full
    assert counted(model, 64, 128, "bf16", cast=True) < full
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert counted(model, 64, 128) < 0.9 * full


def test_what_the_strategies_keep(model: Any) -> None:
    every = sum(parameter.numel() for parameter in model.parameters())
    zero = {"reduce_bucket_size": 1000, "overlap_comm": True}
    coarse = TrainingSettings(half_precision_weights=True, sync_each_batch=False)
    found = {name: state(name, 4, model, coarse, "cuda", zero, "bf16") for name in STRATEGIES}
    assert found["single"] == found["ddp"] == Memory(4 * every, 4 * every, 8 * every, 0)
    assert found["zero1"] == Memory(2 * every, 2 * every, 3 * every, 6000)
    assert found["zero2"] == Memory(2 * every, every, 3 * every, 6000)
    assert found["zero2_offload"] == Memory(2 * every, 0, 0, 6000)
    assert found["zero3"] == Memory(every / 2, every / 2, 3 * every, 2 * every)  # whole weights while a step lasts
    assert found["zero3_offload"] == Memory(0, 0, 0, 2 * every)
    assert found["fsdp2"].weights == every
    assert found["fsdp2"].gradients == 5 * every  # its shard, and the whole until the last micro-batch
    large = state("zero3", 4, model, coarse, "cuda", {**zero, "stage3_max_reuse_distance": every}, "bf16")
    assert large.buffers == 0


def test_fp32_weights_under_autocast_and_a_reduction_in_each_micro_batch(model: Any) -> None:
    every = sum(parameter.numel() for parameter in model.parameters())
    zero = {"reduce_bucket_size": 1000, "overlap_comm": True}
    found = {name: state(name, 4, model, TrainingSettings(), "cuda", zero, "bf16") for name in STRATEGIES}
    assert found["zero1"] == Memory(4 * every, 4 * every, 3 * every, 12000)
    assert found["zero2"] == Memory(4 * every, every, 3 * every, 12000)
    assert found["zero3"] == Memory(every, every, 2 * every, 4 * every)
    assert found["fsdp2"].weights == found["fsdp2"].gradients == every


def fit(model: Any, tokenizer: Any, free: int, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> TrainingSettings:
    monkeypatch.setattr(estimate, "free_memory", lambda: free)
    asked = TrainingSettings(global_batch_size=50, per_device_batch_size="auto", **settings)
    return fit_batch_size(Accelerator(cpu=True), model, of_lengths(LENGTHS), tokenizer, asked)


def test_auto_takes_what_fits_and_leaves_the_global_batch(
    model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [fit(model, tokenizer, megabytes * 10**6, monkeypatch) for megabytes in (12, 25, 1000)]
    sizes = [each.micro_batch_size for each in found]
    assert 1 <= sizes[0] < sizes[1] < sizes[2] == 50
    assert all(50 % size == 0 or -(-50 // -(-50 // size)) == size for size in sizes)
    assert f"--per_device_batch_size auto: {sizes[0]} (12" in capsys.readouterr().err
    schedules = [make_schedule(each, of_lengths(LENGTHS), 1) for each in found]
    assert [schedule.accumulation for schedule in schedules] == [-(-50 // size) for size in sizes]
    assert {schedule.total_steps for schedule in schedules} == {schedules[0].total_steps}
    # tokens limit the micro-batch already: no more samples need fit
    assert fit(model, tokenizer, 12 * 10**6, monkeypatch, max_tokens_per_batch=131).micro_batch_size == 50


def test_auto_says_when_not_even_one_fits(model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"not even one text of 131 tokens fits .*--gradient_checkpointing true"):
        fit(model, tokenizer, 10**5, monkeypatch)


def test_a_gpu_tries_and_catches_what_it_cannot_hold() -> None:
    """Here on a CPU, with a model that cannot do more than 20 samples."""
    trial = Trial(Layers(), "no", "cpu")
    tried = [trial.fits({"input_ids": torch.ones(size, 100, dtype=torch.long)}, beside=10**5) for size in (1, 20, 21)]
    assert tried == [True, True, False]


def test_a_number_stays_and_an_auto_that_nobody_resolves_is_told(tokenizer: Any) -> None:
    settings = TrainingSettings(per_device_batch_size=3)
    assert fit_batch_size(Accelerator(cpu=True), Layers(), of_lengths(LENGTHS), tokenizer, settings) is settings
    with pytest.raises(UserError, match="auto: this recipe does not find out what fits"):
        make_schedule(TrainingSettings(per_device_batch_size="auto"), of_lengths(LENGTHS), 1)


def test_a_run_with_auto(tiny_model: Path, reviews: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    said = train("--model_name_or_path", tiny_model, "--train_file", reviews, "--per_device_batch_size", "auto",
                      "--global_batch_size", 20, "--max_steps", 2, "--output_dir", run)  # fmt: skip
    assert "--per_device_batch_size auto: 20 (" in said
    assert json.loads((run / "config.json").read_text())["data"]["micro_batch_size"] == 20
    lines = lines_of(run / "metrics.jsonl")
    assert all(0 <= line["padding"] < 1 and "mfu" not in line for line in lines)
    assert re.search(r"training: \d+\.\d% of all tokens were padding\n", said)


@pytest.mark.parametrize("first", ["MODEL", "cls", "recipes/bigbird.py", "title"])
def test_the_command(
    first: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(tiny_model)] if first == "MODEL" else [first, "--model_name_or_path", str(tiny_model)]
    more = ["--num_processes", "4", "--max_length", "100", "--per_device_batch_size", "4", "--mixed_precision", "no"]
    monkeypatch.setattr(sys, "argv", ["toolkit", "estimate", *words, *more])
    cli._run()
    said = capsys.readouterr().out
    assert "the peak of each of 4 processes, with micro-batches of 4 texts of 100 tokens" in said
    rows = {line.split()[0]: line for line in said.splitlines() if line}
    assert set(STRATEGIES) < set(rows)
    assert all(rows[name].endswith("yes") for name in STRATEGIES)
    assert "64 tokens" in said


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("way", ["single", "zero2"])
def test_a_run_takes_what_was_estimated(way: str, tmp_path: Path) -> None:
    """Within 15 percent: more ways and larger models in benchmarks/results/memory.md."""
    from benchmarks.memory import WAYS, make_data, measure
    from benchmarks.memory import estimate as estimated

    job = ["--model_name_or_path", "demo:minilm", "--train_file", make_data(tmp_path / "data.csv"), "--max_length",
           "128", "--mixed_precision", "no", "--per_device_batch_size", "32",
           "--global_batch_size", str(32 * WAYS[way])]  # fmt: skip
    assert estimated(job, WAYS[way])[way] == pytest.approx(measure(job, way, tmp_path), rel=0.15)
