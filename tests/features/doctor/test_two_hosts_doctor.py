"""`toolkit doctor` between two hosts: network namespaces with a cable between them."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.hosts import ADDRESSES, NOBODY, TwoHosts

pytestmark = pytest.mark.namespaces

DOCTOR = [sys.executable, "-m", "toolkit", "doctor", "--json"]
PEERS = ["--peers", f"{ADDRESSES['a']},{ADDRESSES['b']}"]
PORT = 29600
# to import torch on a busy machine, twice; each test says itself how long the machines may wait for each other
SPARE_SECONDS = 60.0


@pytest.fixture(autouse=True)
def _healed(hosts: TwoHosts) -> Iterator[None]:
    yield
    hosts.heal()


@dataclass(frozen=True)
class Told:
    """What a doctor said on one host."""

    code: int
    err: str
    said: dict[str, Any]
    seconds: float

    def finding(self, area: str, name: str, host: str | None = None) -> dict[str, str]:
        found = [one for one in self.said["findings"] if (one["area"], one["name"]) == (area, name)]
        found = [one for one in found if host is None or one["host"] == host]
        assert len(found) == 1, f"{area}/{name}: {json.dumps(self.said['findings'], indent=1)}"
        return found[0]

    @property
    def failures(self) -> list[str]:
        return [f"{one['area']}/{one['name']}" for one in self.said["findings"] if one["level"] == "fail"]

    @property
    def links(self) -> dict[tuple[str, str], dict[str, Any]]:
        return {(link["from"], link["to"]): link for link in self.said["links"]}


def doctors(
    hosts: TwoHosts,
    a: Sequence[str] = PEERS,
    b: Sequence[str] | None = None,
    timeout: float = 20.0,
    **of_b: Any,
) -> tuple[Told, Told]:
    """Both at once; `b` types what `a` does where nothing is said. `of_b` goes to `TwoHosts.start`."""
    started = time.monotonic()
    more = ["--timeout", str(timeout)]
    running = [hosts.start("a", [*DOCTOR, *a, *more]), hosts.start("b", [*DOCTOR, *(b or a), *more], **of_b)]
    return told(hosts, running, timeout, started)


def told(hosts: TwoHosts, running: Sequence[Any], timeout: float, started: float = 0.0) -> tuple[Told, Told]:
    found = []
    for process in running:
        done = hosts.finish(process, timeout + SPARE_SECONDS)
        said = json.loads(done.out) if done.out else {"findings": [], "links": [], "machines": []}
        found.append(Told(done.code, done.err, said, time.monotonic() - started))
    return found[0], found[1]


def same_between(a: Told, b: Told) -> None:
    """Both sides say the same of the machines together."""
    areas = ("machines", "links", "all-reduce")
    both = [[one for one in told.said["findings"] if one["area"] in areas and not one["host"]
             and one["name"] != "this one"] for told in (a, b)]  # fmt: skip
    assert both[0] == both[1]
    assert a.said["links"] == b.said["links"]


# holds connections open in silence, and talks nonsense, from an address that was named
STRANGER = f"""
import socket, time
held = []
while True:
    try:
        one = socket.create_connection(("{ADDRESSES["b"]}", {PORT}), timeout=1)
        if len(held) % 2:
            one.sendall(b"\\xff\\xff\\xff\\xffGET / HTTP/1.0")
        held.append(one)
    except OSError:
        pass
    time.sleep(0.2)
