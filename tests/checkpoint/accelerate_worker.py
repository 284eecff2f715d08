"""Saves with `accelerator.save_state` on CPU processes without DeepSpeed.

    torchrun --nproc_per_node 2 tests/checkpoint/accelerate_worker.py FOLDER

writes FOLDER/safe, FOLDER/bin, FOLDER/sharded and FOLDER/truth.safetensors.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors.torch import save_file

from tests.checkpoint.deepspeed_worker import Odd


def main() -> None:
    accelerator = Accelerator(cpu=True)
    folder = Path(sys.argv[1])
    torch.manual_seed(3)
    model = Odd(empty=False)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.arange(5)))
    optimizer.step()
    accelerator.save_state(str(folder / "safe"))
    accelerator.save_state(str(folder / "bin"), safe_serialization=False)
    accelerator.save_model(model, str(folder / "sharded"), max_shard_size=600)
    if accelerator.is_main_process:
        state = {name: tensor.clone() for name, tensor in accelerator.unwrap_model(model).state_dict().items()}
        save_file(state, folder / "truth.safetensors")
    accelerator.wait_for_everyone()
    os._exit(0)


if __name__ == "__main__":
    main()
