"""Lines between two threads of a test, and machines on addresses of the loopback."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from toolkit.launch.wire import Line


@contextlib.contextmanager
def two_lines() -> Iterator[tuple[Line, Line]]:
    """Both ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        calling = socket.create_connection(server.getsockname())
        answering, _ = server.accept()
    with Line(calling) as one, Line(answering) as other:
        yield one, other


def in_thread(work: Callable[[], Any]) -> queue.Queue[Any]:
    """Starts it; its value, or its exception, arrives in the queue."""
    done: queue.Queue[Any] = queue.Queue()

    def run() -> None:
        try:
            done.put(work())
        except Exception as error:
            done.put(error)

    threading.Thread(target=run, daemon=True).start()
    return done


def free_port(addresses: list[str]) -> int:
    """A port that is free at each of these addresses."""
    for _ in range(50):
        with socket.create_server((addresses[0], 0)) as first, contextlib.ExitStack() as others:
            port = int(first.getsockname()[1])
            try:
                for address in addresses[1:]:
                    others.enter_context(socket.create_server((address, port)))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")


def listen(address: str, port: int) -> socket.socket:
    """As `wire.listen`, at one address: so several machines find room on one."""
    return socket.create_server((address, port), backlog=64)
