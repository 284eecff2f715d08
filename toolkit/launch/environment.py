"""The launcher's environment variables, translated to torch's.

`torchrun`, `accelerate launch` and `deepspeed` set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
MASTER_PORT (deepspeed names LOCAL_WORLD_SIZE differently). `mpirun` and `srun` set names of their
own and no address for the rendezvous.
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

# launcher -> (rank, world size, local rank, local world size), as each documents them
_NAMES = {
    "mpirun": tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "mpiexec": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    # SLURM_STEP_NUM_TASKS is set inside `srun` only; SLURM_NTASKS also in a plain batch script
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}
# what our own launcher starts, as JSON (see `relaunch`)
MARKER = "TOOLKIT_LAUNCH"
THREADS = "OMP_NUM_THREADS"
# what our launcher, torchrun and `accelerate launch` set for their processes
_LAUNCHERS_OWN = (MARKER, "TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION")
# what `toolkit verify` adds to the seed of all random numbers but the order of samples and the weights
OTHER_RANDOMNESS = "TOOLKIT_OTHER_RANDOMNESS"
FIRST_PORT, PORTS = 20000, 12000  # below those that systems give to outgoing connections
# settings of how long is waited, whatever launched the script -> the variable that carries them, and their default
TIMEOUTS = {
    "rendezvous_timeout": ("TOOLKIT_RENDEZVOUS_TIMEOUT", 60),  # for each other at the start
    "ddp_timeout": ("TOOLKIT_DDP_TIMEOUT", 1800),  # in a collective; `transformers`' default
    # for any answer of a machine, before it counts as lost; on GPUs see GPU_PEER_TIMEOUT
    "peer_timeout": ("TOOLKIT_PEER_TIMEOUT", 14),
    "stop_timeout": ("TOOLKIT_STOP_TIMEOUT", 25),  # after a stop signal, while nothing moves
}
# NCCL survives a network that is silent while a switch fails over
GPU_PEER_TIMEOUT = 120
FAILURE_DETECTOR = "TOOLKIT_FAILURE_DETECTOR"  # on or off


@dataclass(frozen=True)
class Place:
    """This process's place in the world that its launcher announced."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @property
    def is_local(self) -> bool:
        """Whether all ranks are of this machine."""
        return self.local_world_size == self.world_size


def launch_request() -> dict[str, Any]:
    """What our own launcher starts (see `relaunch.plan`); empty under another one."""
    return dict(json.loads(os.environ.get(MARKER) or "{}"))


def place_of(env: Mapping[str, str]) -> Place:
    """The launcher's own account; one process where no launcher is seen.

    Raises UserError when the launcher's variables are incomplete or are not numbers.
    """
    if ("RANK" in env) != ("WORLD_SIZE" in env):
        present, missing = ("RANK", "WORLD_SIZE") if "RANK" in env else ("WORLD_SIZE", "RANK")
        raise UserError(f"{present} is set and {missing} is not: set both, or `unset {present}` to run one process")
    if "RANK" in env:
        return _place_by_torch(env)
    for launcher, (rank, world, local_rank, local_world) in _NAMES.items():
        if rank in env and world in env and local_rank in env:
            size = _tasks_here(env, local_world) if local_world in env else _number(env, world)
            return Place(launcher, _number(env, rank), _number(env, world), _number(env, local_rank), size)
    return Place("accelerate" if _by_accelerate(env) else "python", 0, 1, 0, 1)


