"""Finds the column of titles, tokenizes titles, and collates them as labels of a decoder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.data.batches import IGNORED, Batch, Collator
from toolkit.data.encode import encode_blocks
from toolkit.data.table import Table, TextBlock
from toolkit.data.targets import Targets
from toolkit.data.token_files import save_texts, save_tokens
from toolkit.data.tokenizer import reading_beginnings
from toolkit.data.tokens import Split, gather_slices, read_jsonl
from toolkit.data.unknown import unknown_notes
from toolkit.errors import UserError
from toolkit.utils.extras import require_extra


class TitleCollator(Collator):
    """Sample indices -> a padded `Batch` whose labels are the tokens of titles."""

    split: TitleSplit

    def __call__(self, indices: np.ndarray) -> Batch:
        """`labels` (B, T) are `decoder_input_ids` (B, T) shifted by one token, IGNORED after the
        end of a title."""
        batch = super().__call__(indices)
        titles, lengths = gather_slices(
            self.split.target_ids, self.split.target_offsets, indices
        )
        first = lengths.cumsum() - lengths
        last = lengths.cumsum() - 1
        counts = lengths - 1
        width = int(counts.max())
        # the causal mask hides right padding: the decoder needs no attention mask
        inputs = self.padded(
            np.delete(titles, last), counts, width, self.pad_id, left=False
        )
        batch.inputs["decoder_input_ids"] = inputs
        labels = self.padded(np.delete(titles, first), counts, width, IGNORED, left=False)
        return replace(batch, labels=labels)


@dataclass(frozen=True)
class TitleSplit(Split):
    """A split whose samples have titles, tokenized like the texts."""

    target_ids: np.ndarray
    """(tokens,) int32: all titles concatenated, each with its start and end token."""
    target_offsets: np.ndarray
    """(samples + 1,) int64."""

    def loss_denominators(self, indices: np.ndarray | slice = slice(None)) -> np.ndarray:
        """(samples,) int64: the predicted tokens of each title, all but the start token."""
        return self.target_offsets[1:][indices] - self.target_offsets[:-1][indices] - 1

    def titles(self) -> list[str]:
        """The reference titles; saved for validation and test splits only."""
        return [title for (title,) in read_jsonl(self.folder / "titles.jsonl")]


@dataclass(frozen=True)
class Titles(Targets):
    """Titles from a column of the table."""

    column: str
    max_length: int
    """Predicted tokens, including the end token; longer titles are truncated."""

    column_setting = "title_column"
    usual_columns = (
        "title",
        "summary",
        "headline",
        "highlights",
        "heading",
        "标题",
        "题目",
        "摘要",
    )
    split_class = TitleSplit
    pipeline_tag = "summarization"

    @property
    def usual_metric(self) -> str:
        return "rougeL"

    @classmethod
    def collator(cls, settings: Any) -> Any:
        return TitleCollator

    @classmethod
    def check(cls, settings: Any, tokenizer: Any) -> None:
        # fail now, not at the first ROUGE
        require_extra("recipes/title.py", "titles", "rouge_score", "jieba")

    @classmethod
    def data_facts(cls, settings: Any) -> dict[str, Any]:
        data = settings.data
        return {
            "title_column": data.title_column,
            "max_target_length": data.max_target_length,
        }

    @classmethod
    def find(cls, settings: Any, table: Table, columns: tuple[str, ...]) -> Titles:
        if len(columns) > 1:
            raise UserError(f"--title_column {','.join(columns)}: name one column")
        return cls(columns[0], settings.data.max_target_length)

    def missing(self, table: Table) -> np.ndarray:
        if self.column not in table.rows.column_names:
            return np.ones(len(table), bool)
        return np.array([not title for (block,) in self._titles(table) for title in block])

    def save(
        self, folder: Path, table: Table, encoded: np.ndarray, tokenizer: Any
    ) -> list[str]:
        """Writes `target_ids`, `target_offsets`, unused `labels`, and, for validation and test, the
        titles."""
        super().save(folder, table, encoded, tokenizer)
        titles = self._titles(table)
        if folder.name != "train":
            titles = save_texts(folder / "titles.jsonl", titles)
        # + 1: the start token, which is not predicted
        length = self.max_length + 1
        name = f"titles of {folder.name}"
        reader = reading_beginnings(tokenizer)
        tokens = encode_blocks(reader, titles, length, len(table), name)
        unknown = tokenizer.unk_token_id
        counts = save_tokens(folder, tokens, "target_ids", "target_offsets", unknown)
        notes = list(unknown_notes(name, counts, table.read([self.column], ""), tokenizer))
        if counts.truncated:
            share = f"{counts.truncated} of {len(table)}"
            limit = f"{self.max_length} tokens (--max_target_length)"
            notes.append(f"{name}: {share} are cut at {limit}")
        return notes

    def facts(self) -> dict[str, Any]:
        settings = {"title_column": self.column, "max_target_length": self.max_length}
        return {"labels": [], "problem_type": "title_generation", **settings}

    def describe(self) -> str:
        return f"titles of at most {self.max_length} tokens, from column {self.column}"

    def _titles(self, table: Table) -> Iterator[TextBlock]:
        for _, (cells,) in table.cells((self.column,)):
            yield [["" if cell is None else " ".join(str(cell).split()) for cell in cells]]
