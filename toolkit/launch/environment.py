"""What started this process: the launcher's environment variables, translated to torch's.

`torchrun`, `accelerate launch` and `deepspeed` set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
MASTER_PORT (deepspeed calls LOCAL_WORLD_SIZE LOCAL_SIZE). `mpirun` and `srun` set other names, and
no address for the rendezvous. Our own launcher sets torch's names, and TOOLKIT_LAUNCH.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
import shlex
import sys
import zlib
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from toolkit.errors import UserError

# launcher -> its variables for rank, world size, local rank and local world size
_VARIABLES = {
    "": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),  # torch's
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
               "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    # SLURM_STEP_NUM_TASKS is set inside `srun` only, SLURM_NTASKS in any batch script
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}  # fmt: skip
MARKER = "TOOLKIT_LAUNCH"
"""Set by our launcher: what it was asked to start, as JSON."""
ERROR_FILE = "TOOLKIT_ERROR_FILE"
"""Set by our launcher: the file in which a process leaves its failure for it to print."""
THREADS = "OMP_NUM_THREADS"
# set by `toolkit verify`: added to every seed except those of the sample order and initial weights
OTHER_RANDOMNESS = "TOOLKIT_OTHER_RANDOMNESS"
_ACCELERATE_LAUNCH = (
    "accelerate launch",
    "accelerate-launch",
    "accelerate.commands.launch",
)
# how variables begin that only this launcher sets -> the launcher, the innermost first
_MARKS = {
    MARKER: "toolkit",
    "CROSS_SIZE": "deepspeed",
    "ACCELERATE_": "accelerate",
    "TORCHELASTIC_RUN_ID": "torchrun",
}
_ADDRESS_REMEDY = (
    "pass the address of rank 0's machine, and a free port of it: `mpirun -x MASTER_ADDR=ADDRESS`, "
    "or in a Slurm script `export MASTER_ADDR=$(scontrol show hostnames | head -n 1)`"
)
FIRST_PORT, PORTS = 20000, 12000  # below the ephemeral ports
# option -> its default in seconds
TIMEOUTS = {
    "rendezvous_timeout": 60,  # for all machines to come
    "ddp_timeout": 1800,  # in a collective; the default of `transformers`
    "peer_timeout": 30,  # without an answer a machine counts as lost
}


@dataclass(frozen=True)
class Place:
    """This process's ranks and world sizes, as its launcher announces them."""

    launcher: str
    """toolkit, deepspeed, accelerate, torchrun, mpirun, srun, environment (torch's variables, set
    by hand) or python (none)."""
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @property
    def is_local(self) -> bool:
        """Whether all ranks run on this machine."""
        return self.local_world_size == self.world_size


def launch_request() -> dict[str, Any]:
    """What our launcher was asked to start (`options.Request`); empty under other launchers."""
    return dict(json.loads(os.environ.get(MARKER) or "{}"))


def place_of(env: Mapping[str, str]) -> Place:
    """Reads the launcher's variables; without any, a world of one process.

    Raises UserError if they are incomplete or not numbers.
    """
    for launcher, names in _VARIABLES.items():
        rank, world, local_rank, local_world = names
        if rank in env and world in env and local_rank in env:
            local = env.get(local_world) or env.get("LOCAL_SIZE") or env[world]
            local = re.split(r"[(,]", local)[0]  # Slurm's: 2(x3)
            values = env[rank], env[world], env[local_rank], local
            name = launcher or _launcher(env) or "environment"
            return Place(name, *map(parse_int, names, values))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PMI_RANK"):
        if name in env:  # each process would train a separate model
            raise UserError(
                f"{name} is set, and not all of the others: set RANK, WORLD_SIZE and LOCAL_RANK, "
                f"or `unset {name}` to run one process"
            )
    return Place(_launcher(env) or "python", 0, 1, 0, 1)


def _launcher(env: Mapping[str, str]) -> str:
    """The launcher that sets torch's variables; empty if none has."""
    for mark, launcher in _MARKS.items():
        if any(name.startswith(mark) for name in env):
            return launcher
    return ""


def parent_words() -> list[str]:
    """The command line of this process's parent."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(os.getppid()).cmdline()
    return []


def accelerate_options() -> argparse.Namespace | None:
    """The options of the `accelerate launch` that is this process's parent; None if it is not the
    parent."""
    words = parent_words()
    for end in range(1, 5):
        if " ".join(words[:end]).endswith(_ACCELERATE_LAUNCH):
            from accelerate.commands.launch import launch_command_parser

            return launch_command_parser().parse_args(words[end:])
    return None


def attempt() -> int:
    """The number of restarts so far (`--max_restarts`): when a process has failed, the launcher
    starts all processes again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


def launcher_start() -> float:
    """When the launcher that counts the restarts was started, in seconds since the epoch."""
    return psutil.Process(os.getppid()).create_time()


def user_threads(env: Mapping[str, str]) -> int | None:
    """OMP_NUM_THREADS as the user set it; None if it is unset, or the 1 that `torchrun` and
    `accelerate launch` set however many cores there are."""
    text = env.get(THREADS, "")
    if text == "1" and _launcher(env) in ("torchrun", "accelerate"):
        return None
    return int(text) if text.isdigit() else None


def set_torch_variables(env: MutableMapping[str, str]) -> Place:
    """Sets torch's variables from the launcher's, with one MASTER_ADDR and MASTER_PORT for all.

    Raises UserError if there are several machines and the address of the first is unknown.
    """
    place = place_of(env)
    if place.world_size == 1:
        if not (env.get("MASTER_ADDR") and env.get("MASTER_PORT")):
            for name in _VARIABLES[""]:  # or accelerate makes a group
                env.pop(name, None)
        return place
    if place.launcher in ("mpirun", "srun"):
        _set_address(place, env)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not env.get(name):
            raise UserError(
                f"{name} is not set, and WORLD_SIZE (SLURM_STEP_NUM_TASKS, OMPI_COMM_WORLD_SIZE) "
                f"announces several processes: {_ADDRESS_REMEDY}"
            )
    values = place.rank, place.world_size, place.local_rank, place.local_world_size
    env.update(zip(_VARIABLES[""], map(str, values), strict=True))
    return place


def _set_address(place: Place, env: MutableMapping[str, str]) -> None:
    """Slurm and Open MPI give no port: one of the job, most likely another for the next one."""
    if place.is_local:
        env.setdefault("MASTER_ADDR", "127.0.0.1")
    step = f"{env.get('SLURM_JOB_ID')}.{env.get('SLURM_STEP_ID')}"
    job = env.get("PMIX_NAMESPACE", step)  # two `mpirun` in one Slurm job differ
    env.setdefault("MASTER_PORT", str(FIRST_PORT + zlib.crc32(job.encode()) % PORTS))


def parse_int(
    name: str, value: object, path: Path | None = None, minimum: int | None = None
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
    """The value of one of TIMEOUTS."""
    return int(os.environ.get(timeout_variable(name)) or TIMEOUTS[name])


def timeout_variable(name: str) -> str:
    """The variable that passes the option to the processes."""
    return f"TOOLKIT_{name.upper()}"


@functools.cache
def launch_info() -> dict[str, Any]:
    """For config.json: the launcher's config file, and the command line to start the same run again
    on this machine, in this folder. Cached: launchers may end before this process."""
    request = launch_request()
    words = parent_words()
    if request or sys.argv[0] not in words:  # a shell's
        words = ["python", *request.get("argv", sys.argv)]
    return {
        "config_file": request.get("config_file"),
        "command": shlex.join(words),
        "folder": str(Path.cwd()),
    }
