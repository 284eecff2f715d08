"""Which of several machines this is, where the first one is, and how it was known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import UserError
from toolkit.launch.environment import first_host
from toolkit.launch.wire import addresses_of, is_loopback, own_addresses

PLACEHOLDER = "ADDRESS_OF_MACHINE_0"
# Not torch's 29500: the `accelerate launch` that was typed holds that one while the file behind the script is followed.
MEETING_PORT = 29600


@dataclass(frozen=True)
class Machines:
    """The machines of a run, as this one knows them."""

    count: int
    rank: int
    """Of this machine, from 0."""
    how: str
    """Where the rank comes from, for the user."""
    addresses: tuple[str, ...]
    """In the order of ranks; machine 0's alone where only that is known."""
    port: int

    @property
    def first(self) -> str:
        return self.addresses[0]

    def name_of(self, rank: int) -> str:
        """`machine 1 (10.0.0.2)`."""
        return f"machine {rank} ({self.addresses[rank]})" if rank < len(self.addresses) else f"machine {rank}"


def find_machines(
    given: Mapping[str, str | None], config: Mapping[str, Any], path: Path, env: Mapping[str, str]
) -> Machines:
    """Settings behind the script, an accelerate config of several machines, the environment -> the machines.

    Raises UserError where an address is missing or cannot be meant, or this machine does not know which it is.
    """
    count = whole("num_machines", config.get("num_machines") or 1, path)
    listed = _listed(given.get("machines"), config.get("machines"), count, path)
    first = _first(given, config, listed, count, path, env)
    port = whole("main_process_port", given.get("main_process_port") or config.get("main_process_port")
                 or MEETING_PORT, path)  # fmt: skip
    if not 0 < port <= 65535:
        raise UserError(f"{path}: main_process_port {port} is no TCP port: choose one from 1024 to 65535")
    rank, how = _rank(given.get("machine_rank"), config, listed or [first], count, path, env)
    if rank is None or not 0 <= rank < count:
        said = "does not know which it is" if rank is None else f"is said to be number {rank} ({how})"
        raise UserError(
            f"{path} is for {count} machines and this one {said}: pass --machine_rank 0 on the first and up to "
            f"{count - 1} on the others (or set NODE_RANK, or list them: --machines ADDRESS,ADDRESS)"
        )
    return Machines(count, rank, how, (first, *listed[1:]), port)


def _listed(given: str | None, in_file: object, count: int, path: Path) -> list[str]:
    found: Sequence[object] = given.split(",") if given else in_file if isinstance(in_file, list) else []
    if in_file and not given and not isinstance(in_file, list):
        raise UserError(f"{path}: machines is {in_file!r} and should be a list: `machines: [10.0.0.1, 10.0.0.2]`")
    names = [str(name).strip() for name in found]
    if names and (len(names) != count or len(set(names)) != count or "" in names):
        raise UserError(
            f"{'--machines' if given else f'{path}: machines'} names {', '.join(names)}, and num_machines is {count}: "
            "name each machine once, the first one first"
        )
    return names


def _first(
    given: Mapping[str, str | None],
    config: Mapping[str, Any],
    listed: Sequence[str],
    count: int,
    path: Path,
    env: Mapping[str, str],
) -> str:
    written = config.get("main_process_ip")
    usable = None if not written or PLACEHOLDER in str(written) else str(written)
    in_list = listed[0] if listed else None
    in_job = env.get("SLURM_JOB_NODELIST") if env.get("SLURM_JOB_NUM_NODES") == str(count) else None
    address = given.get("main_process_ip") or in_list or usable or (first_host(in_job) if in_job else None)
    if not address:
        line = _line_of(path, "main_process_ip")
        raise UserError(
            f"{path}{line}: main_process_ip is still {written!r}: write the first machine's address on that line, or "
            "pass --main_process_ip ADDRESS (on the first machine, `hostname -I` shows it)"
        )
    return address


def _refuse_loopback(address: str) -> None:
    """Every machine would take itself for the first. (By Debian's /etc/hosts a machine's own name means 127.0.1.1
    there, and only there.)"""
    known = addresses_of(address)
    if known and all(is_loopback(found) and found != "127.0.1.1" for found in known):
        raise UserError(
            f"the first machine's address {address} means each machine itself ({known[0]}): give the one by which "
            "the others reach it (`hostname -I` there shows it)"
        )


def _line_of(path: Path, name: str) -> str:
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    place = next((number for number, line in enumerate(lines, 1) if line.strip().startswith(f"{name}:")), None)
    return f", line {place}" if place else ""


def _rank(
    given: str | None,
    config: Mapping[str, Any],
    listed: Sequence[str],
    count: int,
    path: Path,
    env: Mapping[str, str],
) -> tuple[int | None, str]:
    """(this machine's number, how it is known)."""
    spans = (
        whole("GROUP_WORLD_SIZE", env.get("GROUP_WORLD_SIZE", "1"), None) > 1
    )  # an outer launcher that spans machines
    said = {
        "--machine_rank": given,
        "NODE_RANK": env.get("NODE_RANK"),
        "SLURM_NODEID": env.get("SLURM_NODEID"),
        "GROUP_RANK": env.get("GROUP_RANK") if spans else None,
    }
    for name, value in said.items():
        if value is not None:
            return whole(name.lstrip("-"), value, None), name
    _refuse_loopback(listed[0])
    mine = [number for number, name in enumerate(listed) if is_own(name)]
    if len(mine) == 1:
        return mine[0], f"{listed[mine[0]]} is an address of this machine"
    if len(mine) > 1:
        return None, ""  # "machines" that share their addresses, as in a test
    if config.get("machine_rank") is not None:
        return whole("machine_rank", config["machine_rank"], path), "machine_rank in the config file"
    if count == 2 and len(listed) == 1:
        if not addresses_of(listed[0]):
            raise UserError(
                f"no machine is known here by the name {listed[0]}: give the first machine's address in numbers "
                "(`hostname -I` there), or add the name to /etc/hosts, or pass --machine_rank"
            )
        return 1, f"{listed[0]} is not an address of this machine"
    return None, ""


def is_own(name: str) -> bool:
    """Whether a host's name or address is this machine's."""
    own = own_addresses()
    return any(address in own or address == "127.0.1.1" for address in addresses_of(name))


def whole(name: str, value: object, path: Path | None) -> int:
    """Raises UserError for what is no whole number."""
    try:
        return int(str(value))
    except ValueError as error:
        where = f"{path}: " if path else ""
        raise UserError(f"{where}{name} must be a whole number, not {value!r}") from error
