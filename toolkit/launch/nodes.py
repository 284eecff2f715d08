"""This node's rank among the nodes (machines) of a run, the address of the first node, and where both come from."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import UserError, listing
from toolkit.launch.environment import first_host, launch_request, parse_int
from toolkit.launch.network import external_addresses, is_loopback, is_this_machine, resolve_addresses

TWO_NODE_FILES = "accelerate_configs/2node.yaml (or 2node_zero2, 2node_zero3, 2node_fsdp2)"
PLACEHOLDER = "ADDRESS_OF_MACHINE_0"
RENDEZVOUS_PORT = 29600  # not torch's default, which the user's `accelerate launch` keeps open meanwhile


@dataclass(frozen=True)
class Nodes:
    """The nodes of a run."""

    count: int
    rank: int
    """This node's, from 0."""
    rank_source: str
    """The option, variable or address that gave the rank, for the user."""
    addresses: tuple[str, ...]
    """Addresses by rank; only node 0's without a list of machines."""
    port: int

    @property
    def first(self) -> str:
        return self.addresses[0]

    def address_of(self, rank: int) -> str:
        """The address in the settings; empty if it is not listed."""
        return self.addresses[rank] if rank < len(self.addresses) else ""

    def others(self) -> list[str]:
        """The other machines' addresses, as far as the settings list them."""
        return [name for rank, name in enumerate(self.addresses) if rank != self.rank]

    def name_of(self, rank: int) -> str:
        """`machine 1 (10.0.0.2)`."""
        return f"machine {rank} ({known})" if (known := self.address_of(rank)) else f"machine {rank}"


def requested_nodes() -> Nodes | None:
    """The nodes that our launcher starts; None under other launchers."""
    nodes = launch_request().get("nodes")
    return Nodes(**nodes) if nodes else None


def name_machine(host: str, ranks: Sequence[int]) -> str:
    """`hostA (ranks 0, 1)`."""
    return f"{host} (rank{'s' * (len(ranks) > 1)} {listing(ranks, 8)})"


def name_ranks(ranks: Sequence[int]) -> str:
    """`rank 1 (machine 1 (10.0.0.2))`; without the machines under other launchers."""
    text, nodes = f"rank{'s' * (len(ranks) > 1)} {listing(ranks, 8)}", requested_nodes()
    if not nodes or nodes.count == 1:
        return text
    each = int(os.environ["LOCAL_WORLD_SIZE"])
    return f"{text} ({', '.join(dict.fromkeys(nodes.name_of(rank // each) for rank in ranks))})"


def wrong_first_machine(address: str) -> str:
    """The error for a rank 0 that runs on another machine than the one the other ranks connect to."""
    here = ", ".join(external_addresses())
    remedy = "pass --machine_rank here if it is another one, or --main_process_ip with an address of the first machine"
    return f"{address}, which the other machines connect to, is not an address of this machine ({here}): {remedy}"


def doctor_command(first: str, *others: str | None) -> str:
    """What to run when machines do not find each other."""
    names = dict.fromkeys([first, *(name for name in others if name)])
    listed = ",".join(names if len(names) > 1 else [first, "ADDRESS_OF_THE_OTHER"])
    return f"`toolkit doctor --peers {shlex.quote(listed)}` on each machine shows more"


def set_global_ranks(env: MutableMapping[str, str]) -> None:
    """Our launchers start each node separately, so that none waits for another and a restart needs no store of the last
    attempt: turns the ranks within this node into ranks within the run."""
    nodes = requested_nodes()
    if nodes is None or nodes.count == 1 or "LOCAL_RANK" not in env:
        return
    each = int(env["LOCAL_WORLD_SIZE"])
    env.update(
        RANK=str(nodes.rank * each + int(env["LOCAL_RANK"])), WORLD_SIZE=str(nodes.count * each),
        GROUP_RANK=str(nodes.rank), GROUP_WORLD_SIZE=str(nodes.count), MASTER_ADDR=nodes.first,
        MASTER_PORT=str(nodes.port),
    )  # fmt: skip
    env.pop("TORCHELASTIC_USE_AGENT_STORE", None)


def find_nodes(
    options: Mapping[str, str | None], config: Mapping[str, Any], path: Path, env: Mapping[str, str]
) -> Nodes:
    """The nodes, from the options after the script, an accelerate config and the environment.

    Raises UserError if an address is missing or unusable, or this node's rank cannot be determined.
    """
    count = parse_int("num_machines", config.get("num_machines") or 1, path)
    if count == 1:
        _refuse_multi_node_options(options, config, path)
        return Nodes(1, 0, "", ("127.0.0.1",), _port(options, config, path))
    machines = _machines(options.get("machines"), config.get("machines"), count, path)
    first = options.get("main_process_ip") or (machines[0] if machines else _first_address(config, count, path, env))
    sources = {**env, "--machine_rank": options.get("machine_rank")}
    rank, source = _rank(sources, config, machines or [first], count, path)
    if rank is None or not 0 <= rank < count:
        reason = f"cannot tell its rank{source}" if rank is None else f"has rank {rank} ({source})"
        raise UserError(
            f"{path} is for {count} machines, and this one {reason}: pass --machine_rank 0 on the first and up to "
            f"{count - 1} on the others (or set NODE_RANK, or list them: --machines ADDRESS,ADDRESS)"
        )
    return Nodes(count, rank, source, (first, *machines[1:]), _port(options, config, path))


