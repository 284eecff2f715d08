"""Processes with RANK, WORLD_SIZE and MASTER_* of their own, for tests of what they know of each other.

    with group("wait_for_line()", "raise ValueError('x')", hosts=["A", "B"]) as started:
        started.await_line()
        ended = started.end()

All are forked from one process that has imported torch already: that takes a second, and a group takes none.
"""

from __future__ import annotations

import functools
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from tests.conftest import REPOSITORY
from tests.runs import Finished
from toolkit.launch.environment import TIMEOUTS
from toolkit.launch.network import free_port
from toolkit.launch.relaunch import clean_environment

HERE = "127.0.0.1"
# Of what ends by itself; a test that comes near it has failed.
BOUND_SECONDS = 60.0

# Takes (code, environment) and four descriptors: the standard ones, and one for the process id and, later, the exit
# code. The forked process ends as any other does, with all that Python does at its end.
_NURSERY = """
import gc, json, os, signal, socket, sys, threading
import torch.distributed
from toolkit import launch
from toolkit import versions
from toolkit.launch import failure_detector, rank_rendezvous
from toolkit.launch.environment import settle

def wait_for_line():
    if not sys.stdin.readline():  # the tests are gone
        os._exit(99)

control = socket.socket(fileno=int(sys.argv[1]))
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
gc.collect()
gc.freeze()  # what is there by now stays shared memory, and is quickly left
while True:
    request, descriptors, _, _ = socket.recv_fds(control, 1 << 18, 4)
    if not request:  # the tests are over
        break
    if os.fork():
        for descriptor in descriptors:
            os.close(descriptor)
        continue
    control.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    *standard, status = descriptors
    pid = os.fork()
    if pid:
        for descriptor in (*standard, 0, 1, 2):
            os.close(descriptor)
        os.write(status, b"%d\\n" % pid)
        os.write(status, b"%d\\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        os._exit(0)
    os.close(status)
    for number, descriptor in enumerate(standard):
        os.dup2(descriptor, number)
        os.close(descriptor)
    code, environment = json.loads(request)
    os.environ.clear()
    os.environ.update(environment)
    exec(compile(code, "rank.py", "exec"), globals())
    break
"""

_RANK = """
versions.code_digest = lambda script=None: "0123456789ab"  # files may be edited while this runs
if "PRETENDED_HOST" in os.environ:  # a machine of its own
    socket.gethostname = lambda: os.environ["PRETENDED_HOST"]
    rank_rendezvous.network.node_id = lambda: os.environ["PRETENDED_HOST"]
{before}
def main():
    rank_rendezvous.find_ranks(settle(os.environ), "", float(os.environ["SECONDS"]))
    print("here", flush=True)
    {body}
launch.run(main)
"""


