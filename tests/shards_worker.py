"""Started by tests/test_shards.py on two processes: divides a model with PyTorch's own FSDP2 and loads a
saved folder into it.

    shards_worker.py MODEL
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForSequenceClassification

from toolkit import launch
from toolkit.checkpoint.model_folder import load_into_shards


def main() -> None:
    accelerator = launch.make_accelerator("no")
    folder = Path(sys.argv[1])
    expected = AutoModelForSequenceClassification.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_config(expected.config)
    fully_shard(model, mesh=init_device_mesh("cpu", (accelerator.num_processes,)))
    load_into_shards(model, folder, accelerator.is_main_process)
    for (name, parameter), wanted in zip(model.named_parameters(), expected.parameters(), strict=True):
        # rows are divided; a parameter of one row lies on one process
        assert len(wanted) == 1 or parameter.to_local().numel() < wanted.numel(), f"{name} is not divided"
        assert torch.equal(parameter.full_tensor(), wanted), name
    if accelerator.is_main_process:
        print("every parameter is the saved one")


if __name__ == "__main__":
    launch.run(main)
