"""toolkit/launch/rendezvous.py: ranks with RANK, WORLD_SIZE and MASTER_* join and are compared."""

import itertools
import json
import os
import re
import secrets
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest

from tests.faults import refusal
from tests.launch.ranks import HERE, Group, codes, run_group
from toolkit.launch import network, rendezvous
from toolkit.launch.network import free_port
from toolkit.launch.rendezvous import Peer, Rendezvous, RendezvousError


@pytest.mark.multiprocess
def test_all_ranks_join() -> None:
    peers = "[(m.rank, m.host, m.local_rank) for m in failure_detector.current.peers]"
    body = f"wait_for_line()\nprint(*{peers}, *launch.list_machines(), sep='; ')"
    ended = run_group(body, body, body, hosts=["A", "A", "B"])
    assert codes(ended) == [0, 0, 0]
    line = "(0, 'A', 0); (1, 'A', 1); (2, 'B', 0); A (ranks 0, 1); B (rank 2)\n"
    assert [(one.out, one.err) for one in ended] == [(line, "")] * 3


TWIN = {"WORLD_SIZE": "3", "RANK": "1"}
NEWER = """
real = versions.comparable_versions
versions.comparable_versions = lambda script: {**real(script), "torch": "0.0.1", "code": "x", "device": "cuda"}
"""
# Rank 0's time passes when rank 1 has come.
PATIENT = """
import time, types
clock, conflict = [0.0], rendezvous._conflict
rendezvous.time = types.SimpleNamespace(monotonic=lambda: clock[0], sleep=time.sleep)
rendezvous._VERDICT_SECONDS = 60.0
def rank_1_has_come(peers):
    if len(peers) > 1:
        clock[0] = 5.0
    return conflict(peers)
rendezvous._conflict = rank_1_has_come
"""
# fault -> options of `Group`, exit codes, parts of the one line of each failed rank
FAULTS: dict[str, tuple[dict[str, Any], list[int], list[str]]] = {
    "a rank does not come": (
        {"hosts": "ABC", "env": [{"SECONDS": "4"}, {}, {}], "before": {0: PATIENT, 2: "sys.exit(0)"}}, [1, 1, 0],
        ["rank 2 of 3 did not connect to", f"{HERE}:PORT within 4 s", "rank 0 on A", "rank 1 on B",
         "--rendezvous_timeout"]),
    "rank 0 is never there": (
        {"hosts": "B", "seconds": 1, "env": {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}}, [1],
        ["rank 1 on B could not reach rank 0 within 1 s", f"{HERE}:PORT", "nothing listens on this port",
         "toolkit doctor --peers", f"{HERE} is an address of this machine (RANK): is it the first one?"]),
    "rank 0 cannot resolve its name": (
        {"hosts": "A", "seconds": 1, "env": {"WORLD_SIZE": "2", "MASTER_ADDR": "none.invalid"}}, [1],
        ["none.invalid, which the other machines connect to, is not an address of this machine",
         "--main_process_ip"]),
    "two processes of one rank": (
        {"hosts": "ABC", "env": [{"WORLD_SIZE": "3"}, TWIN, TWIN]}, [1, 1, 1],
        ["two processes have rank 1, on ", "--machine_rank"]),
    "different world sizes": (
        {"hosts": "AB", "env": [{}, {"WORLD_SIZE": "4"}], "before": {0: "rendezvous._FAULT_SECONDS = 3.0"}}, [1, 1],
        ["world size is 2 for rank 0 on A and 4 for rank 1 on B", "--num_processes"]),
    "another version of a library": (
        {"hosts": "AB", "before": {1: NEWER}}, [1, 1],
        [f"torch is {version('torch')} on A and 0.0.1 on B", "code is 0123456789ab on A and x on B",
         "device is cpu on A and cuda on B", "pip install torch==", "git pull", "toolkit doctor",
         "nothing was read or trained"]),
}  # fmt: skip


@pytest.mark.multiprocess
@pytest.mark.parametrize("fault", FAULTS)
def test_ranks_that_do_not_match(fault: str) -> None:
    options, expected, words = FAULTS[fault]
    with Group(*[""] * len(expected), **options) as started:
        ended = started.end()
    assert codes(ended) == expected
    for one in [one for one in ended if one.code]:
        one.says_in_one_line(*(word.replace("PORT", str(started.port)) for word in words))
        assert one.out == ""


