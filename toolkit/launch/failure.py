"""Runs a recipe's `main` and turns a failure into one message from one process, whichever process meets it first."""

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
from functools import partial
from typing import NoReturn

from toolkit.errors import UserError, system_error_line
from toolkit.launch import collectives, failure_detector, interrupted
from toolkit.launch.environment import Place, place_of
from toolkit.launch.exit_state import exit_state, stop_launcher
from toolkit.launch.interrupted import INTERRUPTED, write_exit_code
from toolkit.launch.nodes import set_global_ranks
from toolkit.launch.relaunch import relaunch_if_requested
from toolkit.launch.rendezvous import RendezvousError, announce_early_failure
from toolkit.utils import collector
from toolkit.utils.log import logger
from toolkit.utils.versions import check_requirements

# Without a failure detector a rank whose failure others report or have caused waits this long for its launcher's end.
_PEER_REPORT_SECONDS = 20.0
_CONNECTION_ERRORS = re.compile(
    "(?i)connection (closed|reset) by (remote )?peer|broken pipe|remote process exited|connection was likely closed"
    "|timed out waiting"
)
_MISUSES = {  # of what `toolkit.prepare` returns -> the remedy
    "'DistributedDataParallel' object has no attribute|Missing key.s. in state_dict: \"module\\.": "use "
    "`toolkit.unwrapped(model)`",
    "mixed torch.Tensor and DTensor": "FSDP2 has shards: call the model that `prepare` returned, and change weights or "
    "gradients in your optimizer's `step`, or launch with ddp",
}
_STDOUT_CLOSED = "error: standard output is closed (as by `| head`): redirect it to a file"


def explain_failures(explain: Callable[[Exception], str | None] | None = None) -> None:
    """Registers a function that returns the message for an exception, or None for a traceback; None unregisters it."""
    exit_state.explain = explain


def set_exit_signal(number: int) -> None:
    """Makes `run` end with exit code 128 + `number`: a stop signal ended the work early."""
    exit_state.exit_code = 128 + number


def request_rerun() -> None:
    """Makes `run` call `main` again when it returns, in the same processes: for the next of several models."""
    exit_state.rerun = True


def _call(main: Callable[[], None]) -> None:
    """Calls `main`, and again after `request_rerun`; of accelerate's state only the process group stays."""
    while True:
        exit_state.rerun = False
        try:
            main()
        except BaseException:
            _stop_deferring_sigterm()
            raise
        if not exit_state.rerun:
            return
        from accelerate.state import AcceleratorState, GradientState

        if exit_state.free:
            exit_state.free()
            exit_state.free = None
        gc.unfreeze()  # what `collector.after_imports` excludes may hold the model
        gc.collect()  # the model, and the lock on its folder
        AcceleratorState._reset_state(reset_partial_state=False)
        GradientState._reset_state()


def start(name: str) -> None:
    """Call it first in a script, with its `__name__`: before the heavy imports it checks their versions and handles
    `--config_file`; `run` handles it after them."""
    if name == "__main__":
        collector.before_imports()
        interrupted.exit_on_sigint()
        _exit_on_failure(check_requirements)
        if any(re.match("--config[_-]file", word) for word in sys.argv):
            _exit_on_failure(lambda: relaunch_if_requested(sys.argv))


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
        if exit_state.unfinished and place_of(os.environ).rank == 0:
            logger.warning(exit_state.unfinished)
        _exit_with_others()

    _exit_on_failure(work)


def _exit_on_failure(work: Callable[[], object]) -> None:
    """Ends the process with one clear message if `work` fails."""
    try:
        work()
    except KeyboardInterrupt:
        exit_process("interrupted", INTERRUPTED)
    except SystemExit as error:
        if not error.code:
            _exit_with_others()
        elif failure_detector.current is not None:  # the other ranks would wait for this one
            code = error.code if isinstance(error.code, int) else 1
            text = str(error.code) if code is not error.code else f"error: sys.exit({code}) was called"
            exit_process(text, code, text.removeprefix("error: "))
        raise
    except UserError as error:
        early = not isinstance(error, RendezvousError)
        exit_process(f"error: {error}", 1, str(error), permanent=True, early=early)
    except Exception as error:
        if _is_connection_error(error):
            if failure_detector.current is not None:
                failure_detector.current.wait_for_failure(error)
            else:  # its launcher ends this process, if the other one was of this node
                time.sleep(_PEER_REPORT_SECONDS)
        message = _describe(error)
        short = message.removeprefix("error: ").strip().split("\n")[-1]
        exit_process(message, 141 if message == _STDOUT_CLOSED else 1, short, early=True)


