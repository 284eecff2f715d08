"""A saved model that predicts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from accelerate import Accelerator

from toolkit.config import ModelSettings
from toolkit.data.parse import format_of
from toolkit.data.prepare import split_of_texts
from toolkit.data.progress import PartOfProgress
from toolkit.data.tokens import Split, choose_max_length, load_tokenizer
from toolkit.errors import listing
from toolkit.evaluation.answers import Answers, saved_answers
from toolkit.pretrained import load_config
from toolkit.utils.cache import digest_of_text, remove


def run_of(name: str) -> dict[str, Any]:
    """`settings` and `data` in config.json of the run whose model this is; both empty where there is no run."""
    try:
        run = json.loads((Path(name).parent / "config.json").read_text(encoding="utf-8"))
        return {part: dict(run[part]) for part in ("settings", "data")}
    except (OSError, ValueError, KeyError, TypeError):
        return {"settings": {}, "data": {}}


def quoting_of_run(name: str, file: str) -> Literal["csv", "none"]:
    """How the run of a model read its training file, where that is of the same format: a reader that takes double
    quotes otherwise would change the texts without an error."""
    settings = run_of(name)["settings"]
    same = format_of(Path(file)) in Path(str(settings.get("train_file"))).suffixes
    return "none" if same and settings.get("quoting") == "none" else "csv"


def empty_texts(rows: Sequence[int], count: int) -> str:
    """The warning for rows (from 0) of `count` whose text, or one of whose pair, is empty; "" where there are none."""
    where = listing(row + 1 for row in rows)
    return f"{len(rows)} of {count} rows have an empty text (rows {where}): their predictions mean nothing" * bool(rows)


class SavedModel:
    """Its config, its tokenizer, and how its outputs become answers; with `load` its weights, too."""

    def __init__(self, name: str) -> None:
        """Raises UserError for a model that cannot be loaded."""
        self.settings = ModelSettings(model_name_or_path=name)
        self.config, self.tokenizer = load_config(self.settings), load_tokenizer(self.settings)
        self.answers: Answers = saved_answers(name, self.config)
        self._shared: set[Path] = set()
        """Folders of the cache that `split` has filled."""

    def length(self, max_length: int | None, pairs: bool = False) -> int:
        """The most tokens of a text. Raises UserError for more than it reads."""
        return choose_max_length(max_length, self.tokenizer, self.config, pairs)

    def load(
        self, accelerator: Accelerator, max_length: int, per_device_batch_size: int, max_tokens: int | None
    ) -> None:
        model = self.answers.load(self.settings)
        self.accelerator, self.config, self.max_length = accelerator, model.config, max_length
        self._sizes = per_device_batch_size, max_tokens
        self.model = accelerator.prepare_model(model, evaluation_mode=True)

    def split(self, texts: Sequence[str], pairs: Sequence[str] | None = None, facts: str | None = None) -> Split:
        """`facts`, which tell these texts from others: several processes share the work of tokenizing by them."""
        shared_as = digest_of_text(facts) if facts and self.accelerator.num_processes > 1 else None
        split = split_of_texts("texts", self.tokenizer, self.config, self.max_length, texts, pairs, shared_as)
        if shared_as is not None:
            self._shared.add(split.folder.parent)
        return split

    def outputs(self, split: Split, bar: PartOfProgress | None = None) -> Any:
        """Of a whole split, on the main process, None on the others; all must call it. The shared tokens of `split`
        are removed after that."""
        outputs = self.answers.outputs(self.accelerator, self.model, split, self.tokenizer, *self._sizes, bar)
        folder = split.folder.parent
        if folder in self._shared and self.accelerator.is_local_main_process:
            remove(folder)  # every process has computed it, and so has mapped it
            Path(f"{folder}.lock").unlink(missing_ok=True)
        return outputs
