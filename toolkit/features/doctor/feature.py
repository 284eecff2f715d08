"""`toolkit doctor`: what would keep a run from starting."""

from __future__ import annotations

from typing import ClassVar

from toolkit.utils.features import Command, Feature


class DoctorFeature(Feature):
    """Checks of this machine, and of several together."""

    commands: ClassVar = (
        Command(
            "doctor",
            "find what would keep a run from starting, here or between machines",
            "toolkit.features.doctor.command:run",
            relaunches=False,
        ),
    )


FEATURE = DoctorFeature()
