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
from toolkit.launch import watch
from toolkit.launch.environment import Place, place_of
from toolkit.launch.relaunch import relaunch_if_asked
from toolkit.launch.restarts import give_up
from toolkit.launch.rollcall import tell_before_roll

# How long a process that is not the one to speak stays silent: its launcher ends it before that.
SILENCE_SECONDS = 10.0
# How long a process that is done waits for the others: rank 0 still draws the report.
LAST_WAIT_SECONDS = 600.0
INTERRUPTED = 130
# How long rank 0 stays for those that have still to read in its store that all are done.
_BYE_SECONDS = 5.0
_LOST_CONTACT = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "remote process exited",
    "connection was likely closed",
    "timed out waiting",
)
# How long the news of who is gone may take: longer than a machine that does not answer is waited for.
_NEWS_SECONDS = 20.0


# What is being done -> what is to be said where it fails, or nothing
_explain: Callable[[Exception], str | None] = lambda error: None  # noqa: E731


def explain_failures(explain: Callable[[Exception], str | None]) -> None:
    """From now on `explain` is asked first what there is to say of an exception; a line, or None for a traceback."""
    global _explain
    _explain = explain


def run(main: Callable[[], None], module: str | None = None, relaunches: bool = True) -> None:
    """Runs a recipe's `main`: honours `--config_file` after the script, reports failures once.

    Exit codes: 0 done, 1 failed, 130 interrupted. `module` is the package when started by `-m`; without
    `relaunches` the launch options are left to `main`.
    """
    try:
        if relaunches:
            sys.argv, options = relaunch_if_asked(sys.argv, module)
            if options.deepspeed_config:
                os.environ["TOOLKIT_DEEPSPEED_CONFIG"] = options.deepspeed_config
        main()
        _leave_group()
    except KeyboardInterrupt:
        _leave("interrupted", INTERRUPTED)
    except SystemExit as leaving:
        if not leaving.code:
            _leave_group()
        elif watch.current is not None:  # the others would wait for it
            code, said = _exit_code(leaving)
            _leave(said, code, said.removeprefix("error: "))
        raise
    except UserError as error:
        _leave(f"error: {error}", 1, str(error), hopeless=True)
    except Exception as error:
        if _lost_contact(error) and watch.current is not None:
            _leave_for(watch.current.cause_within(_NEWS_SECONDS))
        message = _describe(error)
        _leave(message, 1, message.removeprefix("error: ").strip().split("\n")[-1])


def _exit_code(leaving: SystemExit) -> tuple[int, str]:
    """(code, what there is to say)"""
    if isinstance(leaving.code, int):
        return leaving.code, f"error: it left by sys.exit({leaving.code})"
    return 1, str(leaving.code)


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
    if _lost_contact(error):
        return f"error: lost contact with another process, which has ended or been ended ({first[:200]})"
    return "".join(traceback.format_exception(error)).rstrip()


def _lost_contact(error: Exception) -> bool:
    return any(words in str(error).lower() for words in _LOST_CONTACT)


def _leave_for(cause: watch.Cause | None) -> None:
    """Ends this process for what happened to another one, where that is known."""
    if cause is None or watch.current is None:
        return
    if not watch.current.take_word():
        time.sleep(SILENCE_SECONDS)  # the watch's own thread is at it
    elif watch.current.speaks_of(cause):
        print(f"{_where()}{watch.current.describe(cause)}", file=sys.stderr, flush=True)
    watch.end(cause)


def _leave(message: str, code: int, short: str = "", hopeless: bool = False) -> NoReturn:
    """`short` is what the other machines are told; `hopeless`: it would fail again."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # there is no step left to finish: the launcher may end it at once
    observer = watch.current
    if observer is not None:
        ours = observer.failed("interrupted" if code == INTERRUPTED else "failed", short, hopeless)
        if not ours and observer.cause is not None:
            _leave_for(observer.cause)
        # Ctrl-C reaches every process of a terminal, and rank 0 says so
        speaks = ours and (code != INTERRUPTED or observer.me.rank == 0 or observer.cause is None)
    else:
        place = _place()
        alone = place.world_size == 1
        speaks = place.rank == 0 if code == INTERRUPTED else alone or _first_to_fail(place.rank)
    if speaks:
        print(f"{_where()}{message}", file=sys.stderr, flush=True)
    # No cleanup of a broken group: the exit code must reach the launcher at once.
    sys.stdout.flush()
    if speaks and hopeless:
        tell_before_roll(_place(), short)
    if hopeless:
        give_up()
    os._exit(code)


def _place() -> Place:
    try:
        return place_of(os.environ)
    except UserError:  # the launcher's variables are the fault that is being reported
        return Place("python", 0, 1, 0, 1)


def _where() -> str:
    place = _place()
    return f"[rank {place.rank} on {socket.gethostname()}] " if place.world_size > 1 else ""


def _first_to_fail(rank: int) -> bool:
    """Whether this process is the one that reports, before they know of each other.

    Every process then usually fails alike: the first of each machine speaks, another only when nobody has
    ended it after a while.
    """
    if _place().local_rank == 0:
        return True
    time.sleep(SILENCE_SECONDS)
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
    if watch.current is not None:
        watch.current.await_byes(_BYE_SECONDS)
        watch.current.done()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
