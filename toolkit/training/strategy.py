"""Makes the config of DeepSpeed, FSDP2 or DDP match the settings; saves and restores fp16's loss scale."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Collection, Iterator, Mapping
from functools import partial, reduce
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DynamoBackend
from accelerate.utils.deepspeed import DeepSpeedEngineWrapper
from torch.distributed.fsdp import CPUOffloadPolicy

from toolkit.checkpoint.live import full_shape, persistent_buffers
from toolkit.checkpoint.model_folder import check_adapter
from toolkit.config import TrainingSettings
from toolkit.errors import Faults, UserError
from toolkit.launch import log_on_main
from toolkit.models.layers import outer_layers
from toolkit.pretrained import attention_dropout, encoder_config
from toolkit.training.checks import check_parameters, optimizer_fault, refuse_compiled
from toolkit.training.half_precision import choose_precision, choose_reduction
from toolkit.training.steps import Schedule
from toolkit.utils.compat import require

# of one layer: training or evaluation, with or without a mask, one text or several
_MAX_GRAPHS = 32
# part of a DeepSpeed config -> the values with which a run can use it, and why
_LIMITED: dict[str, tuple[list[Any], str]] = {
    **dict.fromkeys(("optimizer", "scheduler", "torch_autocast"), ([], "use the settings instead")),
    "activation_checkpointing": ([], "it has no effect: pass --gradient_checkpointing true"),
    **dict.fromkeys(("zero_optimization.zenflow", "zero_optimization.offload_optimizer.super_offload"),
                    ([], "it trains with its own Adam, not with --optimizer")),
    "tensor_parallel.autotp_size": ([0, 1], "its processes would need the same texts"),
    "data_efficiency": ([], "it has no effect: the settings choose samples and tokens"),
    **dict.fromkeys(("checkpoint.writer", "datastates_ckpt"),
                    ([], "its files may be written only after the checkpoint counts as complete")),
    **dict.fromkeys(("zero_optimization.offload_optimizer.device", "zero_optimization.offload_param.device"),
                    (["cpu", "none"], "what is on NVMe is not in a checkpoint, nor as fp32 weights in model/")),
    "zero_optimization.compute_grad_norm": ([True], "each step's gradient norm is checked"),
    "managed_gradient_accumulation": ([True], "the settings decide when gradients are reduced"),
    "data_types.grad_accum_dtype": (["fp32", None], "gradients are accumulated in fp32"),
    "gradient_allreduce_op": (["mean"], "a sum grows with the number of processes"),
}  # fmt: skip


def align_strategy(
    accelerator: Accelerator, model: torch.nn.Module, optimizer: Any, settings: TrainingSettings, schedule: Schedule
) -> None:
    """Sets the accelerator's accumulation, and those values of a DeepSpeed config that accelerate would not set by the
    settings (clipping becomes 1.0) or not at all (for a `model` without a config).

    Raises UserError with all values of the DeepSpeed config that contradict the settings or that no run can use, for an
    accelerate config that compiles the model, flash attention in fp32, flex attention with dropout, an optimizer that
    the strategy cannot use (`optimizer_fault`), and where its parameters are not the model's (`check_parameters`).
    """
    if (backend := accelerator.state.dynamo_plugin.backend) != DynamoBackend.NO:
        raise UserError(
            f"the accelerate config compiles the whole model (dynamo_backend: {backend.value}), which renames its "
            "weights: remove dynamo_backend there, and pass --torch_compile true"
        )
    attention = str(getattr(getattr(model, "config", None), "_attn_implementation", ""))
    if attention.startswith("flash_attention") and accelerator.mixed_precision == "no":
        raise UserError(
            f"--attn_implementation {attention} computes in bf16 and fp16 only: pass --mixed_precision bf16"
        )
    if attention == "flex_attention" and (accelerator.device.type == "cpu" or attention_dropout(model.config)):
        why = "has no dropout, and on a CPU no backward pass"
        raise UserError(f"--attn_implementation {attention} {why}: pass --dropout 0, or leave it out")
    refuse_compiled(model)
    check_adapter(model)
    for tensor in (*model.parameters(), *(buffer for _, buffer in persistent_buffers(model))):
        if not tensor.is_contiguous():  # checkpoints, ZeRO and FSDP2 take its elements in a row
            tensor.data = tensor.data.contiguous()
    accelerator.gradient_accumulation_steps = schedule.accumulation
    if accelerator.ddp_handler is not None:  # broadcast running means, but not constants, in each step
        running = (buffer.is_floating_point() for _, buffer in persistent_buffers(model))
        accelerator.ddp_handler.broadcast_buffers = any(running)
    if accelerator.scaler is not None:  # the schedule would count a step that a fused kernel skips
        optimizer._step_supports_amp_scaling = False
        _keep_scale_with_gradients(accelerator)
    check_parameters(accelerator, model, optimizer, settings, schedule.total_steps)
    faults = Faults()
    if fault := optimizer_fault(accelerator, optimizer):
        faults.add(fault)
    if not accelerator.state.deepspeed_plugin:
        faults.raise_if_any()
    if accelerator.is_fsdp2:
        _choose_fsdp_units(accelerator, model)
    if settings.torch_compile:
        compile_layers(accelerator, model)
    choose_precision(accelerator, model, settings)
    reduced_in = choose_reduction(accelerator, settings)
    plugin, micro = accelerator.state.deepspeed_plugin, schedule.micro_batch_size
    if plugin or accelerator.is_fsdp2:
        accelerator.clip_grad_value_ = _refuse_clipping_by_value
    if plugin is None:
        return
    require(DeepSpeedEngineWrapper, "get_global_grad_norm", "accelerate")  # it synchronizes
    DeepSpeedEngineWrapper.get_global_grad_norm = lambda wrapper: wrapper.engine.get_global_grad_norm()
    trained = {id(each) for each in model.parameters() if each.requires_grad}
    accelerator.clip_grad_norm_ = partial(_deepspeed_grad_norm, accelerator, trained, settings.max_grad_norm)
    config = plugin.deepspeed_config
    if plugin.zero_stage == 0:
        faults.add('the DeepSpeed config has "zero_optimization.stage" 0: set it to 1, or launch with ddp.yaml')
    samples = micro * schedule.accumulation * accelerator.num_processes
    limits = (f"--per_device_batch_size {settings.per_device_batch_size} "
              f"and --max_tokens_per_batch {settings.max_tokens_per_batch}")  # fmt: skip
    values: dict[str, tuple[Any, str]] = {
        "gradient_clipping": (settings.max_grad_norm, f"--max_grad_norm {settings.max_grad_norm:g}"),
        "gradient_accumulation_steps": (schedule.accumulation, f"the settings need {schedule.accumulation}"),
        "train_micro_batch_size_per_gpu": (micro, limits),
        "train_batch_size": (samples, f"--global_batch_size {settings.global_batch_size}"),
    }
    if reduced_in:
        values["communication_data_type"] = (reduced_in, "--half_precision_gradients true")
    for key, (value, source) in values.items():
        if config.get(key, "auto") not in ("auto", value):
            faults.add(f'the DeepSpeed config has "{key}": {config[key]}, but {source}: write "auto" in that file')
    for key, (usable, why) in _LIMITED.items():
        *sections, name = key.split(".")
        part = reduce(lambda part, section: part.get(section) or {}, sections, config)
        if name in part and part[name] not in usable:
            other = f" or write {json.dumps(usable[0])}" if usable else ""
            faults.add(f'the DeepSpeed config has "{key}": {json.dumps(part[name])}: remove it{other}: {why}')
    # by default accelerate replaces any optimizer in host memory, SGD or Lion too, by DeepSpeed's Adam
    offloads = (config["zero_optimization"].get("offload_optimizer") or {}).get("device") == "cpu"
    replaces = offloads and config.get("zero_force_ds_cpu_optimizer", False)
    if replaces and type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        replaced = f"which makes an Adam of {type(optimizer).__name__}"
        faults.add(f'the DeepSpeed config has "zero_force_ds_cpu_optimizer": true, {replaced}: remove it')
    faults.raise_if_any()
    config.update({key: value for key, (value, _) in values.items()})
    if offloads and not replaces:
        config["zero_force_ds_cpu_optimizer"] = False
    zero = {name: value for name, value in config["zero_optimization"].items() if value is not None}
    config["zero_optimization"] = zero  # accelerate fails on `"offload_optimizer": null`
    config["zero_allow_untested_optimizer"] = True  # allow optimizers outside DeepSpeed's list
    if not hasattr(getattr(model, "config", None), "hidden_size"):
        _set_bucket_sizes(zero, model)
    if plugin.zero_stage == 3:  # needed to gather the final weights
        zero["stage3_gather_16bit_weights_on_model_save"] = True


@contextlib.contextmanager
def explain_config_errors() -> Iterator[None]:
    """Raises UserError for a DeepSpeed config with an unknown key, a value of the wrong type or a removed feature."""
    try:
        yield
    except Exception as error:  # by name: DeepSpeed is imported only where it is used
        if type(error).__name__ not in ("ValidationError", "DeepSpeedConfigError"):
            raise
        file = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "the DeepSpeed config")
        fault, *_ = " ".join(str(error).split()).split(" For further information")
        raise UserError(f"{file}: DeepSpeed refuses it: {fault}") from error


def _refuse_clipping_by_value(*_: Any, **__: Any) -> None:
    raise UserError("ZeRO and FSDP2 cannot clip by value: use `accelerator.clip_grad_norm_`, --max_grad_norm, or ddp")


def _deepspeed_grad_norm(
    accelerator: Accelerator, trained: Collection[int], clips_at: float, parameters: Any, max_norm: float,
    norm_type: float = 2,
) -> Any:  # fmt: skip
    """`Accelerator.clip_grad_norm_` under DeepSpeed, which ignores `max_norm`: the engine clips by its config. Raises
    UserError for another norm than that, or of other parameters than the model's."""
    parameters = [parameters] if torch.is_tensor(parameters) else list(parameters)
    if missing := len(set(trained) - {id(each) for each in parameters}):
        raise UserError(
            f"DeepSpeed clips the gradients of all parameters together, and {missing} are not among those that "
            "`accelerator.clip_grad_norm_` got: pass model.parameters(), or launch with ddp (accelerate_configs/)"
        )
    if max_norm != (clips_at or math.inf) or norm_type != 2:
        raise UserError(
            f"DeepSpeed clips the 2-norm at --max_grad_norm {clips_at:g}, not norm {norm_type:g} at the recipe's "
            f"{max_norm:g}: keep `training.max_grad_norm or math.inf` in the recipe, and pass --max_grad_norm"
        )
    return Accelerator.clip_grad_norm_(accelerator, parameters, max_norm)