"""


def test_two_good_hosts_and_strangers_on_the_port(hosts: TwoHosts) -> None:
    stranger = hosts.start("a", [sys.executable, "-c", STRANGER])
    a, b = doctors(hosts)
    stranger.kill()
    assert (a.code, b.code) == (0, 0), (a.failures, b.failures)
    same_between(a, b)
    assert [machine["host"] for machine in a.said["machines"]] == ["hostA", "hostB"]
    assert [(m["address"], m["interface"]) for m in b.said["machines"]] == [
        ("10.77.0.1", "eth0"), ("10.77.0.2", "eth0")
    ]  # fmt: skip
    assert abs(a.said["machines"][1]["clock_offset_seconds"]) < 0.5  # two hosts of one machine have one clock
    for link in a.said["links"]:
        assert link["ok"]
        assert 0 < link["latency_ms"] < 1000
    assert a.finding("all-reduce", "gloo")["level"] == "ok"
    for said in b.said["allreduce"]["machines"].values():
        assert said["gloo"]["ok"]
        assert said["gloo"]["mbytes_per_second"] > 1
        assert 0 < said["gloo"]["latency_ms"] < 1000
    assert set(a.said["allreduce"]["machines"]) == {"hostA", "hostB"}


def test_hosts_that_differ_in_everything_that_is_compared(hosts: TwoHosts, tmp_path: Path) -> None:
    """Libraries, settings, and the content of one file at the same path; the others' addresses are learned when they
    call."""
    newer = tmp_path / "extra" / "peft-99.0.dist-info"
    newer.mkdir(parents=True)
    (newer / "METADATA").write_text("Metadata-Version: 2.1\nName: peft\nVersion: 99.0\n")
    data, other = tmp_path / "reviews.csv", tmp_path / "other.csv"
    data.write_text("text,label\ngood,1\n")
    other.write_text("text,label\ngood,0\n")
    line = ["recipes/cls.py", "--train_file", str(data), "--config_file", "accelerate_configs/2node.yaml",
            "--main_process_ip", ADDRESSES["a"]]  # fmt: skip
    a, b = doctors(
        hosts,
        [*line, "--seed", "3", "--learning_rate", "3e-5"],
        [*line, "--seed", "4", "--learning_rate", "0.00003"],
        env={"PYTHONPATH": str(tmp_path / "extra")},
        binds={data: other},
    )
    assert (a.code, b.code) == (1, 1)
    same_between(a, b)
    versions = a.finding("machines", "versions")
    assert " and 99.0 on hostB" in versions["text"]
    assert "pip install peft==" in versions["remedy"]
    assert a.finding("machines", "settings")["text"] == "--seed is 3 on hostA and 4 on hostB"
    assert a.finding("machines", "train_file")["text"].startswith("--train_file does not have the same content: ")
    # what is wrong on the other machine alone is seen here too
    assert a.finding("versions", "peft", "hostB")["text"].startswith("peft 99.0 is installed, and this package needs")
    assert a.links[("hostA", "hostB")]["ok"]
    assert a.finding("all-reduce", "gloo")["level"] == "ok"


def test_a_blocked_port_is_named_with_the_line_that_opens_it(hosts: TwoHosts) -> None:
    hosts.block("b", PORT)
    a, b = doctors(hosts, timeout=30)
    same_between(a, b)
    assert (a.code, b.code) == (1, 1)
    fault = b.finding("links", "0 -> 1")
    assert "hostA does not reach hostB at 10.77.0.2:29600, although the other way works" in fault["text"]
    assert fault["remedy"].startswith("on hostB: sudo ufw allow from 10.77.0.1 to any port 29600 proto tcp")
    assert {way: link["ok"] for way, link in a.links.items()} == {
        ("hostA", "hostB"): False, ("hostB", "hostA"): True
    }  # fmt: skip
    # what works is measured all the same
    assert a.finding("all-reduce", "gloo")["level"] == "ok"


@pytest.mark.slow
def test_an_interface_that_does_not_route(hosts: TwoHosts) -> None:
    hosts.add_interface("a", "lan9", "10.99.0.1/24")
    line = ["--peers", f"10.99.0.1,{ADDRESSES['b']}"]
    a, b = doctors(hosts, line, timeout=5)
    assert (a.code, b.code) == (1, 1)
    assert b.finding("network", "chosen")["text"] == "no interface leads to 10.99.0.1"
    assert "hostB says: there is no route to it from here" in b.finding("links", "machine 0")["text"]
    wrong = a.finding("machines", "10.99.0.1")
    assert (wrong["level"], wrong["remedy"]) == ("warn", "name 10.77.0.1 instead of 10.99.0.1, on all machines")


@pytest.mark.slow
def test_a_pulled_cable(hosts: TwoHosts) -> None:
    hosts.cut()
    a, b = doctors(hosts, timeout=4)
    assert (a.code, b.code) == (1, 1)
    assert a.finding("machines", "10.77.0.1")["remedy"] == "sudo ip link set eth0 up"
    assert "its interface eth0 has no cable" in b.finding("machines", "10.77.0.2")["text"]
    assert a.finding("links", "machine 1")["level"] == b.finding("links", "machine 0")["level"] == "fail"


@pytest.mark.slow
@pytest.mark.parametrize("what", ["the network", "the other doctor"])
def test_what_is_between_dies_in_the_middle(hosts: TwoHosts, what: str) -> None:
    """Whatever they are doing then, those who live end."""
    running = [hosts.start(host, [*DOCTOR, *PEERS, "--timeout", "10"]) for host in ("a", "b")]
    deadline = time.monotonic() + 60
    while not _talking(hosts) and time.monotonic() < deadline:
        time.sleep(0.02)
    if what == "the network":
        hosts.silence()
    else:
        for process in hosts.processes("b"):
            with contextlib.suppress(psutil.Error):
                process.suspend()
    for process in running[: 2 if what == "the network" else 1]:
        done = hosts.finish(process, 10 + 30 + SPARE_SECONDS)
        assert done.code in (0, 1)
        assert json.loads(done.out)["findings"]
    for process in running:
        process.kill()


def _talking(hosts: TwoHosts) -> bool:
    """Whether a connection to the port is open on host b; of a namespace, /proc tells through its processes alone."""
    for process in hosts.processes("b"):
        with contextlib.suppress(OSError):  # it has just ended
            rows = [line.split() for line in Path(f"/proc/{process.pid}/net/tcp").read_text().splitlines()[1:]]
            return any(row[1].endswith(f":{PORT:04X}") and row[3] == "01" for row in rows)
    return False


@pytest.mark.slow
def test_two_tokens(hosts: TwoHosts) -> None:
    both = [hosts.start(host, [*DOCTOR, *PEERS, "--timeout", "4"], env={"TOOLKIT_TOKEN": word})
            for host, word in (("a", "one"), ("b", "two"))]  # fmt: skip
    a, b = told(hosts, both, 4)
    assert (a.code, b.code) == (1, 1)
    assert "does not know the token" in a.finding("links", "machine 1")["text"]
    assert "TOOLKIT_TOKEN to the same secret" in b.finding("links", "machine 0")["remedy"]
    assert all(word not in one.err + json.dumps(one.said) for one in (a, b) for word in ('"one"', '"two"'))


@pytest.mark.slow
def test_another_program_has_the_port(hosts: TwoHosts) -> None:
    code = f"import socket, time; server = socket.create_server(('', {PORT})); print('up', flush=True); time.sleep(90)"
    holder = hosts.start("b", [sys.executable, "-c", code])
    assert holder.stdout is not None
    assert holder.stdout.readline() == "up\n"
    a, b = doctors(hosts, timeout=30)
    holder.kill()
    holder.wait(10)
    (process,) = {finding["remedy"].split()[1] for finding in b.said["findings"] if finding["name"] == "port"}
    assert f"taken by process {process} " in a.finding("network", "port", "hostB")["text"]
    assert a.finding("links", "0 -> 1")["remedy"].startswith("on hostB: `sudo ss -ltnp 'sport = :29600'`")


@pytest.mark.slow
def test_names_instead_of_addresses(hosts: TwoHosts) -> None:
    """Each host's own name means 127.0.1.1 there, as Debian has it."""
    a, b = doctors(hosts, ["--peers", "hostA,hostB"])
    assert (a.code, b.code) == (0, 0), (a.failures, b.failures)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of_b", "said"),
    [
        (f"{ADDRESSES['b']},{ADDRESSES['a']}", "says that it is machine 0, as another one does"),
        (f"{ADDRESSES['a']},{ADDRESSES['b']},{NOBODY}", "was given the machines 10.77.0.1, 10.77.0.2, and "),
    ],
)
def test_hosts_that_are_told_of_other_machines(hosts: TwoHosts, of_b: str, said: str) -> None:
    a, b = doctors(hosts, PEERS, ["--peers", of_b], timeout=30)
    assert (a.code, b.code) == (1, 1)
    assert said in a.finding("machines", "rendezvous")["text"]
    assert "in the same order" in a.finding("machines", "rendezvous")["remedy"]


@pytest.mark.slow
def test_the_other_is_started_later(hosts: TwoHosts) -> None:
    first = hosts.start("a", [*DOCTOR, *PEERS, "--timeout", "40"])
    assert first.stderr is not None
    line = first.stderr.readline()
    assert line.startswith("waiting up to")
    assert line.rstrip().endswith(f"there: toolkit doctor --json {' '.join(PEERS)} --timeout 40")
    second = hosts.run("b", [*DOCTOR, *PEERS], seconds=90)
    assert (second.code, hosts.finish(first, 60).code) == (0, 0)
