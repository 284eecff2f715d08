"""New processes that begin with the imports done: they are forked from one that has imported them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([
    "accelerate", "datasets", "sklearn.metrics", "toolkit.models.bigbird", "toolkit.run", "toolkit.training.prepare",
    "transformers.models.bert.modeling_bert", "transformers.models.big_bird.modeling_big_bird", "transformers.trainer",
])  # fmt: skip


def run(function: Callable[..., Any], *arguments: Any, seconds: float) -> Any:
    """The result of a function of a module, from a process of its own.

    Raises its exception, or TimeoutError, also where the process was killed.
    """
    with _CONTEXT.Pool(1) as pool:
        return pool.apply_async(function, arguments).get(seconds)
