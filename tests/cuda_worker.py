"""Runs recipes on "cuda" with a CUDA build of torch and no GPU, by tensors without data (FakeTensorMode).

    python tests/cuda_worker.py JOBS.json NOTES.json

As tests/meta_worker.py, with CUDA's code paths: autocast, fp16's loss scale, fused AdamW, texts padded to multiples of
8, BigBird's `auto` attention. Wrong devices and synchronizations raise. The backward pass needs a driver
("hasPrimaryContext"): here it sets gradients of zeros.
"""

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

os.environ["ACCELERATE_TORCH_DEVICE"] = "cuda:0"

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests import meta_worker
from toolkit.launch import world

DEVICE = torch.device("cuda", 0)
FAKE = FakeTensorMode(allow_non_fake_inputs=True)


def to_device(model: torch.nn.Module) -> torch.nn.Module:
    """The model with fake weights, tied ones still tied."""
    fakes: dict[int, torch.nn.Parameter] = {}

    def fake(weight: torch.nn.Parameter) -> torch.nn.Parameter:
        if id(weight) not in fakes:
            on_device = FAKE.from_tensor(weight.data).to(DEVICE)
            fakes[id(weight)] = torch.nn.Parameter(on_device, weight.requires_grad)
        return fakes[id(weight)]

    with FAKE:
        for module in model.modules():
            for name, weight in module._parameters.items():
                module._parameters[name] = None if weight is None else fake(weight)
            for name, buffer in module._buffers.items():
                module._buffers[name] = (
                    None if buffer is None else FAKE.from_tensor(buffer).to(DEVICE)
                )
    return model


def give_gradients(accelerator: Any, loss: torch.Tensor) -> None:
    assert loss.device == DEVICE
    assert loss.shape == ()
    if accelerator.scaler is not None:
        accelerator.scaler.scale(loss)
    for hook in (loss._backward_hooks or {}).values():
        hook(loss)
    for model in accelerator._models:
        for weight in model.parameters():
            if weight.requires_grad:
                weight.grad = torch.zeros_like(weight)


class CollateHere:
    """`Prefetcher` without its thread, in which modes are not active."""

    def __init__(self, device: Any) -> None:
        pass

    def batch(self, collation: Any, following: Any) -> Any:
        return collation()


def pretend() -> None:
    """Replaces functions that need the driver."""
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.amp.grad_scaler.amp_definitely_not_available = lambda: False
    torch.cuda.is_bf16_supported = lambda *options: True
    torch.cuda.get_device_capability = lambda *device: (9, 0)
    torch.cuda.get_device_name = lambda *device: "NVIDIA H100 80GB HBM3"
    torch.cuda.max_memory_allocated = lambda *device: 0
    torch.cuda.reset_peak_memory_stats = lambda *device: None
    torch.cuda.get_rng_state = lambda *device: torch.zeros(16, dtype=torch.uint8)
    torch.cuda.set_rng_state = lambda *state: None
    # it reads whether a gradient is infinite: the one synchronization of a step in fp16
    torch.amp.GradScaler._maybe_opt_step = (  # type: ignore[method-assign]
        lambda scaler, optimizer, state, *arguments, **options: optimizer.step(
            *arguments, **options
        )
    )
    world.verify_world = lambda *words: None
    torch.Tensor.pin_memory = lambda tensor, *device: tensor  # type: ignore[method-assign]


if __name__ == "__main__":
    pretend()
    meta_worker.DEVICE, meta_worker.MODE, meta_worker.to_device = DEVICE, FAKE, to_device
    meta_worker.Accelerator.backward = give_gradients
    for name in ("toolkit.training.steps", "toolkit.evaluation.outputs", "toolkit.data.batches"):
        sys.modules[name].Prefetcher = CollateHere  # type: ignore[attr-defined]
    meta_worker.main()
