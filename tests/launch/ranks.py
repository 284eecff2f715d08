"""Ranks with RANK, WORLD_SIZE and MASTER_* set by hand, for tests of the rendezvous and the failure detector.

    with Group("wait_for_line()", "raise ValueError('x')", hosts=["A", "B"]) as started:
        started.await_line()
        ended = started.end()

All are forks of tests/fork_server.py.
"""

import os
import socket
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tests.runs import Finished, Process, fork
from toolkit.launch.network import free_port

HERE = "127.0.0.1"
# For groups that end by themselves; a test that comes near it has failed.
BOUND_SECONDS = 60.0

_RANK = """
import os, signal, socket, sys, threading
from toolkit import launch
from toolkit.launch import failure_detector, rendezvous
from toolkit.launch.environment import timeout_seconds, set_torch_variables
from toolkit.utils import versions

def wait_for_line():
    if not sys.stdin.readline():  # the tests have exited
        os._exit(99)

rendezvous._LOG_SECONDS, rendezvous._FAULT_SECONDS = 1e9, 60.0  # for a busy machine
versions.code_digest = lambda script=None: "0123456789ab"  # files may be edited while this runs
if "PRETENDED_HOST" in os.environ:
    socket.gethostname = lambda: os.environ["PRETENDED_HOST"]
    rendezvous.network.node_id = lambda: os.environ["PRETENDED_HOST"]
{before}
def main():
    ranks = rendezvous.join_ranks(set_torch_variables(os.environ), "", float(os.environ["SECONDS"]))
    failure_detector.start(ranks, timeout_seconds("peer_timeout"))
    print("here", flush=True)
    {body}
launch.run(main)
"""


class Group:
    """The ranks of a run; each prints `here` after the rendezvous and then executes its body. Leaving the context kills
    them.

    `hosts`: the host name of each rank. `env`: variables for all, or for each rank. `before`: code by rank that is
    executed first.
    """

    def __init__(
        self, *bodies: str, hosts: Sequence[str] = (), env: Mapping[str, str] | Sequence[Mapping[str, str]] = (),
        before: Mapping[int, str] | None = None, seconds: float = BOUND_SECONDS,
    ) -> None:  # fmt: skip
        self.port = free_port()
        self.started_at = time.monotonic()
        self.hosts = list(hosts) or [socket.gethostname()] * len(bodies)
        self.ranks: list[Process] = []
        folder = Path(tempfile.mkdtemp(prefix="ranks-", dir=os.environ["TOOLKIT_TESTS_FOLDER"]))
        for rank, body in enumerate(bodies):
            variables = {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(bodies)),
                "LOCAL_RANK": str(self.hosts[:rank].count(self.hosts[rank])),
                "LOCAL_WORLD_SIZE": str(self.hosts.count(self.hosts[rank])),
                "MASTER_ADDR": HERE,
                "MASTER_PORT": str(self.port),
                "GLOO_SOCKET_IFNAME": "lo",
                "SECONDS": str(seconds),
                **({"PRETENDED_HOST": self.hosts[rank]} if hosts else {}),
                **(env if isinstance(env, Mapping) else env[rank] if env else {}),
            }
            script = folder / f"rank{rank}.py"
            indented = body.strip().replace("\n", "\n    ")
            script.write_text(_RANK.format(body=indented, before=(before or {}).get(rank, "")))
            self.ranks.append(fork([script], variables, stdin=True, imported=("torch.distributed", "toolkit.launch")))

    def await_line(self, word: str = "here") -> None:
        for rank, process in enumerate(self.ranks):
            line = process.line().strip()
            assert line == word, f"rank {rank} printed {line!r}, not {word!r}: {self._errors()}"

    def release(self, *ranks: int) -> None:
        """Writes the line that `wait_for_line` waits for."""
        for rank in ranks:
            self.ranks[rank].write_line()

    def end(self, seconds: float = BOUND_SECONDS) -> list[Finished]:
        """The results by rank. AssertionError if one does not end by itself."""
        deadline = time.monotonic() + seconds
        return [process.finish(max(0.0, deadline - time.monotonic())) for process in self.ranks]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.ranks:
            process.__exit__()

    def _errors(self) -> list[str]:
        for process in self.ranks:
            process.kill_session()
        return [process.left().err[-2000:] for process in self.ranks]


def run_group(*bodies: str, ranks: Sequence[int] | None = None, **options: Any) -> list[Finished]:
    """Starts a group, releases these ranks (or all) when all have joined, and returns the results."""
    with Group(*bodies, **options) as started:
        started.await_line()
        started.release(*(range(len(bodies)) if ranks is None else ranks))
        return started.end()


def errors(ended: Iterable[Finished]) -> list[str]:
    return [line for one in ended for line in one.error_lines]


def codes(ended: Iterable[Finished]) -> list[int]:
    return [one.code for one in ended]
