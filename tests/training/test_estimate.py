"""toolkit/training/estimate.py: estimated memory, and the micro-batch size that fits."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForSequenceClassification

from tests.faults import refusal
from tests.runs import WAYS, lines_of, train
from tests.splits import of_lengths
from toolkit.config import TrainingSettings
from toolkit.errors import UserError
from toolkit.training import estimate
from toolkit.training.estimate import (
    STRATEGIES,
    Memory,
    count_activations,
    fit_batch_size,
    memory_of,
)
from toolkit.training.optimizer import make_optimizer
from toolkit.training.steps import make_schedule
from toolkit.utils import memory

LENGTHS = np.array([100] * 10 + [131] * 54)


class Layers(torch.nn.Module):
    """Two linear layers over one-hot rows: every activation can be counted by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 512), torch.nn.Linear(512, 4)

    def forward(self, input_ids: torch.Tensor) -> SimpleNamespace:
        rows = torch.nn.functional.one_hot(input_ids % 8, 8).float()  # (B, S, 8)
        return SimpleNamespace(logits=self.second(self.first(rows)).mean(1))


@pytest.fixture
def model(tiny_model: Path) -> Any:
    return AutoModelForSequenceClassification.from_pretrained(tiny_model)


def activations(
    model: Any, samples: int, length: int, precision: str = "no", autocast: bool = True
) -> int:
    return count_activations(model, {"input_ids": (samples, length)}, "cpu", precision, autocast)


def test_activations_are_counted_at_their_largest() -> None:
    size = activations(Layers(), 3, 1000)
    hidden, one_hot = 4 * 3000 * 512, 4 * 3000 * 8  # float32
    assert (
        hidden + one_hot < size < 2.2 * hidden
    )  # backward holds the hidden states and their gradient
    assert activations(Layers(), 6, 1000) == pytest.approx(2 * size, rel=0.01)


def test_a_model_whose_steps_depend_on_values() -> None:
    """As Longformer's."""
    layers = Layers()
    layers.register_forward_pre_hook(
        lambda *each: each[2]["input_ids"].sum().item() and None, with_kwargs=True
    )
    refusal(activations, layers, 3, 10, says=["memory of Layers", "--per_device_batch_size"])


def test_half_precision_frozen_layers_and_recomputation_take_less(model: Any) -> None:
    full = activations(model, 64, 128)
    assert activations(model, 64, 128, "bf16", autocast=False) < full
    model.bert.requires_grad_(False)
    assert activations(model, 64, 128) < 0.9 * full
    model.bert.requires_grad_(True)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert activations(model, 64, 128) < 0.9 * full
    assert all(weight.grad is None for weight in model.parameters())


def test_padding_masks_on_a_gpu(model: Any) -> None:
    shapes, layers = {"input_ids": (4, 100)}, len(model.bert.encoder.layer)
    assert estimate._mask_bytes(model, shapes, torch.bfloat16) == layers * 4 * 100 * 100 * 2
    assert (
        estimate._mask_bytes(model, {"input_ids": (1, 100)}, torch.bfloat16) == 0
    )  # a single text has none
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert estimate._mask_bytes(model, shapes, torch.float32) == 4 * 100 * 100 * 4


def sharded(
    model: Any, settings: TrainingSettings, device: str = "cuda", **zero: Any
) -> dict[str, Memory]:
    """Strategy -> memory of each of 4 processes in bf16."""
    section = {"reduce_bucket_size": 1000, "overlap_comm": True, **zero}
    return {
        name: memory_of(name, 4, model, settings, section, "bf16", 7, device) for name in STRATEGIES
    }


def test_what_the_strategies_shard(model: Any) -> None:
    total = sum(parameter.numel() for parameter in model.parameters())
    coarse = TrainingSettings(half_precision_weights=True, sync_each_batch=False)
    memory = sharded(model, coarse)
    assert memory["single"] == memory["ddp"] == Memory(4 * total, 4 * total, 8 * total, 0, 7)
    assert memory["zero1"] == Memory(2 * total, 2 * total, 3 * total, 6000, 7)
    assert memory["zero2"] == Memory(2 * total, total / 2, 3 * total, 6000, 7)
    assert memory["zero2_offload"] == Memory(2 * total, 0, 0, 6000, 7)
    assert memory["zero3"] == Memory(
        total / 2, total / 2, 3 * total, 2 * total, 7
    )  # gathered weights
    assert memory["zero3_offload"] == Memory(0, 0, 0, 2 * total, 7)
    assert sharded(model, coarse, "cpu")["zero3_offload"] == memory["zero3"]
    assert memory["fsdp2"].weights == total
    assert (
        memory["fsdp2"].gradients == 5 * total
    )  # a shard, and unsharded ones until the last micro-batch
    assert sharded(model, coarse, stage3_max_reuse_distance=total)["zero3"].buffers == 0
    average = sharded(model, TrainingSettings(ema_decay=0.9))
    assert (average["ddp"].optimizer, average["zero2"].optimizer) == (12 * total, 4 * total)


@pytest.mark.parametrize("name", ["adamw", "adafactor", "lion", "sgd"])
def test_state_of_the_optimizers(model: Any, name: str) -> None:
    settings = TrainingSettings(
        optimizer=name, optimizer_args="momentum=0.9" if name == "sgd" else None
    )
    optimizer = make_optimizer(model, settings)
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    model.zero_grad()
    numbers = sum(value.numel() for state in optimizer.state.values() for value in state.values())
    total = sum(weight.numel() for weight in model.parameters())
    assert sharded(model, settings)["single"].optimizer == pytest.approx(4 * numbers, abs=total / 2)