def _refuse_multi_node_options(options: Mapping[str, str | None], config: Mapping[str, Any], path: Path) -> None:
    """They would be ignored silently, and each machine would train on its own."""
    settings = [f"--{name}" for name in ("machines", "machine_rank", "main_process_ip") if options.get(name)]
    if config.get("machines"):
        settings.append("its list of machines")
    if settings:
        remedy = f"use {TWO_NODE_FILES}, or leave it out"
        raise UserError(f"{path} is for one machine (num_machines: 1), so {settings[0]} would have no effect: {remedy}")


def _port(options: Mapping[str, str | None], config: Mapping[str, Any], path: Path) -> int:
    value = options.get("main_process_port") or config.get("main_process_port") or RENDEZVOUS_PORT
    port = parse_int("main_process_port", value, path)
    if not 0 < port <= 65535:
        raise UserError(f"{path}: main_process_port {port} is not a TCP port: choose one from 1024 to 65535")
    return port


def _machines(option: str | None, in_file: object, count: int, path: Path) -> list[str]:
    items = option.split(",") if option else in_file or []
    if not isinstance(items, list):
        raise UserError(f"{path}: machines is {in_file!r} and should be a list: `machines: [10.0.0.1, 10.0.0.2]`")
    names = [str(name).strip() for name in items]
    if names and (len(names) != count or len(set(names)) != count or "" in names):
        why = f"{'--machines' if option else f'{path}: machines'} names {', '.join(names)}, and num_machines is {count}"
        raise UserError(f"{why}: name each machine once, the first one first")
    return names


def _first_address(config: Mapping[str, Any], count: int, path: Path, env: Mapping[str, str]) -> str:
    """The first node's address, from the file or from Slurm."""
    address = config.get("main_process_ip")
    if address and PLACEHOLDER not in str(address):
        return str(address)
    if env.get("SLURM_JOB_NODELIST") and (nodes := env.get("SLURM_JOB_NUM_NODES")):
        if nodes != str(count):
            remedy = "make them equal, or pass --main_process_ip ADDRESS"
            raise UserError(f"the Slurm job has --nodes {nodes}, and {path} num_machines: {count}: {remedy}")
        return first_host(env["SLURM_JOB_NODELIST"])
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    places = (f", line {number}" for number, line in enumerate(lines, 1) if line.strip().startswith("main_process_ip:"))
    raise UserError(
        f"{path}{next(places, '')}: main_process_ip is still {address!r}: write the first machine's address on that "
        "line, or pass --main_process_ip ADDRESS (on the first machine, `hostname -I` shows it)"
    )


def _refuse_loopback(machines: Sequence[str]) -> None:
    """Every machine would take a loopback address for its own. (127.0.1.1 is allowed: Debian's /etc/hosts gives it to a
    machine's own name, on that machine only.)"""
    for name in machines:
        addresses = resolve_addresses(name)
        if addresses and all(is_loopback(address) and address != "127.0.1.1" for address in addresses):
            remedy = "give one that the other machines can reach (`hostname -I` there shows it)"
            raise UserError(f"{name} is a loopback address ({addresses[0]}): {remedy}")


def _rank(
    sources: Mapping[str, str | None], config: Mapping[str, Any], machines: Sequence[str], count: int, path: Path
) -> tuple[int | None, str]:
    """(this node's rank, its source). `sources`: options and variables."""
    # GROUP_RANK counts only if an outer launcher spans nodes
    spans = parse_int("GROUP_WORLD_SIZE", sources.get("GROUP_WORLD_SIZE", "1")) > 1
    for name in ("--machine_rank", "NODE_RANK", "SLURM_NODEID", *["GROUP_RANK"] * spans):
        if (value := sources.get(name)) is not None:
            return parse_int(name.lstrip("-"), value), name
    _refuse_loopback(machines)
    for rank, name in enumerate(machines):
        if is_this_machine(name):
            return rank, f"{name} is an address of this machine"
    if config.get("machine_rank") is not None:
        return parse_int("machine_rank", config["machine_rank"], path), "machine_rank in the config file"
    if count == 2 and len(machines) == 1:
        if not resolve_addresses(machines[0]):
            raise UserError(
                f"the name {machines[0]} cannot be resolved here: give the first machine's IP address alone "
                "(`hostname -I` there), or add the name to /etc/hosts, or pass --machine_rank"
            )
        return 1, f"{machines[0]} is not an address of this machine"
    return None, f": none of {', '.join(machines)} is an address of this machine ({', '.join(external_addresses())})"
