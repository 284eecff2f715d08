"""Members of a run that watch each other through torch's store: the first failure ends all.

Each member counts up its heartbeat in the store once a second. Whoever sees a failure first
publishes it; the others read it with their next heartbeat. Nobody answers for a member whose count
stands still, so the others publish that. A thread does all of this, because a call to the store of
a process that is stopped never returns.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from toolkit.launch.exit_state import RESUME_HINT

_BEAT_SECONDS = 1.0
_READ_SECONDS = 5.0
"""How long a member waits for the store when the run is over."""
_SERVE_SECONDS = 3.0
"""How long member 0 serves the store for others that have not read the last news."""
_FINISH_SECONDS = 600.0
"""How long it waits for the work of others."""


@dataclass(frozen=True)
class Failure:
    """Why a run ends."""

    line: str
    code: int = 1
    text: str = ""
    """More than the line, for the terminal of the process that failed: a traceback."""
    permanent: bool = False
    """A restart would fail again."""
    is_effect: bool = False
    """Of another failure: a connection to another process was lost."""


class Board:
    """One member's view of the heartbeats, and of the first failure, of all members.

    `names`: of the members, for the user. Member 0 serves the store. A member is lost if its
    heartbeat stands still for `timeout` seconds.
    """

    def __init__(self, store: Any, names: Sequence[str], me: int, timeout: float) -> None:
        self._store, self._names, self._me, self._timeout = store, names, me, timeout
        self._others = [other for other in range(len(names)) if other != me]
        self._beats = dict.fromkeys(self._others, "")
        now = time.monotonic()
        self._seen = dict.fromkeys(range(len(names)), now)
        """When each heartbeat was last seen to move; one's own: when the store last answered."""
        self._mine: Failure | None = None
        self._failure: Failure | None = None
        self._finished = False
        self.all_finished = not self._others
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="heartbeat")
        if self._others:
            self._thread.start()

    def failure(self) -> Failure | None:
        """The run's first failure, as far as this member knows."""
        return self._failure or self._lost()

    def publish(self, failure: Failure) -> Failure:
        """Publishes a failure, without its text; returns the run's first one: this or another."""
        self._mine = replace(failure, text="")
        self._wake.set()
        if self._others:
            self._thread.join(_READ_SECONDS)
        if self._failure in (None, self._mine):
            return failure
        return self._failure

    def finish(self) -> None:
        """This member's work is done: its heartbeat may end."""
        self._finished = True
        self._wake.set()

    def leave(self) -> None:
        """Finishes. Member 0, whose store they read, waits for the others; call it last."""
        self.finish()
        waits = self._me == 0 and self._failure is None
        deadline = time.monotonic() + (_FINISH_SECONDS if waits else _READ_SECONDS)
        while self._thread.is_alive() and self._lost() is None:
            self._thread.join(0.1)
            if time.monotonic() > deadline:
                return

    def _lost(self) -> Failure | None:
        """The failure of a member that does not answer."""
        now, timeout = time.monotonic(), self._timeout
        silent = [other for other in self._others if now - self._seen[other] > timeout]
        if self._me != 0 and now - self._seen[self._me] > timeout:
            silent = [0]  # its store does not answer
        if not silent or self.all_finished:
            return None
        who = self._names[silent[0]]
        why = f"no answer for {timeout:.0f} s: it or the network is down"
        return Failure(f"error: lost the connection to {who}: {why}{RESUME_HINT}", permanent=True)

    def _run(self) -> None:
        number = 0
        try:
            while not self._exchange(number):
                number += 1
                self._wake.wait(_BEAT_SECONDS)
                self._wake.clear()
        except RuntimeError:  # the process that serves the store has ended
            self.all_finished = self._finished
            if not self._finished and self._failure is None:
                why = "it was killed or has crashed; see the output there"
                line = f"error: {self._names[0]} has left the run: {why}{RESUME_HINT}"
                self._failure = Failure(line, permanent=True)

    def _exchange(self, number: int) -> bool:
        """One heartbeat; returns whether it was the last."""
        finished = self._finished  # it may become true while this runs: then the next one says so
        state = "finished" if finished else str(number)
        self._store.set(f"beat {self._me}", state)
        for other in self._others:
            beat = self._get(f"beat {other}")
            if beat != self._beats[other] or beat == "finished":
                self._beats[other], self._seen[other] = beat, time.monotonic()
        failure = self._first_failure()
        self._seen[self._me] = time.monotonic()
        self.all_finished = finished and set(self._beats.values()) <= {"finished"}
        if not failure and not self.all_finished:
            return False
        self._failure = failure
        if self._me == 0:
            time.sleep(_SERVE_SECONDS)
        return True

    def _get(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _first_failure(self) -> Failure | None:
        if self._mine:
            self._store.compare_set("failure", "", json.dumps(asdict(self._mine)))
        text = self._get("failure")
        return Failure(**json.loads(text)) if text else None
