"""Faster attention of training on a CPU: the hook."""

from __future__ import annotations

from typing import Any

from toolkit.utils.features import Feature


class CpuAttentionFeature(Feature):
    """Makes transformers' attention `sdpa` use the kernel where it is faster."""

    def model(self, run: Any, model: Any) -> None:
        if run.accelerator.device.type == "cpu":
            from toolkit.features.cpu_attention.kernel import install

            install()


FEATURE = CpuAttentionFeature()
