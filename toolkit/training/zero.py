"""What DeepSpeed must be told, so that ZeRO trains as DDP does: the settings of the run, weights in
fp32, one reduction of gradients in a step."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedEngineWrapper
from accelerate.utils.deepspeed import DeepSpeedOptimizerWrapper

from toolkit.config import TrainingSettings
from toolkit.errors import UserError
from toolkit.training.precision import add_autocast, reduction_dtype
from toolkit.utils.compat import require
from toolkit.utils.log import log_on_rank_0

# What accelerate computes from `hidden_size` for a base model (768), for models without it
_BUCKET_SIZES = {
    "reduce_bucket_size": 589_824,
    "stage3_prefetch_bucket_size": 530_841,
    "stage3_param_persistence_threshold": 7_680,
}


def prepare_zero(
    accelerator: Accelerator,
    settings: TrainingSettings,
    model: Any,
    optimizer: Any,
) -> tuple[Any, DeepSpeedOptimizerWrapper]:
    """The engine and its optimizer. Raises UserError for a DeepSpeed config that no run can
    use."""
    plugin = accelerator.state.deepspeed_plugin
    config = plugin.deepspeed_config
    _refuse_unusable(config)
    _set_config(accelerator, settings, config)
    if not hasattr(getattr(model, "config", None), "hidden_size"):
        zero = config["zero_optimization"]
        zero.update(
            {name: size for name, size in _BUCKET_SIZES.items() if zero.get(name) == "auto"}
        )
    add_autocast(accelerator, model)
    precision = accelerator.mixed_precision
    if precision != "no":
        config[precision]["enabled"] = False  # an engine in fp32
    model, optimizer = accelerator.prepare(model, optimizer)
    if precision != "no":
        config[precision]["enabled"] = True  # accelerate reads the run's precision there
    engine = accelerator.deepspeed_engine_wrapped.engine
    if precision == "fp16":
        _add_loss_scaler(engine)
    if plugin.zero_stage > 1 and not settings.sync_each_batch:
        accelerator.deepspeed_engine_wrapped = ReduceOnce(engine)
    return model, optimizer


def _refuse_unusable(config: dict[str, Any]) -> None:
    zero, faults = config["zero_optimization"], []
    if "optimizer" in config or "scheduler" in config:
        faults.append('"optimizer" or "scheduler", which the settings choose: remove it')
    devices = [zero.get(name) or {} for name in ("offload_optimizer", "offload_param")]
    if any(device.get("device") == "nvme" for device in devices):
        faults.append("nvme, whose content no checkpoint would have: write cpu or none")
    if zero.get("stage") == 0:
        faults.append('"stage": 0: set it to 1, or launch with ddp.yaml')
    if faults:
        raise UserError(f"the DeepSpeed config has {', and '.join(faults)}")


def _set_config(
    accelerator: Accelerator,
    settings: TrainingSettings,
    config: dict[str, Any],
) -> None:
    """Writes the settings into the config, and says in one line which values it replaces."""
    accumulation = accelerator.gradient_accumulation_steps
    per_batch = accumulation * accelerator.num_processes
    # with `max_tokens_per_batch` some have more samples
    micro_batch = math.ceil(settings.global_batch_size / per_batch)
    values: dict[str, Any] = {
        "gradient_clipping": settings.max_grad_norm,
        "gradient_accumulation_steps": accumulation,
        "train_micro_batch_size_per_gpu": micro_batch,
        "train_batch_size": micro_batch * per_batch,
    }
    dtype = reduction_dtype(accelerator, settings)
    if dtype:
        values["communication_data_type"] = dtype
    replaced = [
        name for name in values if config.get(name, "auto") not in ("auto", values[name])
    ]
    if replaced:
        line = f"the settings replace {', '.join(replaced)} of the DeepSpeed config"
        log_on_rank_0(line)
    config.update(values)
    config["zero_allow_untested_optimizer"] = True  # those outside DeepSpeed's list
    # by default accelerate replaces any optimizer in host memory by DeepSpeed's Adam
    config.setdefault("zero_force_ds_cpu_optimizer", False)
    zero = config["zero_optimization"]
    if zero.get("stage") == 3:
        # DeepSpeed's adds the bias to a product that is rounded to 16 bits
        zero["memory_efficient_linear"] = accelerator.mixed_precision == "no"


class ReduceOnce(DeepSpeedEngineWrapper):
    """Makes ZeRO-2 and ZeRO-3 reduce gradients once per optimizer step, as DDP does, not after each
    micro-batch (DeepSpeed's pull request 7992). Until the last micro-batch each process accumulates
    unsharded gradients, 4 bytes per trained parameter. ZeRO-1 reduces once anyway."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._step = contextlib.ExitStack()
        require(engine, "coalesce_grad_reduction", "deepspeed")

    def backward(
        self, loss: torch.Tensor, sync_gradients: bool = True, **options: Any
    ) -> None:
        engine = self.engine
        if not sync_gradients and not engine.inside_no_sync_ctxt:
            self._step.enter_context(engine.coalesce_grad_reduction())
        engine.set_gradient_accumulation_boundary(sync_gradients)
        engine.backward(loss, **options)
        if sync_gradients:
            self._step.close()  # reduces
            # leaving the block has reset it
            engine.set_gradient_accumulation_boundary(True)
            engine.step()


def _add_loss_scaler(engine: Any) -> None:
    """Gives an engine in fp32 the loss scale of fp16: that of DeepSpeed's `torch_autocast` section
    (0.19.8) never lowers it."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler

    class LateRaise(DynamicLossScaler):
        """Raises the scale before a step's first loss. DeepSpeed 0.19.8 does so in the middle of a
        step, and divides that step's gradients by the new scale: they are halved."""

        was_stable = False

        def update_scale(self, overflow: bool) -> None:
            self.was_stable = not overflow
            if overflow:
                super().update_scale(True)

        def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
            if self.was_stable:
                self.was_stable = False
                super().update_scale(False)
            return super().scale_loss(loss)

    for name in ("loss_scaler", "dynamic_loss_scale"):
        require(engine.optimizer, name, "deepspeed")
    scaler: Any = LossScaler(engine.loss_scale())
    if engine.dynamic_loss_scale():
        scaler = LateRaise(dtype=torch.float16, **engine.dynamic_loss_scale_args())
        # `Steps` reports too many skipped steps
        scaler.raise_error_at_min_scale = False
    engine.optimizer.loss_scaler = scaler
    engine.optimizer.dynamic_loss_scale = scaler.dynamic
