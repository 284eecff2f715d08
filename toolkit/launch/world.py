"""Makes the accelerator: the ranks meet, form a process group, and verify that their world is the
one that was requested."""

from __future__ import annotations

import atexit
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
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from toolkit.errors import UserError, first_line, printable
from toolkit.launch import environment, network, precision
from toolkit.launch.environment import MARKER, Place, launch_request, timeout_seconds
from toolkit.launch.exit_state import exit_state, stop_with_parent
from toolkit.launch.failure import exit_with
from toolkit.launch.heartbeat import Board, Failure
from toolkit.launch.machines import name_machine, wrong_first_machine
from toolkit.launch.meet import Hello, meet, open_store
from toolkit.launch.options import DEEPSPEED_CONFIG, find_file, read_config
from toolkit.launch.precision import AUTO
from toolkit.utils import collector
from toolkit.utils.compat import require
from toolkit.utils.extras import require_extra
from toolkit.utils.log import logger
from toolkit.utils.memory import read_cgroup
from toolkit.utils.versions import (
    check_requirements,
    comparable_versions,
    describe_differences,
)

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from torch.distributed import Store

DEFAULT_DEEPSPEED_CONFIG = "ds_configs/zero2.json"
_ACCUMULATION = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
_NVIDIA = Path("/proc/driver/nvidia/gpus")  # a folder for each GPU, whether or not CUDA works
_LOG_SECONDS = 60.0


@dataclass
class World:
    """The processes of this run."""

    machines: list[tuple[str, list[int]]]
    """(host, its ranks), in order."""
    stores: tuple[Any, ...] = ()
    """Kept alive: this process may serve one."""
    barriers: int = 0
    """How often `wait_for_all` was called."""


# A global, as torch's default process group is: a second accelerator uses it.
current: World | None = None


def make_accelerator(mixed_precision: str | None = None, **options: Any) -> Accelerator:
    """An `Accelerator` for the way this process was started, verified before any data is read.

    `mixed_precision`: no, bf16, fp16, auto (see `toolkit.launch.precision`) or None (accelerate's
    default). `options` go to `Accelerator`. Raises UserError if the world is not the one requested.
    """
    place = environment.set_torch_variables(os.environ)
    _stop_with_launcher(place)
    _set_threads(place)
    device = _choose_device(place)
    uses_deepspeed = _use_deepspeed(place, device)
    _check_parallelism()
    _check_fsdp_config(place)
    _join_ranks(place, device)
    _check_kernels(place, device)
    _start_process_group(device, uses_deepspeed)
    verify_world(place)
    chosen, why = _choose_precision(mixed_precision, place, device)
    accelerator = _create(chosen, device, uses_deepspeed, options)
    _check_agreement(accelerator, mixed_precision)
    precision.choose_matmul_precision(accelerator)
    _log_precision(accelerator, mixed_precision, why)
    collector.after_imports()
    return accelerator


# --- this process and its device