def _place_by_torch(env: Mapping[str, str]) -> Place:
    world = _number(env, "WORLD_SIZE")
    launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in env else "environment"
    if "CROSS_SIZE" in env:  # only DeepSpeed's own launcher sets it
        launcher = "deepspeed"
    elif _by_accelerate(env):
        launcher = "accelerate"
    variable = next((name for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE") if env.get(name)), None)
    # RANK without LOCAL_RANK: one process per host, as a Kubernetes job starts them
    local_rank = _number(env, "LOCAL_RANK") if "LOCAL_RANK" in env else 0
    local = _number(env, variable) if variable else (world if "LOCAL_RANK" in env else 1)
    return Place(launcher, _number(env, "RANK"), world, local_rank, local)


def _by_accelerate(env: Mapping[str, str]) -> bool:
    return any(name.startswith("ACCELERATE_") for name in env)


def accelerate_arguments(line: Sequence[str]) -> Sequence[str] | None:
    """The arguments of `accelerate launch`, where a process's command line is one; otherwise None."""
    for place, word in enumerate(line[:4], 1):
        by_accelerate = any("accelerate" in each for each in line[:place])
        if word == "accelerate.commands.launch" or (
            by_accelerate and Path(word).name in ("launch", "accelerate-launch", "launch.py")
        ):
            return line[place:]
    return None


def started_by_accelerate_launch() -> bool:
    """Whether an `accelerate launch` has started this very process."""
    with contextlib.suppress(psutil.Error):
        return accelerate_arguments(psutil.Process(os.getppid()).cmdline()) is not None
    return False


def user_threads(env: Mapping[str, str]) -> int | None:
    """OMP_NUM_THREADS; None where it is not set, or where it is the 1 of a launcher, which `torchrun` and `accelerate
    launch` set for several processes however many cores there are."""
    first = re.match(r"\s*(\d+)", env.get(THREADS, ""))  # 4,2 is for threads within threads
    number = int(first[1]) if first else 0
    return None if number == 0 or (number == 1 and _launcher_set_threads(env)) else number


def _launcher_set_threads(env: Mapping[str, str]) -> bool:
    """Whether the first process above this one that was started without the variable is a launcher. (Below a shell,
    the user has set it; psutil reads the environment that a process began with.)"""
    with contextlib.suppress(psutil.Error):
        for parent in psutil.Process().parents():
            begun_with = parent.environ()
            if THREADS not in begun_with:
                by_option = "num_cpu_threads_per_process" in " ".join(parent.cmdline()).replace("-", "_")
                return not by_option and any(name in env and name not in begun_with for name in _LAUNCHERS_OWN)
            env = begun_with
    return False


def _tasks_here(env: Mapping[str, str], name: str) -> int:
    """Processes on this machine: a number, or Slurm's list over its machines, `2(x3),1`."""
    counts: list[int] = []
    for part in env[name].split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            raise UserError(f"the launcher's variable {name} is {env[name]!r}, not a number")
        counts += [int(match[1])] * int(match[2] or 1)
    node = _number(env, "SLURM_NODEID") if len(counts) > 1 and "SLURM_NODEID" in env else 0
    return counts[min(node, len(counts) - 1)]


def set_torch_variables(env: MutableMapping[str, str]) -> Place:
    """Sets torch's variables from the launcher's, with an address and a port all processes share.

    Raises UserError when several machines take part and nothing says where the first one is.
    """
    place = place_of(env)
    if place.world_size > 1 and place.launcher in ("environment", "torchrun", "accelerate"):
        _check_master(place, env)
    if place.launcher in ("python", "torchrun", "accelerate") or place.world_size == 1:
        return place
    env.update(
        RANK=str(place.rank),
        WORLD_SIZE=str(place.world_size),
        LOCAL_RANK=str(place.local_rank),
        LOCAL_WORLD_SIZE=str(place.local_world_size),
    )
    if place.launcher == "environment":
        return place  # whoever set RANK by hand sets MASTER_ADDR and MASTER_PORT too
    if place.local_world_size == place.world_size:
        has_master = "MASTER_ADDR" in env and "MASTER_PORT" in env
        is_default = place.launcher == "deepspeed" and env.get("MASTER_PORT") == "29500"  # taken or not
        if not has_master or is_default:
            parent = psutil.Process(os.getppid())
            env["MASTER_PORT"] = str(_port_of(f"{parent.pid} {parent.create_time():.2f}"))
        env.setdefault("MASTER_ADDR", "127.0.0.1")
    elif "MASTER_ADDR" not in env:
        env["MASTER_ADDR"] = _first_machine(place, env)
    job = env.get("SLURM_JOB_ID") or env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or ""
    env.setdefault("MASTER_PORT", str(_port_of(f"{job}.{env.get('SLURM_STEP_ID', '')}")))
    return place


def _check_master(place: Place, env: Mapping[str, str]) -> None:
    """Who sets RANK and WORLD_SIZE by hand has to set these, too."""
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]:
        raise UserError(
            f"RANK and WORLD_SIZE say that there are {place.world_size} processes, but {' and '.join(missing)} is not "
            "set: give the address of rank 0's machine and a port that is free there, the same to all"
        )
    if not env["MASTER_PORT"].isdigit():
        raise UserError(f"MASTER_PORT is {env['MASTER_PORT']!r}, not a TCP port")


def _first_machine(place: Place, env: Mapping[str, str]) -> str:
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    if nodes:
        return first_host(nodes)
    raise UserError(
        f"{place.launcher} started {place.world_size} processes on several machines and none knows the first "
        "machine's address: pass it on, `mpirun -x MASTER_ADDR=<address of the first machine> ...`"
    )


def first_host(nodes: str) -> str:
    """`gpu[03-05,9],login` -> `gpu03`: the first name of Slurm's compact list."""
    first = re.match(r"[^,\[]+(?:\[[^\]]*\]|[^,\[])*", nodes)
    if not first:
        raise UserError(f"cannot read the list of machines {nodes!r}: set MASTER_ADDR")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])


def _port_of(job: str) -> int:
    """The same port for all processes of a job, different between jobs with high probability."""
    digest = hashlib.sha256(job.encode()).digest()
    return FIRST_PORT + int.from_bytes(digest[:4], "big") % PORTS


def _number(env: Mapping[str, str], name: str) -> int:
    return parse_int(f"the launcher's variable {name}", env.get(name))


def parse_int(name: str, value: object, path: Path | None = None, least: int | None = None) -> int:
    """Raises UserError for what is no whole number, or below `least`."""
    where = f"{path}: " if path else ""
    try:
        number = int(str(value))
    except ValueError as error:
        raise UserError(f"{where}{name} must be a whole number, not {value!r}") from error
    if least is not None and number < least:
        raise UserError(f"{where}{name} is {number}: give {least} or more")
    return number


def timeout_seconds(name: str, default: int | None = None) -> int:
    """The value of one of TIMEOUTS, by the environment. Raises UserError for what is no number of seconds."""
    variable, usual = TIMEOUTS[name]
    return parse_int(f"{variable} (seconds)", os.environ.get(variable) or default or usual, least=1)
