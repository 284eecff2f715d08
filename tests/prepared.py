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
        train: list[Any], kind: Any = None, model: Any = MODEL, tokenizer: Any = tokenizer,
        train_name: str = "train_file.jsonl", **settings: Any,
    ) -> Any:  # fmt: skip
        from toolkit.config import TaskSettings, build  # after conftest.py has named the caches
        from toolkit.data.prepare import prepare_data

        settings["train_file"] = write_rows(train_name, train)
        for name in [name for name in settings if name in ("validation_file", "test_file")]:
            settings[name] = write_rows(f"{name}.jsonl", settings[name])
        return prepare_data(build(kind or TaskSettings, settings), tokenizer, model)

    return run
