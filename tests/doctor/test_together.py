"""Three machines talk, in one process: each in a thread, at its own address of the loopback."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.doctor.lines import free_port, listen
from toolkit.doctor import command, meet, network, together
from toolkit.doctor.account import Account, own_account
from toolkit.doctor.exchange import Deadline
from toolkit.doctor.finding import Finding
from toolkit.doctor.job import Job
from toolkit.doctor.meet import Me, Meeting
from toolkit.doctor.network import Interface
from toolkit.doctor.together import Together
from toolkit.launch.machines import Machines

ADDRESSES = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
TORCH = {"version": "2", "devices": [], "gloo": True, "nccl": None}


class Torch:
    """In place of the process that imports torch."""

    def __init__(self, error: str = "") -> None:
        self.orders: list[dict[str, Any]] = []
        self._error = error

    def all_reduce(self, order: dict[str, Any], seconds: float) -> dict[str, Any]:
        self.orders.append(order)
        return {name: {"ok": not self._error, "seconds": 0.001, "error": self._error} for name in order["backends"]}


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meet, "GRACE_SECONDS", 1.0)


class Machine:
    """One of three: what it found is there after `run`."""

    def __init__(self, rank: int, port: int, torch: Torch | None = None, leaves: str = "", **own: Any) -> None:
        self.machines = Machines(3, rank, "", ADDRESSES, port)
        self.torch, self.own, self.leaves = torch or Torch(), own, leaves
        self.me = Me(rank, f"host{rank}", ADDRESSES, 3, port, "word")
        self.together = Together()
        self.findings: list[Finding] = []

    def run(self, seconds: float = 4.0) -> None:
        with Meeting(self.me, listen(ADDRESSES[self.me.rank], self.me.port)) as meeting:
            meeting.run(seconds)
            if self.leaves == "after meeting":
                return
            mine = own_account(Job(), meeting, TORCH, "", {}, [], listens=True)
            mine = replace(mine, address=ADDRESSES[self.me.rank], **self.own)
            torch: Any = self.torch
            self.together = together.talk(meeting, mine, self.machines, torch, True, Deadline(15.0))
        self.findings = together.findings_of(self.together, self.machines, {}, seconds)


def run_all(machines: list[Machine]) -> float:
    started = time.monotonic()
    threads = [threading.Thread(target=machine.run) for machine in machines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return time.monotonic() - started


@pytest.fixture
def port() -> int:
    return free_port(list(ADDRESSES))


def test_three_machines_end_with_one_report(port: int) -> None:
    machines = [Machine(rank, port, settings={"seed": "3" if rank < 2 else "4"}) for rank in range(3)]
    assert run_all(machines) < 20
    first = machines[0]
    assert set(first.together.pairs) == {(0, 1), (0, 2), (1, 2)}
    assert set(first.together.offsets) == {1, 2}
    assert set(first.together.reduced) == {0, 1, 2}
    for other in machines[1:]:
        assert other.findings == first.findings
        assert other.together.accounts == first.together.accounts
    assert [finding.text for finding in first.findings if finding.level == "fail"] == [
        "--seed is 3 on host0, host1 and 4 on host2"
    ]
    orders = [machine.torch.orders[0] for machine in machines]
    assert [order["rank"] for order in orders] == [0, 1, 2]
    assert {(order["address"], order["port"], order["world_size"]) for order in orders} == {("127.0.0.2", port, 3)}


def test_one_of_three_never_comes(port: int) -> None:
    machines = [Machine(rank, port) for rank in (0, 2)]
    assert run_all(machines) < 25
    for machine in machines:
        (fault,) = [finding for finding in machine.findings if finding.level == "fail"]
        assert fault.text.startswith("machine 1 (127.0.0.3) did not come within 4 s. host0 says: ")
        assert "host2 says: " in fault.text or fault.text.count("says") == 1
        assert machine.together.not_reduced == "not every machine is there"
        assert set(machine.together.pairs) == {(0, 2)}


def test_one_of_three_leaves_after_the_meeting(port: int) -> None:
    machines = [Machine(0, port), Machine(1, port, leaves="after meeting"), Machine(2, port)]
    assert run_all(machines) < 30
    for machine in (machines[0], machines[2]):
        assert [account.rank for account in machine.together.accounts] == [0, 2]
        assert any(finding.name == "machine 1" and finding.level == "fail" for finding in machine.findings)


def test_an_all_reduce_that_fails_on_one_is_told_by_all(port: int) -> None:
    machines = [Machine(rank, port, Torch("RuntimeError: timed out" if rank == 2 else "")) for rank in range(3)]
    run_all(machines)
    for machine in machines:
        (fault,) = [finding for finding in machine.findings if finding.level == "fail"]
        assert (fault.area, fault.name) == ("all-reduce", "gloo")
        assert "host2: RuntimeError: timed out" in fault.text
        assert "sudo ufw allow from 127.0.0.3" in fault.remedy


def test_nccl_is_tried_where_every_machine_has_gpus() -> None:
    machines = Machines(2, 0, "", ("10.0.0.1", "10.0.0.2"), 29600)
    one = Account(0, "A", devices=("A100",), backend="NCCL 2.27", calls={1: meet_ok()})
    two = replace(one, rank=1, host="B", calls={0: meet_ok()})
    order = together._order
    assert order([one, two], machines, gpus=True) == {"backends": ["gloo", "nccl"]}
    assert order([one, two], machines, gpus=False) == {"backends": ["gloo"]}
    assert order([one, replace(two, devices=(), backend="gloo")], machines, gpus=True) == {"backends": ["gloo"]}
    assert order([one], machines, gpus=True) == {"reason": "not every machine is there"}
    assert order([one, replace(two, backend="")], machines, gpus=True) == {"reason": "torch does not work on B"}
    assert "cannot reach A" in order([one, replace(two, calls={})], machines, gpus=True)["reason"]
    assert "is taken" in order([replace(one, listens=False), two], machines, gpus=True)["reason"]


def meet_ok() -> Any:
    from toolkit.doctor.account import Call

    return Call(True)


def test_what_nccl_needs_to_be_typed() -> None:
    one = Account(0, "A", "10.0.0.1", "ens5", backend="NCCL 2.27")
    found = Together([one, replace(one, rank=1, host="B", address="10.0.0.2")])
    found.reduced = {rank: {"gloo": {"ok": True, "seconds": 0.1, "error": ""},
                            "nccl": {"ok": False, "seconds": None, "error": "unhandled system error"}}
                     for rank in (0, 1)}  # fmt: skip
    good, bad = together.check_reduced(found)
    assert good.level == "ok"
    assert (bad.level, bad.name) == ("fail", "nccl")
    assert "export NCCL_SOCKET_IFNAME=ens5; export NCCL_IB_DISABLE=1" in bad.remedy


# --- before they meet


HERE = [Interface("lo", "127.0.0.1"), Interface("eth0", "10.0.0.1"), Interface("eth1", "10.1.0.1", up=False),
        Interface("eth2", "10.2.0.1", carrier=False)]  # fmt: skip


@pytest.mark.parametrize(("own", "words", "remedy"), [
    ("10.1.0.1", "its interface eth1 is down", "sudo ip link set eth1 up"),
    ("10.2.0.1", "its interface eth2 has no cable", "`ethtool eth2`; is the cable in, the switch on?"),
    ("10.9.0.1", "10.9.0.1 is not an address of this machine (10.0.0.1", "give its own address"),
])  # fmt: skip
def test_an_own_address_that_cannot_be(own: str, words: str, remedy: str) -> None:
    _, fault = command.check_names(Machines(2, 0, "", (own, "10.0.0.2"), 29600), HERE)
    assert fault.level == "fail"
    assert words in fault.text
    assert fault.remedy.startswith(remedy)


def test_another_machine_that_means_this_one() -> None:
    found = command.check_names(Machines(2, 0, "", ("10.0.0.1", "localhost"), 29600), HERE)
    (fault,) = [finding for finding in found if finding.level == "fail"]
    assert "machine 1 (localhost) means this machine itself" in fault.text


def test_addresses_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.wire, "address_towards", lambda address: "10.0.0.1")
    found = command.check_names(Machines(2, 0, "because", ("10.0.0.1", "10.0.0.2"), 29600), HERE)
    assert [(finding.level, finding.text) for finding in found] == [("ok", "this is machine 0 of 2 (because)")]


@pytest.mark.parametrize(("processes", "machines", "gpus", "remedy"), [
    (None, 1, 2, None), (2, 1, 2, None), (2, 1, 0, None), (4, 1, 2, "--num_processes 2"), (4, 2, 2, None),
    (3, 2, 2, "--num_processes 2"),
])  # fmt: skip
def test_numbers_of_processes(processes: int | None, machines: int, gpus: int, remedy: str | None) -> None:
    several = Machines(machines, 0, "", ADDRESSES[:machines], 1) if machines > 1 else None
    found = command.check_processes(Job(processes=processes, machines=several), gpus)
    assert [finding.remedy for finding in found] == ([remedy] if remedy else [])


def test_the_interfaces_of_this_machine_are_read() -> None:
    with contextlib.suppress(StopIteration):
        assert next(one for one in network.interfaces() if one.address == "127.0.0.1").up
    assert Path("/sys/class/net").is_dir() == bool(network.interface_names())
