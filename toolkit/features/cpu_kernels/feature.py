"""Faster dropout and attention of training on a CPU: the hook."""

from __future__ import annotations

from typing import Any

from toolkit.utils.features import Feature


class CpuKernelsFeature(Feature):
    """No setting turns it off: the masks of dropout differ from torch's, their distribution does
    not."""

    def model(self, run: Any, model: Any) -> None:
        if run.accelerator.device.type == "cpu":
            from toolkit.features.cpu_kernels import attention, dropout

            attention.install()
            dropout.install()


FEATURE = CpuKernelsFeature()
