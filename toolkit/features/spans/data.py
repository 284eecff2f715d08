"""Finds the column of spans, and collates the tags of tokens, in windows of long texts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.data.batches import IGNORED, Batch, Collator
from toolkit.data.read import read_tables
from toolkit.data.table import Table
from toolkit.data.targets import Targets
from toolkit.data.token_files import Counts, save_texts
from toolkit.data.tokens import Split, read_jsonl
from toolkit.data.unknown import unknown_notes
from toolkit.errors import UserError, listing
from toolkit.features.spans.spans import Span, parse_spans
from toolkit.features.spans.tags import USUAL_SPANS, with_texts
from toolkit.features.spans.windows import (
    WindowReader,
    arrays_of,
    decode_tags,
    encode_tags,
)
from toolkit.utils.progress import Progress


class SpanCollator(Collator):
    """Sample indices -> a padded `Batch` whose labels (B, S) are the tags of its tokens, with the
    columns `pieces` (B, S), the tokens of each one's word, and `has_text` (B, T), T the tokens of
    the split's longest window: which tokens have characters."""

    split: SpanSplit

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.left = False  # encoders count positions from the left

    def __call__(self, indices: np.ndarray) -> Batch:
        batch = super().__call__(indices)
        split = self.split
        lengths = split.lengths[indices]
        tags = split.gather(split.tags, indices)
        width = batch.inputs["input_ids"].shape[1]
        is_text = split.gather(split.ends > split.starts, indices)
        has_text = self.padded(is_text, lengths, self.longest, 0, False).bool()
        pieces = np.maximum(split.gather(split.pieces, indices), 1)
        columns = {
            **batch.columns,
            "has_text": has_text,
            "pieces": self.padded(pieces, lengths, width, 1, False),
        }
        labels = self.padded(tags, lengths, width, IGNORED, False)
        return replace(batch, labels=labels, columns=columns)


@dataclass(frozen=True)
class SpanSplit(Split):
    """A split of windows, numbered by `rows`; `labels` (samples,) float64: the words that count."""

    tags: np.ndarray
    """(tokens,) int16: the tag of each token, or IGNORED."""
    starts: np.ndarray
    """(tokens,) int32: of its characters in the text."""
    ends: np.ndarray
    """(tokens,) int32; not above `starts`: no characters."""
    pieces: np.ndarray
    """(tokens,) int32: the tokens of its word."""
    text_index: np.ndarray
    """(samples,) int64: the text of each window, from 0."""
    text_rows: np.ndarray
    """(texts,) int64: the rows of the texts in the source."""
    source_texts: tuple[str, ...] = ()
    """The texts, of a split in memory."""

    def loss_denominators(self, indices: np.ndarray | slice = slice(None)) -> np.ndarray:
        """(samples,) float64: the words of each window that count, each token its share of one."""
        return self.labels[indices]

    def texts(self) -> list[str]:
        return list(self.source_texts) or super().texts()

    def spans(self) -> list[list[Span]]:
        """The spans of each text; saved for validation and test splits only."""
        return [
            [Span(*span) for span in spans]
            for spans in read_jsonl(self.folder / "spans.jsonl")
        ]

    def decode(
        self, tags: np.ndarray, probabilities: np.ndarray
    ) -> Iterator[tuple[int, int, int, int, float]]:
        """The spans of all texts from (samples, T) tags and their probabilities, as of
        `decode_tags`."""
        is_token = np.arange(tags.shape[1]) < self.lengths[:, None]
        counts = self.tags != IGNORED
        texts = np.repeat(self.text_index, self.lengths)[counts]
        starts, ends = self.starts[counts], self.ends[counts]
        arrays = (tags[is_token][counts], texts, starts, ends)
        return decode_tags(*arrays, probabilities[is_token][counts])


