"""`toolkit doctor` from beginning to end."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

from toolkit.doctor import compare, data, job, links, local, network, report, together
from toolkit.doctor.account import own_account, own_host
from toolkit.doctor.exchange import Deadline
from toolkit.doctor.finding import Finding
from toolkit.doctor.job import Job
from toolkit.doctor.meet import Me, Meeting
from toolkit.doctor.together import Together
from toolkit.doctor.torch_process import TorchProcess
from toolkit.errors import UserError
from toolkit.launch import wire
from toolkit.launch.failure import INTERRUPTED
from toolkit.launch.machines import Machines, is_own

_AFTER_MEETING_SECONDS = 30.0
_SAY_AFTER_SECONDS = 2.0
_TOGETHER = ("machines", "links", "all-reduce")


def run(argv: Sequence[str]) -> int:
    """The exit code: 0 nothing failed, 1 something did or the command line cannot be meant, 130 interrupted.

    It says so itself: with a launcher's variables left in the shell `launch.run` may take it for rank 3, and be silent.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # what is found may not be writable in this terminal's encoding
    try:
        asked = job.read(argv, os.environ)
        with TorchProcess() as torch:
            return _Doctor(asked, torch).run()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


class _Doctor:
    def __init__(self, asked: Job, torch: TorchProcess) -> None:
        self.job, self.torch = asked, torch
        self.findings: list[Finding] = []
        self.files: dict[str, dict[str, Any]] = {}
        self.together: Together | None = None
        self.said = 0

    def run(self) -> int:
        machines = self.job.machines
        self.findings = [*self.job.faults, *network.check_port(self.job.port, machines is not None)]
        if machines is None:
            self._look_here([])
            self._say_new()
        else:
            self._look_around(machines)
        self._end()
        return 0 if report.all_well(self.findings) else 1

    def _look_here(self, others: Sequence[str]) -> None:
        """Everything about this machine; about as long as importing torch takes."""
        seconds = self.job.timeout if others else data_seconds(self.job)
        reading = threading.Thread(target=self._read_files, args=(seconds,), daemon=True)
        reading.start()
        self.findings += local.run_checks(local.checks(self.job, self.torch, others))
        reading.join(seconds + 1.0)
        self.findings += data.check(self.files)
        gpus = len(self.torch.sees(0.0).get("devices") or ()) if self.job.uses_gpus else 0
        self.findings += check_processes(self.job, gpus)

    def _read_files(self, seconds: float) -> None:
        self.files = data.checksums(self.job.files, seconds)

    # --- several machines

    def _look_around(self, machines: Machines) -> None:
        others = [name for rank, name in enumerate(machines.addresses) if rank != machines.rank]
        self.findings += check_names(machines, network.interfaces())
        if any(means_this_machine(machines.addresses[rank]) for rank in range(len(machines.addresses))
               if rank != machines.rank):  # fmt: skip
            self._look_here(others)
            self._say_new()
            return
        deadline = Deadline(self.job.timeout + _AFTER_MEETING_SECONDS)
        try:
            server = wire.listen(machines.port)
        except OSError:
            server = None  # it is among the findings
        with Meeting(_me(self.job, machines), server) as meeting:
            waiting = threading.Thread(target=meeting.run, args=(self.job.timeout,), daemon=True)
            waiting.start()
            self._look_here(others)
            self._say_new()
            self._wait(meeting, waiting, machines)
            self._talk(meeting, machines, server is not None, deadline)
        self._say_new()

    def _wait(self, meeting: Meeting, waiting: threading.Thread, machines: Machines) -> None:
        waiting.join(_SAY_AFTER_SECONDS)
        if waiting.is_alive():
            absent = [rank for rank, way in meeting.ways.items() if way.out is None and way.back is None]
            names = ", ".join(machines.name_of(rank) for rank in absent)
            if absent:
                there = job.line_elsewhere(self.job, absent[0])
                print(f"waiting up to {meeting.left:.0f} s for {names}; there: {there}", file=sys.stderr, flush=True)
        while waiting.is_alive():
            waiting.join(0.5)  # in pieces: Ctrl-C is to end it at once

    def _talk(self, meeting: Meeting, machines: Machines, listens: bool, deadline: Deadline) -> None:
        asked, torch = self.job, self.torch.sees(local.TORCH_SECONDS)
        driver = next((f.text.split(",")[0] for f in self.findings if f.name == "driver" and f.level == "ok"), "")
        mine = own_account(asked, meeting, torch, driver, self.files, self.findings, listens)
        found = together.talk(meeting, mine, machines, self.torch, asked.uses_gpus, deadline)
        lines = {rank: job.line_elsewhere(asked, rank) for rank in meeting.ways}
        self.together = found
        for account in found.accounts:
            if account.rank != mine.rank:
                self.findings += [finding.on(account.host) for finding in account.findings]
        if not any(call.kind == "conflict" for call in mine.calls.values()):  # told from both sides otherwise
            remedy = "type the same on all machines, with the machines in the same order"
            self.findings += [Finding("machines", "meeting", "fail", text, remedy) for text in meeting.conflicts]
        self.findings += together.findings_of(found, machines, lines, asked.timeout)

    # --- saying

    def _say_new(self) -> None:
        if self.job.as_json:
            return
        new, self.said = self.findings[self.said :], len(self.findings)
        heading = f"{own_host()}" if self.together is None else "the machines together"
        print(f"{heading}\n\n{report.text_of(new)}\n", flush=True)
        if self.together is not None and len(self.together.accounts) > 1:
            print(report.table(compare.rows(self.together.accounts, self.together.offsets)) + "\n", flush=True)

    def _end(self) -> None:
        if self.job.as_json:
            print(json.dumps(self._as_dict(), ensure_ascii=False), flush=True)
        else:
            print(report.last_line(self.findings, job.line_to_start(self.job)), flush=True)

    @staticmethod
    def _named(finding: Finding) -> Finding:
        """A program that reads it has no headings: this machine's own findings carry its name."""
        return finding if finding.host or finding.area in _TOGETHER else finding.on(own_host())

    def _as_dict(self) -> dict[str, Any]:
        found = self.together or Together()
        names = compare.names_of(found.accounts)
        offsets = found.offsets
        return {
            "host": own_host(),
            "ok": report.all_well(self.findings),
            "findings": [self._named(finding).as_dict() for finding in self.findings],
            "machines": [
                {**account.as_dict(), "clock_offset_seconds": 0.0 if account.rank == 0 else offsets.get(account.rank)}
                for account in found.accounts
            ],
            "links": [link.as_dict(names) for link in links.links_of(found.accounts, found.pairs)],
            "allreduce": {"not_tried": found.not_reduced or None, "machines": {
                names.get(rank, str(rank)): said for rank, said in found.reduced.items()}},
        }  # fmt: skip


