"""`load_into_shards` restores all parameters that FSDP2 shards."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForSequenceClassification

from tests.jobs_worker import run_jobs
from tests.runs import WAYS
from toolkit import launch
from toolkit.checkpoint.model_folder import load_into_shards


def main() -> None:
    """On each of two processes."""
    accelerator = launch.make_accelerator("no")
    folder = Path(sys.argv[1])
    expected = AutoModelForSequenceClassification.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_config(expected.config)
    fully_shard(model, mesh=init_device_mesh("cpu", (accelerator.num_processes,)))
    load_into_shards(model, folder, accelerator.is_main_process)
    for (name, parameter), wanted in zip(model.named_parameters(), expected.parameters(), strict=True):
        # a parameter of one row is on one rank
        assert len(wanted) == 1 or parameter.to_local().numel() < wanted.numel(), f"{name} is not sharded"
        assert torch.equal(parameter.full_tensor(), wanted), name
    if accelerator.is_main_process:
        print("every parameter is the saved one", flush=True)


@pytest.mark.multiprocess
def test_every_parameter_comes_back(tmp_path: Path, tiny_model: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=3)
    for parameter in model.parameters():  # all different from a new model's
        torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "model")
    finished = run_jobs(tmp_path, WAYS["ddp x2"], [["tests.test_shards", tmp_path / "model"]])
    assert "every parameter is the saved one" in finished.out
