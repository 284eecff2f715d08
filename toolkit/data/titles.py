"""The titles of texts: their column, their rows, their tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from toolkit.data.read import Table, columns_of, find_columns
from toolkit.data.rows import Targets
from toolkit.data.tokens import encode
from toolkit.errors import UserError

USUAL = ("title", "summary", "headline", "highlights", "heading", "标题", "题目", "摘要")


@dataclass(frozen=True)
class Titles(Targets):
    """Where titles stand, and how long they may be."""

    column: str
    max_length: int
    """Tokens that are predicted, the end counted."""

    def encode(self, table: Table, rows: np.ndarray) -> np.ndarray:
        """(samples,) str objects."""
        found = self._cells(table)
        return np.array([found[row] for row in rows.tolist()], object)

    def all_missing(self, table: Table) -> bool:
        return self.column in table.rows.column_names and not any(self._cells(table))

    def arrays(self, split: str, encoded: np.ndarray, tokenizer: Any, notes: list[str]) -> dict[str, np.ndarray]:
        """`target_ids`, `target_offsets`, and a `labels` that means nothing."""
        tokens, cut = encode(tokenizer, encoded.tolist(), self.max_length + 1)  # the first is given, not predicted
        if cut:
            share = 100 * cut / len(encoded)
            notes.append(
                f"{split}: {share:.1f} % of the titles are cut at {self.max_length} tokens (--max_target_length)"
            )
        labels = np.zeros(len(encoded), np.int64)
        return {"target_ids": tokens["input_ids"], "target_offsets": tokens["offsets"], "labels": labels}

    def facts(self) -> dict[str, Any]:
        learned = {"title_column": self.column, "max_target_length": self.max_length}
        return {"labels": [], "problem_type": "title_generation", **learned}

    def describe(self) -> str:
        return f"titles of at most {self.max_length} tokens, from column {self.column}"

    def written(self, encoded: np.ndarray) -> list[str]:
        return list(encoded.tolist())

    def _cells(self, table: Table) -> list[str]:
        return ["" if cell is None else " ".join(str(cell).split()) for cell in table.column(self.column, "title")]


def find_titles(table: Table, title_column: str | None, text_column: str, max_length: int) -> Titles:
    """The column of titles. Raises UserError when it cannot be told."""
    texts, columns = columns_of(table, text_column), find_columns(table, title_column, USUAL, "title_column")
    if len(columns) != 1:
        raise table.which("title", "title_column", [name for name in table.rows.column_names if name not in texts])
    if columns[0] in texts:
        raise UserError(
            f"{table.name}: column {columns[0]!r} cannot be both text and title: name --text_column and --title_column"
        )
    return Titles(columns[0], max_length)
