"""The titles of texts: their column, their rows, their tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from toolkit.data.read import Table, columns_of, find_column
from toolkit.data.rows import Targets
from toolkit.data.tokens import encode
from toolkit.errors import UserError, listing

USUAL = ("title", "summary", "headline", "highlights", "heading", "标题", "题目", "摘要")


@dataclass(frozen=True)
class Titles(Targets):
    """Where titles stand, and how long they may be."""

    column: str
    max_length: int
    """Tokens that are predicted, the end counted."""

    def encode(self, table: Table, rows: np.ndarray) -> np.ndarray:
        """(samples,) str objects. Raises UserError naming the rows without a title."""
        found, empty = self._cells(table), self.missing(table, rows)
        if len(empty):
            raise UserError(
                f"{table.name}: no title in column {self.column!r} of rows {listing((empty + 1).tolist())}: fill them, "
                "or pass --drop_empty_text"
            )
        return np.array([found[row] for row in rows.tolist()], object)

    def missing(self, table: Table, rows: np.ndarray) -> np.ndarray:
        found = self._cells(table)
        return np.array([row for row in rows.tolist() if not found[row]], np.int64)

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
    column = find_column(table, title_column, USUAL, "title_column")
    texts = columns_of(table, text_column)
    if column is None:
        others = [name for name in table.rows.column_names if name not in texts]
        raise table.which("title", "title_column", others)
    if column in texts:
        raise UserError(
            f"{table.name}: column {column!r} cannot be both text and title: name --text_column and --title_column"
        )
    return Titles(column, max_length)