def _choose_fsdp_units(accelerator: Accelerator, model: Any) -> None:
    """Makes FSDP2 gather one layer (`outer_layers`) at a time. Accelerate's default, transformers'
    `_no_split_modules`, includes embeddings, or is empty (BigBird)."""
    plugin, layers = accelerator.state.fsdp_plugin, {type(layer).__name__ for layer in outer_layers(model)}
    if (names := plugin.transformer_cls_names_to_wrap) and set(names) != layers:
        effect = f"has no effect: the units are the model's layers ({', '.join(sorted(layers))})"
        log_on_main(accelerator, f"fsdp_transformer_layer_cls_to_wrap: {', '.join(names)} {effect}")
    plugin.transformer_cls_names_to_wrap = sorted(layers)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None:  # accelerate would make a unit of embeddings that T5's encoder and decoder share
        table = getattr(model, "get_input_embeddings", lambda: None)()
        weights = [each for _, each in model.named_parameters(remove_duplicate=False)]
        if sum(each is getattr(table, "weight", None) for each in weights) > 1:
            model.get_input_embeddings = lambda: None
        return
    head_ids, is_tied = {id(each) for each in head.parameters()}, model.get_input_embeddings().weight is head.weight
    names = [name for name, each in model.named_parameters(remove_duplicate=False) if id(each) in head_ids]
    if len(names) > len(head_ids) + is_tied:
        # tied to a decoder's embedding, or a bias with two names (BERT): accelerate would make a unit of the head (and
        # of the embeddings it is tied to), and the parameter would be in two units
        model.get_output_embeddings = lambda: None
        if is_tied:
            model.get_input_embeddings = lambda: None


