"""The machines together: what each says of itself, how fast the ways between are, and a small all-reduce."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolkit.doctor import compare, links
from toolkit.doctor.account import Account, read_account
from toolkit.doctor.exchange import Deadline, Talk, rounds
from toolkit.doctor.finding import Finding, mapping, number, plain
from toolkit.doctor.measure import Measured, drive, read_measured, serve
from toolkit.doctor.meet import Meeting
from toolkit.doctor.torch_process import TorchProcess
from toolkit.launch.machines import Machines
from toolkit.launch.wire import WireError

AREA = "all-reduce"
_MEASURE_SECONDS = 10.0
"""For all pairs of one machine together."""
_MOST_PAIR_SECONDS = 0.7
_REDUCE_SECONDS = {"gloo": 12.0, "nccl": 15.0}
_REDUCE_MEGABYTES = 4
_SWAP_SECONDS = 6.0
_SLOWEST_SECONDS = 15.0
"""How much later than this one another machine may be done with looking at itself."""


@dataclass
class Together:
    """What is known in the end; the same on every machine where all have met."""

    accounts: list[Account] = field(default_factory=list)
    pairs: dict[tuple[int, int], Measured | str] = field(default_factory=dict)
    reduced: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Machine -> backend -> how the all-reduce went there."""
    not_reduced: str = ""
    """Why no all-reduce was tried."""

    @property
    def offsets(self) -> dict[int, float]:
        """Machine -> what its clock shows more than machine 0's, in seconds."""
        return {
            high: seen.clock_offset_seconds
            for (low, high), seen in self.pairs.items()
            if low == 0 and isinstance(seen, Measured)
        }


def talk(
    meeting: Meeting, mine: Account, machines: Machines, torch: TorchProcess, gpus: bool, deadline: Deadline
) -> Together:
    """All that machines do once they have met. Nothing is raised for a machine that leaves on the way."""
    line = Talk(mine.rank, meeting.ways)
    heard = line.swap("account", mine.as_dict(), _soon(deadline, meeting.left + _SLOWEST_SECONDS))
    found = Together(sorted([mine, *(read_account(sent, rank) for rank, sent in heard.items())], key=lambda a: a.rank))
    own = _measure(line, machines.count, deadline)
    meeting.stop_listening()  # the all-reduce needs the port
    order = _order(found.accounts, machines, gpus) if mine.rank == 0 else {}
    told = {str(other): seen.as_dict() if isinstance(seen, Measured) else seen for other, seen in own.items()}
    heard = line.swap("measured", {"measured": told, "order": order}, _soon(deadline, _SWAP_SECONDS + _MEASURE_SECONDS))
    found.pairs = _pairs(mine.rank, own, heard)
    order = order or mapping(heard.get(0, {}).get("order"))
    found.not_reduced = plain(order.get("reason", "")) if order else f"there is no contact with {machines.name_of(0)}"
    if not found.not_reduced:
        backends = [name for name in ("gloo", "nccl") if name in (order.get("backends") or ())]
        mine_reduced = _reduce(torch, mine, machines, backends, deadline)
        heard = line.swap("reduced", {"reduced": mine_reduced}, _soon(deadline, _REDUCE_SECONDS["nccl"]))
        found.reduced = {mine.rank: mine_reduced} | {
            rank: _read_reduced(sent.get("reduced")) for rank, sent in heard.items()
        }
    return found


def _soon(deadline: Deadline, seconds: float) -> Deadline:
    return Deadline(deadline.left(seconds))


# --- the ways between


def _measure(line: Talk, count: int, deadline: Deadline) -> dict[int, Measured | str]:
    """Other machine -> what was measured with it, as this one sees it, or why nothing was."""
    found: dict[int, Measured | str] = {}
    seconds = min(_MOST_PAIR_SECONDS, _MEASURE_SECONDS / 3 / max(count - 1, 1))
    until = _soon(deadline, _MEASURE_SECONDS)
    for other in rounds(count, line.rank):
        if other not in line.lines:
            continue
        try:
            if line.leads(other):
                found[other] = drive(line.lines[other], seconds)
            else:
                found[other] = serve(line.lines[other], seconds, until.left()) or "it sent no numbers"
        except WireError as error:
            found[other] = plain(error, 300)
            line.leave(other)  # what is under way there would be taken for the next message
    return found


def _pairs(
    rank: int, own: Mapping[int, Measured | str], heard: Mapping[int, Mapping[str, Any]]
) -> dict[tuple[int, int], Measured | str]:
    """What all have measured, each pair as its lower number sees it; numbers count more than complaints."""
    pairs: dict[tuple[int, int], Measured | str] = {}

    def put(one: int, other: int, seen: Measured | str) -> None:
        pair = (min(one, other), max(one, other))
        if isinstance(seen, Measured) and not isinstance(pairs.get(pair), Measured):
            pairs[pair] = seen if one < other else seen.reversed()
        else:
            pairs.setdefault(pair, seen)

    for other, seen in own.items():
        put(rank, other, seen)
    for teller, sent in heard.items():
        for name, values in list(mapping(sent.get("measured")).items())[:64]:
            if name.isdecimal() and int(name) != teller:
                put(teller, int(name), read_measured(values) or plain(values, 300))
    return pairs


