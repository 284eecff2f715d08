"""Files, hub data sets and demos -> tables."""

from __future__ import annotations

import bisect
import contextlib
import glob
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from natsort import natsorted

from toolkit import demo
from toolkit.config import TextSettings
from toolkit.data.opening import OPENERS, most_bytes, too_large
from toolkit.data.parse import BATCH_ROWS, format_of, read_batches, wider
from toolkit.errors import UserError, did_you_mean, first_line, listing
from toolkit.utils.cache import (
    cache_folder,
    cached_digest,
    cached_folder,
    digest_of_file,
    digest_of_files,
    digest_of_text,
)
from toolkit.utils.files import refuse_link_out
from toolkit.utils.hub import reach
from toolkit.utils.memory import limit_memory

if TYPE_CHECKING:  # a process whose tokens are in the cache needs neither the library nor the rows
    import datasets
    import pyarrow

_LAYOUT = 3  # raise when the files in a folder of rows change
IN_MEMORY_BYTES = 16 << 20
_WRITTEN_BYTES = 8 << 20
"""Rows are stored in batches of about this size: mapping the file costs 64 KB of memory for each."""
# split -> the names it goes by
_SPLITS = {"train": ("train",), "validation": ("validation", "valid", "dev"), "test": ("test",)}


@dataclass(frozen=True)
class Table:
    """Rows and their source; they are read when first used, and are in memory as a whole only where they are few."""

    source: datasets.Dataset | Callable[[], tuple[datasets.Dataset, dict[str, Any]]]
    name: str
    """The file, the pattern, or `data set (split)`, as messages name it."""
    digest: str
    """Changes when the content does."""

    @cached_property
    def _read(self) -> tuple[datasets.Dataset, dict[str, Any]]:
        return self.source() if callable(self.source) else (self.source, {})

    @property
    def rows(self) -> datasets.Dataset:
        """Raises UserError when they cannot be read."""
        return self._read[0]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def note(self) -> str:
        """How the file, or the first of several, was read, where a setting or its form decides that."""
        return str(self._read[1].get("note", ""))

    def where(self, row: int) -> str:
        """A row, from 0, as messages name it; of several files, its number in that file."""
        files = self._read[1].get("files") or [[0, self.name]]
        start, name = files[bisect.bisect_right(files, row, key=lambda file: file[0]) - 1]
        return f"{name}, row {row - start + 1}"

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[Any]:
        """All rows in their order, some at a time, as record batches or tables of pyarrow.

        They are read, not mapped: pages that were mapped and seen would count as this process's memory.
        """
        import pyarrow

        if not self.rows.cache_files:
            yield from self.rows.select_columns(columns or self.rows.column_names).with_format("arrow").iter(BATCH_ROWS)
        for file in self.rows.cache_files:
            with pyarrow.OSFile(file["filename"]) as stored, pyarrow.ipc.open_stream(stored) as stream:
                for batch in stream:
                    some = batch if columns is None else batch.select(columns)
                    yield from (some.slice(start, BATCH_ROWS) for start in range(0, len(some), BATCH_ROWS))

    def cells(
        self, columns: Sequence[str], rows: np.ndarray | None = None
    ) -> Iterator[tuple[np.ndarray, list[list[Any]]]]:
        """(numbers of rows, their values in each column), some rows at a time: of all, or of `rows`, which ascend.
        Raises UserError where there is no column of such a name."""
        for name in columns:
            if name not in self.rows.column_names:
                raise UserError(f"{self.name} has no column {name!r}: it has {listing(self.rows.column_names)}")
        start = 0
        for batch in self.batches(list(dict.fromkeys(columns))) if columns else ():
            numbers = np.arange(start, start := start + batch.num_rows)
            if rows is not None:
                selected = rows[slice(*np.searchsorted(rows, [numbers[0], start]))]
                if len(selected) < len(numbers):
                    batch, numbers = batch.take(selected - numbers[0]), selected
            if len(numbers):
                yield numbers, [batch.column(name).to_pylist() for name in columns]

    def which(self, what: str, setting: str, others: Sequence[str], more: str = "") -> UserError:
        """The error where it is unclear which column is meant."""
        remedy = f"Name one of {listing(others)} with --{setting}" if others else "There is no other than the text"
        return UserError(f"{self.name}: which column is the {what}? {remedy}{more}")


def read_tables(settings: TextSettings, labelled: bool = True) -> dict[str, Table]:
    """The splits that the settings name: `train` and perhaps `validation` and `test`; `labelled`: a column beside the
    texts is needed. Raises UserError."""
    name = settings.dataset_name
    if not name:
        files = {split: getattr(settings, f"{split}_file") for split in _SPLITS}
        for file in filter(None, files.values()):
            if labelled and Path(file).suffix == ".txt" and not settings.delimiter:
                raise UserError(
                    f"{file}: texts alone, without labels, are for `toolkit predict`: pass --delimiter where its lines "
                    "have several columns (and --column_names where the first line does not name them)"
                )
        return {split: read_file(file, settings) for split, file in files.items() if file}
    splits = read_demo(name) if name.startswith(demo.PREFIX) else read_hub(name, settings.dataset_config_name)
    tables = {
        split: next(splits[alias] for alias in aliases if alias in splits)
        for split, aliases in _SPLITS.items()
        if any(alias in splits for alias in aliases)
    }
    if "train" not in tables:
        raise UserError(f"--dataset_name {name} has no train split: it has {listing(splits)}")
    return tables