def _describe(error: Exception) -> str:
    """One line if a message explains the error; otherwise a traceback."""
    if explained := exit_state.explain and exit_state.explain(error):
        return f"error: {explained}"
    if isinstance(error, BrokenPipeError) and _stdout_is_closed():
        return _STDOUT_CLOSED
    if line := system_error_line(error):
        return f"error: {line}"
    for pattern, remedy in _MISUSES.items():
        if re.search(pattern, str(error)):
            where = collectives.position_of(error)
            return f"error: {' '.join(str(error).split())[:200]} (at {where}): {remedy}"
    if isinstance(error, ImportError | AttributeError):
        try:
            check_requirements()
        except UserError as unsupported:
            return f"error: {unsupported}"
    first, trace = str(error).strip().split("\n")[0], "".join(traceback.format_exception(error)).rstrip()
    if _is_connection_error(error):
        if failure_detector.current is not None and (others := failure_detector.current.describe_others()):
            where = f"a collective failed at {collectives.position_of(error)}, and no rank has exited ({others})"
            return f"error: {where}: perhaps {failure_detector.MISMATCH} ({first[:200]})"
        return f"{trace}\nerror: lost the connection to another process, which exited or was killed ({first[:200]})"
    return trace


def _is_connection_error(error: Exception) -> bool:
    """Whether torch lost a connection to another rank. A tracker or a hub raises an OSError instead."""
    several = isinstance(error, RuntimeError) and _place().world_size > 1
    return several and _CONNECTION_ERRORS.search(str(error)) is not None


def _stdout_is_closed() -> bool:
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError:
        return True
    return False


def exit_process(message: str, code: int, short: str = "", permanent: bool = False, early: bool = False) -> NoReturn:
    """Reports a failure and exits with `code`.

    `short` is what other nodes report; `permanent`: a restart would fail again; `early`: the rendezvous may not have
    begun, so that the other nodes have no report yet.
    """
    _stop_deferring_sigterm()
    with contextlib.suppress(ValueError):  # not the main thread
        # launchers forward a SIGINT that this process already got
        signal.signal(signal.SIGINT, signal.SIG_IGN if code == INTERRUPTED else signal.SIG_DFL)
    detector, place = failure_detector.current, _place()
    if detector is not None:
        detector.report("interrupted" if code == INTERRUPTED else "failed", short[-2000:], permanent)
    elif code != INTERRUPTED and place.world_size > 1 and place.local_rank:
        # usually all fail alike, and local rank 0 reports it, to other nodes too, which takes up to 35 s
        time.sleep(_PEER_REPORT_SECONDS * (1 if place.is_local else 2))
    prints = code != INTERRUPTED or place.rank == 0  # Ctrl-C reaches every process of a terminal
    who = f"[rank {place.rank} on {socket.gethostname()}] " if place.world_size > 1 else ""
    failure_detector.exit_now(
        code,
        f"{who}{message}" if prints else "",
        permanent or (prints and code == INTERRUPTED),
        partial(announce_early_failure, place, short) if prints and early else None,
    )


def _stop_deferring_sigterm() -> None:
    """No step is left to finish: SIGTERM ends this process, or is ignored until it has closed its resources and other
    ranks know why it ends: a launcher sends SIGTERM when the first of them has exited."""
    reports = exit_state.close is not None or failure_detector.current is not None
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, signal.SIG_IGN if reports else signal.SIG_DFL)


def _place() -> Place:
    try:
        return place_of(os.environ)
    except UserError:  # the launcher's variables are the error that is being reported
        return Place("python", 0, 1, 0, 1)


def _exit_with_others() -> None:
    """Exits when all ranks are done.

    The process group is not destroyed: the interpreter ends DeepSpeed's and gloo's threads in an order that sometimes
    aborts the process (`terminate called without an active exception`), and the launcher would report a failure.
    """
    if failure_detector.current is not None:
        failure_detector.current.wait_for_all()
    if exit_state.exit_code:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher ends the others when the first one has exited
        write_exit_code(exit_state.exit_code)
        stop_launcher(exit_state.exit_code)
    if collectives.backends() or exit_state.exit_code:  # Python takes seconds to unload what was imported
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_state.exit_code)
