"""How nodes, or ranks, find each other: the one with number 0 is the coordinator, the others are its peers.

Each peer opens a channel to the coordinator and says what it is (its hello). The coordinator compares what all say, and
its verdict goes to all of them: who is there, or the fault for which they cannot start together. The channels stay.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from toolkit.launch import network
from toolkit.launch.channel import Channel, ChannelError, Listener, Message, UnreachableError, dial

VERDICT_SECONDS = 15.0
_DIAL_SECONDS = 5.0
_PAUSE_SECONDS = 0.2
UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, RecursionError, OverflowError)
"""What messages of another version, or of nobody we know, lead to."""
Reached = TypeVar("Reached")


@dataclass
class Rendezvous(contextlib.AbstractContextManager["Rendezvous"]):
    """Those that found each other. `with Rendezvous(...)` closes the channels."""

    hellos: dict[int, Message]
    """Of all that came, in the order of their numbers; each with its `address` as the coordinator sees it."""
    channels: dict[int, Channel] = field(default_factory=dict)
    """The coordinator's to each peer; a peer's, to 0."""
    fault: str = ""
    """Why they cannot start together."""

    def __exit__(self, *_: object) -> None:
        for channel in self.channels.values():
            channel.close()

    def exchange(self, message: Message, seconds: float) -> dict[int, Message]:
        """An all-gather through the coordinator, and so a barrier: number -> what each said, this one included.

        Who does not answer within `seconds` is left out, then and later; without the coordinator this one is alone.
        """
        if 0 in self.channels:
            self._try(0, lambda channel: channel.send(message))
            answer = self._try(0, lambda channel: channel.receive(seconds + VERDICT_SECONDS)) or {}
            return {int(number): said for number, said in answer.items()}
        deadline = time.monotonic() + seconds
        heard = {0: message}
        for number in list(self.channels):
            said = self._try(number, lambda channel: channel.receive(max(0.1, deadline - time.monotonic())))
            if said is not None:
                heard[number] = said
        for number in list(self.channels):
            self._try(number, lambda channel: channel.send({str(n): said for n, said in heard.items()}))
        return dict(sorted(heard.items()))

    def own_address(self) -> str:
        """This node's, by which the nodes reach each other; empty where that is only itself."""
        return next((channel.own for channel in self.channels.values() if not network.is_loopback(channel.own)), "")

    def _try(self, number: int, do: Callable[[Channel], Any]) -> Any:
        try:
            return do(self.channels[number]) if number in self.channels else None
        except ChannelError:
            self.channels.pop(number).close()
            return None


def coordinate(
    listener: Listener,
    hello: Message,
    size: int,
    seconds: float,
    compare: Callable[[Sequence[Message]], str] = lambda hellos: "",
    waiting: Callable[[Sequence[int], Sequence[Message], float], str] = lambda numbers, hellos, waited: "",
) -> Rendezvous:
    """Number 0's part: waits at most `seconds` for `size - 1` peers, and tells all that came the verdict.

    `compare` gives the fault of the hellos that came so far. `waiting` is called twice a second, and when the time is
    over, with the numbers that are awaited, the hellos, and the seconds since the start; it may give a fault too.
    """
    started = time.monotonic()
    hello = {"id": secrets.token_hex(8), **hello, "number": 0}
    found, came, channels = Rendezvous({0: hello}), [hello], []
    while absent := [number for number in range(size) if number not in found.hellos]:
        left = started + seconds - time.monotonic()
        if (arrived := listener.accept(min(left, 0.5))) is None:
            found.fault = waiting(absent, came, max(time.monotonic() - started, seconds if left <= 0 else 0.0))
            if found.fault or left <= 0:
                break
            continue
        said, channel = arrived
        try:
            if said["id"] == hello["id"]:  # this one itself, by an address that is translated on the way
                raise ValueError
            said = {**said, "number": int(said["number"]), "address": channel.peer}
            found.fault = compare([*came, said])
        except UNREADABLE:  # a stranger
            channel.close()
            continue
        came.append(said)
        channels.append(channel)
        found.hellos.setdefault(said["number"], said)
        found.channels.setdefault(said["number"], channel)
        if found.fault:
            break
    found.hellos = dict(sorted(found.hellos.items()))
    for channel in channels:
        with contextlib.suppress(ChannelError):
            channel.send({"fault": found.fault, "hellos": {str(number): said for number, said in found.hellos.items()}})
        if channel not in found.channels.values():
            channel.close()
    return found


def join(
    address: str,
    port: int,
    token: str,
    hello: Message,
    seconds: float,
    waiting: Callable[[ChannelError, float], object] = lambda trouble, waited: None,
    listener: Listener | None = None,
) -> Rendezvous:
    """A peer's part: dials the coordinator until it answers, and waits for its verdict.

    With a `listener` the coordinator may be the one that gets through (see `call_peer`). `waiting` is called with
    what was met and the seconds since the start. Raises ChannelError after `seconds`, with what says most.
    """
    hello = {"id": secrets.token_hex(8), **hello}

    def attempt(limit: float) -> Rendezvous:
        called = listener.accept(0.0) if listener else None
        by_coordinator = called is not None and called[0].get("number") == 0
        return _verdict(called[1] if called and by_coordinator else dial(address, port, token, limit), hello, seconds)

    return until_reached(attempt, seconds, waiting)


def until_reached(
    attempt: Callable[[float], Reached], seconds: float, waiting: Callable[[ChannelError, float], object]
) -> Reached:
    """What `attempt`, which is given the seconds it may take, returns; it is called again until it does.

    Raises the ChannelError that says most after `seconds`; `waiting` is called with it and the seconds since the start.
    """
    started = time.monotonic()
    trouble: ChannelError | None = None
    while trouble is None or started + seconds > time.monotonic():
        try:
            return attempt(max(1.0, min(started + seconds - time.monotonic(), _DIAL_SECONDS)))
        except ChannelError as error:
            trouble = max(error, trouble or error, key=_tells)
        waiting(trouble, time.monotonic() - started)
        time.sleep(_PAUSE_SECONDS)
    raise trouble


def _tells(error: ChannelError) -> int:
    """A stranger at the port, or another token, tells more than that nobody is there; no answer tells least."""
    return 2 if not isinstance(error, UnreachableError) else int(error.kind != "silent")


def _verdict(channel: Channel, hello: Message, seconds: float) -> Rendezvous:
    try:
        channel.send(hello)
        verdict = channel.receive(seconds + VERDICT_SECONDS)  # the coordinator may have come just now
        hellos = {int(number): dict(said) for number, said in dict(verdict["hellos"]).items()}
        return Rendezvous(hellos, {0: channel}, str(verdict["fault"]))
    except ChannelError:
        channel.close()
        raise
    except UNREADABLE as error:
        channel.close()
        raise ChannelError(f"{channel.peer} sent no verdict: it runs another version of this toolkit") from error


def call_peer(listener: Listener, hello: Message, address: str, port: int, token: str) -> None:
    """The coordinator calls a peer, too, that may not get through itself; `coordinate` takes either channel.

    It says its hello, so that another coordinator knows it for one.
    """

    def call() -> None:
        while not listener.closed:
            with contextlib.suppress(ChannelError):
                channel = dial(address, port, token, _DIAL_SECONDS)
                channel.send({**hello, "number": 0})
                listener.take(channel)
            time.sleep(_PAUSE_SECONDS)

    threading.Thread(target=call, daemon=True, name="rendezvous").start()
