"""Makes real DeepSpeed checkpoints on CPU processes, each with what is true of it.

    torchrun --nproc_per_node N tests/checkpoint/deepspeed_worker.py MODEL FOLDER NAME ...

writes, for each kind in `KINDS`, FOLDER/NAME/{latest, tag, ...} as DeepSpeed does and
FOLDER/NAME.safetensors with `weight.X`, `buffer.X` and `exp_avg.X`, `exp_avg_sq.X` as they were in memory.
MODEL is a folder with a BERT, for the kinds that want one. Starting processes is what takes time, so one
start makes many.
"""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

STEPS = 2


class Norm(nn.Module):
    """Keeps a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 11))
        self.register_buffer("running_mean", torch.zeros(11))
        self.register_buffer("batches", torch.tensor(0))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.running_mean.lerp_(hidden.detach().mean(0).to(self.running_mean.dtype), 0.1)
        self.batches += 1
        return (hidden - self.running_mean.to(hidden.dtype)) * self.weight


class Odd(nn.Module):
    """Sizes that divide by nothing, a tied weight, buffers of two dtypes, one of one element and an empty one."""

    def __init__(self, empty: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 7)
        self.first = nn.Linear(7, 11)
        self.norm = Norm()
        self.second = nn.Linear(11, 7)
        self.scale = nn.Parameter(torch.tensor([1.5]))
        if empty:  # DeepSpeed's stage 3 cannot gather it
            self.nothing = nn.Parameter(torch.empty(0, 3))
        self.head = nn.Linear(7, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(5))
        self.register_buffer("forgotten", torch.ones(3), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(self.embed(tokens)))
        return self.head(self.second(hidden) * self.scale).float().logsumexp(-1).mean()


@dataclass(frozen=True)
class Kind:
    stage: int
    dtype: str = "fp32"
    zero: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    groups: int = 1
    frozen: bool = False
    frozen_group: bool = False
    """The second of the groups holds all that is frozen."""
    exclude: bool = False
    """Saved without the frozen parameters."""
    bert: bool = False
    """The folder's BERT with 3 labels, in place of `Odd`."""
    lora: bool = False
    """With peft's LoRA on queries and values."""
    later: bool = False
    """Saves in NAME-later, too, one step after."""
    moments_of: str = ""
    """The kind made before that has the same moments, where DeepSpeed cannot say them itself."""


KINDS: dict[str, Kind] = {
    **{f"zero{stage}-{dtype}": Kind(stage, dtype) for stage in (2, 3) for dtype in ("fp32", "fp16")},
    **{f"zero{stage}-bf16": Kind(stage, "bf16", later=True) for stage in (1, 2, 3)},
    **{f"zero{stage}-bert": Kind(stage, "bf16", groups=2, bert=True) for stage in (1, 2, 3)},
    **{f"zero{stage}-groups": Kind(stage, "bf16", groups=3) for stage in (1, 2, 3)},
    **{f"zero{stage}-frozen": Kind(stage, "bf16", groups=2, frozen=True) for stage in (1, 2, 3)},
    **{f"zero{stage}-excluded": Kind(stage, frozen=True, exclude=True) for stage in (1, 2, 3)},
    **{f"zero{stage}-lora": Kind(stage, "bf16", bert=True, lora=True, exclude=stage > 1) for stage in (1, 2, 3)},
    "zero3-frozen-group": Kind(3, groups=2, frozen=True, frozen_group=True),  # stages 1 and 2 do not start
    "zero0": Kind(0),
    "zero0-bf16": Kind(0, "bf16"),
    "zero1-bf16-optimizer": Kind(
        1, "bf16", groups=2, config={"data_types": {"grad_accum_dtype": "fp32"}, "gradient_accumulation_steps": 1}
    ),
    "zero2-aligned": Kind(2, "bf16", {"parameter_alignment": True}, groups=2),
    "zero2-in-order": Kind(2, groups=2),
    "zero2-round-robin": Kind(2, zero={"round_robin_gradients": True}, groups=2, moments_of="zero2-in-order"),
    "zero2-elastic": Kind(2, "bf16", {"elastic_checkpoint": True}, groups=2),
    "zero2-offload": Kind(2, "bf16", {"offload_optimizer": {"device": "cpu"}}),
    "zero3-subgroups": Kind(3, "bf16", {"sub_group_size": 50}, groups=2),
    "zero3-offload": Kind(
        3, "bf16", {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}, "sub_group_size": 60}
    ),
    "zero3-hpz": Kind(3, "bf16", {"zero_hpz_partition_size": 2}),
}


