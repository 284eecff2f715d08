"""The titles of texts: their column, their rows, their tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.data.batches import IGNORED, Batch, Collator
from toolkit.data.read import Table, columns_of, find_columns
from toolkit.data.rows import Rows, Targets
from toolkit.data.tokens import Split, encoded, read_lines, save_tokens, write_lines
from toolkit.errors import UserError

USUAL = ("title", "summary", "headline", "highlights", "heading", "标题", "题目", "摘要")
_TRIAL_TITLES = 20


class TitleCollator(Collator):
    """Sample indices -> a padded `Batch` whose labels are the tokens of titles."""

    split: TitleSplit

    def __call__(self, indices: np.ndarray) -> Batch:
        """`decoder_input_ids` (B, T) begin with each title's first token; `labels` (B, T) are what follows each of
        them, and IGNORED where a title has ended."""
        batch = super().__call__(indices)
        titles = [self.split.target(int(index)) for index in (indices if len(indices) else [0])]
        width = max(len(title) for title in titles) - 1
        # no mask of the decoder's padding: it comes last, and no token looks ahead
        inputs = self.padded([title[:-1] for title in titles], width, self.pad_id, left=False)  # (B, T)
        labels = self.padded([title[1:] for title in titles], width, IGNORED, left=False)  # (B, T)
        return replace(batch, inputs={**batch.inputs, "decoder_input_ids": inputs}, labels=labels)


@dataclass(frozen=True)
class TitleSplit(Split):
    """A split whose samples have titles; their tokens are laid out as the texts' are."""

    target_ids: np.ndarray
    """(tokens,) int32, all titles one after another, with the tokens that begin and end them."""
    target_offsets: np.ndarray
    """(samples + 1,) int64."""

    collator: Any = field(default=TitleCollator, kw_only=True)

    def loss_denominators(self, indices: np.ndarray | slice = slice(None)) -> np.ndarray:
        """(samples,) int64: what each title adds to the loss denominator: its tokens but the first, which is not
        predicted."""
        return self.target_offsets[1:][indices] - self.target_offsets[:-1][indices] - 1

    def target(self, index: int) -> np.ndarray:
        """(length,) int32."""
        return self.target_ids[self.target_offsets[index] : self.target_offsets[index + 1]]

    def titles(self) -> list[str]:
        """The titles as they were written; saved for splits that are evaluated."""
        return read_lines(self.folder / "titles.jsonl")


@dataclass(frozen=True)
class Titles(Targets):
    """The column of titles, and how long they may be."""

    column: str
    max_length: int
    """Tokens that are predicted, the end counted."""

    column_setting, usual_columns, split_class = "title_column", USUAL, TitleSplit

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
        columns = find_columns(table, settings.data.title_column, USUAL, "title_column")
        texts = columns_of(table, text_column)
        if len(columns) != 1:
            raise table.which("title", "title_column", [name for name in table.rows.column_names if name not in texts])
        if columns[0] in texts:
            raise UserError(
                f"{table.name}: column {columns[0]!r} cannot be both text and title: name --text_column and "
                "--title_column"
            )
        return cls(columns[0], settings.data.max_target_length)

    def all_missing(self, table: Table) -> bool:
        return self.column in table.rows.column_names and not any(map(any, self._titles(table, None)))

    def trial(self, split: Any) -> tuple[Any, Any]:
        titles = split.titles()[:_TRIAL_TITLES]
        return titles, titles

    def save(self, folder: Path, rows: Rows, tokenizer: Any) -> list[str]:
        """`target_ids`, `target_offsets`, a `labels` that means nothing, and, but for training, the titles."""
        super().save(folder, rows, tokenizer)
        titles: Iterable[Sequence[str]] = self._titles(rows.table, rows.numbers)
        if folder.name != "train":
            titles = write_lines(folder / "titles.jsonl", titles)
        most = self.max_length + 1  # the first is not predicted
        what = f"titles of {folder.name}"
        counts = save_tokens(folder, encoded(tokenizer, ((block, None) for block in titles), most, len(rows), what),
                             "target_ids", "target_offsets")  # fmt: skip
        if not counts.cut:
            return []
        share = 100 * counts.cut / len(rows)
        return [f"{folder.name}: {share:.1f} % of the titles are cut at {self.max_length} tokens (--max_target_length)"]

    def facts(self) -> dict[str, Any]:
        settings = {"title_column": self.column, "max_target_length": self.max_length}
        return {"labels": [], "problem_type": "title_generation", **settings}

    def describe(self) -> str:
        return f"titles of at most {self.max_length} tokens, from column {self.column}"

    def _titles(self, table: Table, rows: np.ndarray | None) -> Iterator[list[str]]:
        for _, (cells,) in table.cells((self.column,), rows):
            yield ["" if cell is None else " ".join(str(cell).split()) for cell in cells]
