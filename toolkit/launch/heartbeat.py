"""Members of a run that watch each other through torch's store: the first failure ends all.

Each member counts up its heartbeat in the store twice a second. Whoever sees a failure first
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

RESUME_HINT = "; the same command resumes from the newest checkpoint (--checkpoint_every)"
_BEAT_SECONDS = 0.5
# A member waits this long for the store when it publishes a failure.
_WRITE_SECONDS = 5.0
# Member 0 serves the store this long for others that have not read the failure.
_SERVE_SECONDS = 3.0


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
        self._store = store
        self._names = names
        self._me = me
        self._timeout = timeout
        self._beats = [""] * len(names)
        self._moved = [time.monotonic()] * len(names)
        """When each heartbeat was last seen to move; this member's, too: its store may not
        answer."""
        self._own: Failure | None = None
        self._first: Failure | None = None
        self._finished = False
        self._wake = threading.Event()
        """Set: the next heartbeat is due at once."""
        self._thread = threading.Thread(target=self._run, daemon=True, name="heartbeat")
        self._thread.start()

    def failure(self) -> Failure | None:
        """The run's first failure, as far as this member knows."""
        return self._first or self._lost()

    def publish(self, failure: Failure) -> Failure:
        """Publishes a failure, without its text; returns the run's first one: this or another."""
        self._own = replace(failure, text="")
        self._wake.set()
        self._thread.join(_WRITE_SECONDS)  # it ends when it has written or read a failure
        if self._first in (None, self._own):
            return failure
        return self._first

    def finish(self) -> Failure | None:
        """This member's work is done. Waits for the others, which may read the store of member 0;
        returns the run's failure, if one of them fails."""
        self._finished = True
        self._wake.set()
        while self._thread.is_alive() and self._lost() is None:
            self._thread.join(0.1)
        return self.failure()

    def _lost(self) -> Failure | None:
        """The failure of a member that does not answer."""
        oldest = time.monotonic() - self._timeout
        silent = [member for member, moved in enumerate(self._moved) if moved < oldest]
        if not silent:
            return None
        lost = 0 if self._me in silent else silent[0]  # 0 serves the store
        line = (
            f"error: lost the connection to {self._names[lost]}: no answer for "
            f"{self._timeout:.0f} s: it or the network is down{RESUME_HINT}"
        )
        return Failure(line, permanent=True)

    def _run(self) -> None:
        number = 0
        try:
            while not self._beat(number):
                number += 1
                self._wake.wait(_BEAT_SECONDS)
                self._wake.clear()
        except RuntimeError:  # the process that serves the store has ended
            if not self._finished:
                line = (
                    f"error: {self._names[0]} has left the run: it was killed or has crashed; see "
                    f"the output there{RESUME_HINT}"
                )
                self._first = Failure(line, permanent=True)

    def _beat(self, number: int) -> bool:
        """One heartbeat; returns whether it was the last."""
        state = "finished" if self._finished else "works"
        self._store.set(f"beat {self._me}", f"{number} {state}")
        for member, last in enumerate(self._beats):
            beat = self._get(f"beat {member}")
            if beat != last:
                self._beats[member] = beat
                self._moved[member] = time.monotonic()
        if self._own:
            self._store.compare_set("failure", "", json.dumps(asdict(self._own)))
        text = self._get("failure")
        if text:
            self._first = Failure(**json.loads(text))
        if not text and not all(beat.endswith("finished") for beat in self._beats):
            return False
        if self._me == 0 and len(self._names) > 1:
            time.sleep(_SERVE_SECONDS)
        return True

    def _get(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""
