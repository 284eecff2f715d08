"""Files and hub data sets -> tables, with errors that name the file and the row."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import IO, TYPE_CHECKING

import xxhash

from toolkit.errors import UserError, did_you_mean, listing

if TYPE_CHECKING:  # a process whose tokens are made already needs neither the library nor the rows
    import datasets

# extension -> (datasets' builder, its options)
_FORMATS: dict[str, tuple[str, dict[str, object]]] = {
    ".csv": ("csv", {"sep": ","}),
    ".tsv": ("csv", {"sep": "\t"}),
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".parquet": ("parquet", {}),
}
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Table:
    """Rows and where they are from; they are read when first asked for."""

    source: datasets.Dataset | Callable[[], datasets.Dataset]
    name: str
    """The file, or `data set (split)`, as messages name it."""
    digest: str
    """Changes when the content does."""

    @cached_property
    def rows(self) -> datasets.Dataset:
        """Raises UserError when they cannot be read."""
        return self.source() if callable(self.source) else self.source


def format_of(path: Path) -> str:
    """`reviews.csv.gz` -> `.csv`. Raises UserError for an ending no reader knows."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    if not suffixes or suffixes[-1] not in _FORMATS:
        raise UserError(f"{path}: cannot tell its format: name it {', '.join(_FORMATS)} (or with .gz behind)")
    return suffixes[-1]


def read_file(name: str, encoding: str = "utf-8") -> Table:
    """One file -> its rows. Raises UserError when it is missing or empty, and when its rows are asked
    for and cannot be parsed."""
    path = Path(name)
    if not path.is_file():
        what = "is a folder, not a file" if path.is_dir() else "does not exist"
        siblings = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UserError(f"{path} {what}{did_you_mean(path.name, siblings)} (looked in {Path.cwd()})")
    if path.stat().st_size == 0:
        raise UserError(f"{path} is empty")
    builder, options = _FORMATS[format_of(path)]
    if builder == "csv":
        # `null`, `NA` and an empty cell are what they say, not missing numbers
        options = {**options, "keep_default_na": False, "encoding": encoding}
    elif builder == "json":
        options = {**options, "encoding": encoding}
    load = partial(_load, path, builder, options, encoding)
    return Table(load, str(path), f"{digest_of_file(path)}-{encoding}")


def _load(path: Path, builder: str, options: dict[str, object], encoding: str) -> datasets.Dataset:
    import datasets

    with _quiet(), _explained(path, encoding):
        rows = datasets.load_dataset(builder, data_files=str(path.resolve()), split="train", **options)
    if len(rows) == 0:
        raise UserError(f"{path} has a header and no rows")
    return rows


def read_hub(name: str, config: str | None = None) -> dict[str, Table]:
    """A hub data set, or a folder `datasets` reads -> its splits by name. Raises UserError."""
    import datasets

    with _quiet():
        try:
            splits = datasets.load_dataset(name, config)
        except Exception as error:
            hint = "; without a network set HF_HUB_OFFLINE=1 and name a folder" if not Path(name).exists() else ""
            raise UserError(f"--dataset_name {name}: {_last_line(error)}{hint}") from error
    return {
        split: Table(rows, f"{name} ({split})", f"{rows._fingerprint}-{len(rows)}") for split, rows in splits.items()
    }


def digest_of_file(path: Path) -> str:
    """xxh3 of the file's bytes: the same content is the same file, wherever it lies."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def _quiet() -> Iterator[None]:
    import datasets

    was_on = datasets.utils.logging.is_progress_bar_enabled()
    level = datasets.utils.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity_error()
    try:
        yield
    finally:
        datasets.utils.logging.set_verbosity(level)
        if was_on:
            datasets.enable_progress_bars()


@contextmanager
def _explained(path: Path, encoding: str) -> Iterator[None]:
    """Turns a reader's error into one line that names the file and, where it can be found, the row."""
    try:
        yield
    except Exception as error:
        chain = list(_causes(error))
        if any(isinstance(cause, LookupError) and "encoding" in str(cause) for cause in chain):
            raise UserError(f"--encoding {encoding}: Python knows no such encoding") from error
        if any(isinstance(cause, UnicodeError) for cause in chain) or "UTF" in _last_line(chain[-1]):
            raise UserError(_bad_encoding(path, encoding)) from error
        if any("corresponds to no data" in str(cause) for cause in chain):
            raise UserError(f"{path} has a header and no rows") from error
        if any(type(cause).__name__ == "EmptyDataError" for cause in chain):
            raise UserError(f"{path} holds no columns") from error
        raise UserError(f"{path} cannot be read as {format_of(path)[1:]}: {_last_line(chain[-1])}") from error


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return re.sub(r"\s+", " ", lines[0]) if lines else type(error).__name__


def _bad_encoding(path: Path, encoding: str) -> str:
    """Names the first line that does not decode and an encoding that would."""
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode(encoding)
            except UnicodeDecodeError as error:
                byte = f"byte 0x{line[error.start]:02x}"
                fits = [name for name in ("gb18030", "big5", "utf-16") if _decodes(path, name)]
                mend = f"pass --encoding {fits[0]}" if fits else "convert it, or pass its --encoding"
                return f"{path}, line {number}: not {encoding} ({byte}): {mend}"
    return f"{path} is not {encoding}: pass its --encoding"


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def _decodes(path: Path, encoding: str) -> bool:
    with _open(path) as file:
        try:
            file.read(_CHUNK_BYTES).decode(encoding)
        except UnicodeDecodeError as error:
            return error.end >= _CHUNK_BYTES - 4  # a character cut by the sample's end
    return True


def find_column(table: Table, wanted: str | None, usual: tuple[str, ...], setting: str) -> str | None:
    """The named column, or one with a usual name. Raises UserError when a named one is missing."""
    columns = table.rows.column_names
    if wanted is not None:
        if wanted not in columns:
            raise UserError(
                f"{table.name} has no column {wanted!r}{did_you_mean(wanted, columns)}: it has "
                f"{listing(columns)}; name one with --{setting}"
            )
        return wanted
    lowered = {column.lower().strip(): column for column in reversed(columns)}
    return next((lowered[name] for name in usual if name in lowered), None)
