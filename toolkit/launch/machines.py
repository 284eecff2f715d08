"""How many machines a run has, which of them this one is and why, and the first one's address."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import UserError, listing
from toolkit.launch.environment import first_host, parse_int
from toolkit.launch.network import external_addresses, is_this_machine, resolve_addresses

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
    addresses: tuple[str, ...]
    """Addresses by rank; only machine 0's without a list of machines."""
    port: int
    """Where machine 0 is reached."""

    @property
    def first(self) -> str:
        return self.addresses[0]

    def others(self) -> list[str]:
        """The other machines' addresses, as far as the settings list them."""
        return [name for rank, name in enumerate(self.addresses) if rank != self.rank]

    def name_of(self, rank: int) -> str:
        """`machine 1 (10.0.0.2)`; without the address if the settings do not list it."""
        if rank < len(self.addresses):
            return f"machine {rank} ({self.addresses[rank]})"
        return f"machine {rank}"


def name_machine(host: str, ranks: Sequence[int]) -> str:
    """`hostA (ranks 0, 1)`."""
    return f"{host} (rank{'s' * (len(ranks) > 1)} {listing(ranks, 8)})"


def wrong_first_machine(address: str) -> str:
    """The error for a rank 0 that does not have the address which the others connect to."""
    here = ", ".join(external_addresses())
    return f"MASTER_ADDR is {address}, and rank 0 runs here, which has {here}: give one of these"


def doctor_command(first: str, *others: str | None) -> str:
    """What to run when machines do not find each other."""
    names = list(dict.fromkeys([first, *filter(None, others)]))
    if len(names) == 1:
        names.append("ADDRESS_OF_THE_OTHER")
    return f"`toolkit doctor --peers {shlex.quote(','.join(names))}` on each machine shows more"


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
    if count == 1:
        _refuse_options_of_several(options, config, path)
        return Machines(1, 0, "", ("127.0.0.1",), _port(options, config, path))
    addresses = _listed(options.get("machines"), config.get("machines"), count, path)
    first = options.get("main_process_ip") or next(iter(addresses), None)
    if not first:
        first = _first_address(config, count, path, env)
    sources = {**env, "--machine_rank": options.get("machine_rank")}
    rank, source = _rank(sources, config, addresses or [first], count, path)
    if rank is None or not 0 <= rank < count:
        fault = f"cannot tell its rank{source}" if rank is None else f"has rank {rank} ({source})"
        raise UserError(
            f"{path} is for {count} machines, and this one {fault}: pass --machine_rank 0 on the "
            f"first and up to {count - 1} on the others (or set NODE_RANK, or list them: "
            "--machines ADDRESS,ADDRESS)"
        )
    return Machines(count, rank, source, (first, *addresses[1:]), _port(options, config, path))


def _refuse_options_of_several(
    options: Mapping[str, str | None],
    config: Mapping[str, Any],
    path: Path,
) -> None:
    """They would be ignored silently, and each machine would train on its own."""
    names = ("machines", "machine_rank", "main_process_ip")
    useless = [f"--{name}" for name in names if options.get(name)]
    if config.get("machines"):
        useless.append("its list of machines")
    if useless:
        remedy = f"use {TWO_NODE_FILES}, or leave it out"
        why = f"{path} is for one machine (num_machines: 1)"
        raise UserError(f"{why}, so {useless[0]} would have no effect: {remedy}")


def _port(options: Mapping[str, str | None], config: Mapping[str, Any], path: Path) -> int:
    value = options.get("main_process_port") or config.get("main_process_port") or DEFAULT_PORT
    port = parse_int("main_process_port", value, path)
    if not 0 < port <= 65535:
        remedy = "choose one from 1024 to 65535"
        raise UserError(f"{path}: main_process_port {port} is not a TCP port: {remedy}")
    return port


def _listed(option: str | None, in_file: object, count: int, path: Path) -> list[str]:
    items = option.split(",") if option else in_file or []
    if not isinstance(items, list):
        remedy = "should be a list: `machines: [10.0.0.1, 10.0.0.2]`"
        raise UserError(f"{path}: machines is {in_file!r} and {remedy}")
    names = [str(name).strip() for name in items]
    if names and ("" in names or not len(names) == len(set(names)) == count):
        where = "--machines" if option else f"{path}: machines"
        why = f"{where} names {', '.join(names)}, and num_machines is {count}"
        raise UserError(f"{why}: name each machine once, the first one first")
    return names


def _first_address(
    config: Mapping[str, Any],
    count: int,
    path: Path,
    env: Mapping[str, str],
) -> str:
    """The first machine's address, from the file or from Slurm."""
    address = config.get("main_process_ip")
    if address and PLACEHOLDER not in str(address):
        return str(address)
    slurm_nodes, slurm_count = env.get("SLURM_JOB_NODELIST"), env.get("SLURM_JOB_NUM_NODES")
    if slurm_nodes and slurm_count:
        if slurm_count != str(count):
            why = f"the Slurm job has --nodes {slurm_count}, and {path} num_machines: {count}"
            raise UserError(f"{why}: make them equal, or pass --main_process_ip ADDRESS")
        return first_host(slurm_nodes)
    raise UserError(
        f"{path}: main_process_ip is still {address!r}: write the first machine's address there, "
        "or pass --main_process_ip ADDRESS (`hostname -I` on the first machine shows it)"
    )


def _rank(
    sources: Mapping[str, str | None],
    config: Mapping[str, Any],
    addresses: Sequence[str],
    count: int,
    path: Path,
) -> tuple[int | None, str]:
    """(this machine's rank, its source). `sources`: options and variables."""
    for name in ("--machine_rank", "NODE_RANK", "SLURM_NODEID"):
        value = sources.get(name)
        if value is not None:
            return parse_int(name.lstrip("-"), value), name
    for rank, name in enumerate(addresses):
        if is_this_machine(name):
            return rank, f"{name} is an address of this machine"
    if config.get("machine_rank") is not None:
        rank = parse_int("machine_rank", config["machine_rank"], path)
        return rank, "machine_rank in the config file"
    if count == 2 and len(addresses) == 1:
        return _second_machine(addresses[0])
    here, names = ", ".join(external_addresses()), list(addresses)
    return None, f": none of {', '.join(names)} is an address of this machine ({here})"


def _second_machine(first: str) -> tuple[int, str]:
    """Of two machines, the one that does not have the first one's address."""
    if not resolve_addresses(first):
        raise UserError(
            f"the name {first} cannot be resolved here: give the first machine's IP address alone "
            "(`hostname -I` there), or add the name to /etc/hosts, or pass --machine_rank"
        )
    return 1, f"{first} is not an address of this machine"
