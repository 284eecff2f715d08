"""The strategy's own config set to match the settings, and the state of fp16's loss scale under each strategy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils.deepspeed import DeepSpeedEngineWrapper

from toolkit.checkpoint.live import persistent_buffers
from toolkit.config import TrainingSettings
from toolkit.errors import UserError
from toolkit.launch import log_on_main
from toolkit.models.layers import outer_layers
from toolkit.pretrained import encoder_config
from toolkit.training.checks import check_parameters, optimizer_faults
from toolkit.training.half_precision import choose_precision, choose_reduction
from toolkit.training.steps import Schedule
from toolkit.utils.compat import require

# Of one layer: in training or not, with a mask or none, of one text or several
_MOST_GRAPHS = 32


def align_strategy(
    accelerator: Accelerator, model: torch.nn.Module, optimizer: Any, settings: TrainingSettings, schedule: Schedule
) -> None:
    """Sets the accelerator's accumulation, and the values of a DeepSpeed config where `auto` would become something
    else than the settings (clipping at 1.0, whatever they are) or nothing (a `model` without a config).

    Raises UserError with every number of that file that contradicts the settings, for an optimizer that cannot be used
    (`optimizer_faults`), and for one that trains other parameters than the model's (`check_parameters`).
    """
    accelerator.gradient_accumulation_steps = schedule.accumulation
    if accelerator.ddp_handler is not None:  # running means are rank 0's; constants are not broadcast at each step
        running = (buffer.is_floating_point() for _, buffer in persistent_buffers(model))
        accelerator.ddp_handler.broadcast_buffers = any(running)
    if accelerator.scaler is not None:  # a fused kernel would skip a step, and the schedule would count it
        optimizer._step_supports_amp_scaling = False
    check_parameters(accelerator, model, optimizer, settings, schedule.total_steps)
    faults = optimizer_faults(accelerator, optimizer)
    if not accelerator.state.deepspeed_plugin:
        faults.raise_if_any()
    if accelerator.is_fsdp2:
        _choose_units(accelerator.state.fsdp_plugin, model)
    if settings.torch_compile:
        compile_layers(accelerator, model)
    choose_precision(accelerator, model, settings)
    reduced_in = choose_reduction(accelerator, settings)
    plugin, micro_batch_size = accelerator.state.deepspeed_plugin, schedule.micro_batch_size
    if plugin is None:
        return
    require(DeepSpeedEngineWrapper, "get_global_grad_norm", "accelerate")  # reads the norm, and waits for the update
    DeepSpeedEngineWrapper.get_global_grad_norm = lambda wrapper: wrapper.engine.get_global_grad_norm()
    config = plugin.deepspeed_config
    values: dict[str, Any] = {
        "gradient_clipping": settings.max_grad_norm,
        "gradient_accumulation_steps": schedule.accumulation,
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "train_batch_size": micro_batch_size * schedule.accumulation * accelerator.num_processes,
    }
    if reduced_in:
        values["communication_data_type"] = reduced_in
    names = {
        "communication_data_type": "--half_precision_gradients true",
        "gradient_clipping": f"--max_grad_norm {settings.max_grad_norm:g}",
        "train_batch_size": f"--global_batch_size {settings.global_batch_size}",
        "train_micro_batch_size_per_gpu": f"--per_device_batch_size {settings.per_device_batch_size}",
    }
    for key, value in values.items():
        if config.get(key, "auto") not in ("auto", value):
            source = names.get(key, "the settings")
            faults.add(f'the DeepSpeed config has "{key}": {config[key]}, and {source}: write "auto" in that file')
    for key in ("optimizer", "scheduler", "torch_autocast"):
        if key in config:
            faults.add(f'the DeepSpeed config has a section "{key}": remove it, the settings decide')
    faults.raise_if_any()
    config.update(values)
    config["zero_allow_untested_optimizer"] = True  # any optimizer of a recipe, not only DeepSpeed's list
    if not hasattr(getattr(model, "config", None), "hidden_size"):
        _fill_sizes(config["zero_optimization"], model)
    if plugin.zero_stage == 3:  # otherwise the final weights could not be gathered
        config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True


def _choose_units(plugin: Any, model: Any) -> None:
    """FSDP2 gathers a model's layers one at a time: `outer_layers`. transformers' `_no_split_modules`, accelerate's
    choice, names embeddings too, or nothing (BigBird)."""
    plugin.transformer_cls_names_to_wrap = sorted({type(layer).__name__ for layer in outer_layers(model)})
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None:
        return
    of_head, is_tied = {id(each) for each in head.parameters()}, model.get_input_embeddings().weight is head.weight
    names = [name for name, each in model.named_parameters(remove_duplicate=False) if id(each) in of_head]
    if len(names) > len(of_head) + is_tied:
        # a decoder's embedding too, or a bias that BERT has twice: accelerate would give the head a unit of its own
        # (with the embeddings it is tied to), and the parameter would be in two
        model.get_output_embeddings = lambda: None
        if is_tied:
            model.get_input_embeddings = lambda: None


def compile_layers(accelerator: Accelerator, model: torch.nn.Module) -> None:
    """Compiles a model's layers one by one, in place: what a checkpoint holds keeps its names, and layers share their
    code. A graph takes any number of texts of any length. Raises UserError where it could not."""
    plugin, config, why = accelerator.state.deepspeed_plugin, getattr(model, "config", None), ""
    if plugin is not None and plugin.zero_stage == 3:
        why = "ZeRO-3 gathers each weight in a hook, where a graph would end: launch with zero2.yaml, ddp.yaml or fsdp2"
    elif getattr(config, "is_encoder_decoder", False):
        why = f"a {type(model).__name__} keeps keys and values that grow with each token of a title"
    elif getattr(encoder_config(config), "attention_type", "") == "block_sparse":
        why = "BigBird's sparse attention has other blocks for each length (its kernel is compiled anyway)"
    if why:
        raise UserError(f"--torch_compile cannot be used: {why}; or leave it out")
    if accelerator.device.type == "cpu":
        log_on_main(accelerator, "torch_compile: on a CPU it makes steps slower (0.86x as fast when it was measured)")
    for layer in outer_layers(model):
        layer.compile(dynamic=True, recompile_limit=_MOST_GRAPHS)


def _fill_sizes(zero: dict[str, Any], model: torch.nn.Module) -> None:
    """Sizes of buckets, as accelerate takes them from a transformers model's hidden size."""
    shapes = [tuple(getattr(parameter, "ds_shape", parameter.shape)) for parameter in model.parameters()]
    width = max((min(shape) for shape in shapes if len(shape) > 1), default=1)
    sizes = {
        "reduce_bucket_size": width * width,
        "stage3_prefetch_bucket_size": int(0.9 * width * width),
        "stage3_param_persistence_threshold": 10 * width,
    }
    zero.update({name: size for name, size in sizes.items() if zero.get(name) == "auto"})


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
    """Restores it; under another strategy the scale alone: the rest adapts within a few steps."""
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