def compile_layers(accelerator: Accelerator, model: torch.nn.Module) -> None:
    """Compiles each layer in place: the names of parameters do not change, and layers share their code. Graphs are
    dynamic in the number of texts and tokens. Raises UserError for models and strategies that this does not suit."""
    plugin, config, why = accelerator.state.deepspeed_plugin, getattr(model, "config", None), ""
    if plugin is not None and plugin.zero_stage == 3:
        why = "ZeRO-3 gathers each weight in a hook, which breaks the graph: launch with zero2.yaml, ddp.yaml or fsdp2"
    elif getattr(config, "is_encoder_decoder", False):
        why = f"the key-value cache of a {type(model).__name__} grows with each token of a title"
    elif getattr(encoder_config(config), "attention_type", "") == "block_sparse":
        why = "BigBird's sparse attention has different blocks for each length (its kernel is compiled anyway)"
    if why:
        raise UserError(f"--torch_compile cannot be used: {why}; or leave it out")
    if accelerator.device.type == "cpu":
        log_on_main(accelerator, "torch_compile: on a CPU steps are slower (0.86x the speed when measured)")
    # it would cut each layer in two or more graphs, to reduce gradients earlier; a layer is a graph of its own already
    torch._dynamo.config.optimize_ddp = False
    for layer in outer_layers(model):
        layer.compile(dynamic=True, recompile_limit=_MAX_GRAPHS)


