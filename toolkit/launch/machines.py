"""How many machines a run has, which of them this one is and why, and the first one's address."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import UserError, listing
from toolkit.launch.environment import parse_int
from toolkit.launch.network import LOOPBACK, is_this_machine, resolve_addresses

TWO_NODE_FILES = "accelerate_configs/2node.yaml (or 2node_zero2, 2node_zero3, 2node_fsdp2)"
PLACEHOLDER = "ADDRESS_OF_MACHINE_0"
DEFAULT_PORT = 29600  # not torch's, which the user's `accelerate launch` keeps open meanwhile


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
    return f"{host} (rank{'s' * (len(ranks) > 1)} {listing(ranks, 8)})"


def doctor_command(first: str) -> str:
    """What to run when machines do not find each other."""
    return f"`toolkit doctor --main_process_ip {first}` on each machine shows more"


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
    value = options.get("main_process_port") or config.get("main_process_port") or DEFAULT_PORT
    port = parse_int("main_process_port", value, path, minimum=1)
    if count == 1:
        _refuse_options_of_several(options, path)
        return Machines(1, 0, "", LOOPBACK, 0)
    first = options.get("main_process_ip") or _first_address(config, path)
    sources = {
        "--machine_rank": options.get("machine_rank"),
        "NODE_RANK": env.get("NODE_RANK"),
        "SLURM_NODEID": env.get("SLURM_NODEID"),
    }
    rank, source = _rank(sources, config, first, count)
    if not 0 <= rank < count:
        why = f"{path} is for {count} machines, and this one has rank {rank} ({source})"
        remedy = f"pass --machine_rank 0 on the first and up to {count - 1} on the others"
        raise UserError(f"{why}: {remedy} (or set NODE_RANK)")
    return Machines(count, rank, source, first, port)


def _refuse_options_of_several(options: Mapping[str, str | None], path: Path) -> None:
    """They would be ignored silently, and each machine would train on its own."""
    for name in ("machine_rank", "main_process_ip"):
        if options.get(name):
            why = f"{path} is for one machine, so --{name} would have no effect"
            raise UserError(f"{why}: use {TWO_NODE_FILES}, or leave it out")


def _first_address(config: Mapping[str, Any], path: Path) -> str:
    """The first machine's address in the file."""
    address = config.get("main_process_ip")
    if address and PLACEHOLDER not in str(address):
        return str(address)
    raise UserError(
        f"{path}: main_process_ip is still {address!r}: write the first machine's address there, "
        "or pass --main_process_ip ADDRESS (`hostname -I` on the first machine shows it; under "
        "Slurm, `scontrol show hostnames | head -n 1`)"
    )


def _rank(
    sources: Mapping[str, str | None],
    config: Mapping[str, Any],
    first: str,
    count: int,
) -> tuple[int, str]:
    """(this machine's rank, its source); -1 if nothing says it."""
    for name, value in sources.items():
        if value is not None:
            return parse_int(name.lstrip("-"), value), name
    if is_this_machine(first):
        return 0, f"{first} is an address of this machine"
    if config.get("machine_rank") is not None:
        rank = parse_int("machine_rank", config["machine_rank"])
        return rank, "machine_rank in the config file"
    if not resolve_addresses(first):
        remedy = "give its IP address (`hostname -I` there), or add the name to /etc/hosts"
        raise UserError(f"the name of the first machine, {first}, is unknown here: {remedy}")
    return 1 if count == 2 else -1, f"{first} is not an address of this machine"
