"""What a launcher told this process through its environment, brought to torch's names.

`torchrun`, `accelerate launch` and `deepspeed` set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
MASTER_PORT (deepspeed names LOCAL_WORLD_SIZE differently). `mpirun` and `srun` set names of their
own and no address to meet at.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
import tempfile
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from toolkit.errors import UserError
from toolkit.files import replace_file

# launcher -> (rank, world size, local rank, local world size), as each documents them
_NAMES = {
    "mpirun": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "mpiexec": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    # SLURM_STEP_NUM_TASKS is set inside `srun` only; SLURM_NTASKS also in a plain batch script
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}
FIRST_PORT, PORTS = 20000, 20000


@dataclass(frozen=True)
class Place:
    """Where this process stands in the world its launcher announced."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def place_of(env: Mapping[str, str]) -> Place:
    """The launcher's own account; one process where no launcher is seen.

    Raises UserError when the launcher's variables are incomplete or are not numbers.
    """
    if ("RANK" in env) != ("WORLD_SIZE" in env):
        given, missing = ("RANK", "WORLD_SIZE") if "RANK" in env else ("WORLD_SIZE", "RANK")
        raise UserError(f"{given} is set and {missing} is not: set both, or `unset {given}` to run one process")
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
    named = next((name for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE") if env.get(name)), None)
    # RANK without LOCAL_RANK: one process per host, as a Kubernetes job starts them
    local_rank = _number(env, "LOCAL_RANK") if "LOCAL_RANK" in env else 0
    local = _number(env, named) if named else (world if "LOCAL_RANK" in env else 1)
    return Place(launcher, _number(env, "RANK"), world, local_rank, local)


def _by_accelerate(env: Mapping[str, str]) -> bool:
    return any(name.startswith("ACCELERATE_") for name in env)


def _tasks_here(env: Mapping[str, str], name: str) -> int:
    """Processes on this machine: a number, or Slurm's list over its machines, `2(x3),1`."""
    counts: list[int] = []
    for part in env[name].split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not found:
            raise UserError(f"the launcher's variable {name} is {env[name]!r}, not a number")
        counts += [int(found[1])] * int(found[2] or 1)
    node = _number(env, "SLURM_NODEID") if len(counts) > 1 and "SLURM_NODEID" in env else 0
    return counts[min(node, len(counts) - 1)]


def settle(env: MutableMapping[str, str]) -> Place:
    """Sets torch's variables from the launcher's, with an address and a port all processes share.

    Raises UserError when several machines take part and nothing says where the first one is.
    """
    place = place_of(env)
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
        given = "MASTER_ADDR" in env and "MASTER_PORT" in env and place.launcher != "deepspeed"
        env.setdefault("MASTER_ADDR", "127.0.0.1")
        if not given:  # DeepSpeed always names one, taken or not
            env["MASTER_PORT"] = str(_agreed_port(place.rank, env.get("MASTER_PORT")))
    elif "MASTER_ADDR" not in env:
        env["MASTER_ADDR"] = _first_machine(place, env)
    env.setdefault("MASTER_PORT", str(_port_of_job(env)))
    return place


def free_port(wanted: int | None = None) -> int:
    """`wanted` if it can be listened on, else one the system gives. Raises UserError for no port at all."""
    if wanted is not None and not 0 <= wanted <= 65535:
        raise UserError(f"{wanted} is no TCP port: choose one from 1024 to 65535")
    for port in (wanted or 0, 0):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
            return int(probe.getsockname()[1])
    raise UserError("no free TCP port on this machine: close what holds them (`ss -ltnp` lists it)")


def _agreed_port(rank: int, wanted: str | None, patience_seconds: float = 60.0) -> int:
    """A free port that the processes of one launcher on one machine agree on through a file.

    The file is named after their common parent, so that two jobs never share one.
    """
    path = _port_file()
    if rank == 0:
        port = free_port(_number({"MASTER_PORT": wanted}, "MASTER_PORT") if wanted else None)
        with replace_file(path, flush=False) as draft:
            draft.write_text(str(port), encoding="ascii")
        return port
    deadline = time.monotonic() + patience_seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError):
            return int(path.read_text(encoding="ascii"))
        time.sleep(0.05)
    raise UserError(
        f"rank {rank} waited {patience_seconds:.0f} s for rank 0 to choose a port: rank 0 did not start, "
        "or does not share /tmp with it; set MASTER_ADDR and MASTER_PORT for all of them"
    )


def _port_file() -> Path:
    parent = psutil.Process(os.getppid())
    name = f"toolkit-port-{os.getuid()}-{parent.pid}-{parent.create_time():.2f}"
    return Path(tempfile.gettempdir()) / name


def forget_port() -> None:
    """Removes the file once every process has met: the next job of the same parent chooses anew."""
    with contextlib.suppress(OSError, psutil.Error):
        _port_file().unlink(missing_ok=True)


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


def _port_of_job(env: Mapping[str, str]) -> int:
    """The same port on every machine of a job, different between jobs with high probability."""
    job = env.get("SLURM_JOB_ID") or env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or ""
    step = env.get("SLURM_STEP_ID", "")
    digest = hashlib.sha256(f"{job}.{step}".encode()).digest()
    return FIRST_PORT + int.from_bytes(digest[:4], "big") % PORTS


def _number(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except (KeyError, ValueError) as error:
        raise UserError(f"the launcher's variable {name} is {env.get(name)!r}, not a number") from error
