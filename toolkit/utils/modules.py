"""Unwraps prepared modules, and finds what an output depends on."""

from __future__ import annotations

import sys
from typing import Any

import torch


def unwrapped(model: Any) -> Any:
    """The module that `Accelerator.prepare` wrapped, without importing DeepSpeed (1.5 s) as
    `unwrap_model` does."""
    engine = getattr(sys.modules.get("deepspeed"), "DeepSpeedEngine", ())
    while isinstance(model, (torch.nn.parallel.DistributedDataParallel, engine)):
        model = model.module
    return model


def autograd_nodes(output: torch.Tensor) -> list[Any]:
    """The nodes of an output's autograd graph."""
    nodes: dict[Any, None] = {}
    queue: list[Any] = [output.grad_fn]
    while queue:
        node = queue.pop()
        if node is not None and node not in nodes:
            nodes[node] = None
            queue += [function for function, _ in node.next_functions]
    return list(nodes)


def autograd_leaves(output: torch.Tensor) -> list[torch.Tensor]:
    return [node.variable for node in autograd_nodes(output) if hasattr(node, "variable")]
