"""How many machines a run has, which of them this one is and why, and the first one's address."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import UserError, listing
from toolkit.launch.environment import parse_int
from toolkit.launch.network import LOOPBACK, is_this_machine

TWO_NODE_FILES = "accelerate_configs/2node.yaml (or 2node_zero2, 2node_zero3, 2node_fsdp2)"
PLACEHOLDER = "ADDRESS_OF_MACHINE_0"
# not torch's, which the user's `accelerate launch` keeps open meanwhile
DEFAULT_PORT = 29600


@dataclass(frozen=True)
class Machines:
    """The machines of a run."""

    count: int
    rank: int
    """This one's, from 0."""
    rank_source: str
    """The option, variable or address that gave the rank, for the user."""
    first: str
    """Machine 0's address."""
    port: int
    """Where machine 0 is reached; 0: any port."""


def name_machine(host: str, ranks: Sequence[int]) -> str:
    """`hostA (ranks 0, 1)`."""
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{host} ({noun} {listing(ranks, 8)})"


def find_machines(
    options: Mapping[str, str | None],
    config: Mapping[str, Any],
    path: Path,
    env: Mapping[str, str],
) -> Machines:
    """The machines, from the options after the script, an accelerate config and the environment.

    Raises UserError if an address is missing or unusable, or this machine's rank is unknown.
    """
    count = parse_int("num_machines", config.get("num_machines") or 1, path)
    value = (
        options.get("main_process_port") or config.get("main_process_port") or DEFAULT_PORT
    )
    port = parse_int("main_process_port", value, path, minimum=1)
    if count == 1:
        if options.get("machine_rank") or options.get("main_process_ip"):
            raise UserError(
                f"{path} is for one machine: use {TWO_NODE_FILES}, or leave out --machine_rank "
                "and --main_process_ip"
            )
        return Machines(1, 0, "", LOOPBACK, 0)
    address = options.get("main_process_ip") or config.get("main_process_ip")
    first = str(address or PLACEHOLDER)
    if PLACEHOLDER in first:
        raise UserError(
            f"{path}: main_process_ip is still {first}: write the first machine's address there, "
            "or pass --main_process_ip ADDRESS (`hostname -I` on the first machine shows it; under "
            "Slurm, `scontrol show hostnames | head -n 1`)"
        )
    rank, source = _rank(options, config, env, first, count)
    if not 0 <= rank < count:
        raise UserError(
            f"{path} is for {count} machines, and this one has rank {rank} ({source}): pass "
            f"--machine_rank 0 on the first and up to {count - 1} on the others (or set NODE_RANK)"
        )
    return Machines(count, rank, source, first, port)


def _rank(
    options: Mapping[str, str | None],
    config: Mapping[str, Any],
    env: Mapping[str, str],
    first: str,
    count: int,
) -> tuple[int, str]:
    """(this machine's rank, its source); -1 if nothing says it."""
    sources: dict[str, Any] = {
        "--machine_rank": options.get("machine_rank"),
        "NODE_RANK": env.get("NODE_RANK"),
        "SLURM_NODEID": env.get("SLURM_NODEID"),
    }
    if is_this_machine(first):
        sources[f"{first} is an address of this machine"] = 0
    sources["machine_rank in the config file"] = config.get("machine_rank")
    sources[f"{first} is not an address of this machine"] = 1 if count == 2 else -1
    source = next(name for name, value in sources.items() if value is not None)
    return parse_int(source, sources[source]), source