def read_file(name: str, settings: TextSettings) -> Table:
    """One file, or all that a pattern names, in the order of their names -> their rows. Raises UserError when one is
    missing or empty, and, when rows are first used, for what cannot be parsed."""
    paths = [Path(name)]
    if not paths[0].is_file() and any(mark in name for mark in "*?["):
        paths = [Path(file) for file in natsorted(glob.glob(name)) if Path(file).is_file()]  # noqa: PTH207
        if not paths:
            raise UserError(f"{name}: no file has such a name (looked in {Path.cwd()})")
    digests = [_digest_of(path) for path in paths]
    options = {"delimiter": settings.delimiter, "quoting": settings.quoting, "names": settings.column_names,
               "by": settings.sample_by}  # fmt: skip
    ways = [f"{name} {value}" for name, value in options.items() if value not in (None, "csv", "line")]
    digest = digests[0] if len(digests) == 1 else digest_of_text(" ".join(digests))
    digest = "-".join([digest, settings.encoding, *ways])
    return Table(partial(_load, paths, settings, name, digest), str(paths[0]) if len(paths) == 1 else name, digest)


def _digest_of(path: Path) -> str:
    if not path.is_file():
        what = "is a folder, not a file" if path.is_dir() else "does not exist"
        siblings = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UserError(f"{path} {what}{did_you_mean(path.name, siblings)} (looked in {Path.cwd()})")
    if path.stat().st_size == 0:
        raise UserError(f"{path} is empty")
    format_of(path)
    try:
        return cached_digest(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


def _load(paths: list[Path], settings: TextSettings, name: str, digest: str) -> tuple[datasets.Dataset, dict[str, Any]]:
    """Rows of small files in memory, of others in the cache, where every later pass and process finds them parsed."""
    import datasets
    import pyarrow

    packed = 10 if any(path.suffix in OPENERS or format_of(path) == ".parquet" for path in paths) else 1
    try:
        if packed * sum(path.stat().st_size for path in paths) <= IN_MEMORY_BYTES:
            about, sink = _write_rows(paths, settings, None)
            return datasets.Dataset(pyarrow.ipc.open_stream(sink.getvalue()).read_all()), about
        with cached_folder("rows", digest_of_text(f"{_LAYOUT} {digest}"), None, name) as (folder, draft):
            if draft:
                about, _ = _write_rows(paths, settings, draft / "rows.arrow")
                (draft / "read.json").write_text(json.dumps(about), encoding="utf-8")
        rows = datasets.Dataset.from_file(str(folder / "rows.arrow"))
        return rows, json.loads((folder / "read.json").read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name}: a field is nested deeper than a table can hold [{first_line(error)}]") from error


def _write_rows(paths: list[Path], settings: TextSettings, output: Path | None) -> tuple[dict[str, Any], Any]:
    """Writes all rows as one stream of Arrow, to memory without `output` -> (how they were read, and the first row of
    each file; the sink)."""
    import pyarrow

    schema = widest = None
    while schema is None or schema != widest:  # a second time, where a later row had another column or a wider type
        about: dict[str, Any] = {"note": "", "files": []}
        schema, rows = widest, 0
        writer: Any = None
        batches: list[pyarrow.RecordBatch] = []
        with pyarrow.OSFile(str(output), "wb") if output else pyarrow.BufferOutputStream() as sink:
            for path in paths:
                about["files"].append([rows, str(path)])
                note, parsed = read_batches(path, settings)
                about["note"] = about["note"] or note
                for batch in parsed:
                    widest = _widened(path, batch.schema, widest)
                    schema = schema or widest
                    writer = writer or pyarrow.ipc.new_stream(sink, schema)
                    if schema == widest:
                        batches.append(cast_batch(batch, schema))
                    if sum(part.nbytes for part in batches) >= _WRITTEN_BYTES:
                        _write(writer, batches)
                    rows += batch.num_rows
            _write(writer, batches)
            writer.close()
    return about, sink


def _write(writer: Any, batches: list[pyarrow.RecordBatch]) -> None:
    """Writes the batches as one, and empties the list."""
    import pyarrow

    if batches:
        writer.write_table(pyarrow.Table.from_batches(batches).combine_chunks())
        batches.clear()


def _widened(path: Path, schema: pyarrow.Schema, before: pyarrow.Schema | None) -> pyarrow.Schema:
    """The schema for the columns of these rows and of those before. Raises UserError where the files do not fit."""
    if before is None:
        return schema
    if not format_of(path).startswith(".json") and set(schema.names) != set(before.names):
        raise UserError(
            f"{path} has the columns {listing(schema.names)}, and the file before it {listing(before.names)}: make "
            "them alike, or name a pattern that leaves it out"
        )
    try:
        return wider(before, schema)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise UserError(f"{path}: its columns are of other types than those before it [{first_line(error)}]") from error


def cast_batch(batch: pyarrow.RecordBatch, schema: pyarrow.Schema) -> pyarrow.RecordBatch:
    import pyarrow

    if batch.schema == schema:
        return batch
    there = set(batch.schema.names)
    nulls = partial(pyarrow.nulls, batch.num_rows)
    columns = [batch[field.name].cast(field.type) if field.name in there else nulls(field.type) for field in schema]
    return pyarrow.RecordBatch.from_arrays(columns, schema=schema)


def read_demo(name: str) -> dict[str, Table]:
    """`demo:rotten-tomatoes` -> its splits, cleaned. Raises UserError when it is not installed."""
    path = demo.locate(name, demo.DATASETS)
    source = demo.demo_entry(name)
    content = digest_of_files(path, path.glob(source.files)) if source.files else digest_of_file(path)
    several = len(source.splits) > 1
    return {
        split: Table(
            partial(_load_demo, partial(read, path)),
            f"{name} ({split})" if several else name,
            "-".join([content, source.reading, *([split] if several else [])]),
        )
        for split, read in source.splits.items()
    }


def _load_demo(read: Callable[[], list[demo.Row]]) -> tuple[datasets.Dataset, dict[str, Any]]:
    import datasets

    rows = read()
    names = ("text", "label") if len(rows[0]) == 2 else ("text", "title", "label")
    return datasets.Dataset.from_dict(dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))), {}


