"""The columns that a model was trained on, as a run saves them with its tokenizer."""

import json
from pathlib import Path
from typing import Any


def save_columns(model: Path, **columns: Any) -> None:
    """None at all without `columns`."""
    model.mkdir(exist_ok=True)
    path = model / "tokenizer_config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**config, "training_columns": columns}))
