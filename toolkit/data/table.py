"""A table: rows of files or of a data set, or some of them; their columns, cells and texts.

Rows keep their number in the source, which is the id of their sample in batches, predictions and
messages."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from toolkit.errors import UserError, did_you_mean, listing

# a process whose tokens are cached needs neither the library nor the rows
if TYPE_CHECKING:
    import datasets

BATCH_ROWS = 2048
TextBlock = Sequence[Sequence[str]]
"""The texts of some rows: a list, or, of pairs, one of first and one of second texts."""


class Rows(NamedTuple):
    """What a table loads."""

    data: datasets.Dataset
    files: Sequence[tuple[int, str]] = ()
    """The first row of each file, and its name."""
    advice: str = ""
    """What to pass if the columns are not the right ones."""


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

    def sample(self, most: int) -> Table:
        """At most so many of the rows, evenly spaced."""
        return self.select(np.arange(0, len(self), 1 + len(self) // most))

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

    def columns_of(self, column: str) -> list[str]:
        """`title,text` -> both, unless a column has that very name; spaces around a name do not
        count."""
        names = self.rows.column_names
        if column in names:
            return [column]
        columns = {name.strip(): name for name in reversed(names)}
        parts = [part.strip() for part in column.split(",")]
        return [columns.get(part, part) for part in parts if part]

    def read(self, text_columns: Sequence[str], separator: str) -> Table:
        """The table whose `texts` are in these columns."""
        return replace(self, text_columns=tuple(text_columns), separator=separator)

    def texts(self) -> Iterator[TextBlock]:
        """The texts of `text_columns`, a batch of rows at a time. Raises UserError for a missing
        column, or one of lists."""
        parts = [self.columns_of(column) for column in self.text_columns]
        names = [name for part in parts for name in part]
        for name in set(names).intersection(self.rows.column_names):
            if not hasattr(self.rows.features[name], "dtype"):
                raise UserError(
                    f"{self.name}: column {name!r} holds lists or objects, not texts: name another"
                )
        for _, cells in self.cells(names):
            texts = dict(zip(names, map(_texts, cells), strict=True))
            yield [self._join([texts[name] for name in part]) for part in parts]

    def _join(self, columns: list[list[str]]) -> list[str]:
        """The texts of several columns as one, without the blank ones."""
        if len(columns) == 1:
            return columns[0]
        rows = zip(*columns, strict=True)
        return [self.separator.join(filter(str.strip, row)) for row in rows]


def _texts(cells: list[Any]) -> list[str]:
    """None and NaN are empty texts."""
    return ["" if cell is None or cell != cell else str(cell) for cell in cells]
