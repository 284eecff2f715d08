"""Python's garbage collector, which scans all imported modules again and again while importing, and once more as Python
exits: 2.1 of 7.2 CPU seconds of a run of one step."""

from __future__ import annotations

import gc

_WHILE_IMPORTING = 1_000_000
"""New objects before it scans: more than importing torch and transformers creates. It is not disabled, because a script
may never call `after_imports`."""
_before: tuple[int, int, int] | None = None


def before_imports() -> None:
    """Makes it scan rarely, until `after_imports`."""
    global _before
    if _before is None:
        _before = gc.get_threshold()
        gc.set_threshold(_WHILE_IMPORTING)


def after_imports() -> None:
    """Restores its threshold and excludes all present objects. No effect without `before_imports`: the objects of a
    notebook must stay collectable."""
    global _before
    if _before is not None:
        gc.freeze()
        gc.set_threshold(*_before)
        _before = None
