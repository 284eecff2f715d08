"""Makes the accelerator, and verifies that its world is the one that was requested."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import logging
import math
import os
import shlex
import socket
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from toolkit.errors import UserError, first_line
from toolkit.launch import environment, failure_detector, precision, rendezvous
from toolkit.launch.environment import Place, launch_request, timeout_seconds
from toolkit.launch.exit_state import stop_with_parent
from toolkit.launch.interrupted import LAUNCHER_PID
from toolkit.launch.network import free_port
from toolkit.launch.nodes import set_global_ranks
from toolkit.launch.precision import AUTO
from toolkit.launch.relaunch import find_file, read_config
from toolkit.utils import collector
from toolkit.utils.compat import require
from toolkit.utils.extras import require_extra
from toolkit.utils.log import logger
from toolkit.utils.memory import read_cgroup
from toolkit.utils.versions import check_requirements, describe_differences

if TYPE_CHECKING:
    from accelerate import Accelerator

DEFAULT_DEEPSPEED_CONFIG = "ds_configs/zero2.json"
# Added to --ddp_timeout for torch: the failure detector acts first, and names the ranks that did not join.
_GROUP_GRACE_SECONDS = 60
_ACCUMULATION = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
# While GPUs connect, the failure detector sees no collective.
_HANG_SECONDS = 60
_NVIDIA = Path("/proc/driver/nvidia/gpus")  # a folder for each GPU, whether or not CUDA works


def make_accelerator(mixed_precision: str | None = None, **options: Any) -> Accelerator:
    """An `Accelerator` for the way this process was started, verified before any data is read.

    `mixed_precision`: no, bf16, fp16, auto (see `toolkit.launch.precision`) or None (accelerate's default).
    `options` go to `Accelerator`. Raises UserError if the world is not the one requested.
    """
    # otherwise this process would train on when our launcher is killed
    stop_with_parent(int(os.environ.get(LAUNCHER_PID, "-1")))
    set_global_ranks(os.environ)
    place = environment.set_torch_variables(os.environ)
    _check_devices(place)
    import torch  # after the environment is set: torch reads OMP_NUM_THREADS on import
    from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs

    on_cpu = _flag("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    _refuse_split_texts()
    _set_threads(place)
    if on_cpu:
        _report_unseen_gpus(place)
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # as DeepSpeed would detect, without its warning
    deepspeed = _use_deepspeed(place)
    device_type = "cpu" if on_cpu else str(torch.accelerator.current_accelerator())
    ranks = rendezvous.join_ranks(place, sys.argv[0], timeout_seconds("rendezvous_timeout"), device=device_type)
    failure_detector.start(ranks, timeout_seconds("peer_timeout", None if on_cpu else environment.GPU_PEER_TIMEOUT))
    if device_type == "cuda":
        if fault := precision.missing_kernels(place.local_rank % torch.cuda.device_count()):
            raise UserError(fault)
        if ranks:
            _refuse_shared_gpus(ranks, place)
    sharded = _flag("ACCELERATE_USE_FSDP")
    if sharded:
        _check_fsdp_config(place)
    timeout = timedelta(seconds=timeout_seconds("ddp_timeout") + _GROUP_GRACE_SECONDS)
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):  # of the groups that DeepSpeed makes
        setattr(torch.distributed.distributed_c10d, name, timeout)
    handlers = [
        InitProcessGroupKwargs(backend="gloo" if on_cpu and deepspeed else None, timeout=timeout),
        DistributedDataParallelKwargs(gradient_as_bucket_view=True),
    ]
    if on_cpu and deepspeed:
        # as DeepSpeed's launcher does; without it ZeRO-3 starts `numactl` at each reduction, to count devices
        os.environ.setdefault("LOCAL_SIZE", str(place.local_world_size))
        _skip_shared_memory_kernel()
    _quiet_libraries()
    by_rank = ranks.exchange(mixed_precision, timeout_seconds("ddp_timeout")) if ranks else [mixed_precision]
    # only rank 0 reads the precision of the checkpoint to resume
    setting, why = by_rank[0] if mixed_precision == AUTO else mixed_precision, ""
    if (mixed_precision := setting) == AUTO:
        device = None if on_cpu else place.local_rank % torch.accelerator.device_count()
        mixed_precision, why = precision.auto_precision(launch_config(), device)
    precision.refuse_other_precision(mixed_precision)
    timer = _report_hang(place, on_cpu)  # DeepSpeed connects GPUs before the first collective
    # without `cpu=True` each process would form a world of one; DeepSpeed chooses its own device
    try:
        if sharded:
            _set_sharded_type(on_cpu, timeout)
        ours = {"cpu": on_cpu and not deepspeed, "kwargs_handlers": handlers}
        accelerator = Accelerator(mixed_precision=mixed_precision, **ours, **options)
    except ValueError as error:
        if "mixed precision" in str(error).replace("_", " "):
            raise UserError(f"--mixed_precision {mixed_precision}: {error}: pass no, or bf16") from error
        if isinstance(error, json.JSONDecodeError) or "DeepSpeed config" in str(error):
            raise UserError(f"{os.environ.get('ACCELERATE_DEEPSPEED_CONFIG_FILE')}: {first_line(error)}") from error
        raise
    except NotImplementedError as error:
        if "NCCL_P2P_DISABLE" not in str(error):
            raise
        raise UserError(  # accelerate's launcher sets them, torchrun, deepspeed and srun do not
            "the driver of these RTX 40 cards is older than 550.40.07, and cannot copy between them: "
            "`export NCCL_P2P_DISABLE=1 NCCL_IB_DISABLE=1`, or update it"
        ) from error
    verify_world(accelerator, place)
    timer.cancel()
    if deepspeed and str(accelerator.distributed_type) != "DistributedType.DEEPSPEED":
        remedy = "leave out use_cpu: true" if _flag("ACCELERATE_USE_CPU") else "try `python -m deepspeed.env_report`"
        raise UserError(f"DeepSpeed was requested, but accelerate does not use it: {remedy}")
    if on_cpu and not deepspeed and accelerator.mixed_precision == "fp16":
        # otherwise accelerate computes in fp32, or shards in fp16, and does not scale the loss
        accelerator.native_amp, accelerator.scaler = True, torch.amp.GradScaler("cpu")
    remedy = f"Pass --mixed_precision no{'' if on_cpu else ' (or fp16)'}" if setting == AUTO else ""
    precisions = {"mixed precision": accelerator.mixed_precision}
    require_equal(accelerator, "--mixed_precision and the devices", precisions, remedy)
    if newer := check_requirements():
        line = f"newer than this toolkit was tested with: {', '.join(newer)}; if it fails, see docs/compatibility.md"
        log_on_main(accelerator, line, logging.WARNING)
    precision.choose_matmul_precision(accelerator)
    line = precision.emulated(accelerator)  # machines may differ
    for each in sorted({*ranks.exchange(line, timeout_seconds("ddp_timeout"))} if ranks else {line}):
        if each:
            log_on_main(accelerator, each)
    collector.after_imports()
    if setting == AUTO:
        line = f"mixed precision {mixed_precision}: {why} (--mixed_precision no, bf16 or fp16 for another)"
        log_on_main(accelerator, line)
    return accelerator


def _refuse_split_texts() -> None:
    """Raises UserError for an accelerate config in which several processes compute one text: ours take different ones,
    which sequence parallelism would mix."""
    sizes = {kind: os.environ.get(f"PARALLELISM_CONFIG_{kind.upper()}_SIZE", "1") for kind in ("tp", "cp", "sp")}
    kind = next((kind for kind, size in sizes.items() if size != "1"), "")
    if kind and _flag("ACCELERATE_USE_PARALLELISM_CONFIG"):
        why = f"parallelism_config_{kind}_size {sizes[kind]} in the accelerate config: no text is split here"
        raise UserError(f"{why}: remove it, and use ZeRO-3 or FSDP2 for a model that does not fit")


def _check_fsdp_config(place: Place) -> None:
    """Turns off FSDP's loading of weights in one process only, which leaves a new head without data in the others.
    Raises UserError for FSDP version 1, and for keys with which it would train otherwise or save no memory."""
    if os.environ.get("FSDP_VERSION", "1") != "2":
        raise UserError("FSDP version 1 is not supported: set fsdp_version: 2 in the config file")
    if _flag("FSDP_ACTIVATION_CHECKPOINTING"):  # accelerate 1.15: preserve_rng_state=False
        raise UserError(
            "fsdp_activation_checkpointing in the config file renames weights, and recomputes layers with another "
            "dropout than forward: set it to false, and pass --gradient_checkpointing true"
        )
    if os.environ.get("FSDP_IGNORED_MODULES"):
        raise UserError("fsdp_ignored_modules in the config file: their gradients would not be averaged: remove it")
    by_layer = "TRANSFORMER_BASED_WRAP"  # accelerate's default is one unit, gathered as a whole
    if (policy := os.environ.setdefault("FSDP_AUTO_WRAP_POLICY", by_layer)) != by_layer:
        raise UserError(f"fsdp_auto_wrap_policy {policy} in the config file: layers are sharded one by one: {by_layer}")
    if _flag("FSDP_CPU_RAM_EFFICIENT_LOADING"):
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
        if place.rank == 0:
            logger.info("fsdp_cpu_ram_efficient_loading is off: each process loads the weights")


def _set_sharded_type(on_cpu: bool, timeout: timedelta) -> None:
    """Accelerate looks at the FSDP plugin if the type is MULTI_GPU only. A process's first accelerator turns that
    into FSDP; the next one, of another fold, say, would ignore the plugin (accelerate 1.15). And on a CPU it would run
    DDP, though torch shards on a CPU mesh as well. Raises UserError for offloading there, which torch does not do."""
    from accelerate import DistributedType, PartialState

    state = PartialState(on_cpu, timeout=timeout)
    if on_cpu and state.num_processes > 1 and _flag("FSDP_OFFLOAD_PARAMS"):
        raise UserError("fsdp_offload_params: true in the config file, and there is no GPU: set it to false")
    if state.distributed_type == DistributedType.FSDP or (on_cpu and state.num_processes > 1):
        state.distributed_type = DistributedType.MULTI_GPU


def _report_hang(place: Place, on_cpu: bool) -> threading.Timer:
    """Logs on rank 0 that GPUs have not connected in time, unless the timer is cancelled."""
    line = (
        f"the first all-reduce has not finished in {_HANG_SECONDS} s: `export NCCL_DEBUG=INFO` shows why; try "
        "NCCL_P2P_DISABLE=1 (one machine) or NCCL_IB_DISABLE=1 (several)"
    )
    timer = threading.Timer(_HANG_SECONDS, logger.warning, (line,))
    timer.daemon = True
    if place.rank == 0 and place.world_size > 1 and not on_cpu:
        timer.start()
    return timer


def verify_world(accelerator: Accelerator, place: Place) -> None:
    """Raises UserError unless as many processes join an all-reduce as were requested and as the launcher announced."""
    import torch

    joined = int(accelerator.reduce(torch.ones(1, device=accelerator.device), reduction="sum").item())
    number, source = requested_processes(place)
    if number == joined == accelerator.num_processes:
        return
    count = f"{joined} joined (this one counts {accelerator.num_processes}, on {socket.gethostname()})"
    way = "`accelerate launch SCRIPT --config_file FILE` (file after the script)"
    fault = f"{source} asks for {number} processes, and {count}: nothing was read or trained"
    raise UserError(f"{fault}. Start with {way} or `torchrun --nproc_per_node {number}`")


def requested_processes(place: Place) -> tuple[int, str]:
    """(number of processes requested, by which file or launcher)."""
    if ours := launch_request():
        return int(ours["num_processes"]), str(ours["config_file"])
    # for MULTI_CPU `accelerate launch` silently starts one process, whatever the file requests
    config = launch_config() if place.world_size == 1 else None
    if config and "num_processes" in config:
        return int(config["num_processes"]), config["source"]
    return place.world_size, place.launcher


def launch_config() -> dict[str, Any] | None:
    """The config of the `accelerate launch` that started this process, or None."""
    if ours := launch_request():
        return read_config(Path(ours["config_file"]))
    words = environment.accelerate_launch_words(generations=3)
    return _parse_launch(words) if words else None


def _parse_launch(words: Sequence[str]) -> dict[str, Any] | None:
    """The config of `accelerate launch` with these arguments, parsed by accelerate: the file, the options that override
    it, and the `source` of num_processes; None if it cannot be parsed."""
    from accelerate.commands.config import config_args
    from accelerate.commands.launch import launch_command_parser

    with contextlib.suppress(SystemExit, ValueError, OSError):
        options = launch_command_parser().parse_args(words)
        # without a file `accelerate launch` silently uses the user's default one
        file = Path(options.config_file or config_args.default_config_file)
        config = {**read_config(file), "source": str(file)} if file.is_file() else {}
        if options.num_processes is not None:
            config |= {"num_processes": options.num_processes, "source": "accelerate launch --num_processes"}
        return config | ({"mixed_precision": options.mixed_precision} if options.mixed_precision else {})
    return None


# programs that start a script
_STARTERS = ("python", "mpi", "orterun", "prterun", "srun", "uv", "pixi")


def launch_info() -> dict[str, Any]:
    """For config.json: the launcher's config file, and the command line to start the same run again on this machine, in
    this folder."""
    ours = launch_request()
    words = ["python", *ours["argv"]] if ours else _command_words(tuple(sys.argv))
    return {"config_file": ours.get("config_file"), "command": shlex.join(words), "folder": str(Path.cwd())}


@functools.cache
def _command_words(argv: tuple[str, ...]) -> list[str]:
    """The command line of the outermost launcher of this script. Cached: Ctrl-C ends DeepSpeed's launcher before the
    run's last step is done."""
    words = ["python", *argv]
    with contextlib.suppress(psutil.Error):
        for process in [psutil.Process(), *psutil.Process().parents()[:4]]:
            line = process.cmdline()
            if argv[0] in line[1:] and Path(line[0]).name.lower().startswith(_STARTERS):  # not `timeout 60 python ...`
                words = line
    interpreter, script = Path(words[0]), Path(words[1])
    if interpreter.is_absolute() and script.parent == interpreter.parent:  # `accelerate`, say
        return [script.name, *words[2:]]
    return [interpreter.name, *words[1:]]


def _check_devices(place: Place) -> None:
    """Raises UserError for more processes than GPUs on this machine, before CUDA fails with a traceback."""
    import torch

    joined = rendezvous.current is not None  # for an earlier model; the variables are torch's now, not the scheduler's
    if joined or place.world_size == 1 or not torch.cuda.is_available() or _flag("ACCELERATE_USE_CPU"):
        return
    devices = torch.cuda.device_count()
    if devices == 1 and place.launcher in ("srun", "mpirun", "mpirun_rsh", "mpiexec"):
        os.environ["LOCAL_RANK"] = "0"  # the scheduler shows each process its own single GPU
    elif place.local_world_size > devices:
        total = devices * place.world_size // place.local_world_size
        options = {"torchrun": f"--nproc_per_node {devices}", "deepspeed": f"--num_gpus {devices}",
                   "srun": f"--ntasks-per-node {devices}", "mpirun": f"-np {total}"}  # fmt: skip
        raise UserError(
            f"{place.local_world_size} processes are started on {socket.gethostname()}, which has {devices} "
            f"GPU{'s' * (devices > 1)}: pass {options.get(place.launcher, f'--num_processes {total}')} "
            "(or set CUDA_VISIBLE_DEVICES)"
        )


def _refuse_shared_gpus(ranks: rendezvous.Rendezvous, place: Place) -> None:
    """Raises UserError for two processes on one GPU, which NCCL refuses with a traceback."""
    import torch

    device = place.local_rank % torch.cuda.device_count()
    mine = str(getattr(torch.cuda.get_device_properties(device), "uuid", f"{ranks.me.node}, {device}"))  # not in ROCm's
    seen: dict[str, int] = {}
    for rank, gpu in enumerate(ranks.exchange(mine, timeout_seconds("ddp_timeout"))):
        if (first := seen.setdefault(gpu, rank)) != rank:
            raise UserError(f"ranks {first} and {rank} have the same GPU ({gpu}): start one process for each GPU")


def _report_unseen_gpus(place: Place) -> None:
    """Logs that this machine has GPUs which torch does not see, and nothing requests CPUs."""
    gpus = len([*_NVIDIA.glob("*")])
    requested = _flag("ACCELERATE_USE_CPU") or "CUDA_VISIBLE_DEVICES" in os.environ
    if gpus and not requested and place.local_rank == 0:
        logger.warning(
            f"{socket.gethostname()} has NVIDIA GPUs ({gpus}), and torch sees none: this run computes on CPUs "
            "(`toolkit doctor` says why; CUDA_VISIBLE_DEVICES= before the command, if you want this)"
        )


def _use_deepspeed(place: Place) -> bool:
    """Whether this launch uses DeepSpeed. Under other launchers it sets the variables of `accelerate launch`, which the
    accelerators of a process's further models (`request_rerun`) read too."""
    file = os.environ.get("TOOLKIT_DEEPSPEED_CONFIG")
    by_accelerate = _flag("ACCELERATE_USE_DEEPSPEED")
    if not (by_accelerate or file or place.launcher == "deepspeed"):
        return False
    require_extra("this launch", "deepspeed")
    if _flag("ACCELERATE_USE_FSDP"):
        raise UserError(f"--deepspeed_config {file} contradicts the accelerate config, which asks for FSDP: use one")
    if file or not by_accelerate:
        path = find_file(file or DEFAULT_DEEPSPEED_CONFIG, sys.argv[0], "ds_configs")
        os.environ |= {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path)}
    if os.environ.get(_ACCUMULATION) == "auto":  # in an accelerate config; accelerate itself reads a number here
        del os.environ[_ACCUMULATION]
    single = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in single.items():
        os.environ.setdefault(name, str(value))
    return True


