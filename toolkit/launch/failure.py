"""One clear message from one process when something fails, whichever process meets it first."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from toolkit.errors import UserError, system_error_line
from toolkit.launch import failure_detector, interrupted
from toolkit.launch.environment import Place, place_of
from toolkit.launch.exit_state import close_resources, exit_state
from toolkit.launch.interrupted import INTERRUPTED
from toolkit.launch.nodes import set_global_ranks
from toolkit.launch.relaunch import relaunch_if_requested
from toolkit.launch.rendezvous import RendezvousError, announce_early_failure
from toolkit.launch.restarts import stop_launcher
from toolkit.utils import collector
from toolkit.utils.log import logger

# A failed process that is not its node's first waits so long before it reports: its launcher ends it before that.
_SILENCE_SECONDS = 25.0
# How long a process that is done waits for the others: rank 0 still draws the report.
LAST_WAIT_SECONDS = 600.0
_LOST_CONTACT = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "remote process exited",
    "connection was likely closed",
    "timed out waiting",
)
# A rank that lost contact waits so long for the report of who is gone: longer than for a node that does not answer.
_REPORT_SECONDS = 20.0


_NO_READER = "error: nobody reads standard output any more (as behind `| head`): send it to a file"


def explain_failures(explain: Callable[[Exception], str | None] | None = None) -> None:
    """From now on `explain` is called first: it returns the message for an exception, or None for a traceback.
    Without it no function is: what the last one explains is over."""
    exit_state.explain = explain


def set_exit_signal(number: int) -> None:
    """From now on `run` ends with 128 + this signal's number: what was to be done is not finished."""
    exit_state.exit_code = 128 + number


def request_rerun() -> None:
    """`run` calls `main` again when it returns, in the same processes: for the next of several models."""
    exit_state.again = True


def _call(main: Callable[[], None]) -> None:
    """Calls it, and again after `request_rerun`, with nothing left of the accelerator but the process group."""
    while True:
        exit_state.again = False
        try:
            main()
        except BaseException:
            _take_sigterm()  # from here on no step is left that would
            raise
        if not exit_state.again:
            return
        from accelerate.state import AcceleratorState, GradientState

        gc.collect()  # the model, and the lock on its folder
        AcceleratorState._reset_state(reset_partial_state=False)
        GradientState._reset_state()


def start(name: str) -> None:
    """First in a script, with its `__name__`: `run` would honour `--config_file` too, after all that is imported."""
    if name == "__main__":
        collector.before_imports()
        interrupted.exit_on_sigint()
        if any(re.match("--config[_-]file", word) for word in sys.argv):
            _report(lambda: relaunch_if_requested(sys.argv))


def run(main: Callable[[], None], module: str | None = None, relaunches: bool = True) -> None:
    """Runs a recipe's `main`: honours `--config_file` after the script, reports failures once.

    Exit codes: 0 done, 1 failed, 128 + N stopped by signal N. `module` is the package when started by `-m`; without
    `relaunches` the launch options are left to `main`.
    """

    def work() -> None:
        interrupted.restore_sigint()
        set_global_ranks(os.environ)
        if relaunches:
            sys.argv, options = relaunch_if_requested(sys.argv, module)
            if options.deepspeed_config:
                os.environ["TOOLKIT_DEEPSPEED_CONFIG"] = options.deepspeed_config
        _call(main)
        _leave_group()

    _report(work)


def _report(work: Callable[[], object]) -> None:
    """Ends the process with one clear message where `work` fails."""
    try:
        work()
    except KeyboardInterrupt:
        exit_process("interrupted", INTERRUPTED)
    except SystemExit as leaving:
        if not leaving.code:
            _leave_group()
        elif failure_detector.current is not None:  # the others would wait for it
            code = leaving.code if isinstance(leaving.code, int) else 1
            text = str(leaving.code) if code is not leaving.code else f"error: it left by sys.exit({code})"
            exit_process(text, code, text.removeprefix("error: "))
        raise
    except UserError as error:
        exit_process(f"error: {error}", 1, str(error), final=True, early=not isinstance(error, RendezvousError))
    except Exception as error:
        if _lost_contact(error) and failure_detector.current is not None:
            failure_detector.current.wait_for_failure(_REPORT_SECONDS)
        message = _describe(error)
        exit_process(
            message, 141 if message == _NO_READER else 1, message.removeprefix("error: ").strip().split("\n")[-1]
        )


