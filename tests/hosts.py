"""Two hosts on one machine: network namespaces joined by a cable, each with a host name and /etc/hosts of its own.

They need root and iproute2, and nothing else. Hosts share the file system but for /etc/hosts and TMPDIR.
"""

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import psutil
import pytest

from tests.inputs import session_folder
from tests.runs import Finished, Process, begin, fork, words_of

HOSTS = ("a", "b")
NAMES = {"a": "hostA", "b": "hostB"}
ADDRESSES = {"a": "10.77.0.1", "b": "10.77.0.2"}
INTERFACE = "eth0"
_WRONG_HARDWARE_ADDRESS = "02:00:00:00:00:99"
_PREFIX = f"tk2h{os.getpid()}"
_ETC = Path("/etc/netns")


class TwoHosts:
    """Hosts "a" and "b". As on Debian, each resolves its own name to 127.0.1.1. Python scripts and modules and
    `accelerate` start as forks of a process with warm imports. Whatever runs when the block is left is ended."""

    def __init__(self) -> None:
        self._spaces = {host: f"{_PREFIX}{host}" for host in HOSTS}
        self._folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=session_folder()))
        self._started: list[Process] = []
        self._rules: list[tuple[str, tuple[str, ...]]] = []

    def __enter__(self) -> Self:
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for space in self._spaces.values():
            _remove(space)
        for process in self._started:
            process.__exit__()

    def _build(self) -> None:
        for host, space in self._spaces.items():
            _ip("netns", "add", space)
            (_ETC / space).mkdir(parents=True, exist_ok=True)
            names = ["127.0.0.1 localhost"]
            for one in HOSTS:
                names.append(f"{'127.0.1.1' if one == host else ADDRESSES[one]} {NAMES[one]}")
            (_ETC / space / "hosts").write_text("\n".join([*names, ""]), encoding="utf-8")
            (self._folder / host).mkdir()
        first, second = self._spaces.values()
        cable = f"link add {INTERFACE} netns {first} type veth peer name {INTERFACE} netns {second}"
        _ip(*cable.split())
        for host in HOSTS:
            self.ip(host, "link", "set", "lo", "up")
            self.ip(host, "addr", "add", f"{ADDRESSES[host]}/24", "dev", INTERFACE)
            self.ip(host, "link", "set", INTERFACE, "up")

    def start(
        self, host: str, command: Any, env: Any = None, binds: Any = None, fresh: Any = None
    ) -> Process:
        """Starts a program on a host. `binds`: path -> file to mount there, for this program only.
        `fresh`: never as a fork."""
        variables = {"TMPDIR": str(self._folder / host), **(env or {})}
        program, *words = words_of(command)
        files = {str(path): str(source) for path, source in (binds or {}).items()}
        is_python = program == sys.executable and words[0] != "-c"
        if program == "accelerate":
            is_python, words = True, [str(Path(sys.executable).with_name(program)), *words]
        if is_python and not fresh:
            inside = {"space": self._spaces[host], "name": NAMES[host], "binds": files}
            variables = {"TESTS_WITHOUT_PAGES": "", **variables}
            process = fork(words, variables, inside=inside)
        else:
            mounts = [shlex.join(["mount", "--bind", *pair[::-1]]) for pair in files.items()]
            prepare = [f"echo {NAMES[host]} > /proc/sys/kernel/hostname", *mounts, 'exec "$@"']
            shell = ["unshare", "--uts", "--", "sh", "-ec", "\n".join(prepare), "sh"]
            enter = ["ip", "netns", "exec", self._spaces[host], *shell]
            process = begin([*enter, *command], variables)
        self._started.append(process)
        return process

    def start_both(self, commands: Mapping[str, Any], **options: Any) -> dict[str, Any]:
        """Starts a command on each host; each of `options` is a mapping by host."""
        started = {}
        for host, command in commands.items():
            of_host = {name: value.get(host) for name, value in options.items()}
            started[host] = self.start(host, command, **of_host)
        return started

    def finish_both(self, started: Mapping[str, Process], seconds: float = 60) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        done = {}
        for host, process in started.items():
            done[host] = process.finish(max(1.0, deadline - time.monotonic()))
        return done

    def run_both(self, commands: Any, seconds: float = 60, **options: Any) -> dict[str, Finished]:
        return self.finish_both(self.start_both(commands, **options), seconds)

    def processes(self, host: str) -> list[psutil.Process]:
        return _processes_in(self._spaces[host])

    def ip(self, host: str, *words: str) -> str:
        return _ip("-n", self._spaces[host], *words)

    def cut(self) -> None:
        """Pulls the cable: host a's interface is down, host b's has no carrier."""
        self.ip("a", "link", "set", INTERFACE, "down")

    def silence(self) -> None:
        """Both interfaces stay up, but every packet is lost, as when a machine or a switch has died."""
        for host, other in (("a", "b"), ("b", "a")):
            way = f"{ADDRESSES[other]} lladdr {_WRONG_HARDWARE_ADDRESS} nud permanent"
            self.ip(host, "neigh", "replace", *way.split(), "dev", INTERFACE)

    def block(self, host: str, port: int) -> None:
        """A firewall on `host` that drops connections from other hosts to this port."""
        rule = ("ipproto", "tcp", "sport", str(port), "blackhole")
        self.ip(host, "rule", "add", *rule)
        self._rules.append((host, rule))

    def heal(self) -> None:
        """Undoes `cut`, `silence` and `block`."""
        while self._rules:
            host, rule = self._rules.pop()
            self.ip(host, "rule", "del", *rule)
        for host in HOSTS:
            self.ip(host, "link", "set", INTERFACE, "up")
            self.ip(host, "neigh", "flush", "dev", INTERFACE, "nud", "permanent")


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    """Skips if network namespaces are not available, but never in CI."""
    probe = ["unshare", "--net", "--mount", "--uts", "true"]
    can = shutil.which("ip") and shutil.which("unshare") and subprocess.call(probe) == 0
    if not can and not os.environ.get("CI"):
        pytest.skip("two hosts need root on Linux, iproute2 and util-linux")
    with TwoHosts() as hosts:
        yield hosts


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def _processes_in(space: str) -> list[psutil.Process]:
    processes = []
    for pid in _ip("netns", "pids", space).split():
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(int(pid)))
    return processes


def _remove(space: str) -> None:
    if not Path("/var/run/netns", space).exists():
        return
    for _ in range(5):  # a process may start another while it is being killed
        running = _processes_in(space)
        for process in running:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(running, timeout=3)
    _ip("netns", "del", space)
    shutil.rmtree(_ETC / space, ignore_errors=True)
    with contextlib.suppress(OSError):
        _ETC.rmdir()  # if it is empty