def _flag(name: str) -> bool:
    """Whether a variable has a true value. It becomes `true`, the only one that accelerate accepts everywhere."""
    is_true = os.environ.get(name, "").lower() in ("true", "1", "yes", "y", "on", "t")
    if is_true:
        os.environ[name] = "true"
    return is_true


def _set_threads(place: Place) -> None:
    """Sets the threads, on GPUs too: an optimizer in host memory would use the one core of its process."""
    import torch

    threads = environment.user_threads(os.environ) or _cores_per_process(place)
    os.environ[environment.THREADS] = str(threads)
    torch.set_num_threads(threads)


def _cores_per_process(place: Place) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # of a container: microseconds of all cores per period, or no limit (max, -1)
    limit = read_cgroup("cpu.max") or " ".join(read_cgroup(f"cpu/cpu.cfs_{name}_us") for name in ("quota", "period"))
    quota, _, period = limit.partition(" ")
    if quota.isdigit():
        cores = min(cores, math.ceil(int(quota) / int(period)))
    per_task = os.environ.get("SLURM_CPUS_PER_TASK", "") if place.launcher == "srun" else ""
    # Slurm may have bound each task to its cores already
    return min(cores, int(per_task)) if per_task.isdigit() else max(1, cores // place.local_world_size)


def _skip_shared_memory_kernel() -> None:
    """On a CPU DeepSpeed compiles a C++ kernel at first use, for its inference all-reduce only: half a minute, and a
    killed build leaves a lock on which later runs hang."""
    # import_module, because the attribute deepspeed.comm.torch is torch itself
    backend = importlib.import_module("deepspeed.comm.torch")
    require(backend, "build_shm_op", "deepspeed")
    backend.build_shm_op = lambda: None  # type: ignore[attr-defined]


def log_on_main(accelerator: Accelerator, line: str, level: int = logging.INFO) -> None:
    """Logs a line from the main process."""
    if accelerator.is_main_process:
        logger.log(level, line)


def wait_for_all(what: str) -> None:
    """A barrier through the store, without a timeout: a collective would time out while one machine works on `what`."""
    if rendezvous.current is not None:
        rendezvous.current.exchange(None, math.inf, what)


def require_equal(accelerator: Accelerator, what: str, values: Mapping[str, Any], remedy: str = "") -> None:
    """Raises UserError on every rank if a value differs between ranks, with the values and their hosts."""
    if accelerator.num_processes == 1:
        return
    from accelerate.utils import gather_object

    host = socket.gethostname() if rendezvous.list_machines() else f"rank {accelerator.process_index}"
    of_hosts = gather_object([(host, dict(values))])
    if differences := describe_differences(of_hosts):
        remedy = remedy or "Give every machine the same files and settings"
        raise UserError(f"{what} are not the same everywhere: {differences}. {remedy}; nothing was trained")


def _quiet_libraries() -> None:
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # or every rank logs its start
    warnings.filterwarnings("ignore", message=".*OMP_NUM_THREADS.*")
    warnings.filterwarnings("ignore", message=r".*torch\.distributed\.\w+. is deprecated.*", category=FutureWarning)
    # accelerate 1.15 has no other name for it
    warnings.filterwarnings("ignore", message=".*broadcast_buffers. is deprecated.*", category=FutureWarning)
