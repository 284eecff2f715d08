"""Before anything is started on several machines they meet, and compare what they are about to start.

Machine 0 listens on the port its launcher will use, the others call it. Without this, torch's own rendezvous waits for
a quarter of an hour in silence, and machines that count differently wait for each other for ever.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.errors import UserError
from toolkit.launch import wire
from toolkit.launch.machines import Machines, is_own
from toolkit.launch.wire import Line, UnreachableError, WireError, listen

_SAY_AFTER_SECONDS = 5.0
_GREET_SECONDS = 3.0
_VERDICT_SECONDS = 10.0
Hello = dict[str, Any]


def meet(machines: Machines, processes: int, script: str, seconds: float) -> None:
    """Returns once every machine is there and asks for the same. Raises UserError after `seconds` otherwise.

    `processes` are those of all machines together, as this one counts them.
    """
    hello: Hello = {
        "id": secrets.token_hex(8),
        "machine": machines.rank,
        "host": socket.gethostname(),
        "machines": machines.count,
        "processes": processes,
        "script": Path(script).name,
    }
    _say(f"{_here(machines)} of {machines.count}: {machines.how}")
    if machines.rank == 0:
        _receive(machines, hello, seconds)
    else:
        _call(machines, hello, seconds)


def _here(machines: Machines) -> str:
    return f"this is machine {machines.rank} ({socket.gethostname()})"


def _token(machines: Machines) -> str:
    return wire.token_or(f"machines at port {machines.port}")


# --- machine 0


def _receive(machines: Machines, mine: Hello, seconds: float) -> None:
    try:
        server = listen(machines.port)
    except OSError as error:
        raise UserError(port_taken(machines.port, error.strerror)) from error
    lines: dict[int, Line] = {}
    with server, contextlib.ExitStack() as closing:
        found = _gather(server, machines, mine, seconds, lines)
        for line in lines.values():
            closing.enter_context(line)
        missing = [rank for rank in range(1, machines.count) if rank not in lines]
        fault = _disagreement(found) or (_missing(machines, missing, found, seconds) if missing else "")
        for line in lines.values():
            with contextlib.suppress(WireError):
                line.send({"fault": fault, "host": mine["host"]})
    if fault:
        raise UserError(fault)


def _gather(
    server: socket.socket, machines: Machines, mine: Hello, seconds: float, lines: dict[int, Line]
) -> list[Hello]:
    """What every machine says that came in time; their lines, by number, are put into `lines`."""
    arrived: queue.Queue[tuple[Hello, Line]] = queue.Queue()
    found, started, said = [mine], time.monotonic(), False
    stop = threading.Event()
    threading.Thread(
        target=_answer_all, args=(server, _token(machines), str(mine["id"]), arrived, stop), daemon=True
    ).start()
    try:
        while len(lines) < machines.count - 1 and (left := started + seconds - time.monotonic()) > 0:
            if not said and time.monotonic() - started > _SAY_AFTER_SECONDS:
                said = True
                names = ", ".join(machines.name_of(rank) for rank in range(1, machines.count) if rank not in lines)
                _say(f"waiting at port {machines.port} for {names}: type the same command there")
            try:
                hello, line = arrived.get(timeout=min(left, 0.5))
            except queue.Empty:
                if not is_own(machines.first) and (other := _other_first(machines, mine)):
                    return [*found, other]
                continue
            found.append(hello)
            if _disagreement(found):  # all are told, at once
                lines[machines.count + len(found)] = line  # under no machine's number
                break
            lines[hello["machine"]] = line
    finally:
        stop.set()
    return found


def _answer_all(
    server: socket.socket,
    token: str,
    own_id: str,
    arrived: queue.Queue[tuple[Hello, Line]],
    stop: threading.Event,
) -> None:
    """Each connection in a thread of its own: one that says nothing holds nobody up."""

    def greet(connection: socket.socket) -> None:
        with contextlib.suppress(WireError, OSError):
            line = wire.greet(connection, token, _GREET_SECONDS)
            hello = line.receive(_GREET_SECONDS)
            hello["from"] = line.peer
            ours = hello.get("id") == own_id  # it called itself, by an address that is translated on the way
            if isinstance(hello.get("machine"), int) and not ours and not stop.is_set():
                arrived.put((hello, line))
            else:
                line.close()

    server.settimeout(0.2)
    while not stop.is_set():
        try:
            connection, _ = server.accept()
        except TimeoutError:
            continue
        except OSError:
            return
        threading.Thread(target=greet, args=(connection,), daemon=True).start()


def _other_first(machines: Machines, mine: Hello) -> Hello | None:
    """The machine that has the first machine's address, where that is not this one and it, too, calls itself 0."""
    try:
        with wire.dial(machines.first, machines.port, _token(machines), 0.5) as line:
            line.send(mine)
            fault = line.receive(_VERDICT_SECONDS).get("fault")
    except WireError:
        return None
    return {**mine, "host": machines.first, "from": machines.first} if fault else None


