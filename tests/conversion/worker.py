"""Makes real checkpoints on CPU processes, each beside the state that was in memory.

    torchrun --nproc_per_node N -m tests.conversion.worker MODEL FOLDER NAME ...

writes FOLDER/NAME as DeepSpeed, accelerate or torch.distributed.checkpoint does, and FOLDER/NAME.safetensors: the
masters, frozen parameters and persistent buffers, read by those libraries' own functions. Of some kinds also
NAME-later, one step later. MODEL is a folder with a BERT.
"""

import importlib
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

STEPS = 2


class Odd(nn.Module):
    """Sizes that no number of ranks divides, a tied weight, buffers of three dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 7)
        self.first = nn.Linear(7, 11)
        self.second = nn.Linear(11, 7)
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.head = nn.Linear(7, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mean", torch.linspace(-1, 1, 5))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("small", torch.arange(3, dtype=torch.bfloat16))
        self.register_buffer("forgotten", torch.ones(3), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(self.embed(tokens))) * self.scale  # (B, S, 11)
        hidden = self.second(hidden)
        return F.cross_entropy(self.head(hidden).float().flatten(0, 1), tokens.roll(1, 1).flatten())


@dataclass(frozen=True)
class Kind:
    """A run of DeepSpeed."""

    stage: int
    config: dict[str, Any] = field(default_factory=dict)
    zero: dict[str, Any] = field(default_factory=dict)
    """Of its section zero_optimization."""
    groups: int = 1
    frozen: bool = False
    excluded: bool = False
    """Saved without the frozen parameters."""
    bert: bool = False
    later: bool = False
    """Also saved one step later."""


BF16: dict[str, Any] = {"bf16": {"enabled": True}}
FP32_GRADIENTS: dict[str, Any] = {"data_types": {"grad_accum_dtype": "fp32"}}
KINDS = {
    "zero0": Kind(0),
    **{f"zero{stage}-bf16": Kind(stage, BF16, later=True) for stage in (1, 2, 3)},
    **{f"zero{stage}-bert": Kind(stage, groups=2, bert=True) for stage in (2, 3)},
    **{f"zero{stage}-frozen": Kind(stage, BF16, groups=2, frozen=True) for stage in (1, 2, 3)},
    **{f"zero{stage}-excluded": Kind(stage, frozen=True, excluded=True) for stage in (1, 3)},
    "zero2-fp32": Kind(2, later=True),
    "zero1-bf16-optimizer": Kind(1, {**BF16, **FP32_GRADIENTS}, groups=2),
    "zero2-aligned": Kind(2, BF16, {"parameter_alignment": True}, groups=2),
    "zero2-round-robin": Kind(2, {}, {"round_robin_gradients": True}, groups=2),
    "zero2-elastic": Kind(2, BF16, {"elastic_checkpoint": True}, groups=2),
    "zero3-subgroups": Kind(3, BF16, {"sub_group_size": 40}, groups=2),
    "zero3-hpz": Kind(3, BF16, {"zero_hpz_partition_size": 2}),
}


def start() -> None:
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: (
        None
    )  # nothing to compile
    import deepspeed

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", verbose=False)


def make_model(kind: Kind, bert: str) -> Any:
    torch.manual_seed(11)
    if kind.bert:
        from transformers import AutoModelForSequenceClassification

        return AutoModelForSequenceClassification.from_pretrained(bert, num_labels=3)
    model = Odd()
    if kind.frozen:
        model.first.requires_grad_(False)
        model.embed.requires_grad_(not kind.excluded)
    return model


def deepspeed_run(kind: Kind, bert: str, folder: Path) -> dict[str, torch.Tensor]:
    import deepspeed

    model = make_model(kind, bert)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": trained[number :: kind.groups]} for number in range(kind.groups)]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": kind.stage, **kind.zero},
        "zero_force_ds_cpu_optimizer": False,
        **kind.config,
    }
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    for step in range(STEPS):
        take_step(engine, kind, step)
    engine.save_checkpoint(str(folder), exclude_frozen_parameters=kind.excluded)
    truth = truth_of(engine, kind)
    if kind.later:
        take_step(engine, kind, STEPS)
        engine.save_checkpoint(f"{folder}-later")
    engine.destroy()
    return truth


def take_step(engine: Any, kind: Kind, step: int) -> None:
    tokens = torch.arange(5)[None] * (dist.get_rank() + 2 + step) % 13
    engine.backward(engine(tokens, labels=tokens[0, :1] % 3).loss if kind.bert else engine(tokens))
    engine.step()


def truth_of(engine: Any, kind: Kind) -> dict[str, torch.Tensor]:
    """By DeepSpeed's own functions."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    truth = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            weight = parameter.data.detach().clone()
        is_half = (
            weight.dtype != torch.float32
        )  # in fp32 the weights are the masters, and always right
        if parameter.requires_grad and is_half and weight.numel() and kind.stage:
            weight = safe_get_full_fp32_param(parameter).detach().clone().view(weight.shape)
        truth[name] = weight
    persistent = engine.module.state_dict().keys()
    truth |= {name: buffer for name, buffer in engine.module.named_buffers() if name in persistent}
    return truth


def data_parallel(folder: Path, safe: bool) -> dict[str, torch.Tensor]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(3)
    model: Any = Odd()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.arange(5)[None]))
    optimizer.step()
    accelerator.save_state(str(folder), safe_serialization=safe)
    return accelerator.unwrap_model(model).state_dict()


def fully_sharded(folder: Path, whole: bool) -> dict[str, torch.Tensor]:
    """As accelerate/utils/fsdp_utils.py writes SHARDED_STATE_DICT and FULL_STATE_DICT."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(5)
    model: Any = Odd()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    state = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if not whole:
        dcp.save(
            {"model": get_model_state_dict(model)},
            checkpoint_id=str(folder / "pytorch_model_fsdp_0"),
        )
    elif dist.get_rank() == 0:
        folder.mkdir()
        torch.save(state, folder / "pytorch_model_fsdp.bin")
    return state


def accelerate_with_deepspeed(folder: Path) -> dict[str, torch.Tensor]:
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    torch.manual_seed(7)
    model: Any = Odd()
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.arange(5)[None]))
    accelerator.save_state(str(folder))
    return accelerator.unwrap_model(model).state_dict()


def make(name: str, bert: str, folder: Path) -> dict[str, torch.Tensor]:
    if name in KINDS:
        return deepspeed_run(KINDS[name], bert, folder)
    if name.startswith("ddp"):
        return data_parallel(folder, safe=name == "ddp-safetensors")
    if name.startswith("fsdp"):
        return fully_sharded(folder, whole=name == "fsdp-full")
    return accelerate_with_deepspeed(folder)


OTHERS = ("ddp-safetensors", "ddp-bin", "fsdp-sharded", "fsdp-full", "accelerate-zero2")


def main() -> None:
    start()
    bert, folder, *names = sys.argv[1:]
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name in names:
        truth = make(name, bert, Path(folder, name))
        if dist.get_rank() == 0:
            tensors = {key: tensor.detach().clone().contiguous() for key, tensor in truth.items()}
            save_file(tensors, Path(folder, f"{name}.safetensors"))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