def _stop_with_launcher(place: Place) -> None:
    """Otherwise this process would train on when its launcher is killed."""
    if MARKER in os.environ or place.launcher not in ("python", "environment"):
        stop_with_parent()


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
    # of a container: microseconds of all cores per period, or no limit (max, -1)
    limit = read_cgroup("cpu.max")
    if not limit:
        names = ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")
        limit = " ".join(read_cgroup(name) for name in names)
    quota, _, period = limit.partition(" ")
    if quota.isdigit():
        cores = min(cores, math.ceil(int(quota) / int(period)))
    per_task = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if place.launcher == "srun" and per_task.isdigit():
        return min(cores, int(per_task))  # Slurm may have bound each task to its cores already
    return max(1, cores // place.local_world_size)


def _choose_device(place: Place) -> str:
    """The type of this process's device. Raises UserError for more processes than GPUs here."""
    import torch

    accelerator = torch.accelerator.current_accelerator()
    if _flag("ACCELERATE_USE_CPU") or not torch.accelerator.is_available() or accelerator is None:
        _report_unseen_gpus(place)
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # as DeepSpeed would find with a warning
        return "cpu"
    # for a further model the variables are torch's, no longer the scheduler's
    if current is None and accelerator.type == "cuda" and place.world_size > 1:
        _check_number_of_gpus(place, torch.cuda.device_count())
    return accelerator.type


def _check_number_of_gpus(place: Place, devices: int) -> None:
    if devices == 1 and place.launcher in ("srun", "mpirun", "mpirun_rsh", "mpiexec"):
        os.environ["LOCAL_RANK"] = "0"  # the scheduler shows each process its own single GPU
    elif place.local_world_size > devices:
        total = devices * place.world_size // place.local_world_size
        options = {"torchrun": f"--nproc_per_node {devices}", "deepspeed": f"--num_gpus {devices}",
                   "srun": f"--ntasks-per-node {devices}", "mpirun": f"-np {total}"}  # fmt: skip
        host, remedy = socket.gethostname(), options.get(place.launcher, f"--num_processes {total}")
        raise UserError(
            f"{place.local_world_size} processes are started on {host}, which has {devices} "
            f"GPU{'s' * (devices > 1)}: pass {remedy} (or set CUDA_VISIBLE_DEVICES)"
        )


def _report_unseen_gpus(place: Place) -> None:
    """Logs that this machine has GPUs which torch does not see, and nothing requests CPUs."""
    gpus = len([*_NVIDIA.glob("*")])
    requested = _flag("ACCELERATE_USE_CPU") or "CUDA_VISIBLE_DEVICES" in os.environ
    if gpus and not requested and place.local_rank == 0:
        host = socket.gethostname()
        logger.warning(
            f"{host} has NVIDIA GPUs ({gpus}), and torch sees none: this run computes on CPUs "
            "(`toolkit doctor` says why; CUDA_VISIBLE_DEVICES= before the command, if you want so)"
        )


def _check_kernels(place: Place, device: str) -> None:
    import torch

    if device == "cuda":
        fault = precision.missing_kernels(place.local_rank % torch.cuda.device_count())
        if fault:
            raise UserError(fault)


# --- what accelerate's config file asks for


def _flag(name: str) -> bool:
    """Whether a variable has a true value. It becomes `true`, which accelerate accepts always."""
    is_true = os.environ.get(name, "").lower() in ("true", "1", "yes", "y", "on", "t")
    if is_true:
        os.environ[name] = "true"
    return is_true


def _use_deepspeed(place: Place, device: str) -> bool:
    """Whether this launch uses DeepSpeed. Under other launchers it sets the variables of
    `accelerate launch`, which the accelerators of further models (`request_rerun`) read too."""
    file = os.environ.get(DEEPSPEED_CONFIG)
    by_accelerate = _flag("ACCELERATE_USE_DEEPSPEED")
    if not (by_accelerate or file or place.launcher == "deepspeed"):
        return False
    require_extra("this launch", "deepspeed")
    if _flag("ACCELERATE_USE_FSDP"):
        why = f"--deepspeed_config {file} contradicts the accelerate config, which asks for FSDP"
        raise UserError(f"{why}: use one")
    if file or not by_accelerate:
        path = find_file(file or DEFAULT_DEEPSPEED_CONFIG, sys.argv[0], "ds_configs")
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(path)
    if os.environ.get(_ACCUMULATION) == "auto":  # in its config; accelerate reads a number here
        del os.environ[_ACCUMULATION]
    alone = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": network.LOOPBACK}
    for name, value in {**alone, "MASTER_PORT": network.free_port()}.items():
        os.environ.setdefault(name, str(value))
    if device == "cpu":
        # as its launcher does; without it ZeRO-3 starts `numactl` at each reduction
        os.environ.setdefault("LOCAL_SIZE", str(place.local_world_size))
        _skip_shared_memory_kernel()
    return True


def _skip_shared_memory_kernel() -> None:
    """On a CPU DeepSpeed compiles a C++ kernel at first use, for its inference all-reduce only:
    half a minute, and a killed build leaves a lock on which later runs hang."""
    # import_module, because the attribute deepspeed.comm.torch is torch itself
    backend = importlib.import_module("deepspeed.comm.torch")
    require(backend, "build_shm_op", "deepspeed")
    backend.build_shm_op = lambda: None  # type: ignore[attr-defined]


def _check_parallelism() -> None:
    """Raises UserError for an accelerate config in which several processes compute one text: ours
    take different ones, which sequence parallelism would mix."""
    for kind in ("tp", "cp", "sp"):
        size = os.environ.get(f"PARALLELISM_CONFIG_{kind.upper()}_SIZE", "1")
        if size != "1" and _flag("ACCELERATE_USE_PARALLELISM_CONFIG"):
            why = f"parallelism_config_{kind}_size {size} in the accelerate config"
            remedy = "remove it, and use ZeRO-3 or FSDP2 for a model that does not fit"
            raise UserError(f"{why}: no text is split here: {remedy}")


def _check_fsdp_config(place: Place) -> None:
    """Turns off FSDP's loading of weights in one process only, which leaves a new head without data
    in the others. Raises UserError for FSDP version 1, and for keys with which it would train
    otherwise or save no memory."""
    if not _flag("ACCELERATE_USE_FSDP"):
        return
    if os.environ.get("FSDP_VERSION", "1") != "2":
        raise UserError("FSDP version 1 is not supported: set fsdp_version: 2 in the config file")
    if _flag("FSDP_ACTIVATION_CHECKPOINTING"):  # accelerate 1.15: preserve_rng_state=False
        raise UserError(
            "fsdp_activation_checkpointing in the config file renames weights, and recomputes "
            "layers with other dropout: set it to false, and pass --gradient_checkpointing true"
        )
    if os.environ.get("FSDP_IGNORED_MODULES"):
        why = "fsdp_ignored_modules in the config file: their gradients would not be averaged"
        raise UserError(f"{why}: remove it")
    by_layer = "TRANSFORMER_BASED_WRAP"  # accelerate's default is one unit, gathered as a whole
    policy = os.environ.setdefault("FSDP_AUTO_WRAP_POLICY", by_layer)
    if policy != by_layer:
        why = f"fsdp_auto_wrap_policy {policy} in the config file"
        raise UserError(f"{why}: layers are sharded one by one: {by_layer}")
    if _flag("FSDP_CPU_RAM_EFFICIENT_LOADING"):
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
        if place.rank == 0:
            logger.info("fsdp_cpu_ram_efficient_loading is off: each process loads the weights")


def launch_config() -> dict[str, Any] | None:
    """The config of the `accelerate launch` that started this process, or None."""
    ours = launch_request()
    if ours:
        return read_config(Path(ours["config_file"]))
    words = environment.accelerate_launch_words()
    return _parse_launch(words) if words else None


def _parse_launch(words: Sequence[str]) -> dict[str, Any] | None:
    """The config of `accelerate launch` with these arguments: the file, the options that override
    it, and the `source` of num_processes; None if accelerate cannot parse them."""
    from accelerate.commands.config import config_args
    from accelerate.commands.launch import launch_command_parser

    with contextlib.suppress(SystemExit, ValueError, OSError):
        options = launch_command_parser().parse_args(words)
        # without a file `accelerate launch` silently uses the user's default one
        file = Path(options.config_file or config_args.default_config_file)
        config = {**read_config(file), "source": str(file)} if file.is_file() else {}
        if options.num_processes is not None:
            source = "accelerate launch --num_processes"
            config |= {"num_processes": options.num_processes, "source": source}
        if options.mixed_precision:
            config["mixed_precision"] = options.mixed_precision
        return config
    return None


# --- the ranks


def _join_ranks(place: Place, device: str) -> None:
    """Under our launcher the machines have met already; under others the ranks meet here."""
    global current
    if current is not None or place.world_size == 1:
        return
    hosts = launch_request().get("hosts")
    if hosts:
        each = place.local_world_size
        ranks = [list(range(first, first + each)) for first in range(0, place.world_size, each)]
        current = World(list(zip(hosts, ranks, strict=True)))
    else:
        current = _meet_under_other_launcher(place, device)


def _meet_under_other_launcher(place: Place, device: str) -> World:
    by_launcher, address = environment.launcher_serves_store(), os.environ["MASTER_ADDR"]
    if not by_launcher and network.is_this_machine(address):
        address = os.environ["MASTER_ADDR"] = network.address_to_serve(address, place.is_local)
    seconds, port = timeout_seconds("rendezvous_timeout"), int(os.environ["MASTER_PORT"])
    who = f"rank {place.rank} on {socket.gethostname()}"
    serves = place.rank == 0 and not by_launcher
    if serves and not network.is_this_machine(address):
        raise UserError(wrong_first_machine(address))
    server = open_store(address, port, serves, seconds, who)
    store = _prefixed(server, f"toolkit/attempt {environment.attempt()}")
    facts = {**comparable_versions(sys.argv[0]), "device": device, "world size": place.world_size}
    source = network.source_address_for(address) or ""
    remedies = {
        "missing": "start them too, with the same number of processes",
        "twin": "give each its own RANK (and NODE_RANK to each machine)",
    }
    names = [f"rank {rank}" for rank in range(place.world_size)]
    hellos = meet(store, Hello(place.rank, address=source, facts=facts), names, seconds, remedies)
    nodes: dict[str, list[int]] = {}
    for hello in hellos:
        nodes.setdefault(hello.node, []).append(hello.number)
    network.choose_interface(os.environ, _node_address(hellos, place.rank, address), device)
    machines = [(printable(hellos[ranks[0]].host, 100), ranks) for ranks in nodes.values()]
    if len(machines) > 1:
        _watch_other_machines(_prefixed(store, "heartbeats"), machines, place.rank)
    own = _serve_again(store, place, address) if by_launcher and environment.attempt() else None
    return World(machines, (server, own))


def _prefixed(store: Store, prefix: str) -> Store:
    from torch.distributed import PrefixStore

    return PrefixStore(prefix, store)


def _node_address(hellos: Sequence[Hello], rank: int, first: str) -> str:
    """This node's address on the way to the others; the loopback address if there is one node."""
    others = [hello.address for hello in hellos if hello.node != hellos[rank].node]
    if not others:
        return network.LOOPBACK
    for address in (first, *others):
        route = network.source_address_for(address) if address else None
        if route and not network.is_loopback(route):
            return route
    return ""


def _serve_again(store: Store, place: Place, address: str) -> Store | None:
    """After a restart torch would read addresses of dead processes from the launcher's store
    (pytorch#167288): rank 0 serves another one."""
    own = None
    if place.rank == 0:
        own = network.serve_store(network.address_to_serve(address, place.is_local), 0)
        store.set("port", str(own.port))
    os.environ["MASTER_PORT"] = store.get("port").decode()
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    return own


def _watch_other_machines(store: Store, machines: list[tuple[str, list[int]]], rank: int) -> None:
    """The first rank of each machine watches the other machines, and its launcher."""
    firsts = [ranks[0] for _, ranks in machines]
    if rank not in firsts:
        return
    names = [name_machine(*machine) for machine in machines]
    me, timeout = firsts.index(rank), timeout_seconds("peer_timeout")
    board = exit_state.board = Board(store, names, me, timeout, exit_with)
    atexit.register(board.finish)
    watch = functools.partial(_watch_parent, board, names[me])
    threading.Thread(target=watch, daemon=True, name="launcher").start()


def _watch_parent(board: Board, name: str) -> None:
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(1.0)
    failure = Failure(f"error: the launcher on {name} was killed", permanent=True)
    exit_with(board.publish(failure))


def _start_process_group(device: str, uses_deepspeed: bool) -> None:
    """Without `cpu=True` each process would form a world of one; DeepSpeed chooses its own device,
    but not gloo."""
    import torch
    from accelerate import PartialState

    timeout = timedelta(seconds=timeout_seconds("ddp_timeout"))
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):  # of the groups DeepSpeed makes
        setattr(torch.distributed.distributed_c10d, name, timeout)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # or every rank logs its start
    warnings.filterwarnings("ignore", message=".*OMP_NUM_THREADS.*")
    deprecated = r".*(torch\.distributed\.\w+|broadcast_buffers). is deprecated.*"
    warnings.filterwarnings("ignore", message=deprecated, category=FutureWarning)
    on_cpu = device == "cpu"
    backend = {"backend": "gloo"} if on_cpu and uses_deepspeed else {}
    try:
        state = PartialState(on_cpu and not uses_deepspeed, timeout=timeout, **backend)
    except NotImplementedError as error:
        if "NCCL_P2P_DISABLE" not in str(error):
            raise
        raise UserError(  # accelerate's launcher sets them, torchrun, deepspeed and srun do not
            "the driver of these RTX 40 cards is older than 550.40.07, and cannot copy between "
            "them: `export NCCL_P2P_DISABLE=1 NCCL_IB_DISABLE=1`, or update it"
        ) from error
    if _flag("ACCELERATE_USE_FSDP"):
        _set_sharded_type(state, on_cpu)


