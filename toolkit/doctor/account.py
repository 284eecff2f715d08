"""What a machine tells the others of itself, and what is made of what they tell: nothing is taken on trust."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from toolkit.doctor import network
from toolkit.doctor.finding import Finding, mapping, plain, read_finding, whole_number
from toolkit.doctor.job import Job
from toolkit.doctor.meet import Meeting, Trouble
from toolkit.doctor.probe import read_text
from toolkit.doctor.shell import COMMUNICATION, environment_of
from toolkit.launch import facts, wire

_MOST_FINDINGS = 50
_MOST_ENTRIES = 300


@dataclass(frozen=True)
class Call:
    """How calling another machine went."""

    ok: bool
    kind: str = ""
    """See `meet.Trouble`; empty where it went well."""
    detail: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Account:
    """One machine, as it describes itself."""

    rank: int
    host: str
    address: str = ""
    """By which the others reach it."""
    interface: str = ""
    mtu: int = 0
    facts: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    """See `data.checksums`."""
    devices: tuple[str, ...] = ()
    """The names of the GPUs torch sees, with their memory."""
    driver: str = ""
    backend: str = ""
    """`NCCL 2.27.3` or `gloo`; empty where torch does not work."""
    environment: dict[str, str] = field(default_factory=dict)
    """NCCL's and gloo's variables."""
    per_machine: int | None = None
    """Processes asked for on each machine."""
    listens: bool = True
    calls: dict[int, Call] = field(default_factory=dict)
    strangers: dict[str, str] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    """Its own warnings and failures."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def own_account(
    job: Job,
    meeting: Meeting,
    torch: Mapping[str, Any],
    driver: str,
    files: Mapping[str, dict[str, Any]],
    findings: Sequence[Finding],
    listens: bool,
) -> Account:
    """Of this machine, after the meeting."""
    me = meeting.me
    address, interface, mtu = _own_way(meeting)
    return Account(
        rank=me.rank,
        host=me.host,
        address=address,
        interface=interface,
        mtu=mtu,
        facts={name: str(value or "not installed") for name, value in facts.facts(job.script).items()},
        settings=dict(job.settings),
        files=dict(files),
        devices=tuple(f"{found['name']} {found['memory'] >> 30} GiB" for found in torch.get("devices") or ()),
        driver=driver,
        backend="" if torch.get("broken") else f"NCCL {torch['nccl']}" if torch.get("nccl") else "gloo",
        environment={name: plain(value, 200) for name, value in environment_of(os.environ, COMMUNICATION).items()},
        per_machine=job.processes // me.count if job.processes else None,
        listens=listens,
        calls=_calls(meeting),
        strangers=dict(meeting.strangers),
        findings=tuple(finding for finding in findings if finding.level in ("warn", "fail"))[:_MOST_FINDINGS],
    )


def _own_way(meeting: Meeting) -> tuple[str, str, int]:
    """(this machine's address, interface and MTU on the way to the others)."""
    lines = [line for way in meeting.ways.values() for line in (way.out, way.back) if line is not None]
    me = meeting.me
    named = me.names[me.rank] if me.rank < len(me.names) else ""
    address = lines[0].own if lines else next(iter(wire.addresses_of(named)), named)
    found = next((found for found in network.interfaces() if found.address == address), None)
    return (address, found.name, found.mtu) if found else (address, "", 0)


def _calls(meeting: Meeting) -> dict[int, Call]:
    found = {}
    for rank, way in meeting.ways.items():
        if way.out is not None:
            found[rank] = Call(True)
        elif way.trouble is None:
            opened = f"here: sudo ufw allow from THAT_MACHINE to any port {meeting.me.port} proto tcp"
            remedy = f"if it was typed there, a firewall may drop it ({opened}); --machines A,B tells more"
            found[rank] = Call(False, "absent", "it has not called, and its address is not known here", remedy)
        else:
            found[rank] = _failed_call(way.trouble, network.unanswered(read_text("/proc/net/arp") or ""))
    return found


def _failed_call(trouble: Trouble, unanswered: Mapping[str, str]) -> Call:
    if trouble.fault is None:
        return Call(False, trouble.kind, trouble.detail)
    address = next((known for known in wire.addresses_of(trouble.fault.address) if known in unanswered), None)
    if address and trouble.kind in ("no_route", "silent"):
        text = f"no machine on the network of {unanswered[address]} answers to {address}"
        return Call(False, trouble.kind, text, "`hostname -I` on that machine shows its address; is it on?")
    return Call(False, trouble.kind, trouble.detail, wire.remedy(trouble.fault))


def read_account(sent: Mapping[str, Any], rank: int) -> Account:
    """What machine `rank` sent, every field of the type it should have and of bounded length."""
    host = plain(sent.get("host") or f"machine {rank}", 100)
    findings = [read_finding(found) for found in _list(sent.get("findings"))[:_MOST_FINDINGS]]
    each = sent.get("per_machine")
    return Account(
        rank=rank,
        host=host,
        address=plain(sent.get("address", ""), 100),
        interface=plain(sent.get("interface", ""), 50),
        mtu=whole_number(sent.get("mtu")),
        facts=_texts(sent.get("facts")),
        settings=_texts(sent.get("settings")),
        files={name: _file(entry) for name, entry in _entries(sent.get("files")).items()},
        devices=tuple(plain(name, 100) for name in _list(sent.get("devices"))[:64]),
        driver=plain(sent.get("driver", ""), 50),
        backend=plain(sent.get("backend", ""), 50),
        environment=_texts(sent.get("environment")),
        per_machine=whole_number(each) if each is not None else None,
        listens=sent.get("listens") is True,
        calls={int(other): _call(call) for other, call in _entries(sent.get("calls")).items() if other.isdecimal()},
        strangers=_texts(sent.get("strangers")),
        findings=tuple(found for found in findings if found is not None),
    )


def _call(sent: object) -> Call:
    values = mapping(sent)
    words = {name: plain(values.get(name, ""), 500) for name in ("kind", "detail", "remedy")}
    return Call(values.get("ok") is True, **words)


def _file(sent: object) -> dict[str, Any]:
    values = mapping(sent)
    entry: dict[str, Any] = {
        name: plain(values[name], 500) for name in ("path", "digest", "unread") if values.get(name)
    }
    entry["bytes"] = whole_number(values.get("bytes"))
    entry["missing"] = values.get("missing") is True
    entry["files"] = _texts(values.get("files"))
    return entry


def _texts(sent: object) -> dict[str, str]:
    return {plain(name, 200): plain(value, 500) for name, value in _entries(sent).items()}


def _entries(sent: object) -> dict[str, Any]:
    return dict(list(mapping(sent).items())[:_MOST_ENTRIES])


def _list(sent: object) -> list[Any]:
    return sent if isinstance(sent, list) else []


def own_host() -> str:
    return plain(socket.gethostname(), 100)