def _set_bucket_sizes(zero: dict[str, Any], model: torch.nn.Module) -> None:
    """As accelerate does, with the model's largest width in place of a config's `hidden_size`."""
    width = max((min(shape) for shape in map(full_shape, model.parameters()) if len(shape) > 1), default=1)
    sizes = {"reduce_bucket_size": width * width, "stage3_prefetch_bucket_size": int(0.9 * width * width),
             "stage3_param_persistence_threshold": 10 * width}  # fmt: skip
    zero.update({name: size for name, size in sizes.items() if zero.get(name) == "auto"})


_SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def _keep_scale_with_gradients(accelerator: Accelerator) -> None:
    """Creates fp16's loss scale on the CPU if FSDP2 has gradients there: torch would copy it for each check for
    infinities, and read it before the copy is done."""
    if accelerator.is_fsdp2 and isinstance(accelerator.state.fsdp_plugin.cpu_offload, CPUOffloadPolicy):
        accelerator.scaler.scale(torch.ones(()))


def scaler_state(accelerator: Accelerator, optimizer: Any) -> dict[str, Any] | None:
    """The state of fp16's loss scale; None where none is used."""
    scaler = _deepspeed_scaler(optimizer)
    if scaler is not None:
        return {name: getattr(scaler, name) for name in _SCALER_FIELDS if hasattr(scaler, name)}
    if accelerator.scaler is None:
        return None
    state = accelerator.scaler.state_dict()
    return {"cur_scale": state["scale"], "torch": state} if state else None


def set_scaler(accelerator: Accelerator, optimizer: Any, state: Mapping[str, Any] | None) -> None:
    """Restores the state of fp16's loss scale; under another strategy only the scale, and the rest adapts."""
    scaler = _deepspeed_scaler(optimizer)
    if state is None or not math.isfinite(state["cur_scale"]):
        return
    if scaler is not None:
        vars(scaler).update({name: state[name] for name in _SCALER_FIELDS if name in state})
    elif accelerator.scaler is not None:
        saved = state.get("torch") or {**accelerator.scaler.state_dict(), "scale": state["cur_scale"]}
        accelerator.scaler.load_state_dict(saved)


def _deepspeed_scaler(optimizer: Any) -> Any:
    """None where the scale is constant: in fp32 and bf16 it is 1."""
    scaler = getattr(getattr(optimizer, "optimizer", None), "loss_scaler", None)
    return scaler if getattr(scaler, "dynamic", False) else None
