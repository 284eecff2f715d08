"""A table of rows: its columns, its cells and its texts, a batch of rows at a time; selected rows."""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.errors import UserError, did_you_mean, listing

if TYPE_CHECKING:  # a process whose tokens are cached needs neither the library nor the rows
    import datasets

BATCH_ROWS = 2048
_MAX_GROUPS = 20
USUAL_TEXT = ("text", "sentence", "content", "review", "comment", "document", "article",
              "文本", "内容", "评论", "评论内容", "正文")  # fmt: skip
_FLATTEN = (
    "fields within objects are not read: make columns of them first, as pandas.json_normalize does"
)
_NUMBER = re.compile(r"\s*[-+]?[\d.,]*(e[-+]?\d+)?\s*", re.IGNORECASE)


FileRows = tuple[int, str, str]
"""A file's first row in the table, its name, and how it was read, if a setting or its form decides that."""


@dataclass(frozen=True)
class Table:
    """Rows and their source. The rows are loaded when first used; large tables stay on disk."""

    source: datasets.Dataset | Callable[[], tuple[datasets.Dataset, list[FileRows]]]
    """The rows, or a function that loads them and their files."""
    name: str
    """The file, the pattern, or `data set (split)`, as messages name it."""
    digest: str
    """Changes when the content does."""

    @cached_property
    def _loaded(self) -> tuple[datasets.Dataset, list[FileRows]]:
        return self.source() if callable(self.source) else (self.source, [])

    @property
    def rows(self) -> datasets.Dataset:
        """Raises UserError when they cannot be read."""
        return self._loaded[0]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def note(self) -> str:
        """The first file's note."""
        return next((f"{name}: {note}" for _, name, note in self._loaded[1] if note), "")

    def where(self, row: int) -> str:
        """The name of a row (from 0) in messages: its file, and its number (from 1) in that file."""
        files = self._loaded[1] or [(0, self.name, "")]
        start, name, _ = files[bisect.bisect_right(files, row, key=lambda file: file[0]) - 1]
        return f"{name}, row {row - start + 1}"

    def listing(self, rows: Iterable[int]) -> str:
        """At most ten rows: `2, 3`, or, if the table has several files, `a.csv, row 2, b.csv, row 1`."""
        several = len(self._loaded[1]) > 1
        return listing(self.where(row) if several else row + 1 for row in rows)

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[Any]:
        """All rows in order, as record batches or tables of pyarrow; not memory-mapped, which would count as memory."""
        import pyarrow

        if not self.rows.cache_files:
            yield from (
                self.rows.select_columns(columns or self.rows.column_names)
                .with_format("arrow")
                .iter(BATCH_ROWS)
            )
        for file in self.rows.cache_files:
            with (
                pyarrow.OSFile(file["filename"]) as stored,
                pyarrow.ipc.open_stream(stored) as stream,
            ):
                for batch in stream:
                    selected = batch if columns is None else batch.select(columns)
                    yield from (
                        selected.slice(start, BATCH_ROWS)
                        for start in range(0, len(selected), BATCH_ROWS)
                    )

    def cells(
        self, columns: Sequence[str], rows: np.ndarray | None = None
    ) -> Iterator[tuple[np.ndarray, list[list[Any]]]]:
        """Batches of (row numbers, the cells of each column) of all rows, or of ascending `rows`. Raises UserError."""
        for name in columns:
            if name not in self.rows.column_names:
                raise UserError(
                    f"{self.name} has no column {name!r}: it has {listing(self.rows.column_names)}"
                )
        start = 0
        for batch in self.batches(list(dict.fromkeys(columns))) if columns else ():
            numbers = np.arange(start, start := start + batch.num_rows)
            if rows is not None:
                selected = rows[slice(*np.searchsorted(rows, [numbers[0], start]))]
                if len(selected) < len(numbers):
                    batch, numbers = batch.take(selected - numbers[0]), selected
            if len(numbers):
                yield (
                    numbers,
                    [self._decoded(batch.column(name), name).to_pylist() for name in columns],
                )

    def _decoded(self, column: Any, name: str) -> Any:
        """Bytes as strings: older Spark, Hive and Impala write strings without their type."""
        import pyarrow

        if not (pyarrow.types.is_binary(column.type) or pyarrow.types.is_large_binary(column.type)):
            return column
        try:
            return column.cast("string")
        except pyarrow.ArrowInvalid as error:
            raise UserError(
                f"{self.name}: column {name!r} holds bytes that are not UTF-8: name another"
            ) from error

    def columns_of(self, column: str) -> list[str]:
        """`title,text` -> both, unless a column has that very name; spaces around a name do not count."""
        if column in self.rows.column_names:
            return [column]
        names = self.rows.column_names
        columns = {name.strip(): name for name in reversed(names)} | {name: name for name in names}
        return [columns.get(part, part) for name in column.split(",") if (part := name.strip())]

    def find_columns(
        self, value: str | None, usual: tuple[str, ...], setting: str
    ) -> tuple[str, ...]:
        """The columns that the value of a setting names, several as `a,b`; without a value, one with a usual name, or
        none. Raises UserError when one is missing."""
        columns = self.rows.column_names
        if value is None:
            lowered = {column.lower().strip(): column for column in reversed(columns)}
            return tuple(lowered[name] for name in usual if name in lowered)[:1]
        for name in (names := self.columns_of(value)):
            if name not in columns:
                hint = f" ({_FLATTEN})" if name.partition(".")[0] in columns else ""
                raise UserError(
                    f"{self.name} has no column {name!r}{did_you_mean(name, columns)}: it has "
                    f"{listing(columns)}; name one with --{setting}{hint}"
                )
        return tuple(names)

    def text_column(self, name: str | None, excluded: Iterable[str | None] = ()) -> str:
        """The column to read, or several, `title,text`: those that the setting names, one with a usual name, or the
        only text column that is not `excluded`. Raises UserError if none or several are possible."""
        columns = self.find_columns(name, USUAL_TEXT, "text_column")
        if not columns:
            others = [other for other in self.rows.column_names if other not in excluded]
            columns = tuple(name for name in others if self._contains_text(name))
            if len(columns) != 1:
                header = " (or all with --column_names, if the first line is no header)"
                raise self.ambiguous_column("text", "text_column", columns or others, header)
            delimiters = r"[;|,；，]" if ".tsv" in self.name else r"[;|\t；，]"
            if len(self.rows.column_names) == 1 and (other := re.search(delimiters, columns[0])):
                raise UserError(
                    f"{self.name} has one column, {columns[0][:60]!r}: pass --delimiter {other[0]!r}, or "
                    "--column_names text if the first line is no header, or name it with --text_column"
                )
        return ",".join(columns)

    def _contains_text(self, column: str) -> bool:
        """Not numbers (strings in CSV) and not lists."""
        if getattr(self.rows.features[column], "dtype", None) not in ("string", "large_string"):
            return False
        return not all(_NUMBER.fullmatch(str(cell or "")) for cell in self.rows[:100][column])

    def pair_column(self, name: str | None, column: str) -> str | None:
        """The column of second texts that the setting names. Raises UserError when it is missing, or the first's."""
        if name is not None and name in self.columns_of(column):
            raise UserError(
                f"--text_pair {name} is the first text's column too: name another, or leave it out"
            )
        return ",".join(self.find_columns(name, (), "text_pair")) or None

    def text_blocks(
        self, columns: Sequence[str], separator: str, rows: np.ndarray | None = None
    ) -> Iterator[list[list[str]]]:
        """The texts of all rows, or of `rows`, a batch at a time: a list for each of `columns`. A column `a,b` stands
        for several of the table, joined by the separator. Raises UserError for a missing column."""
        parts = [self.columns_of(column) for column in columns]
        for name in set(itertools.chain(*parts)) & set(self.rows.column_names):
            if not hasattr(self.rows.features[name], "dtype"):
                raise UserError(
                    f"{self.name}: column {name!r} holds lists or objects, not texts: name another column ({_FLATTEN})"
                )
        for _, cells in self.cells([name for part in parts for name in part], rows):
            each = iter(cells)
            yield [
                _join_texts(list(itertools.islice(each, len(part))), separator) for part in parts
            ]

    def ambiguous_column(
        self, what: str, setting: str, names: Sequence[str], hint: str = ""
    ) -> UserError:
        """The error if it is unclear which column is the text, the label, ..."""
        remedy = (
            f"Name one of {listing(names)} with --{setting}"
            if names
            else "There is no other than the text"
        )
        return UserError(f"{self.name}: which column is the {what}? {remedy}{hint}")