@functools.cache
def _nursery() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    env = {**clean_environment(os.environ), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _NURSERY, str(theirs.fileno())]
    with theirs:
        subprocess.Popen(command, cwd=REPOSITORY, env=env, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
    return ours  # when this process ends, the other one does


class Rank:
    """A process that was forked; what it says comes through pipes."""

    def __init__(self, code: str, env: Mapping[str, str]) -> None:
        inner_in, self._in = os.pipe()
        self._out, inner_out = os.pipe()
        self._err, inner_err = os.pipe()
        self._status, inner_status = os.pipe()
        inner = [inner_in, inner_out, inner_err, inner_status]
        socket.send_fds(_nursery(), [json.dumps([code, dict(env)]).encode()], inner)
        for descriptor in inner:
            os.close(descriptor)
        self.pid = int(_line(self._status, BOUND_SECONDS))
        self._code: int | None = None

    def poll(self, seconds: float = 0.0) -> int | None:
        """The exit code (negative: the signal), where it comes within `seconds`."""
        if self._code is None and (line := _line(self._status, seconds)):
            self._code = int(line)
        return self._code

    def line(self) -> str:
        """The next line it prints; nothing where it ends first."""
        return _line(self._out, BOUND_SECONDS).strip()

    def tell(self) -> None:
        """A line for `wait_for_line`."""
        os.write(self._in, b"go\n")

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Also one that is stopped."""
        self.send_signal(signal.SIGKILL)

    def left(self) -> Finished:
        """What it left behind; it has ended."""
        assert self._code is not None
        return Finished(self._code, _rest(self._out), _rest(self._err))

    def close(self) -> None:
        self.kill()
        self.poll(BOUND_SECONDS)
        for descriptor in (self._in, self._out, self._err, self._status):
            os.close(descriptor)


class Group:
    """The processes of a run, started by hand: one for each of `bodies`, which is what a rank does after the roll.

    `hosts`: a word for each rank; those of one word are a machine of that name. `env` is for all of them, or one for
    each rank; `before` holds lines that come before everything, by rank. Each prints `here` after the roll.
    """

    def __init__(
        self,
        bodies: Sequence[str],
        hosts: Sequence[str] = (),
        env: Mapping[str, str] | Sequence[Mapping[str, str]] = (),
        before: Mapping[int, str] | None = None,
        seconds: float = BOUND_SECONDS,
    ) -> None:
        self.port = free_port()
        self.started_at = time.monotonic()
        self.hosts = list(hosts) or [socket.gethostname()] * len(bodies)
        self.ranks: list[Rank] = []
        for rank, body in enumerate(bodies):
            own = env if isinstance(env, Mapping) else dict(env[rank]) if env else {}
            pretended = {"PRETENDED_HOST": self.hosts[rank]} if hosts else {}
            code = _RANK.format(body=body.strip().replace("\n", "\n    "), before=(before or {}).get(rank, ""))
            self.ranks.append(Rank(code, {**self._environment(rank), **pretended, "SECONDS": str(seconds), **own}))

    def _environment(self, rank: int) -> dict[str, str]:
        clean = clean_environment(os.environ)
        for name, _ in TIMEOUTS.values():
            clean.pop(name, None)
        return {
            **clean,
            "RANK": str(rank),
            "WORLD_SIZE": str(len(self.hosts)),
            "LOCAL_RANK": str(self.hosts[:rank].count(self.hosts[rank])),
            "LOCAL_WORLD_SIZE": str(self.hosts.count(self.hosts[rank])),
            "MASTER_ADDR": HERE,
            "MASTER_PORT": str(self.port),
            "GLOO_SOCKET_IFNAME": "lo",
        }

    def await_line(self, word: str = "here", ranks: Iterable[int] | None = None) -> None:
        """Until each of these ranks has printed a line that is this word."""
        for rank in range(len(self.ranks)) if ranks is None else ranks:
            line = self.ranks[rank].line()
            if line != word:
                raise AssertionError(f"rank {rank} said {line!r}, not {word!r}: {self._said()}")

    def tell(self, *ranks: int) -> None:
        """A line for `wait_for_line`."""
        for rank in ranks:
            self.ranks[rank].tell()

    def await_end(self, *ranks: int, seconds: float = BOUND_SECONDS) -> int:
        """The first of these ranks that ends."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for rank in ranks:
                if self.ranks[rank].poll(0.02) is not None:
                    return rank
        raise AssertionError(f"none of the ranks {ranks} ended in {seconds} s: {self._said()}")

    def end(self, seconds: float = BOUND_SECONDS) -> list[Finished]:
        """What each left behind, in the order of ranks. AssertionError where one does not end by itself."""
        deadline = time.monotonic() + seconds
        for rank, process in enumerate(self.ranks):
            if process.poll(max(0.0, deadline - time.monotonic())) is None:
                raise AssertionError(f"rank {rank} did not end in {seconds} s: {self._said()}")
        return [process.left() for process in self.ranks]

    def _said(self) -> list[str]:
        for process in self.ranks:
            process.kill()
            process.poll(BOUND_SECONDS)
        return [process.left().err[-2000:] for process in self.ranks]


@contextmanager
def group(*bodies: str, **options: Any) -> Iterator[Group]:
    """Whatever still runs when the block is left is killed."""
    started = Group(bodies, **options)
    try:
        yield started
    finally:
        for process in started.ranks:
            process.close()


def errors(ended: Iterable[Finished]) -> list[str]:
    """The lines that say `error:`, of all of them."""
    return [line for one in ended for line in one.error_lines]


def codes(ended: Iterable[Finished]) -> list[int]:
    return [one.code for one in ended]


def _line(descriptor: int, seconds: float) -> str:
    """The next line of a pipe, read a byte at a time so that no more is taken; what there is of it at the end."""
    line, deadline = b"", time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while not line.endswith(b"\n") and selector.select(max(0.0, deadline - time.monotonic())):
            byte = os.read(descriptor, 1)
            if not byte:
                break
            line += byte
    return line.decode()


def _rest(descriptor: int) -> str:
    """What is in a pipe by now: a process that was forked in turn may still hold the other end."""
    parts: list[bytes] = []
    os.set_blocking(descriptor, False)
    with suppress(BlockingIOError):
        while part := os.read(descriptor, 1 << 16):
            parts.append(part)
    return b"".join(parts).decode(errors="replace")