EARLY = """
from toolkit.errors import UserError
find, calls = rendezvous.join_ranks, []
def fails_at_first(*arguments):
    calls.append(arguments)
    if len(calls) == 1:
        raise UserError("unknown setting --trainfile")
    find(*arguments)
rendezvous.join_ranks = fails_at_first
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("rank", [0, 1])
def test_early_failure_is_reported_on_the_other_machine(rank: int) -> None:
    with Group("", "", hosts=["A", "B"], before={rank: EARLY}) as started:
        ended = started.end()
    assert codes(ended) == [1, 1]
    assert ended[rank].error_lines == [f"[rank {rank} on {'AB'[rank]}] error: unknown setting --trainfile"]
    (line,) = ended[1 - rank].error_lines
    assert f"rank {rank} on {'AB'[rank]} failed: unknown setting --trainfile" in line


@pytest.mark.multiprocess
def test_restart_in_the_launchers_store() -> None:
    from torch.distributed import TCPStore

    port = free_port()
    store = TCPStore(HERE, port, None, True, wait_for_workers=False)
    launcher = {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for attempt in range(2):
        env = {**launcher, "TORCHELASTIC_RESTART_COUNT": str(attempt)}
        assert codes(run_group("wait_for_line()", "wait_for_line()", env=env)) == [0, 0]
    assert store.num_keys() > 0  # the ranks used this store


# An earlier process of rank 0, which ends when rank 1 waits for it.
EARLIER_PROCESS = """
import json, time
from torch.distributed import PrefixStore
server = rendezvous.network.listen(int(os.environ["MASTER_PORT"]), "127.0.0.1")
store = PrefixStore("toolkit/rendezvous", rendezvous.network.serve_store("127.0.0.1", server))
place = dict(launcher="", rank=0, world_size=2, local_rank=0, local_world_size=1)
store.set("coordinator", json.dumps({**place, "host": "A", "node": "", "pid": 1, "number": "x"}))
while not PrefixStore("x", store).check(["hellos"]):
    time.sleep(0.1)
del store
os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize(("counts", "before"), [("10", {}), ("01", {}), ("00", {0: EARLIER_PROCESS})])
def test_restart_before_the_rendezvous(counts: str, before: dict[int, str]) -> None:
    """Their attempt counts differ, or rank 0 is restarted while rank 1 waits for it."""
    env = [{"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RESTART_COUNT": count} for count in counts]
    ended = run_group("wait_for_line()", "wait_for_line()", hosts=["A", "B"], env=env, before=before)
    assert codes(ended) == [0, 0]


@pytest.mark.multiprocess
def test_taken_port_names_its_process() -> None:
    with socket.create_server(("", 0)) as holder:
        port = str(holder.getsockname()[1])
        with Group("", env={"WORLD_SIZE": "2", "MASTER_PORT": port}) as started:
            (one,) = started.end()
    assert one.code == 1
    one.says_in_one_line(f"port {port}", f"process {os.getpid()}", f"kill {os.getpid()}", "--main_process_port")


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    number = free_port()
    monkeypatch.setenv("MASTER_ADDR", HERE)
    monkeypatch.setenv("MASTER_PORT", str(number))
    return number


def peer(rank: int, size: int = 3, failure: str = "", attempt: int = 0) -> Peer:
    return Peer("", rank, size, rank, size, host="A", node="a", pid=rank, number=secrets.token_hex(8), failure=failure,
                attempt=attempt)  # fmt: skip


def join(rank: int, size: int = 3, seconds: float = 20.0, failure: str = "", attempt: int = 0) -> Any:
    ranks = Rendezvous(peer(rank, size, failure, attempt), seconds)
    try:
        ranks.join()
    except RendezvousError as error:
        return error
    return ranks


