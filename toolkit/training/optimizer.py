"""AdamW with decay chosen by name, a schedule counted in optimizer steps, and the strategy's own
config brought in line with the settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator
from transformers import get_scheduler
from transformers.trainer_pt_utils import get_parameter_names

from toolkit.config import TrainingSettings
from toolkit.errors import Faults
from toolkit.training.loop import Schedule

# transformers.Trainer's: biases and every kind of norm are not decayed
_NO_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


def make_optimizer(model: torch.nn.Module, settings: TrainingSettings) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter, 2019), fused, with two groups of parameters.

    The groups are made by name: a strategy that divides parameters leaves them without a shape.
    """
    decayed = set(get_parameter_names(model, [torch.nn.LayerNorm], _NO_DECAY))
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = [
        {
            "params": [parameter for name, parameter in named if name in decayed],
            "weight_decay": settings.weight_decay,
        },
        {"params": [parameter for name, parameter in named if name not in decayed], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=settings.learning_rate, fused=True)


def make_scheduler(optimizer: torch.optim.Optimizer, settings: TrainingSettings, total_steps: int) -> Any:
    """The schedule by name. It is stepped once per optimizer step, and not handed to
    `accelerator.prepare`, which would step it once per process."""
    warmup = settings.warmup_steps
    if warmup is None:
        warmup = math.ceil(total_steps * (settings.warmup_ratio or 0.0))
    return get_scheduler(settings.lr_scheduler_type, optimizer, num_warmup_steps=warmup, num_training_steps=total_steps)


def align_strategy(accelerator: Accelerator, settings: TrainingSettings, schedule: Schedule) -> None:
    """Tells the accelerator the accumulation, and a DeepSpeed config what the settings mean, where `auto`
    would mean something else (clipping at 1.0, whatever was asked).

    Raises UserError with every number of that file that contradicts the settings.
    """
    accelerator.gradient_accumulation_steps = schedule.accumulation
    plugin, micro_batch_size = accelerator.state.deepspeed_plugin, schedule.micro_batch_size
    if plugin is None:
        return
    config = plugin.deepspeed_config
    meant: dict[str, float | bool] = {
        "gradient_clipping": settings.max_grad_norm,
        "gradient_accumulation_steps": schedule.accumulation,
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "train_batch_size": micro_batch_size * schedule.accumulation * accelerator.num_processes,
    }
    names = {
        "gradient_clipping": f"--max_grad_norm {settings.max_grad_norm:g}",
        "train_batch_size": f"--global_batch_size {settings.global_batch_size}",
        "train_micro_batch_size_per_gpu": f"--per_device_batch_size {settings.per_device_batch_size}",
    }
    faults = Faults()
    for key, value in meant.items():
        if config.get(key, "auto") not in ("auto", value):
            source = names.get(key, "the settings")
            faults.add(f'the DeepSpeed config says "{key}": {config[key]}, and {source}: write "auto" in that file')
    for key in ("optimizer", "scheduler"):
        if key in config:
            faults.add(f'the DeepSpeed config has a section "{key}": remove it, the settings decide')
    faults.raise_if_any()
    config.update(meant)
    config.setdefault("zero_allow_untested_optimizer", True)  # any class: its state is saved by name, or refused
    if plugin.zero_stage == 3:  # otherwise the final weights could not be gathered
        config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True


def set_schedule(scheduler: Any, steps: int) -> None:
    """`transformers`' schedules are functions of the step alone."""
    scheduler.last_epoch = steps
    scheduler._step_count = steps + 1
    rates = [function(steps) * base for function, base in zip(scheduler.lr_lambdas, scheduler.base_lrs, strict=True)]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates


_SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def scaler_state(accelerator: Accelerator, optimizer: Any) -> dict[str, Any] | None:
    """Of fp16's loss scale; None where none is used."""
    scaler = _deepspeed_scaler(optimizer)
    if scaler is not None:
        return {name: getattr(scaler, name) for name in _SCALER_FIELDS if hasattr(scaler, name)}
    if accelerator.scaler is None:
        return None
    state = accelerator.scaler.state_dict()
    return {"cur_scale": state["scale"], "torch": state} if state else None


def set_scaler(accelerator: Accelerator, optimizer: Any, state: Mapping[str, Any] | None) -> None:
    """Under another strategy the scale alone is taken over: it finds the rest within a few steps."""
    scaler = _deepspeed_scaler(optimizer)
    if state is None or not math.isfinite(state["cur_scale"]):
        return
    if scaler is not None:
        for name in _SCALER_FIELDS:
            if name in state and hasattr(scaler, name):
                setattr(scaler, name, state[name])
    elif accelerator.scaler is not None:
        accelerator.scaler.load_state_dict(
            state.get("torch") or {**accelerator.scaler.state_dict(), "scale": state["cur_scale"]}
        )


def _deepspeed_scaler(optimizer: Any) -> Any:
    """Only where it changes: in fp32 and bf16 it is the number 1."""
    scaler = getattr(getattr(optimizer, "optimizer", None), "loss_scaler", None)
    return scaler if getattr(scaler, "dynamic", False) else None