def read_hub(name: str, config: str | None = None) -> dict[str, Table]:
    """A hub data set, or a folder `datasets` reads -> its splits by name. Raises UserError.

    A folder is identified by its content: `datasets` alone compares the times of its files, in its cache too.
    """
    import datasets

    folder, content, cache, most = Path(name), "", None, sys.maxsize
    if folder.is_dir():
        files = [path for path in folder.rglob("*") if path.is_file()]
        content, most = digest_of_files(folder, files), most_bytes(*files)
        cache = str(cache_folder() / "datasets" / content)
    else:
        reach(name, "dataset", Path(datasets.config.HF_DATASETS_CACHE) / name.replace("/", "___"))
    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity_error()
    try:
        with limit_memory(most) if folder.is_dir() else contextlib.nullcontext():
            if folder.is_dir():
                _refuse_addresses(folder)
                _refuse_data_outside(folder, datasets.load_dataset_builder(name, config, cache_dir=cache))
            splits = datasets.load_dataset(name, config, cache_dir=cache)
    except UserError:
        raise
    except Exception as error:
        if isinstance(error.__cause__ or error, MemoryError):
            raise too_large(folder, most) from error
        hint = "" if folder.exists() else "; without a network set HF_HUB_OFFLINE=1 and name a folder"
        raise UserError(f"--dataset_name {name}: {' '.join(str(error).split())[:300]}{hint}") from error
    digests = {split: f"{content}-{config}-{split}" if content else rows._fingerprint for split, rows in splits.items()}
    return {split: Table(rows, f"{name} ({split})", f"{digests[split]}-{len(rows)}") for split, rows in splits.items()}


def _refuse_addresses(folder: Path) -> None:
    """Raises UserError where the README of a folder names an address: to look for data would ask there."""
    from huggingface_hub import metadata_load

    readme, configs = folder / "README.md", folder / ".huggingface.yaml"
    text = str((metadata_load(readme) or {}).get("configs")) if readme.is_file() else ""
    text += configs.read_text(encoding="utf-8", errors="replace") if configs.is_file() else ""
    if address := re.search(r"[\w+]+://[^'\"\s]*", text):
        raise UserError(f"{folder} names {address[0][:200]}, outside it: put the file itself there")


def _refuse_data_outside(folder: Path, builder: Any) -> None:
    """Raises UserError where a file of the data is, by its name in the README or by a link, elsewhere."""
    for file in itertools.chain(*(builder.config.data_files or {}).values()):
        refuse_link_out(Path(str(file).rpartition("::")[2]), folder)  # zip://NAME::FILE


def columns_of(table: Table, column: str) -> list[str]:
    """`title,text` -> both, unless a column has that very name."""
    if column in table.rows.column_names:
        return [column]
    return [part for name in column.split(",") if (part := name.strip())]


def find_columns(table: Table, value: str | None, usual: tuple[str, ...], setting: str) -> tuple[str, ...]:
    """The columns that the value of a setting names, several as `a,b`; without a value, one with a usual name, or none.
    Raises UserError when one is missing."""
    columns = table.rows.column_names
    if value is None:
        lowered = {column.lower().strip(): column for column in reversed(columns)}
        return tuple(lowered[name] for name in usual if name in lowered)[:1]
    for name in (names := columns_of(table, value)):
        if name not in columns:
            raise UserError(
                f"{table.name} has no column {name!r}{did_you_mean(name, columns)}: it has "
                f"{listing(columns)}; name one with --{setting}"
            )
    return tuple(names)