def data_seconds(asked: Job) -> float:
    """How long reading the files of a lone machine may take."""
    return min(asked.timeout, job.DEFAULT_TIMEOUT)


def check_processes(asked: Job, gpus: int) -> list[Finding]:
    """Whether so many processes can be started, as far as this machine tells; `gpus` are those that it sees."""
    machines = asked.machines.count if asked.machines else 1
    if asked.processes is None or asked.processes < 1:
        return []
    if asked.processes % machines:
        text = f"{asked.processes} processes cannot be shared equally by {machines} machines"
        fitting = machines * max(1, asked.processes // machines)
        return [Finding("devices", "processes", "fail", text, f"--num_processes {fitting}")]
    if machines == 1 and 0 < gpus < asked.processes:
        text = f"{asked.processes} processes are asked for, and there {'are' if gpus > 1 else 'is'} {gpus}"
        text += f" GPU{'s' * (gpus > 1)} for them"
        return [Finding("devices", "processes", "fail", text, f"--num_processes {gpus}")]
    return []


def check_names(machines: Machines, interfaces: Sequence[network.Interface]) -> list[Finding]:
    """The machines' addresses as they were given, from here."""
    found = []
    up = {interface.address: interface for interface in interfaces}
    for rank, name in enumerate(machines.addresses):
        addresses = wire.addresses_of(name)
        if rank == machines.rank:
            found += _own_address(name, addresses, up) or _other_way_out(name, addresses, machines)
        elif means_this_machine(name):
            text = f"{machines.name_of(rank)} means this machine itself ({addresses[0]}): no other one can be there"
            remedy = "give the address by which the others reach it (`hostname -I` there)"
            found.append(Finding("machines", name, "fail", text, remedy))
    text = f"this is machine {machines.rank} of {machines.count} ({machines.how})"
    return [Finding("machines", "this one", "ok", text), *found]


def means_this_machine(name: str) -> bool:
    """Whether only this machine itself can be there."""
    addresses = wire.addresses_of(name)
    return bool(addresses) and all(wire.is_loopback(address) for address in addresses)


def _own_address(name: str, addresses: Sequence[str], up: dict[str, network.Interface]) -> list[Finding]:
    here = [up[address] for address in addresses if address in up]
    if here and not any(interface.up for interface in here):
        text = f"{name} is an address of this machine, and its interface {here[0].name} is down"
        return [Finding("machines", name, "fail", text, f"sudo ip link set {here[0].name} up")]
    if here and not any(interface.carrier for interface in here):
        text = f"{name} is an address of this machine, and its interface {here[0].name} has no cable"
        return [Finding("machines", name, "fail", text, f"`ethtool {here[0].name}`; is the cable in, the switch on?")]
    if addresses and not here and not is_own(name):
        own = ", ".join(address for address in up if not wire.is_loopback(address)) or "none"
        text = f"{name} is not an address of this machine ({own}), which is said to be the one"
        return [
            Finding("machines", name, "fail", text, "give its own address (`hostname -I`), or another --machine_rank")
        ]
    return []


def _me(asked: Job, machines: Machines) -> Me:
    derived = f"doctor {','.join(sorted(machines.addresses))} of {machines.count} at {machines.port}"
    return Me(
        rank=machines.rank,
        host=own_host(),
        names=machines.addresses,
        count=machines.count,
        port=machines.port,
        token=asked.token or derived,
        only_named=not asked.token,
    )


def _other_way_out(name: str, addresses: Sequence[str], machines: Machines) -> list[Finding]:
    """A machine with several addresses calls the others from one that they may not know."""
    for rank, other in enumerate(machines.addresses):
        source = wire.address_towards(other) if rank != machines.rank else None
        if source and not wire.is_loopback(source) and addresses and source not in addresses and not is_own_name(name):
            text = f"{name} was named for this machine, and what it sends to {other} comes from {source}"
            return [Finding("machines", name, "warn", text, f"name {source} instead of {name}, on all machines")]
    return []


def is_own_name(name: str) -> bool:
    """A host name that means 127.0.1.1 at home, as Debian has it."""
    return wire.addresses_of(name) == ["127.0.1.1"]