def _disagreement(found: list[Hello]) -> str:
    """Why these machines cannot start together; empty where they can."""
    first = found[0]
    seen: dict[Any, Hello] = {}
    for hello in found:
        other = seen.setdefault(hello["machine"], hello)
        if other is not hello:
            return (
                f"two machines say that they are number {hello['machine']}: {_who(other)} and {_who(hello)}: pass "
                "another --machine_rank on one of them"
            )
    for hello in found[1:]:
        for name, how in (("machines", "machines (num_machines)"), ("script", "(the script)")):
            if hello.get(name) != first[name]:
                return (
                    f"{_who(first)} starts {first[name]} {how}, {_who(hello)} {hello.get(name)}: type the same on both"
                )
        if hello.get("processes") != first["processes"]:
            return _unequal(first, hello)
    return ""


def _unequal(one: Hello, other: Hello) -> str:
    counts = [int(hello["processes"]) for hello in (one, other)]
    machines = int(one["machines"])
    each = min(counts) // machines
    return (
        f"{_who(one)} asks for {counts[0]} processes ({counts[0] // machines} on each machine), {_who(other)} for "
        f"{counts[1]} ({counts[1] // machines} on each): without --num_processes they are the devices it sees. "
        f"Every machine runs the same number: pass --num_processes {machines * each} on all of them ({each} on each)"
    )


def _who(hello: Mapping[str, Any]) -> str:
    address = f" ({hello['from']})" if hello.get("from") else ""
    return f"{hello.get('host')}{address}"


def _missing(machines: Machines, missing: list[int], found: list[Hello], seconds: float) -> str:
    names = ", ".join(machines.name_of(rank) for rank in missing)
    here = wire.address_towards(machines.first) if is_own(machines.first) else None
    fault = f"{names} did not come within {seconds:.0f} s to machine 0 ({socket.gethostname()}, port {machines.port})"
    if not is_own(machines.first):
        own = ", ".join(address for address in wire.own_addresses() if not wire.is_loopback(address))
        return (
            f"{fault}: {machines.first}, which the others call, is not an address of this machine ({own}): pass "
            "--machine_rank here if it is another one, or --main_process_ip with an address of machine 0"
        )
    others = len(found) - 1
    came = f"; {others} other{'s' * (others > 1)} came" if others else ""
    return (
        f"{fault}{came}: type the same command there too. If it was typed, that machine says what it met; where it "
        f"found no answer, a firewall here drops it: `sudo ufw allow from THAT_MACHINE to any port {machines.port} "
        f"proto tcp`. `{_doctor(here or machines.first, machines)}` on each machine finds out"
    )


def _doctor(address: str, machines: Machines) -> str:
    return f"toolkit doctor --peers {address},{','.join(machines.addresses[1:]) or 'ADDRESS_OF_THE_OTHER'}"


def port_taken(port: int, why: str | None) -> str:
    """What there is to say of a port of this machine that another process holds."""
    holder = wire.holder_of(port)
    by = f" by {holder[1]}: `kill {holder[0]}` if it is left over, or" if holder else ":"
    return (
        f"port {port} of this machine ({socket.gethostname()}) is taken{by} pass another --main_process_port on every "
        f"machine ({why})"
    )


# --- the others


def _call(machines: Machines, hello: Hello, seconds: float) -> None:
    started, said = time.monotonic(), False
    trouble: WireError | None = None
    while (left := started + seconds - time.monotonic()) > 0:
        try:
            with wire.dial(machines.first, machines.port, _token(machines), min(left, 5.0)) as line:
                line.send(hello)
                verdict = line.receive(seconds + _VERDICT_SECONDS)  # machine 0 may have come just now
        except WireError as error:
            # a stranger at the port, or another token, tells more than that nobody is there any more
            if trouble is None or isinstance(trouble, UnreachableError) or not isinstance(error, UnreachableError):
                trouble = error
        else:
            if verdict.get("fault"):
                raise UserError(str(verdict["fault"]))
            _say(f"machine 0 ({verdict.get('host')}) is there: it tells how the run goes, this one what fails here")
            return
        if not said and time.monotonic() - started > _SAY_AFTER_SECONDS:
            said = True
            _say(f"machine 0 is not there yet: {trouble}")
        time.sleep(0.3)
    raise UserError(_not_found(machines, trouble, seconds))


def _not_found(machines: Machines, trouble: WireError | None, seconds: float) -> str:
    fault = f"machine 0 was not found within {seconds:.0f} s from here ({_here(machines)}): {trouble}"
    if isinstance(trouble, UnreachableError):
        fault += f". To do: {wire.remedy(trouble)}"
    if is_own(machines.first):
        fault += (
            f". {machines.first} is an address of this very machine, which is said to be number {machines.rank} "
            f"({machines.how}): is it machine 0?"
        )
    own = wire.address_towards(machines.first) or "ADDRESS_OF_THIS_MACHINE"
    own = "ADDRESS_OF_THE_OTHER" if own == machines.first else own
    stop = "" if fault.endswith("?") else "."
    return f"{fault}{stop} `toolkit doctor --peers {machines.first},{own}` on each machine finds out more"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
