"""Latency, bandwidth and the difference of clocks between two machines, over one open line."""

from __future__ import annotations

import statistics
import struct
import time
from dataclasses import asdict, dataclass
from typing import Any

from toolkit.doctor.finding import mapping, number
from toolkit.launch.wire import Line, WireError

PINGS = 16
_WARM_UP = 2
_BLOCK = 1 << 18
_MOST_BYTES = 256 << 20
_SPARE_SECONDS = 3.0
LARGE_MESSAGES = "small messages pass, large ones do not"
"""What an error begins with where a line is there and carries nothing."""


@dataclass(frozen=True)
class Measured:
    """Between the machine that drives and the one that serves; rates in 10^6 bytes per second."""

    latency_ms: float
    """Median of the round trips."""
    clock_offset_seconds: float
    """What the other clock shows more than this one's (RFC 5905, the sample with the shortest round trip)."""
    out_mbytes_per_second: float
    back_mbytes_per_second: float

    def as_dict(self) -> dict[str, float]:
        return asdict(self)

    def reversed(self) -> Measured:
        """As the other machine would have measured it."""
        return Measured(
            self.latency_ms, -self.clock_offset_seconds, self.back_mbytes_per_second, self.out_mbytes_per_second
        )


def read_measured(sent: object) -> Measured | None:
    """What the other machine sent, or None for anything else."""
    values = mapping(sent)
    numbers = {name: number(values.get(name)) for name in Measured.__dataclass_fields__}
    return None if None in numbers.values() else Measured(**numbers)  # type: ignore[arg-type]


def drive(line: Line, seconds: float) -> Measured:
    """Measures, each direction's bandwidth for `seconds` at most. Raises WireError."""
    latency, offset = _ping(line)
    _tell(line, {"take": seconds})
    _send_blocks(line, seconds)
    out = number(line.receive(seconds + _SPARE_SECONDS).get("rate")) or 0.0
    _tell(line, {"give": seconds})
    back = _receive_blocks(line, seconds)
    found = Measured(latency, offset, out, back)
    _tell(line, {"end": found.as_dict()})
    return found


def serve(line: Line, seconds: float, patience: float) -> Measured | None:
    """The other side of `drive`; waits `patience` seconds for it to begin. Raises WireError."""
    message = line.receive(patience)
    while "end" not in message:
        arrived = time.time()
        if "ping" in message:
            _tell(line, {"pong": arrived, "sent": time.time()})
        elif "take" in message:
            _tell(line, {"rate": _receive_blocks(line, seconds)})
        elif "give" in message:
            _send_blocks(line, seconds)
        else:
            raise WireError(f"{line.peer} asks for something unknown")
        message = line.receive(seconds + _SPARE_SECONDS)
    found = read_measured(message["end"])
    return found.reversed() if found else None


def _tell(line: Line, message: dict[str, Any]) -> None:
    line.send(message, _SPARE_SECONDS)


def _ping(line: Line) -> tuple[float, float]:
    """(median round trip in ms, clock offset in s)."""
    trips, offsets = [], []
    for _ in range(PINGS):
        began, clock = time.perf_counter(), time.time()
        _tell(line, {"ping": clock})
        reply = line.receive(_SPARE_SECONDS)
        trip, ended = time.perf_counter() - began, time.time()
        arrived, left = number(reply.get("pong")), number(reply.get("sent"))
        if arrived is None or left is None:
            raise WireError(f"{line.peer} does not answer as it should")
        trips.append(trip)
        offsets.append(((arrived - clock) + (left - ended)) / 2)
    best = min(range(_WARM_UP, PINGS), key=lambda number: trips[number])
    return statistics.median(trips[_WARM_UP:]) * 1000, offsets[best]


def _send_blocks(line: Line, seconds: float) -> None:
    """Blocks with their size before them, a size of 0 at the end."""
    block = struct.pack("!I", _BLOCK) + bytes(_BLOCK)
    deadline, left = time.monotonic() + seconds, _MOST_BYTES
    try:
        line.connection.settimeout(seconds + _SPARE_SECONDS)
        while left > 0 and time.monotonic() < deadline:
            line.connection.sendall(block)
            left -= _BLOCK
        line.connection.sendall(struct.pack("!I", 0))
    except TimeoutError as error:
        raise WireError(f"{LARGE_MESSAGES}, in {seconds + _SPARE_SECONDS:.0f} s") from error
    except OSError as error:
        raise WireError(f"{line.peer} is gone: {error.strerror or error}") from error


def _receive_blocks(line: Line, seconds: float) -> float:
    """10^6 bytes per second, from the first block on."""
    buffer = memoryview(bytearray(_BLOCK))
    total, began = 0, 0.0
    deadline = time.monotonic() + seconds + _SPARE_SECONDS
    while True:
        _fill(line, buffer[:4], deadline)
        (size,) = struct.unpack("!I", buffer[:4])
        if size == 0:
            break
        if size > _BLOCK or total > 2 * _MOST_BYTES:
            raise WireError(f"{line.peer} sends more than was agreed")
        _fill(line, buffer[:size], deadline)
        if began:
            total += size
        else:
            began = time.perf_counter()
    taken = time.perf_counter() - began
    return total / 1e6 / taken if began and total and taken > 0 else 0.0


def _fill(line: Line, view: memoryview, deadline: float) -> None:
    done = 0
    while done < len(view):
        left = deadline - time.monotonic()
        if left <= 0:
            raise WireError(f"{LARGE_MESSAGES} in time")
        try:
            line.connection.settimeout(left)
            count = line.connection.recv_into(view[done:])
        except TimeoutError:
            continue
        except OSError as error:
            raise WireError(f"{line.peer} is gone: {error.strerror or error}") from error
        if count == 0:
            raise WireError(f"{line.peer} closed the connection")
        done += count
