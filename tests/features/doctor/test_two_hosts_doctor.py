"""Promises: `toolkit doctor` on two hosts says whether they find each other and sum numbers, and if
not, why."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.features.doctor.printed import findings_in
from tests.hosts import ADDRESSES, TwoHosts
from tests.runs import Process
from toolkit.features.doctor.machine import Finding

pytestmark = pytest.mark.namespaces

DOCTOR = [sys.executable, "-m", "toolkit", "doctor", "--main_process_ip", ADDRESSES["a"]]
PORT = 29600
# to import torch on a busy machine, twice
SPARE_SECONDS = 60.0


@pytest.fixture(autouse=True)
def _healed(hosts: TwoHosts) -> Iterator[None]:
    yield
    hosts.heal()


def doctors(hosts: TwoHosts, timeout: float = 20.0, **of_b: Any) -> dict[str, dict[str, Finding]]:
    """Runs one on each host; what each found, by name. `of_b` goes to `TwoHosts.start`."""
    words = [*DOCTOR, "--timeout", str(timeout)]
    running = {"a": hosts.start("a", words), "b": hosts.start("b", words, **of_b)}
    return {name: findings(process, timeout) for name, process in running.items()}


def findings(process: Process, timeout: float) -> dict[str, Finding]:
    """The exit code is 1 after a FAIL, else 0."""
    done = process.finish(timeout + SPARE_SECONDS)
    found = findings_in(done.out)
    failed = any(finding.level == "FAIL" for finding in found.values())
    assert done.code == int(failed), done.out + done.err
    return found


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
    reports = doctors(hosts)
    stranger.kill()
    for found in reports.values():
        assert found["machines"].text.startswith("hostA, hostB found each other")
        assert "16 MB summed over 2 machines at " in found["gloo"].text
        assert found["gloo"].level != "FAIL"


def test_hosts_with_different_libraries(hosts: TwoHosts, tmp_path: Path) -> None:
    newer = tmp_path / "extra" / "peft-99.0.dist-info"
    newer.mkdir(parents=True)
    (newer / "METADATA").write_text("Metadata-Version: 2.1\nName: peft\nVersion: 99.0\n")
    reports = doctors(hosts, env={"PYTHONPATH": str(tmp_path / "extra")}, fresh=True)
    for found in reports.values():
        assert found["machines"].level == "FAIL"
        assert " and 99.0 on hostB" in found["machines"].text


def test_a_port_that_drops_packets_is_told_from_one_that_refuses(hosts: TwoHosts) -> None:
    hosts.block("a", PORT)
    reports = doctors(hosts, timeout=5)
    dropped = reports["b"]["machines"].text
    assert "10.77.0.1:29600: no answer" in dropped
    assert "on 10.77.0.1, `sudo ufw allow from 10.77.0.2`" in dropped
    assert "machine 1 did not come" in reports["a"]["machines"].text
    hosts.heal()
    alone = findings(hosts.start("b", [*DOCTOR, "--timeout", "3"]), 3)
    assert "nothing listens on this port" in alone["machines"].text
    assert "start the other machine too" in alone["machines"].text
