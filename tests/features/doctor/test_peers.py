"""Three machines meet and talk, in one process: each in a thread, at its own address of the loopback."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace
from typing import Any

import pytest

from toolkit.features.doctor import peers
from toolkit.features.doctor.compare import Node, check
from toolkit.features.doctor.finding import Finding, report
from toolkit.features.doctor.peers import Cluster, Link
from toolkit.launch.nodes import Nodes

ADDRESSES = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
GOOD = {"ok": True, "latency_ms": 0.1, "mbytes_per_second": 1000.0}
A = Node(0, "A", "10.0.0.1", "ens5", backend="NCCL 2.27", devices=["A100"])
B = replace(A, rank=1, host="B", address="10.0.0.2")
TWO = Nodes(2, 0, "", ("10.0.0.1", "10.0.0.2"), 29600)


class Machines:
    """Those of three that are run; what each knows in the end, and what was summed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with socket.create_server((ADDRESSES[0], 0)) as server:
            self.port = int(server.getsockname()[1])
        self.own = threading.local()
        self.clusters: dict[int, Cluster] = {}
        self.sums: list[tuple[Any, ...]] = []
        self.errors: dict[int, str] = {}
        self.raised: list[Exception] = []
        monkeypatch.setattr(peers.network, "listen", lambda port, _: socket.create_server((self.own.address, port)))
        monkeypatch.setattr(peers.torch_checks, "all_reduce", self.all_reduce)

    def all_reduce(self, rank: int, world: int, *where: Any) -> dict[str, Any]:
        self.sums.append((rank, world, *where[:3]))
        error = self.errors.get(rank)
        return {"gloo": {"ok": False, "error": error} if error else GOOD}

    def run(self, *ranks: int, seconds: float = 4.0, **seeds: str) -> None:
        def one(rank: int) -> None:
            self.own.address = ADDRESSES[rank]
            node = Node(rank, f"host{rank}", backend="gloo", settings={"seed": seeds.get(f"of{rank}", "3")})
            try:
                self.clusters[rank] = peers.meet(node, self.nodes(rank), "word", seconds, "toolkit doctor")
            except Exception as error:
                self.raised.append(error)

        threads = [threading.Thread(target=one, args=(rank,)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)

    def nodes(self, rank: int) -> Nodes:
        return Nodes(3, rank, "", ADDRESSES, self.port)

    def findings(self, rank: int) -> list[Finding]:
        lines = {number: f"type {number}" for number in range(3)}
        return peers.check(self.clusters[rank], self.nodes(rank), lines, 4.0)


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> Machines:
    return Machines(monkeypatch)


def test_three_machines_end_with_one_report(machines: Machines) -> None:
    machines.run(0, 1, 2, of2="4")
    first = machines.clusters[0]
    for cluster in machines.clusters.values():
        assert cluster == first
    assert set(first.links) == {(one, other) for one in range(3) for other in range(3) if one != other}
    assert all(link.ok for link in first.links.values())
    assert all(abs(node.clock_offset_seconds or 0.0) < 0.5 for node in first.nodes)
    (fault,) = [finding.text for finding in check(first.nodes) if finding.level == "fail"]
    assert fault == "--seed is 3 on host0, host1 and 4 on host2"
    assert [finding.level for finding in machines.findings(1)] == ["ok"] * 4
    assert sorted(machines.sums) == [(rank, 3, ADDRESSES[0], machines.port, ["gloo"]) for rank in range(3)]


def test_one_of_three_never_comes(machines: Machines) -> None:
    machines.run(0, 2)
    for rank in (0, 2):
        (fault,) = [finding for finding in machines.findings(rank) if finding.level == "fail"]
        assert fault.text.startswith("machine 1 (127.0.0.3) did not come within 4 s. host0 says: ")
        assert "host2 says: " in fault.text
        assert fault.remedy.startswith("on it type: type 1; start the other machine too")
        assert machines.clusters[rank].not_reduced == "not every machine is there"


def test_an_all_reduce_that_fails_on_one_is_told_by_all(machines: Machines) -> None:
    machines.errors[2] = "RuntimeError: timed out"
    machines.run(0, 1, 2)
    for rank in range(3):
        (fault,) = [finding for finding in machines.findings(rank) if finding.level == "fail"]
        assert (fault.area, fault.name) == ("all-reduce", "gloo")
        assert "host2: RuntimeError: timed out" in fault.text


def test_a_machine_that_sends_what_cannot_be_read(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version to come, or somebody hostile: it is a line, wherever it breaks."""
    monkeypatch.setattr(peers, "asdict", lambda one: {"host": "x", "later": "version"})
    machines.run(0, 1, 2)
    assert machines.clusters == {}
    assert all(isinstance(error, peers.UNREADABLE) for error in machines.raised)


def test_a_finding_that_a_peer_made_up_is_a_line() -> None:
    sent = {"area": ["x"], "name": None, "level": "\x1b[31m", "text": "\x1b]0;title\x07red\nnext", "host": "me"}
    assert peers._told({**sent, "remedy": "curl x | sh"}, "B").remedy == "the doctor on B has the line to type"
    told = peers._told(sent, "B")
    assert told == Finding("['x']", "None", "note", "]0;title red next", "", "B")
    assert report([told]) == "['x']\n  --    None  [B] ]0;title red next"


@pytest.mark.parametrize(("other", "links", "why"), [
    ([], {}, "not every machine is there"),
    ([replace(B, backend="")], {(1, 0): Link(True)}, "torch does not work on B"),
    ([B], {(1, 0): Link(False)}, "B cannot reach A"),
    ([B], {(1, 0): Link(True)}, ""),
])  # fmt: skip
def test_why_no_all_reduce_is_tried(other: list[Node], links: dict[tuple[int, int], Link], why: str) -> None:
    assert peers._why_not(Cluster([A, *other], links), TWO) == why


@pytest.mark.parametrize(("rate", "level", "words"), [
    (1000.0, "ok", "at 8.0 Gbit/s"), (12.5, "warn", "each step of a model with 110M parameters in fp32 takes 35.2 s"),
])  # fmt: skip
def test_bandwidth_and_what_it_means(rate: float, level: str, words: str) -> None:
    said = {"gloo": {**GOOD, "mbytes_per_second": rate}, "nccl": {"ok": False, "error": "unhandled system error"}}
    gloo, nccl = peers._check_reduced(Cluster([A, B], reduced={0: said, 1: {"gloo": said["gloo"]}}), TWO)
    assert (gloo.level, words in gloo.text) == (level, True)
    assert nccl.text == "failed between the machines (A: unhandled system error; B: no word)"
    assert "export NCCL_SOCKET_IFNAME=ens5" in nccl.remedy
    assert "NCCL_IB_DISABLE=1" in nccl.remedy


@pytest.mark.parametrize(("there", "link", "remedy"), [
    (B, Link(False, "silent", "no answer in 4 s"), "on B: sudo ufw allow from 10.0.0.1 to any port 29600 proto"),
    (B, Link(False, "local", "a rule"), "on A: `sudo iptables -S OUTPUT`"),
    (B, Link(False, "stranger", "?"), "on B: `sudo ss -ltnp 'sport = :29600'`"),
    (replace(B, listens=False), Link(False, "refused", "?"), "on B: `sudo ss -ltnp 'sport = :29600'`"),
])  # fmt: skip
def test_one_way_that_does_not_work(there: Node, link: Link, remedy: str) -> None:
    found = Cluster([A, there], {(0, 1): link, (1, 0): Link(True)}, not_reduced="x")
    fault = peers.check(found, TWO, {}, 4.0)[0]
    assert (fault.name, fault.level) == ("0 -> 1", "fail")
    assert f"A does not reach B at 10.0.0.2:29600, although the other way works. A says: {link.detail}" in fault.text
    assert fault.remedy.startswith(remedy)
