"""Translates the launcher's environment variables to torch's.

`torchrun`, `accelerate launch` and `deepspeed` set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT (deepspeed
calls LOCAL_WORLD_SIZE LOCAL_SIZE). `mpirun` and `srun` set other names, and no address for the rendezvous.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from toolkit.errors import UserError

# launcher -> its variables for rank, world size, local rank and local world size
_VARIABLES = {
    "mpirun": tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "mpirun_rsh": tuple(f"MV2_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "mpiexec": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    # SLURM_STEP_NUM_TASKS is set inside `srun` only, SLURM_NTASKS in any batch script
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}
# set by our launcher: what it was asked to start, as JSON (see `relaunch.plan_launch`)
MARKER = "TOOLKIT_LAUNCH"
THREADS = "OMP_NUM_THREADS"
# variables by which to recognise a process that our launcher, torchrun or `accelerate launch` started
_SET_BY_LAUNCHERS = (MARKER, "TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION")
_RESTARTS = "TORCHELASTIC_RESTART_COUNT"
# set by `toolkit verify`: added to every seed except those of the sample order and the initial weights
OTHER_RANDOMNESS = "TOOLKIT_OTHER_RANDOMNESS"
FIRST_PORT, PORTS = 20000, 12000  # below the ephemeral ports
# timeout setting -> the variable that passes it to the processes, and its default in seconds
TIMEOUTS = {
    "rendezvous_timeout": ("TOOLKIT_RENDEZVOUS_TIMEOUT", 60),  # for all ranks to join
    "ddp_timeout": ("TOOLKIT_DDP_TIMEOUT", 1800),  # in a collective; `transformers`' default
    "peer_timeout": ("TOOLKIT_PEER_TIMEOUT", 14),  # for any answer of a node, before it counts as lost
    "stop_timeout": ("TOOLKIT_STOP_TIMEOUT", 25),  # for the main thread to move, after a stop signal
}
GPU_PEER_TIMEOUT = 120  # the default on GPUs: NCCL survives a network that is down while a switch fails over
FAILURE_DETECTOR = "TOOLKIT_FAILURE_DETECTOR"  # on or off


@dataclass(frozen=True)
class Place:
    """This process's ranks and world sizes, as its launcher announces them."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @property
    def is_local(self) -> bool:
        """Whether all ranks run on this node."""
        return self.local_world_size == self.world_size


def launch_request() -> dict[str, Any]:
    """What our launcher was asked to start (see `relaunch.plan_launch`); empty under other launchers."""
    return dict(json.loads(os.environ.get(MARKER) or "{}"))


def place_of(env: Mapping[str, str]) -> Place:
    """Reads the launcher's variables; without any, a world of one process.

    Raises UserError if they are incomplete or not numbers.
    """
    if ("RANK" in env) != ("WORLD_SIZE" in env):
        present, missing = ("RANK", "WORLD_SIZE") if "RANK" in env else ("WORLD_SIZE", "RANK")
        raise UserError(f"{present} is set and {missing} is not: set both, or `unset {present}` to run one process")
    if "RANK" in env:
        return _place_by_torch(env)
    for launcher, (rank, world, local_rank, local_world) in _VARIABLES.items():
        if rank in env and world in env and local_rank in env:
            size = _local_tasks(env, local_world) if local_world in env else _number(env, world)
            return Place(launcher, _number(env, rank), _number(env, world), _number(env, local_rank), size)
    if (env.get("PMI_SIZE") or "1") != "1":  # each process would train a separate model
        raise UserError(f"PMI_SIZE is {env['PMI_SIZE']}, but no MPI_LOCALRANKID: set RANK, WORLD_SIZE and LOCAL_RANK")
    if "LOCAL_RANK" in env:  # accelerate would wait for a group
        raise UserError("LOCAL_RANK is set and RANK is not: set RANK and WORLD_SIZE too, or `unset LOCAL_RANK`")
    return Place("accelerate" if _by_accelerate(env) else "python", 0, 1, 0, 1)


