"""Faster dropout in every run on a CPU."""

from __future__ import annotations

from typing import Any

from toolkit.utils.features import Feature


class CpuDropoutFeature(Feature):
    """No setting turns it off: the masks differ from torch's, their distribution does not."""

    def model(self, run: Any, model: Any) -> None:
        if run.accelerator.device.type == "cpu":
            from toolkit.features.cpu_dropout.kernel import install

            install()


FEATURE = CpuDropoutFeature()
