"""Saves a model as Accelerate does, on CPU processes without DeepSpeed: data parallel, and sharded by FSDP2.

    torchrun --nproc_per_node 2 tests/checkpoint/accelerate_worker.py FOLDER

writes FOLDER/ddp/{safe,bin}, FOLDER/fsdp/{sharded,full} and a truth.safetensors beside them.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.checkpoint.elastic_ways import Odd


def data_parallel(accelerator: Accelerator, folder: Path) -> None:
    torch.manual_seed(3)
    model = Odd("")
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.arange(5)[None]))
    optimizer.step()
    accelerator.save_state(str(folder / "safe"))
    accelerator.save_state(str(folder / "bin"), safe_serialization=False)
    if accelerator.is_main_process:
        state = {name: tensor.clone() for name, tensor in accelerator.unwrap_model(model).state_dict().items()}
        save_file(state, folder / "truth.safetensors")


def fully_sharded(accelerator: Accelerator, folder: Path) -> None:
    """As accelerate/utils/fsdp_utils.py writes SHARDED_STATE_DICT and FULL_STATE_DICT."""
    torch.manual_seed(5)
    model = Odd("")
    fully_shard(model, mesh=init_device_mesh("cpu", (accelerator.num_processes,)))
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=str(folder / "sharded" / "pytorch_model_fsdp_0"))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = get_model_state_dict(model, options=options)
    if accelerator.is_main_process:
        (folder / "full").mkdir()
        torch.save(whole, folder / "full" / "pytorch_model_fsdp.bin")
        for place in ("sharded", "full"):
            torch.save(None, folder / place / "scheduler.bin")
        save_file({name: tensor.clone() for name, tensor in whole.items()}, folder / "truth.safetensors")


def main() -> None:
    accelerator, folder = Accelerator(cpu=True), Path(sys.argv[1])
    data_parallel(accelerator, folder / "ddp")
    fully_sharded(accelerator, folder / "fsdp")
    accelerator.wait_for_everyone()
    os._exit(0)


if __name__ == "__main__":
    main()
