"""Saves a model that FSDP2 divides on two CPU processes as Accelerate does, sharded and whole.

    torchrun --nproc_per_node 2 tests/checkpoint/fsdp_worker.py FOLDER

writes FOLDER/sharded, FOLDER/full and FOLDER/truth.safetensors.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.checkpoint.deepspeed_worker import Odd


def main() -> None:
    dist.init_process_group("gloo")
    folder = Path(sys.argv[1])
    torch.manual_seed(5)
    model = Odd(empty=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(2):
        model(torch.arange(5) + step).backward()
        optimizer.step()
        optimizer.zero_grad()
    # accelerate/utils/fsdp_utils.py, SHARDED_STATE_DICT
    state, optimizer_state = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
    dcp.save({"model": state}, checkpoint_id=str(folder / "sharded" / "pytorch_model_fsdp_0"))
    dcp.save({"optimizer": optimizer_state}, checkpoint_id=str(folder / "sharded" / "optimizer_0"))
    # FULL_STATE_DICT
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = get_model_state_dict(model, options=options)
    whole_optimizer = get_optimizer_state_dict(model, optimizer, options=options)
    if dist.get_rank() == 0:
        (folder / "full").mkdir()
        torch.save(whole, folder / "full" / "pytorch_model_fsdp.bin")
        torch.save(whole_optimizer, folder / "full" / "optimizer.bin")
        for place in ("sharded", "full"):
            torch.save(None, folder / place / "scheduler.bin")
        truth = {f"weight.{name}": tensor.clone() for name, tensor in whole.items()}
        for name, moments in whole_optimizer["state"].items():
            truth |= {f"{key}.{name}": moments[key].clone() for key in ("exp_avg", "exp_avg_sq")}
        save_file(truth, folder / "truth.safetensors")
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
