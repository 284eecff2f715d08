"""Promises: `toolkit doctor` on two hosts says whether they find each other and sum numbers, and if not, why."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.features.doctor.printed import findings_in
from tests.hosts import ADDRESSES, TwoHosts
from tests.runs import Process

pytestmark = pytest.mark.namespaces

DOCTOR = [sys.executable, "-m", "toolkit", "doctor"]
SEVERAL = ["--main_process_ip", ADDRESSES["a"]]
PORT = 29600
# to import torch on a busy machine, twice; each test names how long the machines may wait for each other
SPARE_SECONDS = 60.0


@pytest.fixture(autouse=True)
def _healed(hosts: TwoHosts) -> Iterator[None]:
    yield
    hosts.heal()


@dataclass
class Report:
    """What a doctor printed on one host, and its exit code."""

    code: int
    out: str

    def text(self, name: str) -> str:
        return findings_in(self.out)[name].text


def finish(running: Sequence[Process], timeout: float) -> list[Report]:
    done = [process.finish(timeout + SPARE_SECONDS) for process in running]
    return [Report(each.code, each.out) for each in done]


def doctors(
    hosts: TwoHosts,
    a: Sequence[str] = SEVERAL,
    b: Sequence[str] | None = None,
    timeout: float = 20.0,
    **of_b: Any,
) -> list[Report]:
    """Runs one on each host, on b with the words of a by default. `of_b` goes to `TwoHosts.start`."""
    more = ["--timeout", str(timeout)]
    running = [
        hosts.start("a", [*DOCTOR, *a, *more]),
        hosts.start("b", [*DOCTOR, *(b or a), *more], **of_b),
    ]
    return finish(running, timeout)


# opens connections in silence, and sends nonsense, from an address of the run
STRANGER = f"""
import socket, time
connections = []
while True:
    try:
        connection = socket.create_connection(("{ADDRESSES["a"]}", {PORT}), timeout=1)
        if len(connections) % 2:
            connection.sendall(b"\\xff\\xff\\xff\\xffGET / HTTP/1.0")
        connections.append(connection)
    except OSError:
        pass
    time.sleep(0.2)
"""


def test_two_good_hosts_and_strangers_on_the_port(hosts: TwoHosts) -> None:
    stranger = hosts.start("b", [sys.executable, "-c", STRANGER])
    a, b = doctors(hosts)
    stranger.kill()
    assert (a.code, b.code) == (0, 0), (a.out, b.out)
    for report in (a, b):
        assert report.text("machines").startswith("hostA, hostB found each other")
        assert "16 MB summed over 2 machines at " in report.text("gloo")


def test_hosts_with_different_libraries(hosts: TwoHosts, tmp_path: Path) -> None:
    newer = tmp_path / "extra" / "peft-99.0.dist-info"
    newer.mkdir(parents=True)
    (newer / "METADATA").write_text("Metadata-Version: 2.1\nName: peft\nVersion: 99.0\n")
    a, b = doctors(hosts, env={"PYTHONPATH": str(tmp_path / "extra")}, fresh=True)
    assert (a.code, b.code) == (1, 1)
    for report in (a, b):
        assert " and 99.0 on hostB" in report.text("machines")


def test_a_port_that_drops_packets_is_told_from_one_that_refuses(hosts: TwoHosts) -> None:
    hosts.block("a", PORT)
    a, b = doctors(hosts, timeout=5)
    assert (a.code, b.code) == (1, 1)
    dropped = b.text("machines")
    assert "10.77.0.1:29600: no answer" in dropped
    assert "on 10.77.0.1, `sudo ufw allow from 10.77.0.2`" in dropped
    assert "machine 1 did not come" in a.text("machines")
    hosts.heal()
    (alone,) = finish([hosts.start("b", [*DOCTOR, *SEVERAL, "--timeout", "3"])], 3)
    refused = alone.text("machines")
    assert "nothing listens on this port" in refused
    assert "start the other machine too" in refused