def _describe(error: Exception) -> str:
    """A traceback for our own faults; one line where a message explains it."""
    if explained := exit_state.explain and exit_state.explain(error):
        return f"error: {explained}"
    if isinstance(error, BrokenPipeError) and _no_reader():
        return _NO_READER
    if line := system_error_line(error):
        return f"error: {line}"
    first, trace = str(error).strip().split("\n")[0], "".join(traceback.format_exception(error)).rstrip()
    if _lost_contact(error):
        return f"{trace}\nerror: lost contact with another process, which has ended or been ended ({first[:200]})"
    return trace


def _lost_contact(error: Exception) -> bool:
    """Of torch with another process. What a tracker or a hub loses is an OSError, or the requests of one process."""
    several = isinstance(error, RuntimeError) and _place().world_size > 1
    return several and any(words in str(error).lower() for words in _LOST_CONTACT)


def _no_reader() -> bool:
    """Whether it is standard output that nobody reads any more (`| head`)."""
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError:
        return True
    return False


def exit_process(message: str, code: int, short: str = "", final: bool = False, early: bool = False) -> NoReturn:
    """`short` is what the other nodes report; `final`: it would fail again; `early`: they may not have a report of it.

    There is no cleanup of a broken group: the exit code must reach the launcher at once.
    """
    _take_sigterm()
    with contextlib.suppress(ValueError):  # not of the main thread
        # launchers pass on what their processes have had already
        signal.signal(signal.SIGINT, signal.SIG_IGN if code == INTERRUPTED else signal.SIG_DFL)
    detector, place = failure_detector.current, _place()
    if detector is not None:
        detector.report("interrupted" if code == INTERRUPTED else "failed", short[-2000:], final)
    elif code != INTERRUPTED and place.world_size > 1 and place.local_rank:
        time.sleep(_SILENCE_SECONDS)  # all usually fail alike, and the first of each node reports it
    speaks = code != INTERRUPTED or place.rank == 0  # Ctrl-C reaches every process of a terminal
    if speaks:
        who = f"[rank {place.rank} on {socket.gethostname()}] " if place.world_size > 1 else ""
        logger.error(f"{who}{message}")
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    if speaks and early:
        announce_early_failure(place, short)
    close_resources()
    if detector is not None:
        detector.wait_for_readers()
        final = detector.forbids_restart(final)
    if final or (speaks and code == INTERRUPTED):
        stop_launcher(code)
    os._exit(code)


def _take_sigterm() -> None:
    """No step is left to finish: the launcher may end this process at once, or once all is closed."""
    with contextlib.suppress(ValueError):  # not of the main thread
        signal.signal(signal.SIGTERM, signal.SIG_IGN if exit_state.close else signal.SIG_DFL)


def _place() -> Place:
    try:
        return place_of(os.environ)
    except UserError:  # the launcher's variables are the fault that is being reported
        return Place("python", 0, 1, 0, 1)


def _leave_group() -> None:
    """Ends a process whose work is done, once all the others are done too.

    Nothing of a process group is taken down: the groups' threads, DeepSpeed's and gloo's, are torn down by the
    interpreter in an order that now and then aborts a process (`terminate called without an active exception`), and
    the launcher would report a failure of a run that succeeded.
    """
    if failure_detector.current is not None:
        failure_detector.current.wait_for_all(LAST_WAIT_SECONDS)
    if exit_state.exit_code:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher ends the others when the first one has left
        stop_launcher(exit_state.exit_code)
    distributed = sys.modules.get("torch.distributed")
    grouped = distributed is not None and distributed.is_available() and distributed.is_initialized()
    if grouped or exit_state.exit_code:  # Python takes seconds to unload what was imported
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_state.exit_code)
