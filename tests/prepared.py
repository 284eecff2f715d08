"""The data of files written for a test."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

MODEL = SimpleNamespace(model_type="bert", max_position_embeddings=131, pad_token_id=0)


@pytest.fixture
def prepared(
    write_rows: Callable[..., str], tokenizer: Any, toolkit_cache: Path
) -> Callable[..., Any]:
    """`prepared(rows, validation_file=rows, seed=3, ...)` -> what is made of them."""

    def run(
        train: list[Any],
        kind: Any = None,
        model: Any = MODEL,
        tokenizer: Any = tokenizer,
        **given: Any,
    ) -> Any:
        from toolkit.config import TaskSettings, build  # after conftest.py has named the caches
        from toolkit.data.prepare import prepare_data

        files = {"train_file": train} | {
            name: given.pop(name) for name in list(given) if name.endswith("_file")
        }
        names = {"train_file": given.pop("train_name", "train_file.jsonl")}
        paths = {
            name: write_rows(names.get(name, f"{name}.jsonl"), rows) for name, rows in files.items()
        }
        return prepare_data(build(kind or TaskSettings, paths | given), tokenizer, model)

    return run
