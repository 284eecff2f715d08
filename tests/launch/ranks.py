"""Processes with RANK, WORLD_SIZE and MASTER_* of their own, for tests of what they know of each other.

    with group("wait_for_line()", "raise ValueError('x')", hosts=["A", "B"]) as started:
        started.await_line()
        ended = started.end()

All are forked from one process that has imported torch already: that takes a second, and a group takes none.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.fork_server import become
from tests.runs import Finished
from toolkit.launch.environment import TIMEOUTS
from toolkit.launch.network import free_port
from toolkit.launch.relaunch import clean_environment

HERE = "127.0.0.1"
# Of what ends by itself; a test that comes near it has failed.
BOUND_SECONDS = 60.0

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["torch.distributed", "toolkit.launch", __name__])

_RANK = """
import os, signal, socket, sys, threading
from toolkit import launch
from toolkit.launch import failure_detector, rendezvous
from toolkit.launch.environment import seconds_of, settle
from toolkit.utils import versions

def wait_for_line():
    if not sys.stdin.readline():  # the tests are gone
        os._exit(99)

versions.code_digest = lambda script=None: "0123456789ab"  # files may be edited while this runs
if "PRETENDED_HOST" in os.environ:  # a machine of its own
    socket.gethostname = lambda: os.environ["PRETENDED_HOST"]
    rendezvous.network.node_id = lambda: os.environ["PRETENDED_HOST"]
{before}
def main():
    ranks = rendezvous.find_ranks(settle(os.environ), "", float(os.environ["SECONDS"]))
    failure_detector.start(ranks, seconds_of("peer_timeout"))
    print("here", flush=True)
    {body}
launch.run(main)
"""


def _run(folder: str, env: Mapping[str, str]) -> None:
    for number, (name, mode) in enumerate((("in", os.O_RDONLY), ("out", os.O_WRONLY), ("err", os.O_WRONLY))):
        os.dup2(os.open(f"{folder}/{name}", mode), number)
    become([sys.executable, f"{folder}/rank.py"], env)


class Rank:
    """A process that was forked; what it says goes to files."""

    def __init__(self, code: str, env: Mapping[str, str]) -> None:
        self._files = tempfile.TemporaryDirectory()
        folder = Path(self._files.name)
        (folder / "rank.py").write_text(code)
        os.mkfifo(folder / "in")
        self._in = os.open(folder / "in", os.O_RDWR)
        self._out, self._err = ((folder / name).open("w+", errors="replace") for name in ("out", "err"))
        self._process = _SERVER.Process(target=_run, args=(self._files.name, dict(env)), daemon=True)
        self._process.start()
        self.pid = self._process.pid or 0

    def poll(self, seconds: float = 0.0) -> int | None:
        """The exit code (negative: the signal), where it comes within `seconds`."""
        self._process.join(seconds)
        return self._process.exitcode

    def line(self) -> str:
        """The next line it prints; nothing where it ends first."""
        deadline = time.monotonic() + BOUND_SECONDS
        while not (line := self._out.readline()) and self.poll(0.02) is None and time.monotonic() < deadline:
            pass
        return (line or self._out.readline()).strip()

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
        code = self.poll()
        assert code is not None
        return Finished(code, self._out.read(), self._err.read())

    def close(self) -> None:
        self.kill()
        self.poll(BOUND_SECONDS)
        for opened in (self._out, self._err):
            opened.close()
        os.close(self._in)
        self._files.cleanup()


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
