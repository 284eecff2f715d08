"""A table: rows of files or of a data set, or some of them; their columns, cells and texts."""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from toolkit.errors import UserError, did_you_mean, listing

if TYPE_CHECKING:  # a process whose tokens are cached needs neither the library nor the rows
    import datasets

USUAL_TEXT = ("text", "sentence", "content", "review", "comment", "document", "article",
              "文本", "内容", "评论", "评论内容", "正文")  # fmt: skip
BATCH_ROWS = 2048
_NUMBER = re.compile(r"[-+\d.,e\s]*", re.IGNORECASE)
TextBlock = tuple[Sequence[str], Sequence[str] | None]
"""Texts, and the second texts of pairs."""


class Rows(NamedTuple):
    data: datasets.Dataset
    files: Sequence[tuple[int, str]] = ()
    """The first row of each file, and its name."""


@dataclass(frozen=True)
class Table:
    """Rows and their source."""

    load: Callable[[], Rows]
    """Loads the rows when they are first used, and returns the same ones later."""
    name: str
    """The file, the pattern, or `data set (split)`, as messages name it."""
    digest: str
    """Changes when the content does."""
    numbers: np.ndarray | None = None
    """(rows,) int64, ascending: the rows that count, from 0; None: all."""
    text_columns: tuple[str, ...] = ()
    """The columns that the model reads: of texts, or several as `title,text`; of second texts."""
    separator: str = "\n"
    """Between the texts of several columns."""

    @classmethod
    def of(cls, rows: datasets.Dataset, name: str, digest: str = "") -> Table:
        """The table of rows that are loaded."""
        return cls(partial(Rows, rows), name, digest)

    @property
    def rows(self) -> datasets.Dataset:
        """All rows. Raises UserError when they cannot be read."""
        return self.load().data

    @property
    def row_numbers(self) -> np.ndarray:
        """(rows,) int64: `numbers`, or all."""
        if self.numbers is None:
            return np.arange(len(self.rows))
        return self.numbers

    def __len__(self) -> int:
        return len(self.row_numbers)

    def select(self, places: np.ndarray) -> Table:
        """The rows at these ascending places among those that count."""
        return replace(self, numbers=self.row_numbers[places])

    def where(self, row: int) -> str:
        """The name of a row (from 0) in messages: its file, and its number (from 1) there."""
        files = self.load().files or [(0, self.name)]
        place = bisect.bisect_right(files, row, key=lambda file: file[0]) - 1
        start, name = files[place]
        return f"{name}, row {row - start + 1}"

    def listing(self, rows: Iterable[int]) -> str:
        """At most ten rows: `2, 3`, or, of several files, `a.csv, row 2, b.csv, row 1`."""
        if len(self.load().files) > 1:
            return listing(map(self.where, rows))
        return listing(row + 1 for row in rows)

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[Any]:
        """All rows in order, as record batches or tables of pyarrow; read from the disk, as pages
        of a memory-mapped file count as memory."""
        import pyarrow

        names = list(columns or self.rows.column_names)
        if not self.rows.cache_files:
            yield from self.rows.select_columns(names).with_format("arrow").iter(BATCH_ROWS)
        for file in self.rows.cache_files:
            with (
                pyarrow.OSFile(file["filename"]) as stored,
                pyarrow.ipc.open_stream(stored) as stream,
            ):
                for batch in stream:
                    yield batch.select(names)

    def cells(self, columns: Sequence[str]) -> Iterator[tuple[np.ndarray, list[list[Any]]]]:
        """Batches of (row numbers, the cells of each column). Raises UserError."""
        for name in columns:
            self.require(name)
        end = 0
        for batch in self.batches(list(dict.fromkeys(columns))):
            start = end
            end += batch.num_rows
            numbers = np.arange(start, end)
            if self.numbers is not None:
                first, last = np.searchsorted(self.numbers, [start, end])
                numbers = self.numbers[first:last]
                batch = batch.take(numbers - start)
            if len(numbers):
                yield numbers, [batch.column(name).to_pylist() for name in columns]

    def require(self, name: str, setting: str = "") -> None:
        """Raises UserError when the table lacks a column."""
        columns = self.rows.column_names
        if name not in columns:
            hint = did_you_mean(name, columns)
            remedy = f"; name one with --{setting}" if setting else ""
            raise UserError(
                f"{self.name} has no column {name!r}{hint}: it has {listing(columns)}{remedy}"
            )

    # --- which columns

    def columns_of(self, column: str) -> list[str]:
        """`title,text` -> both, unless a column has that very name; spaces around a name do not
        count."""
        names = self.rows.column_names
        if column in names:
            return [column]
        columns = {name.strip(): name for name in reversed(names)}
        parts = [part.strip() for part in column.split(",")]
        return [columns.get(part, part) for part in parts if part]

    def find_columns(
        self, value: str | None, usual: tuple[str, ...], setting: str
    ) -> tuple[str, ...]:
        """The columns that the value of a setting names, several as `a,b`; without a value, one
        with a usual name, or none. Raises UserError when one is missing."""
        if value is None:
            lowered = {name.lower().strip(): name for name in reversed(self.rows.column_names)}
            return tuple(lowered[name] for name in usual if name in lowered)[:1]
        names = self.columns_of(value)
        for name in names:
            self.require(name, setting)
        return tuple(names)

    def text_column(self, name: str | None, excluded: Iterable[str | None] = ()) -> str:
        """The column to read, or several, `title,text`: those that the setting names, one with a
        usual name, or the only text column that is not `excluded`. Raises UserError if none or
        several are possible."""
        columns = self.find_columns(name, USUAL_TEXT, "text_column")
        if columns:
            return ",".join(columns)
        others = [other for other in self.rows.column_names if other not in excluded]
        texts = [other for other in others if self._contains_text(other)]
        if len(texts) != 1:
            hint = ""
            if not self.name.endswith(("json", "jsonl", "parquet")):
                hint = " (or all with --column_names, if the first line is no header)"
            raise self.ambiguous_column("text", "text_column", texts or others, hint)
        if len(self.rows.column_names) == 1 and re.search(r"[;|\t]", texts[0]):
            raise UserError(
                f"{self.name} has one column, {texts[0][:60]!r}: pass its --delimiter, or "
                "--column_names text if the first line is no header, or name it with "
                "--text_column"
            )
        return texts[0]

    def _contains_text(self, column: str) -> bool:
        """Not numbers (strings in CSV) and not lists."""
        kind = getattr(self.rows.features[column], "dtype", None)
        if kind not in ("string", "large_string"):
            return False
        return not all(_NUMBER.fullmatch(str(cell or "")) for cell in self.rows[:100][column])

    def pair_column(self, name: str | None, column: str) -> str | None:
        """The column of second texts that the setting names. Raises UserError when it is missing,
        or the first's."""
        if name is not None and name in self.columns_of(column):
            raise UserError(f"--text_pair {name} is the first text's column too: name another")
        return ",".join(self.find_columns(name, (), "text_pair")) or None

    def ambiguous_column(
        self, what: str, setting: str, names: Sequence[str], hint: str = ""
    ) -> UserError:
        """The error if it is unclear which column is the text, the label, ..."""
        remedy = "There is no other than the text (is the --delimiter right?)"
        if names:
            remedy = f"Name one of {listing(names)} with --{setting}"
        return UserError(f"{self.name}: which column is the {what}? {remedy}{hint}")

    # --- texts

    def text_blocks(self, columns: Sequence[str], separator: str) -> Iterator[list[list[str]]]:
        """The texts, a batch at a time: a list for each of `columns`. A column `a,b` stands for
        several of the table, joined by the separator. Raises UserError for a missing column, or one
        of lists."""
        parts = [self.columns_of(column) for column in columns]
        names = [name for part in parts for name in part]
        for name in set(names).intersection(self.rows.column_names):
            if not hasattr(self.rows.features[name], "dtype"):
                raise UserError(
                    f"{self.name}: column {name!r} holds lists or objects, not texts: name another"
                )
        for _, cells in self.cells(names):
            texts = {name: _texts(each) for name, each in zip(names, cells, strict=True)}
            yield [_join([texts[name] for name in part], separator) for part in parts]

    def texts(self) -> Iterator[TextBlock]:
        """Batches of (texts, second texts or None), of `text_columns`."""
        for texts, *pairs in self.text_blocks(self.text_columns, self.separator):
            yield texts, pairs[0] if pairs else None


def _texts(cells: list[Any]) -> list[str]:
    """None and NaN are empty texts."""
    return ["" if cell is None or cell != cell else str(cell) for cell in cells]


def _join(columns: list[list[str]], separator: str) -> list[str]:
    if len(columns) == 1:
        return columns[0]
    return [separator.join(filter(str.strip, row)) for row in zip(*columns, strict=True)]
