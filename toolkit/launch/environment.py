"""What started this process: the launcher's environment variables, translated to torch's.

`torchrun`, `accelerate launch` and `deepspeed` set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
MASTER_PORT (deepspeed calls LOCAL_WORLD_SIZE LOCAL_SIZE). `mpirun` and `srun` set other names, and
no address for the rendezvous. Our own launcher sets torch's names, and TOOLKIT_LAUNCH.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from toolkit.errors import UserError

# launcher -> its variables for rank, world size, local rank and local world size
_VARIABLES = {
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
               "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "mpiexec": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    # SLURM_STEP_NUM_TASKS is set inside `srun` only, SLURM_NTASKS in any batch script
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}  # fmt: skip
MARKER = "TOOLKIT_LAUNCH"
"""Set by our launcher: what it was asked to start, as JSON (`options.Request.marker`)."""
THREADS = "OMP_NUM_THREADS"
# set by `toolkit verify`: added to every seed except those of the sample order and initial weights
OTHER_RANDOMNESS = "TOOLKIT_OTHER_RANDOMNESS"
_ACCELERATE_LAUNCH = re.compile(r"accelerate(-| |\.commands\.|/commands/)launch(\.py)?$")
FIRST_PORT, PORTS = 20000, 12000  # below the ephemeral ports
# timeout setting -> the variable that passes it to the processes, and its default in seconds
TIMEOUTS = {
    "rendezvous_timeout": ("TOOLKIT_RENDEZVOUS_TIMEOUT", 60),  # for all machines to come
    "ddp_timeout": ("TOOLKIT_DDP_TIMEOUT", 1800),  # in a collective; `transformers`' default
    "peer_timeout": ("TOOLKIT_PEER_TIMEOUT", 30),  # without an answer a machine counts as lost
}


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
    """What our launcher was asked to start (`options.Request`); empty under other launchers."""
    return dict(json.loads(os.environ.get(MARKER) or "{}"))


def place_of(env: Mapping[str, str]) -> Place:
    """Reads the launcher's variables; without any, a world of one process.

    Raises UserError if they are incomplete or not numbers.
    """
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if name in env and other not in env:
            remedy = f"set both, or `unset {name}` to run one process"
            raise UserError(f"{name} is set and {other} is not: {remedy}")
    if "RANK" in env:
        return _place_by_torch(env)
    for launcher, (rank, world, local_rank, local_world) in _VARIABLES.items():
        if rank in env and world in env and local_rank in env:
            local = env.get(local_world, env[world]).partition("(")[0]  # Slurm's: 2(x3)
            ranks = _number(env, rank), _number(env, world), _number(env, local_rank)
            return Place(launcher, *ranks, parse_int(local_world, local.partition(",")[0]))
    tasks = env.get("PMI_SIZE") or "1"
    if tasks != "1":  # each process would train a separate model
        remedy = "set RANK, WORLD_SIZE and LOCAL_RANK"
        raise UserError(f"PMI_SIZE is {tasks}, but there is no MPI_LOCALRANKID: {remedy}")
    if "LOCAL_RANK" in env:  # accelerate would wait for a group
        remedy = "set RANK and WORLD_SIZE too, or `unset LOCAL_RANK`"
        raise UserError(f"LOCAL_RANK is set and RANK is not: {remedy}")
    launcher = _launcher_with_torch_variables(env)
    return Place("python" if launcher in ("environment", "torchrun") else launcher, 0, 1, 0, 1)


def _place_by_torch(env: Mapping[str, str]) -> Place:
    rank, world = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    launcher = _launcher_with_torch_variables(env)
    # RANK without LOCAL_RANK: one process per host, as in a Kubernetes job
    local_rank = _number(env, "LOCAL_RANK") if "LOCAL_RANK" in env else 0
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        if env.get(name):
            return Place(launcher, rank, world, local_rank, _number(env, name))
    return Place(launcher, rank, world, local_rank, world if "LOCAL_RANK" in env else 1)


def _launcher_with_torch_variables(env: Mapping[str, str]) -> str:
    if MARKER in env:
        return "toolkit"
    if "CROSS_SIZE" in env:  # only DeepSpeed's own launcher sets it
        return "deepspeed"
    if _by_accelerate(env):
        return "accelerate"
    return "torchrun" if "TORCHELASTIC_RUN_ID" in env else "environment"


def _by_accelerate(env: Mapping[str, str]) -> bool:
    return any(name.startswith("ACCELERATE_") for name in env)


def accelerate_arguments(line: Sequence[str]) -> Sequence[str] | None:
    """The arguments of `accelerate launch` in a process's command line; None for others."""
    for end in range(1, 5):
        if _ACCELERATE_LAUNCH.search(" ".join(line[:end])):
            return line[end:]
    return None


def accelerate_launch_words() -> Sequence[str] | None:
    """The arguments of the `accelerate launch` that is this process's parent; None: it is not."""
    with contextlib.suppress(psutil.Error):
        return accelerate_arguments(psutil.Process(os.getppid()).cmdline())
    return None


