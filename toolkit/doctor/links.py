"""Who reaches whom, how fast, and what to type where somebody does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from toolkit.doctor.account import Account, Call
from toolkit.doctor.compare import names_of
from toolkit.doctor.finding import Finding
from toolkit.doctor.measure import LARGE_MESSAGES, Measured
from toolkit.launch.machines import Machines

AREA = "links"
_EXAMPLE_BYTES = 4 * 110e6
"""The gradients of a model with 110 million parameters in fp32."""
_SLOW = 125.0
"""10^6 bytes per second: 1 Gbit/s."""


@dataclass(frozen=True)
class Link:
    """From one machine (by its number) to another; `kind` says what stands in the way where it is not ok."""

    from_rank: int
    to_rank: int
    ok: bool
    kind: str = ""
    detail: str = ""
    latency_ms: float | None = None
    mbytes_per_second: float | None = None

    def as_dict(self, names: Mapping[int, str]) -> dict[str, Any]:
        values = asdict(self)
        values["from"] = names.get(values.pop("from_rank"), f"machine {self.from_rank}")
        values["to"] = names.get(values.pop("to_rank"), f"machine {self.to_rank}")
        return values


Pairs = Mapping[tuple[int, int], Measured | str]
"""(lower number, higher number) -> what was measured between them, as the lower one sees it, or why nothing was."""


def links_of(accounts: Sequence[Account], pairs: Pairs) -> list[Link]:
    """Every call that an account tells of."""
    found = []
    for account in accounts:
        for other, call in sorted(account.calls.items()):
            measured = pairs.get((min(account.rank, other), max(account.rank, other)))
            if isinstance(measured, Measured):
                seen = measured if account.rank < other else measured.reversed()
                numbers = (round(seen.latency_ms, 3), round(seen.out_mbytes_per_second, 1))
            else:
                numbers = (None, None)  # type: ignore[assignment]
            found.append(Link(account.rank, other, call.ok, call.kind, call.detail, *numbers))
    return found


def check(
    accounts: Sequence[Account], pairs: Pairs, machines: Machines, lines: Mapping[int, str], seconds: float
) -> list[Finding]:
    """`lines`: machine -> what to type on it. `seconds` were waited for all of them."""
    return [
        *missing(accounts, machines, lines, seconds),
        *one_way(accounts, machines),
        *measured(accounts, pairs),
        *strangers(accounts),
    ]


def missing(accounts: Sequence[Account], machines: Machines, lines: Mapping[int, str], seconds: float) -> list[Finding]:
    """Machines nobody has met."""
    came = {account.rank for account in accounts}
    found = []
    for rank in (rank for rank in range(machines.count) if rank not in came):
        calls = {account.rank: account.calls[rank] for account in accounts if rank in account.calls}
        found.append(_missing_one(rank, calls, names_of(accounts), machines, lines.get(rank, ""), seconds))
    return found


def _missing_one(
    rank: int, calls: Mapping[int, Call], names: Mapping[int, str], machines: Machines, line: str, seconds: float
) -> Finding:
    why = "; ".join(dict.fromkeys(f"{names[caller]} says: {call.detail}" for caller, call in calls.items()))
    there = {call.kind for call in calls.values()} & set(_NOT_LET_IN)
    if there:
        text, remedy = f"{machines.name_of(rank)} is there and was not met", _NOT_LET_IN[min(there)]
    else:
        text = f"{machines.name_of(rank)} did not come within {seconds:.0f} s"
        remedy = next((call.remedy for call in calls.values() if call.remedy), "")
        remedy = "; ".join(filter(None, (f"on it type: {line}" if line else "", remedy)))
    return Finding(AREA, f"machine {rank}", "fail", f"{text}{f'. {why}' if why else ''}", remedy)


_NOT_LET_IN = {
    "conflict": "type the same on all machines, with the machines in the same order",
    "stranger": "another program's port there? Or this machine's address is not the one that was named for it: then "
    "name that, or give the same --token on all machines",
    "token": "give the same --token on all machines; where none is given, the same --peers, spelled alike",
}
"""Kind of trouble where somebody answers -> what to do."""


def one_way(accounts: Sequence[Account], machines: Machines) -> list[Finding]:
    """Pairs that met over one way only."""
    by_rank, names = {account.rank: account for account in accounts}, names_of(accounts)
    found = []
    for account in accounts:
        for other, call in sorted(account.calls.items()):
            if call.ok or other not in by_rank:
                continue
            there = by_rank[other]
            address = machines.addresses[other] if other < len(machines.addresses) else there.address
            back = ", although the other way works" if there.calls.get(account.rank, Call(False)).ok else ""
            caller, where = names[account.rank], f"{names[other]} at {address}:{machines.port}"
            text = f"{caller} does not reach {where}{back}. {caller} says: {call.detail}"
            remedy = _mend(account, there, call, machines, names)
            found.append(Finding(AREA, f"{account.rank} -> {other}", "fail", text, remedy))
    return found


def _mend(caller: Account, there: Account, call: Call, machines: Machines, names: Mapping[int, str]) -> str:
    port, here = machines.port, names[there.rank]
    source = caller.address or "THAT_MACHINE"
    opened = f"on {here}: sudo ufw allow from {source} to any port {port} proto tcp"
    if not there.listens or call.kind == "stranger":
        return f"on {here}: `sudo ss -ltnp 'sport = :{port}'` shows what holds the port; or another --main_process_port"
    if call.kind in ("silent", "refused"):
        way = "drops" if call.kind == "silent" else "rejects"
        return f"{opened}  (a firewall {way} it; a run needs every port: sudo ufw allow from {source})"
    if call.kind == "token":
        return _NOT_LET_IN["token"]
    return f"on {names[caller.rank]}: {call.remedy}" if call.remedy else opened


def measured(accounts: Sequence[Account], pairs: Pairs) -> list[Finding]:
    """Latency and bandwidth of each pair, and what the slowest means for a run."""
    names, found = names_of(accounts), []
    for (low, high), seen in sorted(pairs.items()):
        if low not in names or high not in names:
            continue
        name, who = f"{low} <-> {high}", f"{names[low]} and {names[high]}"
        if isinstance(seen, str):
            found.append(_unmeasured(name, who, seen))
            continue
        slower = min(seen.out_mbytes_per_second, seen.back_mbytes_per_second)
        text = (
            f"{seen.latency_ms:.2f} ms there and back, {_rate(seen.out_mbytes_per_second)} from {names[low]}, "
            f"{_rate(seen.back_mbytes_per_second)} from {names[high]}"
        )
        if slower >= _SLOW:
            found.append(Finding(AREA, name, "ok", text))
        else:
            found.append(Finding(AREA, name, "warn", f"{text}: {_meaning(slower, len(accounts))}", _FASTER))
    return found


_FASTER = (
    "a faster interface, if there is one: `export NCCL_SOCKET_IFNAME=NAME GLOO_SOCKET_IFNAME=NAME` on all machines"
)


def _unmeasured(name: str, who: str, why: str) -> Finding:
    if why.startswith(LARGE_MESSAGES):
        remedy = "`ping -M do -s 1472 OTHER_MACHINE`; if that fails: sudo ip link set dev INTERFACE mtu 1400, on both"
        return Finding(AREA, name, "fail", f"{why} between {who}: the MTU of one is too large for the way", remedy)
    return Finding(AREA, name, "warn", f"nothing could be measured between {who}: {why}")


def _rate(mbytes: float) -> str:
    gigabits = mbytes * 8 / 1000
    return f"{gigabits:.1f} Gbit/s" if gigabits >= 1 else f"{gigabits * 1000:.0f} Mbit/s"


def _meaning(mbytes: float, machines: int) -> str:
    """A ring all-reduce sends 2 (n - 1) / n of the gradients from each machine (Patarasuk and Yuan, 2009)."""
    if mbytes <= 0:
        return "too slow to be measured"
    seconds = 2 * (machines - 1) / machines * _EXAMPLE_BYTES / (mbytes * 1e6)
    return f"each step of a model with 110M parameters in fp32 takes {seconds:.1f} s for its all-reduce alone"


def strangers(accounts: Sequence[Account]) -> list[Finding]:
    """Connections that were sent away."""
    names, addresses = names_of(accounts), {account.address for account in accounts}
    found = []
    for account in accounts:
        for address, why in account.strangers.items():
            ours = address in addresses
            text = f"{names[account.rank]} sent a connection from {address} away: {why}"
            found.append(Finding(AREA, "stranger", "warn" if ours else "note", text))
    return found
