"""The command `toolkit doctor`."""

from __future__ import annotations

from toolkit.utils.features import Command, Feature

FEATURE = Feature(Command(
    "doctor", "find problems that keep a run from starting, on or between machines",
    "toolkit.features.doctor.command:run", relaunches=False,
))  # fmt: skip