def attempt() -> int:
    """The number of restarts so far (`--max_restarts`): when a process has failed, the launcher
    starts all processes again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


def launcher_start() -> float:
    """When the launcher that counts the restarts was started, in seconds since the epoch."""
    return psutil.Process(os.getppid()).create_time()


def max_restarts() -> int:
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or 0)


def launcher_serves_store() -> bool:
    """Whether the launcher serves torch's store, and not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def user_threads(env: Mapping[str, str]) -> int | None:
    """OMP_NUM_THREADS as the user set it; None if it is unset, or the 1 that `torchrun` and
    `accelerate launch` set however many cores there are."""
    first = re.match(r"\s*(\d+)", env.get(THREADS, ""))  # 4,2: nested levels
    number = int(first[1]) if first else 0
    by_launcher = MARKER not in env and ("TORCHELASTIC_RUN_ID" in env or _by_accelerate(env))
    return None if number == 0 or (number == 1 and by_launcher) else number


def set_torch_variables(env: MutableMapping[str, str]) -> Place:
    """Sets torch's variables from the launcher's, with one MASTER_ADDR and MASTER_PORT for all.

    Raises UserError if there are several nodes and the address of the first is unknown.
    """
    place = place_of(env)
    if place.world_size == 1 and not (env.get("MASTER_ADDR") and env.get("MASTER_PORT")):
        env.pop("LOCAL_RANK", None)  # with it accelerate opens a store at that address
    if place.launcher == "toolkit" or place.world_size == 1:
        return place
    if place.launcher in ("environment", "torchrun", "accelerate"):
        _check_master(place, env)
    _set_ranks(place, env)
    if place.launcher in ("environment", "torchrun", "accelerate"):
        return place
    if place.is_local and place.launcher == "deepspeed" and env.get("MASTER_PORT") == "29500":
        del env["MASTER_PORT"]  # its default, which it passes even if the port is taken
    if "MASTER_ADDR" not in env:
        env["MASTER_ADDR"] = "127.0.0.1" if place.is_local else _first_machine(place, env)
    if "MASTER_PORT" not in env:  # the same for the whole job, most likely another for the next one
        digest = hashlib.sha256(_job_id(place, env).encode()).digest()
        env["MASTER_PORT"] = str(FIRST_PORT + int.from_bytes(digest[:4], "big") % PORTS)
    return place


def _set_ranks(place: Place, env: MutableMapping[str, str]) -> None:
    env["RANK"], env["WORLD_SIZE"] = str(place.rank), str(place.world_size)
    env["LOCAL_RANK"] = str(place.local_rank)
    env["LOCAL_WORLD_SIZE"] = str(place.local_world_size)


def _job_id(place: Place, env: Mapping[str, str]) -> str:
    """The parent is the launcher only where no shell or container lies between, so the scheduler's
    id comes first."""
    namespace = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid")
    if place.launcher == "mpirun" and namespace:  # two in one Slurm job differ
        return namespace
    if place.is_local and not (place.launcher == "srun" and "SLURM_STEP_ID" in env):
        parent = psutil.Process(os.getppid())
        return f"{parent.pid} {parent.create_time():.2f}"
    return f"{env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_STEP_ID', '')}"


def _check_master(place: Place, env: Mapping[str, str]) -> None:
    """RANK and WORLD_SIZE set by hand need MASTER_ADDR and MASTER_PORT, too."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not env.get(name):
            remedy = "the address of rank 0's machine, and a free port of it"
            raise UserError(f"WORLD_SIZE is {place.world_size}, but {name} is not set: {remedy}")


def _first_machine(place: Place, env: Mapping[str, str]) -> str:
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    if nodes:
        return first_host(nodes)
    raise UserError(
        f"{place.launcher} started {place.world_size} processes on several machines and did not "
        "pass the first machine's address: `mpirun -x MASTER_ADDR=<address of the first machine>`"
    )


def first_host(nodes: str) -> str:
    """The first name of Slurm's compact list: `gpu[03-05,9],login` -> `gpu03`."""
    first = re.match(r"[^,\[]+(?:\[[^\]]*\]|[^,\[])*", nodes)
    if not first:
        raise UserError(f"cannot read the list of machines {nodes!r}: set MASTER_ADDR")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])


def _number(env: Mapping[str, str], name: str) -> int:
    return parse_int(f"the launcher's variable {name}", env.get(name))


def parse_int(
    name: str,
    value: object,
    path: Path | None = None,
    minimum: int | None = None,
) -> int:
    """Raises UserError, naming `path` and `name`, unless `value` is a whole number of at least
    `minimum`."""
    where = f"{path}: " if path else ""
    try:
        number = int(str(value))
    except ValueError as error:
        raise UserError(f"{where}{name} must be a whole number, not {value!r}") from error
    if minimum is not None and number < minimum:
        raise UserError(f"{where}{name} is {number}: it must be at least {minimum}")
    return number


def timeout_seconds(name: str) -> int:
    """The value of one of TIMEOUTS, from its option, or else its default."""
    variable, default = TIMEOUTS[name]
    return int(os.environ.get(variable) or default)


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
