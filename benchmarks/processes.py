"""New processes that begin with the imports done: they are forked from one that has imported them."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from typing import Any

if len(tempfile.gettempdir()) > 64:  # the path of the fork server's socket has at most 107 bytes
    _FOLDER = tempfile.TemporaryDirectory(dir="/tmp")
    multiprocessing.current_process()._config["tempdir"] = _FOLDER.name  # type: ignore[attr-defined]
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