def groups_of(model: nn.Module, kind: Kind) -> list[dict[str, Any]]:
    parameters, count = [parameter for parameter in model.parameters() if parameter.requires_grad], kind.groups
    dealt = [parameters[number::count] for number in range(count)]
    if kind.frozen_group:
        dealt.insert(1, [parameter for parameter in model.parameters() if not parameter.requires_grad])
    return [{"params": group, "weight_decay": 0.01 * number} for number, group in enumerate(dealt)]


def with_adapter(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(12)
    config = LoraConfig(task_type="SEQ_CLS", r=3, target_modules=["query", "value"], init_lora_weights=False)
    return get_peft_model(model, config)


def make_model(kind: Kind) -> nn.Module:
    torch.manual_seed(11)
    if kind.bert:
        from transformers import AutoModelForSequenceClassification

        model = AutoModelForSequenceClassification.from_pretrained(sys.argv[1], num_labels=3)
        return with_adapter(model) if kind.lora else model
    model: nn.Module = Odd(empty=kind.stage < 3)
    if kind.frozen:
        model.first.requires_grad_(False)
    return model


def config_of(kind: Kind) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": kind.stage, **kind.zero},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": kind.dtype == "bf16"},
        "fp16": {"enabled": kind.dtype == "fp16", "initial_scale_power": 4},
        **kind.config,
    }


def take_step(engine: Any, kind: Kind, step: int) -> None:
    tokens = torch.arange(5) * (dist.get_rank() + 2 + step) % 13
    engine.backward(engine(tokens[None], labels=tokens[:1] % 3).loss if kind.bert else engine(tokens))
    engine.step()


def make(kind: Kind, folder: Path) -> None:
    import deepspeed

    model = make_model(kind)
    whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(groups_of(model, kind), lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config_of(kind))
    for step in range(STEPS):
        take_step(engine, kind, step)
    engine.save_checkpoint(str(folder), exclude_frozen_parameters=kind.exclude)
    truth = {**weights_of(engine, kind, whole), **buffers_of(engine)}
    truth |= moments_read(folder.parent / kind.moments_of) if kind.moments_of else moments_of(engine, kind)
    if dist.get_rank() == 0:
        save_file({name: tensor.contiguous() for name, tensor in truth.items()}, f"{folder}.safetensors")
    if kind.later:
        take_step(engine, kind, STEPS)
        engine.save_checkpoint(f"{folder}-later")
    engine.destroy()


def buffers_of(engine: Any) -> dict[str, torch.Tensor]:
    persistent = engine.module.state_dict()
    return {f"buffer.{name}": buffer for name, buffer in engine.module.named_buffers() if name in persistent}


def weights_of(engine: Any, kind: Kind, whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from deepspeed.utils import safe_get_full_fp32_param

    found = {}
    for name, parameter in engine.module.named_parameters():
        if _owned(kind, name, parameter) and not kind.moments_of:
            value = safe_get_full_fp32_param(parameter)
        else:  # it never changed, or it is its own master
            value = whole[name].to(parameter.dtype) if kind.stage == 3 else parameter.data
        found[f"weight.{name}"] = value.detach().clone().view(whole[name].shape)
    return found


def moments_of(engine: Any, kind: Kind) -> dict[str, torch.Tensor]:
    from deepspeed.utils import safe_get_full_optimizer_state

    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        # with several groups DeepSpeed links when only the first has been stepped
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    found = {}
    for name, parameter in engine.module.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            if _owned(kind, name, parameter):
                value = safe_get_full_optimizer_state(parameter, key)
                found[f"{key}.{name}"] = value.detach().clone()
    return found


def _owned(kind: Kind, name: str, parameter: torch.Tensor) -> bool:
    return kind.stage > 0 and parameter.requires_grad and name != "nothing"


def moments_read(reference: Path) -> dict[str, torch.Tensor]:
    dist.barrier()
    return {name: tensor for name, tensor in load_file(f"{reference}.safetensors").items() if name.startswith("exp_")}


def main() -> None:
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    # fp16 is refused on CPU only because it is slow there
    type(deepspeed.get_accelerator()).supported_dtypes = lambda _: [torch.float32, torch.bfloat16, torch.float16]
    type(deepspeed.get_accelerator()).is_fp16_supported = lambda _: True
    folder = Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[3:]:
        make(KINDS[name], folder / name)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
