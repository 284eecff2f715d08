"""Promise: a run listens on no port but those that SECURITY.md names, from its start to its end, by
every way to start it."""

import contextlib
import ipaddress
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.hosts import ADDRESSES, TwoHosts
from tests.matrix import REVIEWS
from tests.runs import losses_of, slow_but, wait_for_steps

pytestmark = pytest.mark.namespaces

SCRIPT = "recipes/cls.py"
SETTINGS = [*REVIEWS, "--max_steps", 100_000, "--eval_every", 100_000]
DDP, ZERO2 = (["--config_file", f"accelerate_configs/{name}.yaml"] for name in ("ddp", "zero2"))
TORCHRUN = ["--nproc_per_node", "2", SCRIPT]
WAYS: dict[str, list[str]] = {  # name -> words before the settings
    "python and a file": [sys.executable, SCRIPT, *DDP],
    "accelerate launch, the file before": ["accelerate", "launch", *ZERO2, SCRIPT],
    "deepspeed": ["deepspeed", "--num_gpus", "2", SCRIPT],
    "deepspeed, one process": ["deepspeed", "--num_gpus", "1", SCRIPT],
    "torchrun": ["torchrun", *TORCHRUN],
    "torchrun, as SECURITY.md has it": ["torchrun", "--master_port", "29501", *TORCHRUN],
}
# Launchers that listen themselves: SECURITY.md lists them, with the options against it.
LAUNCHERS_OWN = "torchrun", "torchrun, as SECURITY.md has it", "accelerate launch, the file before"
# Lists the keys of the stores among these ports. Others may make torch hang, hence the alarm.
READER = """
import os, signal, sys
from datetime import timedelta
from torch.distributed import TCPStore
for port in map(int, sys.argv[1:]):
    if not os.fork():
        signal.alarm(15)
        store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=12), False)
        os.write(1, "".join(f"{key}\\n" for key in store.list_keys()).encode())
        os._exit(0)
for _ in sys.argv[1:]:
    os.wait()
"""


@contextlib.contextmanager
def running(
    hosts: TwoHosts, folder: Path, command: Mapping[str, list[Any]]
) -> Iterator[dict[str, set[str]]]:
    """A run, after its first step: host -> each `address port inode` that has listened there. Killed afterwards."""
    here, over = Path("/proc/self/ns/net").readlink(), threading.Event()
    started = hosts.start_both(command)
    listened: dict[str, set[str]] = {host: set() for host in started}

    def watch() -> None:
        while not over.wait(0.01):
            for host, process in started.items():
                with contextlib.suppress(OSError):  # it has ended
                    if Path(f"/proc/{process.pid}/ns/net").readlink() != here:
                        listened[host] |= set(listening(process.pid))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        wait_for_steps(folder, 1, started.values())
        yield listened
        steps = len(losses_of(folder))
        wait_for_steps(folder, steps + 20, started.values())  # reading did no harm
    finally:
        over.set()
        thread.join()
        for process in [process for host in started for process in hosts.processes(host)]:
            with contextlib.suppress(psutil.Error):
                process.kill()
        hosts.finish_both(started)


def listening(pid: int) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            place, state = line.split()[1], line.split()[3]
            if state == "0A":
                address, _, port = place.partition(":")
                parts = [int(address[at : at + 8], 16) for at in range(0, len(address), 8)]
                packed = b"".join(part.to_bytes(4, sys.byteorder) for part in parts)
                inode = line.split()[9]
                yield f"{ipaddress.ip_address(packed)} {int(port, 16)} socket:[{inode}]"


def elsewhere(places: Iterable[str], named: str = "127.0.0.1") -> set[str]:
    """Those that are neither on the loopback nor on this address."""
    addresses = {place: ipaddress.ip_address(place.split()[0]) for place in places}
    return {place for place, one in addresses.items() if not one.is_loopback and str(one) != named}


@pytest.mark.parametrize("name", slow_but(WAYS, "python and a file"))
def test_one_machine_listens_on_loopback_only(name: str, hosts: TwoHosts, tmp_path: Path) -> None:
    """And keeps nothing there that torch unpickles."""
    command = [*WAYS[name], *SETTINGS, "--output_dir", str(tmp_path / "run")]
    with running(hosts, tmp_path / "run", {"a": command}) as listened:
        launcher = min(hosts.processes("a"), key=lambda process: process.create_time())
        its_own = {str(file.readlink()) for file in Path(f"/proc/{launcher.pid}/fd").iterdir()}
        theirs = its_own if name in LAUNCHERS_OWN else set()
        ours = {place for place in listened["a"] if place.split()[2] not in theirs}
        assert ours
        assert elsewhere(ours) == set()
        ports = {place.split()[1] for place in listened["a"]}
        reader = hosts.start("a", [sys.executable, "-c", READER, *ports])
        keys = reader.finish(120).succeeded().out
    if name != "deepspeed, one process":
        assert "toolkit/" in keys  # a store was read
    assert name == "torchrun" or "torch.rendezvous" not in keys


def test_two_machines_listen_on_their_addresses_only(hosts: TwoHosts, tmp_path: Path) -> None:
    way = ["--config_file", "accelerate_configs/2node.yaml", "--main_process_ip", ADDRESSES["a"]]
    words = [sys.executable, SCRIPT, *SETTINGS, "--output_dir", str(tmp_path / "run"), *way]
    with running(hosts, tmp_path / "run", {"a": words, "b": words}) as listened:
        pass
    for host, address in ADDRESSES.items():
        assert elsewhere(listened[host], address) == set()
        assert elsewhere(listened[host]) != set()