def _place_by_torch(env: Mapping[str, str]) -> Place:
    world = _number(env, "WORLD_SIZE")
    launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in env else "environment"
    if "CROSS_SIZE" in env:  # only DeepSpeed's own launcher sets it
        launcher = "deepspeed"
    elif _by_accelerate(env):
        launcher = "accelerate"
    variable = next((name for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE") if env.get(name)), None)
    # RANK without LOCAL_RANK: one process per host, as in a Kubernetes job
    local_rank = _number(env, "LOCAL_RANK") if "LOCAL_RANK" in env else 0
    # Azure ML sets LOCAL_RANK and NODE_RANK, and not how many processes a node has
    is_local = "LOCAL_RANK" in env and not (launcher == "environment" and "NODE_RANK" in env)
    by_azure = world // _number(env, "AZUREML_NODE_COUNT") if "AZUREML_NODE_COUNT" in env else 1
    local = _number(env, variable) if variable else (world if is_local else by_azure)
    return Place(launcher, _number(env, "RANK"), world, local_rank, local)


def _by_accelerate(env: Mapping[str, str]) -> bool:
    return any(name.startswith("ACCELERATE_") for name in env)


def accelerate_arguments(line: Sequence[str]) -> Sequence[str] | None:
    """The arguments of `accelerate launch` in a process's command line; None for other commands."""
    for end, word in enumerate(line[:4], 1):
        by_accelerate = any("accelerate" in each for each in line[:end])
        if word == "accelerate.commands.launch" or (
            by_accelerate and Path(word).name in ("launch", "accelerate-launch", "launch.py")
        ):
            return line[end:]
    return None


def accelerate_launch_words(generations: int = 1) -> Sequence[str] | None:
    """The arguments of the `accelerate launch` that is this process's parent, or the nearest of several generations of
    ancestors; None if there is none."""
    with contextlib.suppress(psutil.Error):
        lines = (parent.cmdline() for parent in psutil.Process().parents()[:generations])
        return next(filter(None, map(accelerate_arguments, lines)), None)
    return None


def attempt() -> int:
    """The number of restarts so far (`--max_restarts`): when a process has failed, torchrun and `accelerate launch`
    start all processes of the node again."""
    return int(os.environ.get(_RESTARTS) or 0)


def launcher_start() -> float:
    """When the launcher that counts the restarts was started, in seconds since the epoch: before the first attempt. 0
    if it cannot be read."""
    with contextlib.suppress(psutil.Error):
        parents = psutil.Process().parents()
        return next((each.create_time() for each in parents if _RESTARTS not in each.environ()), 0.0)
    return 0.0


def max_restarts() -> int:
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or 0)


def launcher_serves_store() -> bool:
    """Whether the launcher serves torch's store, the same for all attempts."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def user_threads(env: Mapping[str, str]) -> int | None:
    """OMP_NUM_THREADS as the user set it; None if it is unset, or the 1 that `torchrun` and `accelerate launch` set
    however many cores there are."""
    first = re.match(r"\s*(\d+)", env.get(THREADS, ""))  # 4,2: nested levels
    number = int(first[1]) if first else 0
    return None if number == 0 or (number == 1 and _launcher_set_threads(env)) else number


def _launcher_set_threads(env: Mapping[str, str]) -> bool:
    """Whether the nearest ancestor that was started without the variable is a launcher (a shell: the user set it).
    psutil reads the environment that a process was started with."""
    with contextlib.suppress(psutil.Error):
        for parent in psutil.Process().parents():
            start_env = parent.environ()
            if THREADS not in start_env:
                by_option = "num_cpu_threads_per_process" in " ".join(parent.cmdline()).replace("-", "_")
                return not by_option and any(name in env and name not in start_env for name in _SET_BY_LAUNCHERS)
            env = start_env
    return False


def _local_tasks(env: Mapping[str, str], name: str) -> int:
    """Processes on this node, from a number or Slurm's list over its nodes (`2(x3),1`)."""
    counts: list[int] = []
    for part in env[name].split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            raise UserError(f"the launcher's variable {name} is {env[name]!r}, not a number")
        counts += [int(match[1])] * int(match[2] or 1)
    node = _number(env, "SLURM_NODEID") if len(counts) > 1 and "SLURM_NODEID" in env else 0
    return counts[min(node, len(counts) - 1)]


def set_torch_variables(env: MutableMapping[str, str]) -> Place:
    """Sets torch's variables from the launcher's, with one MASTER_ADDR and MASTER_PORT for all processes.

    Raises UserError if there are several nodes and the address of the first is unknown.
    """
    place = place_of(env)
    if place.world_size == 1 and not (env.get("MASTER_ADDR") and env.get("MASTER_PORT")):
        env.pop("LOCAL_RANK", None)  # with it accelerate opens a store at that address
    if place.world_size > 1 and place.launcher in ("environment", "torchrun", "accelerate"):
        _check_master(place, env)
    if place.launcher in ("python", "torchrun", "accelerate") or place.world_size == 1:
        return place
    env.update(
        RANK=str(place.rank), WORLD_SIZE=str(place.world_size), LOCAL_RANK=str(place.local_rank),
        LOCAL_WORLD_SIZE=str(place.local_world_size),
    )  # fmt: skip
    if place.launcher == "environment":
        return place  # MASTER_ADDR and MASTER_PORT were set by hand, too
    if place.is_local and place.launcher == "deepspeed" and env.get("MASTER_PORT") == "29500":
        del env["MASTER_PORT"]  # its default, which it passes even if the port is taken
    if "MASTER_ADDR" not in env:
        env["MASTER_ADDR"] = "127.0.0.1" if place.is_local else _first_machine(place, env)
    if "MASTER_PORT" not in env:  # the same for all processes of the job, most likely another for the next job
        digest = hashlib.sha256(_job_id(place, env).encode()).digest()
        env["MASTER_PORT"] = str(FIRST_PORT + int.from_bytes(digest[:4], "big") % PORTS)
    return place


def _job_id(place: Place, env: Mapping[str, str]) -> str:
    """The parent is the launcher only where no shell or container lies between, so the scheduler's id comes first."""
    step = f"{env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_STEP_ID', '')}"
    namespace = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid")
    if place.launcher == "mpirun" and namespace:  # two in one Slurm job differ
        return namespace
    if place.is_local and not (place.launcher == "srun" and "SLURM_STEP_ID" in env):
        parent = psutil.Process(os.getppid())
        return f"{parent.pid} {parent.create_time():.2f}"
    return step


def _check_master(place: Place, env: Mapping[str, str]) -> None:
    """RANK and WORLD_SIZE set by hand need MASTER_ADDR and MASTER_PORT, too."""
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]:
        remedy = "set the address of rank 0's machine and a port that is free there, the same for all processes"
        raise UserError(f"WORLD_SIZE is {place.world_size}, but {' and '.join(missing)} is not set: {remedy}")
    if not env["MASTER_PORT"].isdigit():
        raise UserError(f"MASTER_PORT is {env['MASTER_PORT']!r}, not a TCP port")


