"""Promises: which machine this one is, and why, from options, config file and environment; the
first one's address; what cannot be decided is an error. A store listens on one address."""

import socket
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.faults import refusal
from tests.runs import free_port
from toolkit.launch import network
from toolkit.launch.machines import PLACEHOLDER, Machines, find_machines
from toolkit.launch.network import address_to_serve, connect_store

FIRST, SECOND, ELSEWHERE = "10.0.0.1", "10.0.0.2", "10.9.9.9"


def pretend_network(monkeypatch: Any, own: Sequence[str], **names: str) -> None:
    """Gives this machine the addresses `own` (and 127.0.0.1), and a resolver that knows `names`."""
    known = {"localhost": "127.0.0.1", **names}
    interfaces = {}
    for name, addresses in {"lo": ["127.0.0.1"], "eth0": own}.items():
        entries = [SimpleNamespace(family=socket.AF_INET, address=one) for one in addresses]
        interfaces[name] = entries

    def resolve(host: str, port: object, *_: object, **__: object) -> list[Any]:
        address = host if host[:1].isdigit() else known.get(host)
        if not address:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, int(str(port or 0))))]

    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)
    monkeypatch.setattr(socket, "getaddrinfo", resolve)


@pytest.fixture(autouse=True)
def _network(monkeypatch: Any) -> None:
    pretend_network(monkeypatch, [ELSEWHERE])


def find(options: Any, env: Any, **config: object) -> Machines:
    """By default two, the first of which is FIRST."""
    options = {"main_process_ip": FIRST, **options}
    return find_machines(options, {"num_machines": 2, **config}, Path("mine.yaml"), env)


def test_source_of_the_rank(monkeypatch: Any) -> None:
    for options, env, config, own, rank, source in (
        ({}, {}, {}, FIRST, 0, FIRST),
        ({}, {}, {}, ELSEWHERE, 1, FIRST),
        ({"machine_rank": "0"}, {"NODE_RANK": "1"}, {}, SECOND, 0, "--machine_rank"),
        ({}, {"NODE_RANK": "1", "SLURM_NODEID": "0"}, {}, SECOND, 1, "NODE_RANK"),
        ({}, {"SLURM_NODEID": "0"}, {}, SECOND, 0, "SLURM_NODEID"),
        # the first machine's address comes before the rank in the file
        ({}, {}, {"machine_rank": 1}, FIRST, 0, FIRST),
        ({}, {}, {"machine_rank": 0}, SECOND, 0, "config file"),
    ):
        pretend_network(monkeypatch, [own])
        machines = find(options, env, **config)
        assert (machines.rank, machines.count, machines.first) == (rank, 2, FIRST)
        assert source in machines.rank_source


def test_unclear_machines() -> None:
    for options, env, config, says in (
        ({}, {}, {"num_machines": 3}, ["--machine_rank", "up to 2"]),  # the second of three?
        ({"machine_rank": "2"}, {}, {}, ["rank 2 (--machine_rank)", "mine.yaml", "up to 1"]),
        ({}, {"NODE_RANK": "-1"}, {}, ["rank -1 (NODE_RANK)"]),
        ({}, {"NODE_RANK": "1.5"}, {}, ["NODE_RANK", "'1.5'"]),
        ({"main_process_ip": ""}, {}, {"main_process_ip": PLACEHOLDER}, ["mine.yaml", PLACEHOLDER]),
        ({"main_process_port": "x"}, {}, {}, ["main_process_port", "'x'"]),
    ):
        refusal(find, options, env, says=says, **config)


def test_address_to_serve(monkeypatch: Any) -> None:
    """Never all addresses."""
    pretend_network(monkeypatch, [FIRST], gpu1=FIRST, me="127.0.1.1")
    monkeypatch.setattr(network, "source_address_for", lambda _: FIRST)
    for name, address in {FIRST: FIRST, "gpu1": FIRST, "me": FIRST}.items():
        assert address_to_serve(name, is_local=False) == address
    assert address_to_serve("me", is_local=True) == "127.0.1.1"  # as on Debian
    monkeypatch.setattr(network, "source_address_for", lambda _: "")  # no route
    refusal(address_to_serve, "me", False, says=["me is 127.0.1.1 here", "hostname -I"])


def test_a_store_listens_on_one_address(monkeypatch: Any) -> None:
    """A taken or a closed port is an error."""
    monkeypatch.undo()  # the real network
    says = ["127.0.0.1", "start the other machine"]
    refusal(connect_store, "127.0.0.1", free_port(), 0.1, says=says)
    refusal(connect_store, "nobody.invalid", 29600, 0.1, says=["nobody.invalid", "/etc/hosts"])
    served = network.serve_store("127.0.0.1", port := free_port())
    network.connect_store("127.0.0.1", port, 5).set("a", "b")
    assert served.get("a") == b"b"
    refusal(connect_store, "127.0.0.2", port, 0.1)
    says = [f"port {port} of ", "--main_process_port"]
    refusal(network.serve_store, "127.0.0.1", port, says=says)
