"""Makes the accelerator: the ranks meet, form a process group, and verify that their world is the
one that was requested."""

from __future__ import annotations

import logging
import os
import signal
import socket
import warnings
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from toolkit.errors import UserError, first_line
from toolkit.launch import environment, precision, ranks, strategy
from toolkit.launch.environment import Place, timeout_seconds
from toolkit.launch.failure import exit_state
from toolkit.launch.meet import device_type
from toolkit.launch.ranks import World
from toolkit.launch.strategy import is_set
from toolkit.utils import collector
from toolkit.utils.children import stop_with_parent

if TYPE_CHECKING:
    from accelerate import Accelerator


def make_accelerator(mixed_precision: str | None = None) -> Accelerator:
    """An `Accelerator` for the way this process was started, verified before any data is read.

    `mixed_precision`: no, bf16, fp16, auto (see `toolkit.launch.precision`) or None (accelerate's
    default). Raises UserError if the world is not the one requested.
    """
    place = environment.set_torch_variables(os.environ)
    _stop_with_launcher(place)
    _set_threads(place)
    device = _choose_device(place)
    uses_deepspeed = strategy.set_deepspeed_variables(place, device)
    strategy.refuse_unsupported()
    strategy.set_fsdp_variables()
    world = ranks.join(place, device)
    _start_process_group(world, device, uses_deepspeed)
    verify_world(place)
    if mixed_precision == "auto":
        mixed_precision = precision.auto_precision(device)
    # rank 0's device decides
    mixed_precision = world.gather(mixed_precision, "the precision")[0]
    accelerator = _create(mixed_precision, device, uses_deepspeed)
    precision.choose_matmul_precision(accelerator)
    collector.after_imports()
    return accelerator


# --- this process and its device


def _stop_with_launcher(place: Place) -> None:
    """Otherwise this process would train on when its launcher is killed. A checkpoint takes all
    machines: of several, the others miss this one's heartbeat (`ranks`)."""
    if place.launcher in ("python", "environment"):
        return
    if place.launcher == "toolkit" or place.is_local:
        stop_with_parent()
    else:
        stop_with_parent(signal.SIGKILL)


def _set_threads(place: Place) -> None:
    """On GPUs too: an optimizer in host memory would use the one core of its process.

    torch reads the variable when it is imported.
    """
    threads = environment.user_threads(os.environ) or _cores_per_process(place)
    os.environ[environment.THREADS] = str(threads)
    import torch

    torch.set_num_threads(threads)


def _cores_per_process(place: Place) -> int:
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    share = cores // place.local_world_size
    if place.launcher == "srun":  # may have bound each task to its cores already
        share = min(cores, int(os.environ.get("SLURM_CPUS_PER_TASK", share)))
    return max(1, share)


def _choose_device(place: Place) -> str:
    """The type of this process's device. Raises UserError for more processes than GPUs here."""
    import torch

    device = "cpu" if is_set("ACCELERATE_USE_CPU") else device_type()
    if device == "cpu":
        # as DeepSpeed would find with a warning
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # for a further model the variables are torch's, no longer the scheduler's
    if exit_state.world is None and device == "cuda" and place.world_size > 1:
        _choose_gpu(place, torch.cuda.device_count())
    return device


def _choose_gpu(place: Place, devices: int) -> None:
    """The GPU of the process's local rank, or the only one that a scheduler shows it."""
    if devices == 1 and place.launcher in ("srun", "mpirun"):
        os.environ["LOCAL_RANK"] = "0"
    elif place.local_world_size > devices:
        raise UserError(
            f"{place.local_world_size} processes are started on {socket.gethostname()}, where "
            f"torch sees {devices} GPUs: start at most one for each (--num_processes of all "
            "machines, --nproc_per_node, -np, --ntasks), or set CUDA_VISIBLE_DEVICES"
        )


# --- the process group


