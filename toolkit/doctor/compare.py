"""The accounts of several machines side by side: a table, and what must not differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from toolkit.doctor.account import Account
from toolkit.doctor.finding import Finding, plain, size_of
from toolkit.errors import listing
from toolkit.launch import facts

AREA = "machines"
_CLOCK_SECONDS = 2.0
# each machine has its own, and may
_OWN_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def names_of(accounts: Sequence[Account]) -> dict[int, str]:
    """Rank -> host name, with the address or number where two are called the same."""
    hosts = [account.host for account in accounts]
    return {
        account.rank: account.host
        if hosts.count(account.host) == 1
        else f"{account.host} ({account.address or account.rank})"
        for account in accounts
    }


def rows(accounts: Sequence[Account], offsets: Mapping[int, float]) -> list[list[str]]:
    """A heading, then a row per fact; the first column marks those that differ and should not."""
    names = names_of(accounts)
    made = [["", "", *(names[account.rank] for account in accounts)]]

    def add(name: str, values: Sequence[str], compared: bool = True) -> None:
        if any(values):
            made.append(["!!" if compared and len(set(values)) > 1 else "", name, *(value[:60] for value in values)])

    add("machine", [str(account.rank) for account in accounts], compared=False)
    add("address", [f"{a.address} ({a.interface})" if a.interface else a.address for a in accounts], compared=False)
    for name in _all_names(account.facts for account in accounts):
        add(name, [account.facts.get(name, "-") for account in accounts])
    add("GPUs", [_short(account.devices) for account in accounts])
    add("driver", [account.driver for account in accounts])
    add("backend", [account.backend for account in accounts])
    add("MTU", [str(account.mtu or "") for account in accounts])
    for name in _all_names(account.environment for account in accounts):
        add(name, [account.environment.get(name, "-") for account in accounts], name not in _OWN_VARIABLES)
    by_content = _all_names(account.files for account in accounts)
    for name in _all_names(account.settings for account in accounts):
        add(f"--{name}", [account.settings.get(name, "-") for account in accounts], name not in by_content)
    for name in by_content:
        add(f"content of {name}", [_content(account.files.get(name)) for account in accounts])
    add("clock", [_clock(account.rank, offsets) for account in accounts], compared=False)
    return made


def _all_names(tables: object) -> list[str]:
    return list(dict.fromkeys(name for table in tables for name in table))  # type: ignore[attr-defined]


def _short(devices: Sequence[str]) -> str:
    if not devices:
        return "none"
    kinds = dict.fromkeys(devices)
    return ", ".join(f"{devices.count(kind)} x {kind}" for kind in kinds)


def _content(entry: Mapping[str, object] | None) -> str:
    if entry is None:
        return "-"
    if entry.get("missing"):
        return "MISSING"
    return str(entry.get("digest") or "not read")


def _clock(rank: int, offsets: Mapping[int, float]) -> str:
    if rank == 0:
        return "0 s"
    return f"{offsets[rank]:+.3f} s" if rank in offsets else ""


# --- what must not differ


def check(accounts: Sequence[Account], offsets: Mapping[int, float]) -> list[Finding]:
    """Of the machines that came."""
    return [
        *versions(accounts),
        *settings(accounts),
        *files(accounts),
        *devices(accounts),
        *variables(accounts),
        *mtu(accounts),
        *clocks(accounts, offsets),
    ]


def _unlike(accounts: Sequence[Account], value: Callable[[Account], str]) -> str:
    """`A on hostA, B on hostB, hostC`, the values that there are; empty where all have the same."""
    names = names_of(accounts)
    holders: dict[str, list[str]] = {}
    for account in accounts:
        holders.setdefault(value(account), []).append(names[account.rank])
    return " and ".join(f"{held} on {', '.join(who)}" for held, who in holders.items()) if len(holders) > 1 else ""


def versions(accounts: Sequence[Account]) -> list[Finding]:
    """Python, libraries and code."""
    names = names_of(accounts)
    found = [(names[account.rank], account.facts) for account in accounts]
    unlike = facts.unlike(found)
    if not unlike:
        text = f"the same Python, libraries and code ({accounts[0].facts.get('code', '?')}) on all {len(accounts)}"
        return [Finding(AREA, "versions", "ok", text)]
    return [Finding(AREA, "versions", "fail", plain(unlike), plain(facts.mend_versions(found)))]


def settings(accounts: Sequence[Account]) -> list[Finding]:
    """What was typed, or is in the YAML file that was named; of files the content counts, not where they lie."""
    wrong, by_content = [], _all_names(account.files for account in accounts)
    for name in _all_names(account.settings for account in accounts):
        if name in by_content:
            continue
        if unlike := _unlike(accounts, lambda account, name=name: account.settings.get(name, "not given")):  # type: ignore[misc]
            wrong.append(f"--{name} is {unlike}")
    if wrong:
        remedy = "type the same line on all machines, with the same files of settings"
        return [Finding(AREA, "settings", "fail", plain("; ".join(wrong)), remedy)]
    count = len(accounts[0].settings)
    return [Finding(AREA, "settings", "ok", f"the same on all ({count} compared)")] if count else []


def files(accounts: Sequence[Account]) -> list[Finding]:
    """The content of what settings name; what is missing is the machine's own finding too."""
    found = []
    for name in _all_names(account.files for account in accounts):
        entries = {account.rank: account.files.get(name, {}) for account in accounts}
        if any(entry.get("unread") for entry in entries.values()):
            text = "could not be compared: it was not read to the end everywhere"
            found.append(Finding(AREA, name, "note", text))
        elif unlike := _unlike(accounts, lambda account, e=entries: _content(e[account.rank])):  # type: ignore[misc]
            found.append(_other_content(name, entries, unlike, names_of(accounts)))
        else:
            entry = entries[accounts[0].rank]
            if not entry.get("missing"):
                text = f"the same content on all ({size_of(entry.get('bytes', 0))})"
                found.append(Finding(AREA, name, "ok", text))
    return found


