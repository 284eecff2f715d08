"""toolkit/launch/network.py: connection errors, TCP keep-alive, and a store on one address."""

from __future__ import annotations

import socket

import pytest

from toolkit.launch import network
from toolkit.launch.network import UnreachableError, connect, free_port


@pytest.mark.parametrize(("name", "kind"), [("127.0.0.1", "refused"), ("no-such-machine.invalid", "name")])
def test_closed_port_and_unknown_name(name: str, kind: str) -> None:
    with pytest.raises(UnreachableError) as error:
        connect(name, free_port(), 2)
    assert error.value.kind == kind
    assert error.value.remedy


@pytest.mark.parametrize("seconds", [14, 120])
def test_keep_alive_follows_the_timeout(seconds: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, connect(*server.getsockname()[:2], 5) as connection:
        network.keep_alive(connection, seconds)
        option = connection.getsockopt
        assert option(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * seconds
        probes = option(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) * option(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL)
        assert option(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) + probes == seconds


def test_store_on_ipv6_only() -> None:
    from torch.distributed import TCPStore

    served = network.serve_store("::1", network.listen(port := free_port(), "::1"))
    TCPStore("::1", port, None, False).set("a", "b")
    assert served.get("a") == b"b"
    with pytest.raises(UnreachableError):
        connect("127.0.0.1", port, 2)