def _join_texts(cells: list[list[Any]], separator: str) -> list[str]:
    """The cells of one or several columns -> a text for each row."""
    texts = [
        ["" if text is None or text != text else str(text) for text in column] for column in cells
    ]
    return (
        texts[0]
        if len(texts) == 1
        else [separator.join(filter(str.strip, row)) for row in zip(*texts, strict=True)]
    )


@dataclass(frozen=True)
class Rows:
    """Selected rows of a table."""

    table: Table
    columns: tuple[str, ...]
    """The text column, or several as `title,text`; and the column of second texts, if there is one."""
    separator: str
    """Between the texts of several columns."""
    numbers: np.ndarray
    """(samples,) int64, row numbers in the table, from 0, ascending."""
    hashes: np.ndarray
    """(samples,) int64 of the texts, valid in this process."""
    targets: np.ndarray
    """(samples, ...), as `Targets.encode` gives them; empty before they are encoded."""

    def __len__(self) -> int:
        return len(self.numbers)

    def texts(self) -> Iterator[tuple[list[str], list[str] | None]]:
        """Batches of (texts, second texts or None)."""
        for texts, *pairs in self.table.text_blocks(self.columns, self.separator, self.numbers):
            yield texts, pairs[0] if pairs else None

    def encode_targets(self, targets: Any) -> Rows:
        """Raises UserError naming a row without a label."""
        return replace(self, targets=targets.encode(self.table, self.numbers))

    def take(self, places: np.ndarray) -> Rows:
        return replace(
            self,
            numbers=self.numbers[places],
            hashes=self.hashes[places],
            targets=self.targets[places] if len(self.targets) else self.targets,
        )

    def group_cells(self, inputs: Sequence[str]) -> Iterator[dict[str, str]]:
        """{column: cell} of each row, of the columns with 2 to 20 distinct values, by which metrics are grouped
        in reports. `inputs`: columns that the model reads or learns, which are left out."""
        table, limit = self.table.rows.with_format(None), min(_MAX_GROUPS, len(self) // 2)
        names = [name for name in table.column_names if name not in inputs]
        names = [
            name for name in names if len({str(cell) for cell in table[:1000][name]}) <= limit
        ]  # quick, for texts
        values: dict[str, set[str]] = {name: set() for name in names}
        for _, cells in self.table.cells(names, self.numbers):
            for name, column in zip(names, cells, strict=True):
                if len(values[name]) <= limit:
                    values[name].update(map(str, column))
        names = [name for name in names if 1 < len(values[name]) <= limit]
        for _, cells in self.table.cells(names, self.numbers):
            yield from (
                dict(zip(names, map(str, row), strict=True)) for row in zip(*cells, strict=True)
            )