def _start_process_group(world: World, device: str, uses_deepspeed: bool) -> None:
    """Forms the group of all ranks, and accelerate's state of it. Without `cpu=True` each process
    would form a world of one; DeepSpeed chooses its own device, but not gloo."""
    import torch
    from accelerate import PartialState

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # or every rank logs its start
    deprecated = r".*(torch\.distributed\.\w+|broadcast_buffers). is deprecated.*"
    warnings.filterwarnings("ignore", message=deprecated, category=FutureWarning)
    options: dict[str, Any] = {
        "store": world.store,
        "rank": world.place.rank,
        "world_size": world.place.world_size,
        "timeout": timedelta(seconds=timeout_seconds("ddp_timeout")),
    }
    on_cpu = device == "cpu"
    if uses_deepspeed:  # it accepts no store, and uses the group that exists
        if not torch.distributed.is_initialized():
            backend = torch.distributed.get_default_backend_for_device(device)
            torch.distributed.init_process_group(backend, **options)
        options = {"backend": "gloo"} if on_cpu else {}
    state = PartialState(cpu=on_cpu and not uses_deepspeed, **options)
    if is_set("ACCELERATE_USE_FSDP"):
        _set_sharded_type(state, on_cpu)


def _set_sharded_type(state: Any, on_cpu: bool) -> None:
    """Accelerate looks at the FSDP plugin if the type is MULTI_GPU only. A process's first
    accelerator turns that into FSDP; the next one, of another fold, say, would ignore the plugin
    (accelerate 1.15). And on a CPU it would run DDP, though torch shards on a CPU mesh as well.
    Raises UserError for offloading there, which torch does not do."""
    from accelerate import DistributedType

    several_on_cpu = on_cpu and state.num_processes > 1
    if several_on_cpu and is_set("FSDP_OFFLOAD_PARAMS"):
        raise UserError(
            "fsdp_offload_params: true in the config file, and there is no GPU: set it to false"
        )
    if state.distributed_type == DistributedType.FSDP or several_on_cpu:
        state.distributed_type = DistributedType.MULTI_GPU


def verify_world(place: Place) -> None:
    """Raises UserError unless as many processes join an all-reduce as were requested and as the
    launcher announced."""
    import torch
    from accelerate import PartialState

    state = PartialState()
    joined = torch.ones(1, device=state.device)
    if torch.distributed.is_initialized():
        # the devices' first contact: here an error comes before hours of tokenizing
        torch.distributed.all_reduce(joined)
    count = min(int(joined), state.num_processes)
    number, source = strategy.requested_processes(place)
    if count != number:
        raise UserError(
            f"{source} asks for {number} processes, and {count} joined: nothing was read or "
            "trained. Start with `accelerate launch SCRIPT --config_file FILE` (file after the "
            f"script) or `torchrun --nproc_per_node {number}`"
        )


# --- the accelerator


def _create(mixed_precision: str | None, device: str, uses_deepspeed: bool) -> Accelerator:
    import torch
    from accelerate import DistributedDataParallelKwargs

    from toolkit.launch.accelerator import Accelerator

    on_cpu = device == "cpu" and not uses_deepspeed
    handlers = [DistributedDataParallelKwargs(gradient_as_bucket_view=True)]
    try:
        accelerator = Accelerator(
            mixed_precision=mixed_precision, cpu=on_cpu, kwargs_handlers=handlers
        )
    except ValueError as error:  # accelerate's, of its settings
        setting = f"--mixed_precision {mixed_precision}"
        where = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", setting)
        raise UserError(f"{where}: {first_line(error)}") from error
    _check_precision(accelerator, mixed_precision)
    if on_cpu and accelerator.mixed_precision == "fp16":
        # otherwise accelerate computes in fp32, or shards in fp16, and does not scale the loss
        accelerator.native_amp, accelerator.scaler = True, torch.amp.GradScaler("cpu")
    return accelerator


def _check_precision(accelerator: Accelerator, mixed_precision: str | None) -> None:
    """Raises UserError if it is not what was requested."""
    actual = accelerator.mixed_precision
    if actual not in ("no", "bf16", "fp16") or mixed_precision not in (None, actual):
        file = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "the accelerate config")
        raise UserError(
            f"--mixed_precision {mixed_precision}: {file} enables {actual}: "
            'write "enabled": "auto" there, or make them agree (no, bf16 or fp16)'
        )
