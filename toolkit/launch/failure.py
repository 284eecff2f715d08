"""One clear message from one process when something fails, whoever meets it first."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

from toolkit.errors import UserError
from toolkit.launch.environment import Place, place_of
from toolkit.launch.relaunch import relaunch_if_asked

# How long a process that is not the one to speak stays silent: its launcher ends it before that.
SILENCE_SECONDS = 10.0
# How long a process that is done waits for the others: rank 0 still draws the report.
LAST_WAIT_SECONDS = 600.0
INTERRUPTED = 130
_LOST_CONTACT = ("connection closed by peer", "connection reset by peer", "broken pipe", "remote process exited")


# What is being done -> what is to be said where it fails, or nothing
_explain: Callable[[Exception], str | None] = lambda error: None  # noqa: E731


def explain_failures(explain: Callable[[Exception], str | None]) -> None:
    """From now on `explain` is asked first what there is to say of an exception; a line, or None for a traceback."""
    global _explain
    _explain = explain


def run(main: Callable[[], None], module: str | None = None) -> None:
    """Runs a recipe's `main`: honours `--config_file` after the script, reports failures once.

    Exit codes: 0 done, 1 failed, 130 interrupted. `module` is the package when started by `-m`.
    """
    try:
        sys.argv, options = relaunch_if_asked(sys.argv, module)
        if options.deepspeed_config:
            os.environ["TOOLKIT_DEEPSPEED_CONFIG"] = options.deepspeed_config
        main()
        _leave_group()
    except KeyboardInterrupt:
        _leave("interrupted", INTERRUPTED)
    except UserError as error:
        _leave(f"error: {error}", 1)
    except Exception as error:
        _leave(_describe(error), 1)


def _describe(error: Exception) -> str:
    """A traceback for our own faults; one line where another process has gone, or the doing explains it."""
    if explained := _explain(error):
        return f"error: {explained}"
    first = str(error).strip().split("\n")[0]
    if "eaddrinuse" in first.lower() or "address already in use" in first.lower():
        return (
            f"error: port {os.environ.get('MASTER_PORT')} is in use, by another run perhaps: choose another with "
            "--main_process_port (accelerate, or behind the script) or --master_port (deepspeed, torchrun)"
        )
    if any(words in first.lower() for words in _LOST_CONTACT):
        return f"error: lost contact with another process, which has ended or been ended ({first[:200]})"
    return "".join(traceback.format_exception(error)).rstrip()


def _leave(message: str, code: int) -> NoReturn:
    try:
        place = place_of(os.environ)
    except UserError:  # the launcher's variables are the fault that is being reported
        place = Place("python", 0, 1, 0, 1)
    where = f"[rank {place.rank} on {socket.gethostname()}] " if place.world_size > 1 else ""
    # Ctrl-C reaches every process of a terminal: none has to wait to hear of it
    speaks = place.rank == 0 if code == INTERRUPTED else place.world_size == 1 or _first_to_fail(place.rank)
    if speaks:
        print(f"{where}{message}", file=sys.stderr, flush=True)
    # No cleanup of a broken group: the exit code must reach the launcher at once.
    sys.stdout.flush()
    os._exit(code)


def _first_to_fail(rank: int) -> bool:
    """Whether this process is the one that reports.

    With a process group the shared store decides. Before there is one every process usually fails
    alike: rank 0 speaks, and another only when nobody has ended it after a while.
    """
    store = _store()
    if store is not None:
        try:
            if store.add("toolkit/failed", 1) == 1:
                return True
        except RuntimeError:
            pass  # the process that kept the store is gone, and has spoken unless it was killed
    elif rank == 0:
        return True
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # there is no step left to finish: the launcher may end it at once
    time.sleep(SILENCE_SECONDS)
    return store is None or not _store_answers(store)


def _store_answers(store: Any) -> bool:
    try:
        store.num_keys()
    except RuntimeError:
        return False
    return True


def _store() -> Any:
    """The process group's own key-value store, or None before there is a group."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.distributed_c10d._get_default_store()


def _leave_group() -> None:
    """Ends a process of a group whose work is done, once all the others are done too.

    Nothing is taken down: the groups' threads, DeepSpeed's and gloo's, are torn down by the interpreter
    in an order that now and then aborts a process (`terminate called without an active exception`), and
    the launcher would report a failure of a run that succeeded.
    """
    store = _store()
    if store is None:
        return
    ranks = range(place_of(os.environ).world_size)
    with contextlib.suppress(RuntimeError):  # whoever kept the store may have left already
        store.set(f"toolkit/done/{place_of(os.environ).rank}", "yes")
        store.wait([f"toolkit/done/{rank}" for rank in ranks], timedelta(seconds=LAST_WAIT_SECONDS))
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
