"""The line between machines, and whoever else calls."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
from toolkit.launch.wire import Line, UnreachableError, WireError

from toolkit.launch import wire

TOKEN = "a word"


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        made.settimeout(5)
        yield made


def port_of(server: socket.socket) -> int:
    return int(server.getsockname()[1])


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


@contextlib.contextmanager
def two_ends() -> Iterator[tuple[Line, socket.socket]]:
    """A line and the bare other end of it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        bare = socket.create_connection(server.getsockname())
        connection, _ = server.accept()
    with bare, Line(connection) as line:
        yield line, bare


def test_two_that_know_the_token_talk_both_ways(server: socket.socket) -> None:
    answered = in_thread(lambda: wire.answer(server, TOKEN))
    with wire.dial("127.0.0.1", port_of(server), TOKEN) as line, answered.get(timeout=5) as other:
        line.send({"text": "文本", "numbers": [1, 2.5, None]})
        assert other.receive() == {"text": "文本", "numbers": [1, 2.5, None]}
        other.send({"large": "x" * 900_000})
        assert len(line.receive()["large"]) == 900_000
        assert (line.peer, line.own) == ("127.0.0.1", "127.0.0.1")


def test_both_sides_learn_of_a_wrong_token(server: socket.socket) -> None:
    answered = in_thread(lambda: wire.answer(server, TOKEN))
    with pytest.raises(WireError, match="does not know the token"):
        wire.dial("127.0.0.1", port_of(server), "another word")
    assert "does not know the token" in str(answered.get(timeout=5))


def test_the_token_never_travels(server: socket.socket) -> None:
    heard = in_thread(lambda: _overhear(server))
    with pytest.raises(WireError):
        wire.dial("127.0.0.1", port_of(server), "geheim", seconds=1)
    assert b"geheim" not in heard.get(timeout=5)


def _overhear(server: socket.socket) -> bytes:
    connection, _ = server.accept()
    with connection:
        greeting = json.dumps({"greeting": "finetune-toolkit 1", "once": "00"}).encode()
        connection.sendall(struct.pack("!I", len(greeting)) + greeting)
        connection.settimeout(1)
        return connection.recv(4096)


def framed(content: bytes) -> bytes:
    return struct.pack("!I", len(content)) + content


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\xff" * 64,  # a length of 4 GB
        framed(b"not json"),
        framed(b"[1, 2]"),
        framed(b'{"once": "x"}'),
        framed(b'{"once": "x", "proof": "\xc3\xa9"}'),  # not ASCII
        framed(b'{"once": "\\ud800", "proof": "\\ud800"}'),  # half a surrogate pair
        framed(b'{"once": 1, "proof": {"a": 1}}'),
        framed(b"[" * 1000),
        framed(b'{"x": "' + b"y" * 2000 + b'"}'),  # longer than a stranger's message may be
        b"",
    ],
)
def test_whoever_cannot_greet_is_sent_away(server: socket.socket, said: bytes) -> None:
    before = psutil.Process().num_fds()
    answered = in_thread(lambda: wire.answer(server, TOKEN, seconds=2))
    with socket.create_connection(server.getsockname()) as stranger:
        stranger.sendall(said)
        with contextlib.suppress(OSError):  # it may have been sent away already
            stranger.shutdown(socket.SHUT_WR)
        assert isinstance(answered.get(timeout=5), WireError)
        stranger.settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(4096):  # it was closed
                pass
    assert psutil.Process().num_fds() == before


def test_whoever_says_nothing_is_sent_away_in_time(server: socket.socket) -> None:
    answered = in_thread(lambda: wire.answer(server, TOKEN, seconds=0.5))
    with socket.create_connection(server.getsockname()):
        started = time.monotonic()
        error = answered.get(timeout=5)
    assert "said nothing in time" in str(error)
    assert time.monotonic() - started < 3


def test_a_byte_now_and_then_gains_no_time(server: socket.socket) -> None:
    answered = in_thread(lambda: wire.answer(server, TOKEN, seconds=0.6))
    with socket.create_connection(server.getsockname()) as stranger, contextlib.suppress(OSError):
        started = time.monotonic()
        for byte in framed(b'{"once": "x"}' + b" " * 100):
            stranger.send(bytes([byte]))
            time.sleep(0.1)
            if not answered.empty():
                break
    assert isinstance(answered.get(timeout=5), WireError)
    assert time.monotonic() - started < 3


def test_whoever_hangs_up_at_once_is_no_crash(server: socket.socket) -> None:
    stranger = socket.create_connection(server.getsockname())
    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stranger.close()  # a reset, before the connection is taken
    with pytest.raises(WireError):
        wire.answer(server, TOKEN, seconds=1)


def test_another_program_at_the_port_is_named_as_such(server: socket.socket) -> None:
    def other_program() -> None:
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"SSH-2.0-OpenSSH_9.2p1\r\n")

    in_thread(other_program)
    with pytest.raises(WireError, match="not a message of ours"):
        wire.dial("127.0.0.1", port_of(server), TOKEN, seconds=2)


def test_what_is_too_long_is_neither_sent_nor_read() -> None:
    with two_ends() as (line, bare):
        with pytest.raises(WireError, match="too long"):
            line.send({"x": "y" * wire.MAX_BYTES})
        bare.sendall(struct.pack("!I", wire.MAX_BYTES + 1))
        with pytest.raises(WireError, match="not a message of ours"):
            line.receive(2)


def test_half_a_message_is_waited_for_only_so_long() -> None:
    with two_ends() as (line, bare):
        bare.sendall(framed(b'{"x": 1}')[:-3])
        started = time.monotonic()
        with pytest.raises(WireError, match="said nothing in time"):
            line.receive(0.4)
        assert time.monotonic() - started < 2
        bare.close()
        with pytest.raises(WireError, match="closed the connection"):
            line.receive(2)


def test_nobody_reads_and_sending_ends_in_time() -> None:
    with two_ends() as (line, _):
        started = time.monotonic()
        with pytest.raises(WireError, match="gone"):
            _fill(line)
        assert time.monotonic() - started < 10


def _fill(line: Line) -> None:
    for _ in range(100):
        line.send({"x": "y" * 500_000}, seconds=0.5)


def test_a_port_nobody_listens_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = port_of(server)
    with pytest.raises(UnreachableError) as caught:
        wire.dial("127.0.0.1", port, TOKEN)
    assert caught.value.kind == "refused"


def test_a_name_nobody_knows() -> None:
    with pytest.raises(UnreachableError) as caught:
        wire.connect("no-such-machine.invalid", 1, 2)
    assert caught.value.kind == "name"
    assert "/etc/hosts" in wire.remedy(caught.value)


@pytest.mark.parametrize("kind", ["name", "refused", "silent", "no_route", "local"])
def test_every_kind_has_something_to_type(kind: str) -> None:
    assert "`" in wire.remedy(UnreachableError("192.0.2.77", 29600, kind, ""))


def test_a_port_can_be_listened_on_again_at_once() -> None:
    server = wire.listen(0)
    port = server.getsockname()[1]
    calling = socket.create_connection(("127.0.0.1", port))
    accepted, _ = server.accept()
    server.close()
    wire.listen(port).close()  # while a connection of the first is still open
    with pytest.raises(OSError, match="in use"), wire.listen(port):
        wire.listen(port)
    calling.close()
    accepted.close()