def _set_sharded_type(state: Any, on_cpu: bool) -> None:
    """Accelerate looks at the FSDP plugin if the type is MULTI_GPU only. A process's first
    accelerator turns that into FSDP; the next one, of another fold, say, would ignore the plugin
    (accelerate 1.15). And on a CPU it would run DDP, though torch shards on a CPU mesh as well.
    Raises UserError for offloading there, which torch does not do."""
    from accelerate import DistributedType

    several_on_cpu = on_cpu and state.num_processes > 1
    if several_on_cpu and _flag("FSDP_OFFLOAD_PARAMS"):
        remedy = "there is no GPU: set it to false"
        raise UserError(f"fsdp_offload_params: true in the config file, and {remedy}")
    if state.distributed_type == DistributedType.FSDP or several_on_cpu:
        state.distributed_type = DistributedType.MULTI_GPU


def verify_world(place: Place) -> None:
    """Raises UserError unless as many processes join an all-reduce as were requested and as the
    launcher announced."""
    import torch
    from accelerate import PartialState

    state, joined = PartialState(), 1
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        ones: torch.Tensor = torch.ones(1, device=state.device)
        torch.distributed.all_reduce(ones)
        joined = int(ones.item())
    number, source = requested_processes(place)
    if number == joined == state.num_processes:
        return
    host = socket.gethostname()
    count = f"{joined} joined (this one counts {state.num_processes}, on {host})"
    fault = f"{source} asks for {number} processes, and {count}: nothing was read or trained"
    way = "`accelerate launch SCRIPT --config_file FILE` (file after the script)"
    raise UserError(f"{fault}. Start with {way} or `torchrun --nproc_per_node {number}`")