def test_fp32_weights_under_autocast_and_a_reduction_in_each_micro_batch(model: Any) -> None:
    total = sum(parameter.numel() for parameter in model.parameters())
    memory = sharded(model, TrainingSettings())
    assert memory["zero1"] == Memory(4 * total, 4 * total, 3 * total, 12000, 7)
    assert memory["zero2"] == Memory(4 * total, total, 3 * total, 12000, 7)
    assert memory["zero3"] == Memory(total, total, 2 * total, 4 * total, 7)
    assert memory["fsdp2"].weights == memory["fsdp2"].gradients == total
    averaged = sharded(model, TrainingSettings(ema_decay=0.9))
    more = {
        name: averaged[name].optimizer - memory[name].optimizer
        for name in ("ddp", "zero2", "zero3", "fsdp2")
    }
    assert more == {"ddp": 4 * total, "zero2": total, "zero3": total, "fsdp2": total}
    # accumulated unsharded, or in shards: ZeRO-2's of all micro-batches and of one
    for half, each, zero2, zero3 in (
        (False, None, 4, 5),
        (False, True, 2, 1),
        (True, None, 1, 0.5),
    ):
        settings = TrainingSettings(
            per_device_batch_size=4, sync_each_batch=each, half_precision_weights=half
        )
        memory = sharded(model, settings)
        assert (memory["zero2"].gradients, memory["zero3"].gradients) == (
            zero2 * total,
            zero3 * total,
        )
        assert (memory["single"].buffers, memory["ddp"].buffers) == (
            0,
            0 if each else 4 * total,
        )  # DDP's buckets


def fit(
    model: Any, tokenizer: Any, usable: int, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> TrainingSettings:
    monkeypatch.setattr(estimate, "usable_memory", lambda device, processes: usable)
    settings = {"global_batch_size": 50, "per_device_batch_size": "auto", **settings}
    return fit_batch_size(
        Accelerator(cpu=True), model, of_lengths(LENGTHS), tokenizer, TrainingSettings(**settings)
    )


def test_auto_keeps_the_global_batch(
    model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    settings = [
        fit(model, tokenizer, megabytes * 10**6, monkeypatch) for megabytes in (8, 16, 1000)
    ]
    sizes = [each.micro_batch_size for each in settings]
    assert 1 <= sizes[0] < sizes[1] < sizes[2] == 50
    assert all(50 % size == 0 or -(-50 // -(-50 // size)) == size for size in sizes)
    assert (
        f"--per_device_batch_size auto: {sizes[0]} (texts of up to 131 tokens, 8 MB"
        in capsys.readouterr().err
    )
    schedules = [make_schedule(each, of_lengths(LENGTHS), 1) for each in settings]
    assert [schedule.accumulation for schedule in schedules] == [-(-50 // size) for size in sizes]
    assert {schedule.total_steps for schedule in schedules} == {schedules[0].total_steps}
    assert (
        fit(model, tokenizer, 8 * 10**6, monkeypatch, max_tokens_per_batch=131).micro_batch_size
        == 50
    )
    with pytest.raises(
        UserError, match=r"not even one text of 131 tokens fits .*--gradient_checkpointing true"
    ):
        fit(model, tokenizer, 10**5, monkeypatch)


def test_the_memory_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its page cache is usable."""
    contents = {"max": "1000", "current": "900",
                "stat": "anon 100\ninactive_file 500\nactive_file 200\ninactive_anon 50"}  # fmt: skip
    for name, content in contents.items():
        (tmp_path / f"memory.{name}").write_text(f"{content}\n")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    assert memory.machine_memory.__wrapped__() == 1000
    assert estimate.usable_memory("cpu", 2) == (1000 - 900 + 700) / 2 / 2


@pytest.mark.parametrize(
    "section", [None, {}, {"device": None}, {"device": "none"}, {"device": "cpu"}]
)
def test_strategy_of_an_offload_section(section: dict[str, Any] | None) -> None:
    zero = {"stage": 2, "offload_optimizer": section}
    plugin = SimpleNamespace(zero_stage=2, deepspeed_config={"zero_optimization": zero})
    accelerator: Any = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin))
    name = "zero2_offload" if section == {"device": "cpu"} else "zero2"
    assert estimate.strategy_of(accelerator) == (name, zero)


def test_a_number_is_kept_and_an_unresolved_auto_is_an_error(tokenizer: Any) -> None:
    settings = TrainingSettings(per_device_batch_size=3)
    assert (
        fit_batch_size(Accelerator(cpu=True), Layers(), of_lengths(LENGTHS), tokenizer, settings)
        is settings
    )
    with pytest.raises(UserError, match="--per_device_batch_size auto"):
        make_schedule(TrainingSettings(per_device_batch_size="auto"), of_lengths(LENGTHS), 1)


@pytest.mark.parametrize("way", ["single", *(
    pytest.param(way, marks=[pytest.mark.slow, pytest.mark.multiprocess])
    for way in ("ddp x2", "zero2 x2", "zero3 x2", "fsdp2 x2"))])  # fmt: skip
def test_a_run_with_auto(way: str, tiny_model: Path, reviews: Path, tmp_path: Path) -> None:
    size, run = 20 if way == "single" else 10, tmp_path / "run"
    screen = train("--model_name_or_path", tiny_model, "--train_file", reviews, "--per_device_batch_size", "auto",
                   "--global_batch_size", 20, "--max_steps", 1, "--output_dir", run, *WAYS[way])  # fmt: skip
    assert f"--per_device_batch_size auto: {size} (" in screen
    assert json.loads((run / "config.json").read_text())["data"]["micro_batch_size"] == size
    lines = lines_of(run / "metrics.jsonl")
    assert all(0 <= line["padding"] < 1 for line in lines)
