"""The titles of texts: their column, their rows, their tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.data.read import Table, columns_of, find_columns
from toolkit.data.rows import Rows, Targets
from toolkit.data.tokens import encoded, save_strings, save_tokens
from toolkit.errors import UserError

USUAL = ("title", "summary", "headline", "highlights", "heading", "标题", "题目", "摘要")


@dataclass(frozen=True)
class Titles(Targets):
    """Where titles stand, and how long they may be."""

    column: str
    max_length: int
    """Tokens that are predicted, the end counted."""

    column_setting, usual_columns = "title_column", USUAL

    @classmethod
    def check(cls, settings: Any, tokenizer: Any) -> None:
        if tokenizer.cls_token_id is None or tokenizer.sep_token_id is None:
            name = settings.model.model_name_or_path
            raise UserError(f"{name}: its tokenizer has no tokens that begin and end a title")

    @classmethod
    def data_facts(cls, settings: Any) -> dict[str, Any]:
        return {name: getattr(settings.data, name) for name in ("title_column", "max_target_length")}

    @classmethod
    def text_columns(cls, settings: Any, table: Table, text_column: str) -> dict[str, str]:
        return {"title_column": cls.find(settings, table, text_column).column}

    @classmethod
    def find(cls, settings: Any, table: Table, text_column: str, rows: np.ndarray | None = None) -> Titles:
        return find_titles(table, settings.data.title_column, text_column, settings.data.max_target_length)

    def encode(self, table: Table, rows: np.ndarray) -> np.ndarray:
        """(samples,) int64 that mean nothing: titles are read when they are kept."""
        return np.zeros(len(rows), np.int64)

    def all_missing(self, table: Table) -> bool:
        return self.column in table.rows.column_names and not any(map(any, self._titles(table, None)))

    def save(self, folder: Path, rows: Rows, tokenizer: Any, notes: list[str]) -> None:
        """`target_ids`, `target_offsets`, a `labels` that means nothing, and, but for training, the titles."""
        np.save(folder / "labels.npy", rows.targets)
        blocks = ((titles, None) for titles in self._titles(rows.table, rows.numbers))
        most = self.max_length + 1  # the first is given, not predicted
        tokenized = encoded(tokenizer, blocks, most, len(rows), f"titles of {folder.name}")
        counts = save_tokens(folder, tokenized, "target_ids", "target_offsets")
        if folder.name != "train":
            save_strings(folder / "titles.jsonl", self._titles(rows.table, rows.numbers))
        if counts.cut:
            share = 100 * counts.cut / len(rows)
            said = f"{share:.1f} % of the titles are cut at {self.max_length} tokens (--max_target_length)"
            notes.append(f"{folder.name}: {said}")

    def facts(self) -> dict[str, Any]:
        learned = {"title_column": self.column, "max_target_length": self.max_length}
        return {"labels": [], "problem_type": "title_generation", **learned}

    def describe(self) -> str:
        return f"titles of at most {self.max_length} tokens, from column {self.column}"

    def _titles(self, table: Table, rows: np.ndarray | None) -> Iterator[list[str]]:
        for _, (cells,) in table.cells((self.column,), "title", rows):
            yield ["" if cell is None else " ".join(str(cell).split()) for cell in cells]


def find_titles(table: Table, title_column: str | None, text_column: str, max_length: int) -> Titles:
    """The column of titles. Raises UserError where it is unclear which one that is."""
    texts, columns = columns_of(table, text_column), find_columns(table, title_column, USUAL, "title_column")
    if len(columns) != 1:
        raise table.which("title", "title_column", [name for name in table.rows.column_names if name not in texts])
    if columns[0] in texts:
        raise UserError(
            f"{table.name}: column {columns[0]!r} cannot be both text and title: name --text_column and --title_column"
        )
    return Titles(columns[0], max_length)