def requested_processes(place: Place) -> tuple[int, str]:
    """(number of processes requested, by which file or launcher)."""
    ours = launch_request()
    if ours:
        return int(ours["num_processes"]), str(ours["config_file"])
    # for MULTI_CPU `accelerate launch` silently starts one process, whatever the file requests
    config = launch_config() if place.world_size == 1 else None
    if config and "num_processes" in config:
        return int(config["num_processes"]), config["source"]
    return place.world_size, place.launcher


# --- the accelerator


def _choose_precision(setting: str | None, place: Place, device: str) -> tuple[str | None, str]:
    """(the precision, why). `auto` is what rank 0 says, which alone reads the checkpoint to resume;
    if it says `auto`, too, each decides by its own device."""
    import torch
    from accelerate.utils import broadcast_object_list

    why, settings = "", [setting]
    if place.world_size > 1:
        broadcast_object_list(settings)
    if setting == AUTO:
        setting = settings[0]
    if setting == AUTO:
        index = None
        if device != "cpu":
            index = place.local_rank % torch.accelerator.device_count()
        setting, why = precision.auto_precision(launch_config(), index)
    precision.refuse_other_precision(setting)
    return setting, why


def _create(
    mixed_precision: str | None, device: str, uses_deepspeed: bool, options: Mapping[str, Any]
) -> Accelerator:
    import torch
    from accelerate import Accelerator, DistributedDataParallelKwargs

    on_cpu = device == "cpu" and not uses_deepspeed
    handlers = [DistributedDataParallelKwargs(gradient_as_bucket_view=True)]
    try:
        accelerator = Accelerator(
            mixed_precision=mixed_precision, cpu=on_cpu, kwargs_handlers=handlers, **options
        )
    except ValueError as error:
        if "mixed precision" in str(error).replace("_", " "):
            remedy = "pass no, or bf16"
            raise UserError(f"--mixed_precision {mixed_precision}: {error}: {remedy}") from error
        if isinstance(error, json.JSONDecodeError) or "DeepSpeed config" in str(error):
            file = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
            raise UserError(f"{file}: {first_line(error)}") from error
        raise
    if uses_deepspeed and str(accelerator.distributed_type) != "DistributedType.DEEPSPEED":
        remedy = "try `python -m deepspeed.env_report`"
        if _flag("ACCELERATE_USE_CPU"):
            remedy = "leave out use_cpu: true"
        raise UserError(f"DeepSpeed was requested, but accelerate does not use it: {remedy}")
    if on_cpu and accelerator.mixed_precision == "fp16":
        # otherwise accelerate computes in fp32, or shards in fp16, and does not scale the loss
        accelerator.native_amp, accelerator.scaler = True, torch.amp.GradScaler("cpu")
    return accelerator