def test_exchange(port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(rendezvous, "_LOG_EXCHANGE_SECONDS", 0.1)
    with ThreadPoolExecutor() as pool:
        ranks = list(pool.map(join, range(3)))
        assert [[peer.rank for peer in each.peers] for each in ranks] == [[0, 1, 2]] * 3
        for value in ("a", "b"):
            values = pool.map(lambda each, value=value: each.exchange(f"{value}{each.me.rank}", 20), ranks)
            assert list(values) == [[f"{value}{rank}" for rank in range(3)]] * 3
    clock = itertools.count()
    monkeypatch.setattr(rendezvous, "time", SimpleNamespace(monotonic=lambda: next(clock) / 5, sleep=lambda _: None))
    with pytest.raises(RendezvousError) as error:
        ranks[0].exchange("x", 0.5, "the data")
    assert error.value.missing == [1, 2]
    assert re.search("waiting for ranks 1, 2.*: the data", capsys.readouterr().err)


def test_rank_that_is_started_again_while_others_are_awaited(port: int) -> None:
    from torch.distributed import PrefixStore, TCPStore

    with ThreadPoolExecutor() as pool:
        first = pool.submit(join, 0)
        # rank 1 says hello and ends, and its launcher starts it again
        common = PrefixStore("toolkit/rendezvous", TCPStore(HERE, port, None, False))
        store = PrefixStore(rendezvous.read(common, "coordinator")["number"], common)
        store.append("hellos", f"{json.dumps(asdict(peer(1)))}\n")  # type: ignore[attr-defined]
        ranks = [first, pool.submit(join, 1, attempt=1)]
        while store.get("hellos").count(b"\n") < 2:  # before rank 2: with that the first process would do
            time.sleep(0.01)
        ranks.append(pool.submit(join, 2))
        assert [[each.attempt for each in rank.result().peers] for rank in ranks] == [[0, 1, 0]] * 3


def test_fault_is_raised_by_all_and_printable(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though rank 2 has not come, it is not what is missing."""
    monkeypatch.setattr(rendezvous, "_FAULT_SECONDS", 1.0)
    with ThreadPoolExecutor() as pool:
        errors = list(pool.map(lambda rank: join(rank, failure="no \x1b[2J good" * rank), range(2)))
    assert [(str(error), error.missing) for error in errors] == [("no  [2J good", [])] * 2


def test_another_programs_port(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    monkeypatch.setattr(rendezvous, "_VERDICT_SECONDS", 0.5)
    with socket.create_server((HERE, port)):
        assert "another program" in str(join(1, seconds=0.1))


@pytest.mark.parametrize(
    ("others", "setting", "chosen"),
    [
        (["10.0.0.1"], None, "eth7"),
        (["127.0.0.1", "10.0.0.1"], None, "eth7"),  # another rank on the first node connects over loopback
        (["10.0.0.1"], "eth9", "eth9"),  # the user's setting
        (["127.0.0.1"], None, None),
        ([], None, "lo"),  # one node
    ],
)
def test_choose_interface(monkeypatch: pytest.MonkeyPatch, others: list[str], setting: Any, chosen: str | None) -> None:
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for name in names:
        monkeypatch.setenv(name, setting or "")
        if setting is None:
            monkeypatch.delenv(name)
    monkeypatch.setattr(network, "local_addresses", lambda: {"127.0.0.1": "lo", "10.0.0.1": "eth7", "10.0.0.2": "eth9"})
    monkeypatch.setattr(network, "source_address_for", lambda name: name.removeprefix("to "))
    me = SimpleNamespace(node="B", address="")
    peers = [me, me, *(SimpleNamespace(node="A", address=f"to {address}") for address in others)]
    ranks: Any = SimpleNamespace(address="127.0.0.1", me=me, peers=peers)
    network.choose_interface(rendezvous._node_address(ranks), "cpu")
    assert [os.environ.get(name) for name in names] == [chosen, f"={chosen}" if chosen and not setting else chosen]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7,none0")
    refusal(network.choose_interface, "", "cpu", says=["GLOO_SOCKET_IFNAME=eth7,none0", "lo"])


def test_nodes_of_one_host_name() -> None:
    one, same, other = (SimpleNamespace(host="node", node=node, versions={"torch": torch})
                        for node, torch in (("m0", "2"), ("m1", "2"), ("m1", "1")))  # fmt: skip
    difference: Any = rendezvous._difference
    assert "torch is 2 on node (m0) and 1 on node (m1)" in difference([one, other])
    assert difference([one, same]) == ""
