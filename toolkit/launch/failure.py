"""Runs a recipe's `main`; a failure becomes one message from one process, and an exit code."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from toolkit.errors import UserError, first_line, is_panic, system_error_line
from toolkit.launch.environment import ERROR_FILE, Place, place_of, timeout_seconds
from toolkit.launch.heartbeat import Board, Failure
from toolkit.launch.options import take_options
from toolkit.launch.signals import INTERRUPTED
from toolkit.utils import collector
from toolkit.utils.log import logger
from toolkit.utils.timeouts import call_with_timeout
from toolkit.utils.versions import check_requirements

if TYPE_CHECKING:
    from toolkit.launch.ranks import World

_CLOSING = threading.Lock()
_CLOSE_SECONDS = 10.0  # a tracker's server may not answer
# A rank whose failure others report or have caused waits this long for its launcher to end it.
_REPORT_SECONDS = 6.0
_CONNECTION_ERRORS = re.compile(
    "(?i)connection (closed|reset|refused)|broken pipe|remote process exited|likely closed"
    "|timed out|no route to host|network is unreachable|clients joined|failed to recv"
)


@dataclass
class ExitState:
    """The run's processes, and what any thread of this one needs to end it. The rest of the package
    sets `close`, `explain` and `exit_code`."""

    place: Place
    """As the launcher announced it, before this process chose its device."""
    close: Callable[[], object] | None = None
    """Closes trackers (in 10 s at most) before `os._exit`, which closes nothing."""
    explain: Callable[[Exception], str | None] | None = None
    """Returns the message for an exception of what is computed now; None for a traceback."""
    exit_code: int = 0
    """Of `run`, when all went well: 128 + a stop signal that ended the work early."""
    world: World | None = None
    """The processes of this run; a second accelerator uses the same."""
    board: Board | None = None
    """Where this process reports its failure to other machines, under a launcher that does not."""


# A global: the main thread and the heartbeat's thread can each exit the process.
exit_state = ExitState(Place("python", 0, 1, 0, 1))


def run(main: Callable[[], None], relaunches: bool = True) -> None:
    """Runs a recipe's `main`: honours `--config_file` after the script, reports failures once.

    Exit codes: 0 done, 1 failed, 128 + N stopped by signal N. Without `relaunches` the launch
    options are left to `main`.
    """
    # neither a closed output nor a terminal's encoding must end finished work
    sys.stdout = sys.stdout or io.StringIO()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        with contextlib.suppress(UserError):  # which `make_accelerator` raises again
            exit_state.place = place_of(os.environ)
        collector.before_imports()
        if relaunches:
            sys.argv, request = take_options(sys.argv)
            if request is not None:
                from toolkit.launch.launcher import launch

                _exit(launch(request))
        check_requirements()
        main()
        _exit_at_end()
    except KeyboardInterrupt:
        fail(Failure("interrupted", INTERRUPTED, permanent=True))
    except SystemExit as error:
        if not error.code:
            _exit_at_end()
        elif isinstance(error.code, int):
            _exit(error.code)
        raise
    except UserError as error:
        fail(replace(_failure(str(error)), permanent=True))
    except Exception as error:
        fail(_describe(error))
    except BaseException as error:
        if not is_panic(error):
            raise
        cause = first_line(error)
        fail(
            _failure(
                f"tokenizer.json is damaged, or of another version of tokenizers [{cause}]"
            )
        )


def _failure(message: str, trace: str = "") -> Failure:
    """`message`: one line, or more if it ends in a colon. `trace`: for this process's terminal."""
    place, who = exit_state.place, ""
    if place.world_size > 1:
        who = f"[rank {place.rank} on {socket.gethostname()}] "
    line = f"{who}error: {message}"
    return Failure(line, text=f"{who}{trace.rstrip()}\n{line}" if trace else "")


def _describe(error: Exception) -> Failure:
    """One line if a message explains the error; otherwise a traceback, too."""
    explained = exit_state.explain and exit_state.explain(error)
    line = explained or system_error_line(error)
    if line:
        return _failure(line)
    # torch's; a tracker or a hub raises an OSError instead
    several = isinstance(error, RuntimeError) and exit_state.place.world_size > 1
    if several and _CONNECTION_ERRORS.search(str(error)):
        line = (
            "lost the connection to another process, which exited, was killed or does not come "
            f"({first_line(error)}); docs/stuck.md"
        )
        return replace(_failure(line), is_effect=True)
    trace = "".join(traceback.format_exception(error))
    return _failure(f"{type(error).__name__}: {first_line(error)}", trace)


# --- the ends of a process


def fail(failure: Failure) -> NoReturn:
    """Reports a failure, to our launcher, which prints it, or else here; and exits."""
    for number in (signal.SIGTERM, signal.SIGINT):
        # of a launcher, when the first rank has exited
        signal.signal(number, signal.SIG_IGN)
    file = os.environ.get(ERROR_FILE)
    if file:
        with contextlib.suppress(OSError):  # the launcher was killed, or the disk is full
            Path(file).write_text(json.dumps(asdict(failure)), encoding="utf-8")
    # Ctrl-C reaches all of a terminal
    elif failure.code != INTERRUPTED or exit_state.place.rank == 0:
        _wait_for_cause(failure)
        exit_with(failure)
    _exit(failure.code)


def _wait_for_cause(failure: Failure) -> None:
    """Lets another process print its failure: local rank 0, if all fail alike, or the one that has
    caused this one. Then the launcher, or the heartbeat's thread, ends this process."""
    place = exit_state.place
    if not failure.is_effect and not place.local_rank:
        return
    _close_resources()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if failure.is_effect and not place.is_local:
        time.sleep(timeout_seconds("peer_timeout"))
    time.sleep(_REPORT_SECONDS)


def exit_with(failure: Failure) -> NoReturn:
    """Prints the run's first failure, this one or another machine's, and exits with its code,
    whatever the main thread waits for."""
    board, exit_state.board = exit_state.board, None  # its thread ends this process no more
    if board:
        failure = board.publish(failure)
    with contextlib.suppress(OSError):  # the output is closed
        logger.error(failure.text or failure.line)
    _exit(failure.code)


def _exit_at_end() -> None:
    """Exits when the work is done.

    The process group is not destroyed: the interpreter ends DeepSpeed's and gloo's threads in an
    order that sometimes aborts the process, and unloads what was imported for seconds.
    """
    if exit_state.exit_code:
        # of a launcher, when the first has exited
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    board, exit_state.board = exit_state.board, None
    if board:
        board.finish()
    if exit_state.exit_code or exit_state.place.world_size > 1:
        _exit(exit_state.exit_code)


def _close_resources() -> None:
    """Calls the registered `close` once; a second thread that exits waits for the first."""
    with _CLOSING:
        close, exit_state.close = exit_state.close, None
        if close is not None:
            with contextlib.suppress(Exception):  # the failure has been reported
                call_with_timeout(_CLOSE_SECONDS, close)


def _exit(code: int) -> NoReturn:
    _close_resources()
    logging.shutdown()
    with contextlib.suppress(OSError, ValueError):  # the output is closed
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
