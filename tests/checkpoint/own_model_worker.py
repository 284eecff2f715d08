"""Started by tests/checkpoint/test_own_model.py on two processes under ZeRO-3: own_model_worker.py FOLDER"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from torch import nn

from toolkit import launch
from toolkit.checkpoint.model_folder import load_weights, save_model, step_of


class Own(nn.Module):
    """Not from `transformers`: no config, a save of its own, a tied weight, a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(13, 7)
        self.head = nn.Linear(7, 13, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(7)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(tokens)))

    def save(self, folder: Path, state_dict: dict[str, torch.Tensor]) -> None:
        (folder / "own.txt").write_text(" ".join(f"{name}={state_dict[name].numel()}" for name in sorted(state_dict)))


class Bare(nn.Linear):
    """Nothing but a module."""


def main() -> None:
    folder = Path(sys.argv[1])
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # which takes half a minute
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
    }
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    )
    model = Own(seed=1)
    prepared, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    save_model(accelerator, prepared, None, folder / "model", step=7)
    before = whole(prepared)
    with torch.no_grad():
        for parameter in prepared.parameters():
            parameter.ds_tensor.zero_()
    assert not any(tensor.any() for tensor in whole(prepared).values())
    load_weights(accelerator, prepared, folder / "model")
    after = whole(prepared)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert step_of(folder / "model") == 7
    if accelerator.is_main_process:
        print("the weights came back")


def whole(model: Any) -> dict[str, torch.Tensor]:
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


if __name__ == "__main__":
    launch.run(main)