def _other_content(
    name: str, entries: Mapping[int, Mapping[str, object]], unlike: str, names: Mapping[int, str]
) -> Finding:
    there = {rank: entry for rank, entry in entries.items() if entry.get("digest")}
    parts = {rank: dict(entry.get("files") or {}) for rank, entry in there.items()}  # type: ignore[call-overload]
    inner = sorted({file for held in parts.values() for file in held})
    differ = [file for file in inner if len({held.get(file) for held in parts.values()}) > 1]
    which = f" (in {listing(differ, 3)})" if len(inner) > 1 and differ else ""
    source = min(there, default=None)
    if source is None:
        return Finding(AREA, name, "fail", plain(f"--{name}: {unlike}{which}"), "bring it to all machines")
    path = there[source].get("path")
    remedy = f"on the others, if {names[source]}'s is the right one: rsync -a {names[source]}:{path} {path}"
    return Finding(AREA, name, "fail", plain(f"--{name} has not the same content: {unlike}{which}"), plain(remedy))


def devices(accounts: Sequence[Account]) -> list[Finding]:
    """Every machine runs the same number of processes, one per GPU."""
    names, counts = names_of(accounts), {account.rank: len(account.devices) for account in accounts}
    machines, least = len(accounts), min(counts.values())
    asked = accounts[0].per_machine
    shown = _unlike(accounts, lambda account: f"{_short(account.devices)}")
    if len(set(counts.values())) > 1 and (asked is None or asked > least):
        text = f"not the same number of GPUs: {shown}"
        remedy = f"--num_processes {machines * max(least, 1)} on all machines ({max(least, 1)} on each)"
        if least == 0:
            remedy += "; a machine without GPUs cannot join those that have some: leave it out"
        elif least < max(counts.values()):
            larger = next(rank for rank in counts if counts[rank] > least)
            remedy += f"; {names[larger]} then uses CUDA_VISIBLE_DEVICES={','.join(map(str, range(least)))}"
        return [Finding(AREA, "devices", "fail", text, remedy)]
    if asked and least and asked > least:
        text = f"{asked} processes on each machine, and {least} GPU{'s' * (least > 1)} there"
        return [Finding(AREA, "devices", "fail", text, f"--num_processes {machines * least} on all machines")]
    if shown:
        text = f"not the same GPUs: {shown}; every step waits for the slowest"
        return [Finding(AREA, "devices", "note", text)]
    return [Finding(AREA, "devices", "ok", f"{_short(accounts[0].devices)} on each")] if least else []


def variables(accounts: Sequence[Account]) -> list[Finding]:
    """NCCL's and gloo's variables should agree; one side that uses InfiniBand waits for the other."""
    found = []
    for name in _all_names(account.environment for account in accounts):
        unlike = _unlike(accounts, lambda account, name=name: account.environment.get(name, "not set"))  # type: ignore[misc]
        if unlike and name not in _OWN_VARIABLES:
            remedy = f"`export {name}=...` on all machines, or `unset {name}` on all"
            found.append(Finding(AREA, name, "warn", plain(f"{name} is {unlike}"), remedy))
    return found


def mtu(accounts: Sequence[Account]) -> list[Finding]:
    """Large packets that one side sends and the other does not take are lost without a word."""
    unlike = _unlike(accounts, lambda account: f"{account.mtu} ({account.interface})" if account.mtu else "unknown")
    if len({account.mtu for account in accounts if account.mtu}) < 2:
        return []
    least = min(account.mtu for account in accounts if account.mtu)
    larger = next(account for account in accounts if account.mtu > least)
    remedy = f"on {larger.host}: sudo ip link set dev {larger.interface} mtu {least}"
    return [Finding(AREA, "MTU", "warn", f"the largest packet is {unlike} bytes: larger ones may be lost", remedy)]


def clocks(accounts: Sequence[Account], offsets: Mapping[int, float]) -> list[Finding]:
    """Against machine 0's."""
    names = names_of(accounts)
    wrong = {rank: offset for rank, offset in offsets.items() if abs(offset) > _CLOCK_SECONDS}
    if wrong:
        said = ", ".join(f"{names.get(rank, rank)} by {offset:+.1f} s" for rank, offset in wrong.items())
        text = f"clocks are apart: {said}, against {names.get(0, 'machine 0')}"
        return [Finding(AREA, "clocks", "warn", text, "sudo timedatectl set-ntp true  (or sudo chronyc makestep)")]
    if not offsets:
        return []
    most = max(abs(offset) for offset in offsets.values())
    return [Finding(AREA, "clocks", "ok", f"at most {max(most * 1000, 1):.0f} ms apart")]
