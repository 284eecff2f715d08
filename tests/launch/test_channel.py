"""The channel between two machines, whoever else calls, and the exchange of several."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from toolkit.launch.channel import (
    MAX_BYTES,
    MOST_GREETED_OF_ONE,
    Channel,
    ChannelError,
    ClosedError,
    Listener,
    Message,
    UnreachableError,
    connect,
    dial,
)
from toolkit.launch.network import free_port, listen
from toolkit.launch.rendezvous import Rendezvous, call_peer, coordinate, join

HERE, TOKEN = "127.0.0.1", "a word"


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def listener(port: int) -> Iterator[Listener]:
    with Listener(listen(port), TOKEN, seconds=0.5) as made:
        yield made


@contextlib.contextmanager
def two_ends() -> Iterator[tuple[Channel, socket.socket]]:
    """A channel and the bare other end of it."""
    with socket.create_server((HERE, 0)) as server:
        bare = socket.create_connection(server.getsockname())
        with bare, Channel(server.accept()[0]) as channel:
            yield channel, bare


def framed(content: bytes) -> bytes:
    return struct.pack("!i", len(content)) + content


def test_two_that_know_the_token_talk_both_ways(port: int, listener: Listener) -> None:
    with dial(HERE, port, TOKEN) as channel:
        channel.send({"text": "文本", "numbers": [1, 2.5, None]})
        arrived = listener.accept(5)
        assert arrived[0] == {"text": "文本", "numbers": [1, 2.5, None]}
        with arrived[1] as other:
            other.send({"large": "x" * 900_000})
            assert len(channel.receive()["large"]) == 900_000
            assert (channel.peer, channel.own) == (HERE, HERE)


def test_both_sides_learn_of_a_wrong_token(port: int, listener: Listener) -> None:
    with pytest.raises(ChannelError, match="does not know the token"):
        dial(HERE, port, "another word")
    await_refusal(listener, "does not know the token")


class Relay:
    """Somebody between: what the one who was dialled is asked, it asks another."""

    def __init__(self, port: int, ask: Any) -> None:
        with socket.create_server((HERE, 0)) as server, ThreadPoolExecutor() as pool:
            dialled = pool.submit(dial, HERE, server.getsockname()[1], TOKEN, 2)
            with server.accept()[0] as caught, Connection(socket.create_connection((HERE, port)).detach()) as caller:
                ask(Connection(os.dup(caught.fileno())), caller)
                self.error = dialled.exception(5)


def pass_on(caught: Connection, caller: Connection) -> None:
    """The one who was dialled answers for the stranger."""
    caught.send_bytes(caller.recv_bytes())
    caller.send_bytes(caught.recv_bytes())


def send_back(caught: Connection, _: Connection) -> None:
    caught.send_bytes(bytes(32))
    caught.send_bytes(caught.recv_bytes()[32:64])


def test_a_link_that_breaks_while_one_thread_sends_is_no_end_for_the_one_that_reads() -> None:
    """The kernel tells it once: whoever reads then sees the connection closed."""
    with two_ends() as (channel, _):
        channel._messages.close()
        channel._messages = SimpleNamespace(send_bytes=raises(TimeoutError(errno.ETIMEDOUT, "timed out")),
                                            recv_bytes=raises(EOFError()), close=lambda: None)  # fmt: skip
        with pytest.raises(ClosedError):
            channel.receive()
        with pytest.raises(ChannelError, match="is gone: timed out"):
            channel.send({})
        with pytest.raises(ChannelError, match="is gone: timed out") as raised:
            channel.receive()
        assert not isinstance(raised.value, ClosedError)


def raises(error: Exception) -> Any:
    def act(*_: object) -> None:
        raise error

    return act


@pytest.mark.parametrize("ask", [pass_on, send_back])
def test_a_proof_is_good_for_one_connection_and_one_direction(port: int, listener: Listener, ask: Any) -> None:
    assert isinstance(Relay(port, ask).error, ChannelError)
    assert listener.accept(0.7) is None
    assert HERE in listener.refused


def await_refusal(listener: Listener, words: str) -> None:
    deadline = time.monotonic() + 5
    while words not in listener.refused.get(HERE, "") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert words in listener.refused[HERE]
    assert listener.accept(0.1) is None


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "not a message of ours"),
        (b"\xff" * 64, "not a message of ours"),  # a length beyond all measure
        (framed(b"not a digest"), "token"),
        (framed(b"y" * 2000), "not a message of ours"),  # longer than a stranger's message may be
        (b"\0", "said nothing in time"),
    ],
)
def test_whoever_cannot_authenticate_is_sent_away(port: int, listener: Listener, said: bytes, words: str) -> None:
    before = psutil.Process().num_fds()
    with socket.create_connection((HERE, port)) as stranger:
        stranger.sendall(said)
        await_refusal(listener, words)
    assert psutil.Process().num_fds() == before


def test_another_program_at_the_port_is_named_as_such() -> None:
    with socket.create_server((HERE, 0)) as server, ThreadPoolExecutor() as pool:
        dialled = pool.submit(dial, HERE, server.getsockname()[1], TOKEN, 2)
        with server.accept()[0] as connection:
            connection.sendall(b"SSH-2.0-OpenSSH_9.2p1\r\n")
            assert "another program's port?" in str(dialled.exception(5))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (struct.pack("!i", MAX_BYTES + 1), "not a message of ours"),
        (framed(b"[1, 2]"), "not an object"),
        (framed(b"not json"), "not JSON"),
        (framed(b"[" * 10000), "not JSON"),
        (framed(b'{"x": 1}')[:-3], "said nothing in time"),
    ],
)
def test_what_is_no_message_is_an_error_in_time(content: bytes, words: str) -> None:
    with two_ends() as (channel, bare):
        bare.sendall(content)
        with pytest.raises(ChannelError, match=words):
            channel.receive(0.4)


def test_connections_that_say_nothing_are_bounded_and_keep_nobody_out(port: int) -> None:
    before = psutil.Process().num_threads()
    with contextlib.ExitStack() as silent, Listener(listen(port), TOKEN, seconds=1.0) as listener:
        for _ in range(3 * MOST_GREETED_OF_ONE):
            silent.enter_context(socket.create_connection((HERE, port)))
        assert psutil.Process().num_threads() <= before + 1 + MOST_GREETED_OF_ONE
        with ThreadPoolExecutor() as pool:
            joining = pool.submit(join, HERE, port, TOKEN, {"number": 1}, 20)
            with coordinate(listener, {}, 2, 20) as found, joining.result(30):
                assert list(found.hellos) == [0, 1]


def test_where_machines_are_named_no_other_address_is_heard(port: int) -> None:
    with Listener(listen(port), TOKEN, allowed={"10.0.0.1"}) as listener:
        with pytest.raises(ChannelError):
            dial(HERE, port, TOKEN)
        await_refusal(listener, "not one of the machines that were named")


def test_what_a_peer_says_can_be_printed() -> None:
    with two_ends() as (channel, bare):
        bare.sendall(framed(json.dumps({"host": "a\x1b[2Jb\u202e", "x": ["\x9b1m\r", 1]}).encode()))
        assert channel.receive() == {"host": "a [2Jb", "x": ["1m", 1]}


def test_a_stranger_that_says_what_cannot_be_read_stops_nobody(port: int) -> None:
    def compare(hellos: Sequence[Message]) -> str:
        return "" if hellos[-1]["peer"]["host"] else "no host"

    with ThreadPoolExecutor() as pool, Listener(listen(port), TOKEN) as listener:
        strangers = [dial(HERE, port, TOKEN), dial(HERE, port, TOKEN)]
        strangers[0].send({"number": 1, "id": "x", "peer": 7})
        strangers[1].send({"number": "one", "id": "x"})
        joining = pool.submit(join, HERE, port, TOKEN, {"number": 1, "peer": {"host": "B"}}, 20)
        with coordinate(listener, {}, 2, 20, compare) as found, joining.result(30):
            assert found.fault == ""
            assert found.hellos[1]["peer"] == {"host": "B"}


def test_silence_of_a_network_is_borne_as_long_as_the_setting_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds in (14, 60):
        monkeypatch.setenv("TOOLKIT_PEER_TIMEOUT", str(seconds))
        with two_ends() as (channel, _):
            option = channel._socket.getsockopt
            assert option(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * seconds
            probes = option(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) * option(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL)
            assert option(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) + probes == seconds


def test_a_wait_without_a_limit_has_none() -> None:
    with two_ends() as (channel, bare), ThreadPoolExecutor() as pool:
        received = pool.submit(channel.receive, None)
        time.sleep(0.3)
        assert channel._socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16) == bytes(16)
        bare.sendall(framed(b"{}"))
        assert received.result(10) == {}


def test_what_is_too_long_is_not_sent_and_nobody_who_reads_nothing_holds_it_up() -> None:
    with two_ends() as (channel, bare):
        with pytest.raises(ChannelError, match="too long"):
            channel.send({"x": "y" * MAX_BYTES})
        with pytest.raises(ChannelError):
            [channel.send({"x": "y" * 500_000}, seconds=0.3) for _ in range(100)]
        bare.close()
        with pytest.raises(ClosedError):
            channel.receive(2)


def test_a_port_nobody_listens_on_and_a_name_nobody_knows(port: int) -> None:
    with pytest.raises(UnreachableError) as refused:
        dial(HERE, port, TOKEN)
    assert refused.value.kind == "refused"
    with pytest.raises(UnreachableError) as unknown:
        connect("no-such-machine.invalid", 1, 2)
    assert unknown.value.kind == "name"
    assert "/etc/hosts" in unknown.value.remedy


@pytest.mark.parametrize("kind", ["name", "refused", "silent", "no_route", "local"])
def test_every_kind_has_something_to_type(kind: str) -> None:
    assert "`" in UnreachableError("192.0.2.77", 29600, kind, "").remedy


def test_three_exchange_what_they_have_and_one_that_is_silent_is_left_out(port: int) -> None:
    def peer(number: int) -> Rendezvous:
        return join(HERE, port, TOKEN, {"number": number, "host": f"host{number}"}, 10)

    with ThreadPoolExecutor() as pool, Listener(listen(port), TOKEN) as listener:
        joined = [pool.submit(peer, number) for number in (2, 1)]
        first, two, one = coordinate(listener, {"host": "host0"}, 3, 10), *(each.result() for each in joined)
        with first, two, one:
            for found in (first, one, two):
                assert [said["host"] for said in found.hellos.values()] == ["host0", "host1", "host2"]
            answers = pool.map(lambda pair: pair[1].exchange({"x": pair[0]}, 5), enumerate((first, one, two)))
            assert list(answers) == [{0: {"x": 0}, 1: {"x": 1}, 2: {"x": 2}}] * 3
            answers = pool.map(lambda found: found.exchange({"y": 1}, 0.5), (first, one))  # and not two
            assert list(answers) == [{0: {"y": 1}, 1: {"y": 1}}] * 2
            assert list(first.channels) == [1]


def test_a_peer_that_does_not_get_through_is_called_by_the_coordinator(port: int) -> None:
    own, nobody = free_port(), free_port()
    with ThreadPoolExecutor() as pool, Listener(listen(port), TOKEN) as there, Listener(listen(own), TOKEN) as here:
        joined = pool.submit(join, HERE, nobody, TOKEN, {"number": 1}, 10, listener=here)
        call_peer(there, {}, HERE, own, TOKEN)
        with coordinate(there, {}, 2, 10) as first, joined.result() as second:
            assert list(first.hellos) == list(second.hellos) == [0, 1]