@dataclass(frozen=True)
class Spans(Targets):
    """Labelled spans from a column of the table."""

    column: str
    labels: tuple[str, ...]
    stride: int | None

    column_setting = "spans_column"
    usual_columns = USUAL_SPANS
    reads_objects = True
    split_class = SpanSplit
    pipeline_tag = "token-classification"

    @property
    def usual_metric(self) -> str:
        return "f1"

    @classmethod
    def collator(cls, settings: Any) -> Any:
        return SpanCollator

    @classmethod
    def check(cls, settings: Any, tokenizer: Any) -> None:
        if not tokenizer.is_fast:
            name = settings.model.model_name_or_path
            why = (
                f"its tokenizer ({type(tokenizer).__name__}) does not say where tokens are"
            )
            raise UserError(f"model {name}: {why}: take one with tokenizer.json")
        if "," in (settings.data.text_column or ""):
            raise UserError("--text_column: spans are in one text, name one column")

    @classmethod
    def tables(cls, settings: Any) -> dict[str, Table]:
        """With the texts of tokens, and the spans of their tags."""
        tables = read_tables(settings.data)
        return {split: with_texts(table, settings.data) for split, table in tables.items()}

    @classmethod
    def data_facts(cls, settings: Any) -> dict[str, Any]:
        names = ("spans_column", "token_separator", "stride")
        return {name: getattr(settings.data, name) for name in names}

    @classmethod
    def find(cls, settings: Any, table: Table, columns: tuple[str, ...]) -> Spans:
        if len(columns) > 1:
            raise UserError(f"--spans_column {','.join(columns)}: name one column")
        targets = cls(columns[0], (), settings.data.stride)
        labels = {span.label for _, spans in targets._rows(table) for span in spans}
        if not labels:
            raise UserError(f"{table.name}: no text has a span in column {columns[0]!r}")
        return replace(targets, labels=tuple(sorted(labels)))

    def missing(self, table: Table) -> np.ndarray:
        if self.column not in table.rows.column_names:
            return np.ones(len(table), bool)
        cells = [cell for _, (block,) in table.cells((self.column,)) for cell in block]
        return np.array([cell in (None, "") for cell in cells])

    def encode(self, table: Table) -> np.ndarray:
        for row, spans in self._rows(table):
            unknown = sorted({span.label for span in spans}.difference(self.labels))
            if unknown:
                fault = f"label {listing(unknown)} does not occur in the training rows"
                raise UserError(f"{table.where(row)}: {fault} ({listing(self.labels)})")
        return super().encode(table)

    def write(
        self,
        folder: Path,
        table: Table,
        encoded: np.ndarray,
        tokenizer: Any,
        max_length: int,
    ) -> list[str]:
        """Writes windows of the texts, and, for validation and test, the texts and their spans."""
        split = folder.name
        reader = WindowReader(tokenizer, max_length, self.stride)
        texts = table.texts()
        if split != "train":
            texts = save_texts(folder / "texts.jsonl", texts)
        tokens = (each for (block,) in texts for each in reader.tokens(block))
        rows = zip(self._rows(table), tokens, strict=True)
        bar = Progress(f"tokens of {split}", len(table), "texts")
        windows = []
        counts = Counts()
        count = 0
        lost = []
        with (folder / "spans.jsonl").open("w", encoding="utf-8") as file:
            for (row, spans), of_text in rows:
                tags, lost_spans = encode_tags(spans, of_text, self.labels)
                windows.append(list(reader.windows(of_text, tags)))
                file.write(json.dumps(spans, ensure_ascii=False) + "\n")
                count += len(spans)
                lost += [row] * lost_spans
                counts.add(
                    of_text.ids, np.array([len(of_text.ids)]), tokenizer.unk_token_id
                )
                bar.update(len(windows))
        bar.close()
        for name, array in arrays_of(windows).items():
            np.save(folder / f"{name}.npy", array)
        np.save(folder / "text_rows.npy", table.row_numbers)
        notes = list(unknown_notes(split, counts, table, tokenizer))
        several = sum(len(of_text) > 1 for of_text in windows)
        if several:
            share = f"{several} of {len(table)} texts are read in several windows"
            notes.append(f"{split}: {share}, which share {reader.stride} tokens (--stride)")
        if lost:
            where = f"rows {table.listing(dict.fromkeys(lost))}"
            notes.append(
                f"{split}: {len(lost)} of {count} spans begin or end inside a token, and count as "
                f"missed ({where})"
            )
        return notes

    def facts(self) -> dict[str, Any]:
        spans = {"span_labels": list(self.labels), "stride": self.stride}
        return {"labels": [], "problem_type": "token_classification", **spans}

    def source(self) -> dict[str, Any]:
        return {"spans_column": self.column}

    def describe(self) -> str:
        labels = f"{len(self.labels)} labels: {listing(self.labels)}"
        return f"spans from column {self.column}, of {labels}"

    def _rows(self, table: Table) -> Iterator[tuple[int, list[Span]]]:
        """(row, the spans of its text). Raises UserError naming the row of a fault."""
        blocks = zip(table.cells((self.column,)), table.texts(), strict=True)
        for (numbers, (cells,)), (texts,) in blocks:
            for row, cell, text in zip(numbers.tolist(), cells, texts, strict=True):
                try:
                    yield row, parse_spans(cell or [], text)
                except ValueError as error:
                    where = f"{table.where(row)}, column {self.column!r}"
                    raise UserError(f"{where}: {error}") from error
