"""toolkit/training/mfu.py: model FLOPs utilization."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertForSequenceClassification, BigBirdConfig, BigBirdForSequenceClassification

from toolkit.training.mfu import peak_flops, training_flops, utilization

SIZES = {"vocab_size": 50, "hidden_size": 128, "num_hidden_layers": 8, "num_attention_heads": 2,
         "intermediate_size": 512}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA A100-SXM4-80GB", 312), ("Tesla T4", 65),
     ("NVIDIA H200", 989), ("NVIDIA H200 NVL", 835), ("NVIDIA GeForce RTX 4090", 165), ("NVIDIA L40S", 362),
     ("Tesla V100-SXM2-32GB", 125), ("An unknown device", None), ("", None),
     ("NVIDIA H800 PCIe", 756), ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("NVIDIA GeForce RTX 3090 Ti", None),
     ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None), ("NVIDIA GeForce RTX 4090 D", None)],
)  # fmt: skip
def test_the_peak_of_known_devices(name: str, teraflops: int | None) -> None:
    assert peak_flops(name, "bf16") == (teraflops and teraflops * 1e12)
    assert peak_flops(name, "no") is None


@pytest.mark.parametrize("length", [32, 128, 512])
def test_operations_equal_those_that_torch_counts(length: int) -> None:
    model = BertForSequenceClassification(BertConfig(**SIZES, attn_implementation="eager"))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.ones(2, length, dtype=torch.long)).logits.sum().backward()
    count = training_flops(model)
    assert count(np.full(2, length)) == pytest.approx(counter.get_total_flops(), rel=0.03)


def test_frozen_weights_and_sparse_attention_take_less() -> None:
    bert: Any = BertForSequenceClassification(BertConfig(**SIZES))
    count, lengths = training_flops(bert), np.array([10, 2000])
    bert.bert.encoder.requires_grad_(False)
    frozen = training_flops(bert)
    long = training_flops(BigBirdForSequenceClassification(BigBirdConfig(**SIZES, attention_type="block_sparse")))
    assert frozen(lengths) < count(lengths)
    assert long(lengths) < 0.7 * count(lengths)
    assert training_flops(torch.nn.Linear(3, 3)) is None


def test_utilization_is_of_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    model = BertForSequenceClassification(BertConfig(**SIZES))
    accelerator: Any = SimpleNamespace(device=torch.device("cuda", 0), mixed_precision="bf16", num_processes=2,
                                       unwrap_model=lambda wrapped: wrapped)  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    mfu, count, lengths = utilization(accelerator, model), training_flops(model), np.array([7, 20])
    assert mfu(lengths, 0.5) == pytest.approx(count(lengths) / 0.5 / (2 * 312e12))
    accelerator.mixed_precision = "no"
    assert utilization(accelerator, model) is None