def _check_agreement(accelerator: Accelerator, setting: str | None) -> None:
    remedy = ""
    if setting == AUTO:
        remedy = f"Pass --mixed_precision {'no' if accelerator.device.type == 'cpu' else 'fp16'}"
    precisions = {"mixed precision": accelerator.mixed_precision}
    require_equal(accelerator, "--mixed_precision and the devices", precisions, remedy)
    newer = check_requirements()
    if newer:
        why = f"newer than this toolkit was tested with: {', '.join(newer)}"
        line = f"{why}; if it fails, see docs/compatibility.md"
        log_on_main(accelerator, line, logging.WARNING)


def _log_precision(accelerator: Accelerator, setting: str | None, why: str) -> None:
    from accelerate.utils import gather_object

    emulated = set(gather_object([precision.emulated(accelerator)]))  # machines may differ
    for line in sorted(emulated - {""}):
        log_on_main(accelerator, line)
    if setting == AUTO:
        chosen = accelerator.mixed_precision
        others = "--mixed_precision no, bf16 or fp16 for another"
        log_on_main(accelerator, f"mixed precision {chosen}: {why} ({others})")


# --- for the rest of the package


def log_on_main(accelerator: Accelerator, line: str, level: int = logging.INFO) -> None:
    """Logs a line from the main process."""
    if accelerator.is_main_process:
        logger.log(level, line)


