"""`toolkit doctor`: what would keep a run from starting."""

from __future__ import annotations

from toolkit.utils.features import Command, Feature

FEATURE = Feature(
    Command(
        "doctor",
        "find what would keep a run from starting, here or between machines",
        "toolkit.features.doctor.command:run",
        relaunches=False,
    )
)