# --- the all-reduce


def _order(accounts: Sequence[Account], machines: Machines, gpus: bool) -> dict[str, Any]:
    """Machine 0 decides: {reason} against it, or {backends}."""
    if len(accounts) < machines.count:
        return {"reason": "not every machine is there"}
    broken = [account.host for account in accounts if not account.backend]
    if broken:
        return {"reason": f"torch does not work on {', '.join(broken)}"}
    deaf = [account.host for account in accounts[1:] if 0 not in account.calls or not account.calls[0].ok]
    if deaf:
        return {"reason": f"{', '.join(deaf)} cannot reach {accounts[0].host}"}
    if not accounts[0].listens:
        return {"reason": f"port {machines.port} of {accounts[0].host} is taken"}
    nccl = gpus and all(account.devices and account.backend.startswith("NCCL") for account in accounts)
    return {"backends": ["gloo", "nccl"] if nccl else ["gloo"]}


def _reduce(
    torch: TorchProcess, mine: Account, machines: Machines, backends: Sequence[str], deadline: Deadline
) -> dict[str, Any]:
    own = mine.interface
    order = {
        "rank": mine.rank,
        "world_size": machines.count,
        "address": machines.first,
        "port": machines.port,
        "backends": list(backends),
        "megabytes": _REDUCE_MEGABYTES,
        "seconds": _REDUCE_SECONDS["gloo"],
        # as the launcher of this package sets them: see toolkit.launch.rollcall
        "env": {"GLOO_SOCKET_IFNAME": own, "NCCL_SOCKET_IFNAME": f"={own}"} if own else {},
    }
    return torch.all_reduce(order, deadline.left(sum(_REDUCE_SECONDS[name] for name in backends)))


def _read_reduced(sent: object) -> dict[str, Any]:
    found = {}
    for backend, values in list(mapping(sent).items())[:4]:
        said = mapping(values)
        found[plain(backend, 20)] = {
            "ok": said.get("ok") is True,
            "seconds": number(said.get("seconds")),
            "error": plain(said.get("error", ""), 500),
        }
    return found


def check_reduced(found: Together) -> list[Finding]:
    """How the all-reduce went."""
    if found.not_reduced:
        return [Finding(AREA, "gloo", "note", f"not tried: {found.not_reduced}")]
    names = compare.names_of(found.accounts)
    findings = []
    for backend in dict.fromkeys(backend for said in found.reduced.values() for backend in said):
        said = {rank: by_backend[backend] for rank, by_backend in found.reduced.items() if backend in by_backend}
        wrong = {rank: plain(one.get("error") or "?", 300) for rank, one in said.items() if not one["ok"]}
        silent = [names[account.rank] for account in found.accounts if account.rank not in said]
        if wrong or silent:
            told = [f"{names[rank]}: {why}" for rank, why in wrong.items()] + [f"{name}: no word" for name in silent]
            text = f"failed between the machines ({'; '.join(told)})"
            findings.append(Finding(AREA, backend, "fail", text, _mend(backend, found.accounts)))
        else:
            slowest = max(one.get("seconds") or 0.0 for one in said.values())
            text = f"{_REDUCE_MEGABYTES} MB summed over {len(said)} machines in {slowest * 1000:.1f} ms"
            findings.append(Finding(AREA, backend, "ok", text))
    return findings


def _mend(backend: str, accounts: Sequence[Account]) -> str:
    """Every port is needed, over the interface that leads to the others."""
    first, others = accounts[0], accounts[1:]
    opened = (
        f"on {first.host}: sudo ufw allow from {others[0].address}, and so on each for all others" if others else ""
    )
    interface = next((account.interface for account in accounts if account.interface), "NAME")
    if backend == "gloo":
        return f"{opened}; export GLOO_SOCKET_IFNAME={interface}  (each machine's own name for it)"
    return f"export NCCL_SOCKET_IFNAME={interface}; export NCCL_IB_DISABLE=1; {opened}; `NCCL_DEBUG=INFO` says more"


def findings_of(found: Together, machines: Machines, lines: Mapping[int, str], seconds: float) -> list[Finding]:
    """Between the machines; `lines` and `seconds` as in `links.check`."""
    return [
        *links.check(found.accounts, found.pairs, machines, lines, seconds),
        *(compare.check(found.accounts, found.offsets) if len(found.accounts) > 1 else []),
        *(check_reduced(found) if len(found.accounts) > 1 else []),
    ]