def _first_machine(place: Place, env: Mapping[str, str]) -> str:
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    if nodes:
        return first_host(nodes)
    raise UserError(
        f"{place.launcher} started {place.world_size} processes on several machines and did not pass the first "
        "machine's address: `mpirun -x MASTER_ADDR=<address of the first machine> ...`"
    )


def first_host(nodes: str) -> str:
    """The first name of Slurm's compact list: `gpu[03-05,9],login` -> `gpu03`."""
    first = re.match(r"[^,\[]+(?:\[[^\]]*\]|[^,\[])*", nodes)
    if not first:
        raise UserError(f"cannot read the list of machines {nodes!r}: set MASTER_ADDR")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])


def _number(env: Mapping[str, str], name: str) -> int:
    return parse_int(f"the launcher's variable {name}", env.get(name))


def parse_int(name: str, value: object, path: Path | None = None, minimum: int | None = None) -> int:
    """Raises UserError, naming `path` and `name`, unless `value` is a whole number of at least `minimum`."""
    where = f"{path}: " if path else ""
    try:
        number = int(str(value))
    except ValueError as error:
        raise UserError(f"{where}{name} must be a whole number, not {value!r}") from error
    if minimum is not None and number < minimum:
        raise UserError(f"{where}{name} is {number}: it must be at least {minimum}")
    return number


def timeout_seconds(name: str, default: int | None = None) -> int:
    """The value of one of TIMEOUTS, from its option, or else `default`, or else its own default."""
    variable, usual = TIMEOUTS[name]
    return int(os.environ.get(variable) or default or usual)