def list_machines() -> list[str]:
    """`hostA (ranks 0, 1)` for each machine; empty if there is one."""
    machines = current.machines if current else []
    return [name_machine(*machine) for machine in machines] if len(machines) > 1 else []


def wait_for_all(what: str) -> None:
    """A barrier without a timeout: a collective would time out while one machine works on `what`,
    which rank 0 logs every minute."""
    if current is None:
        return
    from torch.distributed import distributed_c10d, get_world_size

    store = require(distributed_c10d, "_get_default_store", "torch")()
    current.barriers += 1
    key, started = f"toolkit/barrier {current.barriers}", time.monotonic()
    logged = started
    store.add(key, 1)
    while store.add(key, 0) < get_world_size():
        now = time.monotonic()
        if os.environ["RANK"] == "0" and now - logged > _LOG_SECONDS:
            logged = now
            logger.info(f"waiting for other processes, for {now - started:.0f} s: {what}")
        time.sleep(min(0.5, 0.01 + (now - started) / 10))


def require_equal(
    accelerator: Accelerator, what: str, values: Mapping[str, Any], remedy: str = ""
) -> None:
    """Raises UserError on every rank if a value differs between ranks, with the values and their
    hosts."""
    if accelerator.num_processes == 1:
        return
    from accelerate.utils import gather_object

    host = socket.gethostname() if list_machines() else f"rank {accelerator.process_index}"
    differences = describe_differences(gather_object([(host, dict(values))]))
    if differences:
        remedy = remedy or "Give every machine the same files and settings"
        why = f"{what} are not the same everywhere: {differences}"
        raise UserError(f"{why}. {remedy}; nothing was trained")


# programs that start a script
_STARTERS = ("python", "mpi", "orterun", "prterun", "srun", "uv", "pixi")


def launch_info() -> dict[str, Any]:
    """For config.json: the launcher's config file, and the command line to start the same run again
    on this machine, in this folder."""
    ours = launch_request()
    words = ["python", *ours["argv"]] if ours else _command_words(tuple(sys.argv))
    file, folder = ours.get("config_file"), str(Path.cwd())
    return {"config_file": file, "command": shlex.join(words), "folder": folder}


@functools.cache
def _command_words(argv: tuple[str, ...]) -> list[str]:
    """The command line of the outermost launcher of this script. Cached: Ctrl-C ends DeepSpeed's
    launcher before the run's last step is done."""
    words = ["python", *argv]
    with contextlib.suppress(psutil.Error):
        for process in [psutil.Process(), *psutil.Process().parents()[:4]]:
            line = process.cmdline()
            starts = Path(line[0]).name.lower().startswith(_STARTERS)  # not `timeout 60 python ...`
            if argv[0] in line[1:] and starts:
                words = line
    interpreter, script = Path(words[0]), Path(words[1])
    if interpreter.is_absolute() and script.parent == interpreter.parent:  # `accelerate`, say
        return [script.name, *words[2:]]
    return [interpreter.name, *words[1:]]
