"""Files, hub data sets and demos -> tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit import demo
from toolkit.cache import cache_folder, digest_of_file, digest_of_files
from toolkit.config import TextSettings, named_in
from toolkit.data.parse import format_of, parse_file
from toolkit.errors import UserError, did_you_mean, first_line, listing
from toolkit.hub import reach

if TYPE_CHECKING:  # a process whose tokens are made already needs neither the library nor the rows
    import datasets

# split -> the names it goes by
_SPLITS = {"train": ("train",), "validation": ("validation", "valid", "dev"), "test": ("test",)}


@dataclass(frozen=True)
class Table:
    """Rows and where they are from; they are read when first asked for."""

    source: datasets.Dataset | Callable[[], tuple[datasets.Dataset, str]]
    name: str
    """The file, or `data set (split)`, as messages name it."""
    digest: str
    """Changes when the content does."""

    @cached_property
    def _read(self) -> tuple[datasets.Dataset, str]:
        return self.source() if callable(self.source) else (self.source, "")

    @property
    def rows(self) -> datasets.Dataset:
        """Raises UserError when they cannot be read."""
        return self._read[0]

    @property
    def said(self) -> str:
        """How the file was read, where that is worth a line."""
        return self._read[1]

    def column(self, name: str, what: str) -> list[Any]:
        """Its values as they are. Raises UserError where there is none of this name; `what` it would hold."""
        if name not in self.rows.column_names:
            raise UserError(f"{self.name} has no {what} column {name!r}: it has {listing(self.rows.column_names)}")
        return list(self.rows.with_format(None)[name][:])

    def which(self, what: str, setting: str, others: Sequence[str], more: str = "") -> UserError:
        """The error where a column cannot be told."""
        named = f"Name one of {listing(others)} with --{setting}" if others else "There is no other than the text"
        return UserError(f"{self.name}: which column is the {what}? {named}{more}")


def read_tables(settings: TextSettings) -> dict[str, Table]:
    """The splits that were named: `train` and perhaps `validation` and `test`. Raises UserError."""
    name = settings.dataset_name
    if not name:
        files = {split: getattr(settings, f"{split}_file") for split in _SPLITS}
        for file in filter(None, files.values()):
            if Path(file).suffix == ".txt" and not settings.delimiter:
                raise UserError(
                    f"{file}: texts alone, without labels, are for `toolkit predict`: pass --delimiter where its lines "
                    "have several columns (and --column_names where the first line does not name them)"
                )
        return {split: read_file(file, settings) for split, file in files.items() if file}
    found = read_demo(name) if name.startswith(demo.PREFIX) else read_hub(name, settings.dataset_config_name)
    tables = {
        split: next(found[alias] for alias in aliases if alias in found)
        for split, aliases in _SPLITS.items()
        if any(alias in found for alias in aliases)
    }
    if "train" not in tables:
        raise UserError(f"--dataset_name {name} has no train split: it has {listing(found)}")
    return tables


def read_file(name: str, settings: TextSettings) -> Table:
    """One file -> its rows. Raises UserError when it is missing or empty, and when its rows are asked
    for and cannot be parsed."""
    path = Path(name)
    if not path.is_file():
        what = "is a folder, not a file" if path.is_dir() else "does not exist"
        siblings = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UserError(f"{path} {what}{did_you_mean(path.name, siblings)} (looked in {Path.cwd()})")
    if path.stat().st_size == 0:
        raise UserError(f"{path} is empty")
    format_of(path)
    try:
        digest = digest_of_file(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    given = {"delimiter": settings.delimiter, "quoting": settings.quoting, "names": settings.column_names}
    ways = [f"{name} {value}" for name, value in given.items() if value not in (None, "csv")]
    return Table(partial(_load, path, settings), str(path), "-".join([digest, settings.encoding, *ways]))


def _load(path: Path, settings: TextSettings) -> tuple[datasets.Dataset, str]:
    import datasets

    table, said = parse_file(path, settings)
    try:
        return datasets.Dataset(table), said
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: a field is nested deeper than a table can hold [{first_line(error)}]") from error


def read_demo(name: str) -> dict[str, Table]:
    """`demo:rotten-tomatoes` -> its splits, cleaned. Raises UserError when it is not installed."""
    path = demo.locate(name, demo.DATASETS)
    source = demo.about(name)
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


def _load_demo(read: Callable[[], list[demo.Row]]) -> tuple[datasets.Dataset, str]:
    import datasets

    rows = read()
    names = ("text", "label") if len(rows[0]) == 2 else ("text", "title", "label")
    return datasets.Dataset.from_dict(dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))), ""


def read_hub(name: str, config: str | None = None) -> dict[str, Table]:
    """A hub data set, or a folder `datasets` reads -> its splits by name. Raises UserError.

    A folder is told by its content: `datasets` alone goes by the times of its files, in its cache too.
    """
    import datasets

    folder, content, kept = Path(name), "", None
    if folder.is_dir():
        content = digest_of_files(folder, folder.rglob("*"))
        kept = str(cache_folder() / "datasets" / content)
    else:
        reach(name, "dataset", Path(datasets.config.HF_DATASETS_CACHE) / name.replace("/", "___"))
    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity_error()
    try:
        splits = datasets.load_dataset(name, config, cache_dir=kept)
    except Exception as error:
        hint = "" if folder.exists() else "; without a network set HF_HUB_OFFLINE=1 and name a folder"
        raise UserError(f"--dataset_name {name}: {' '.join(str(error).split())[:300]}{hint}") from error
    digests = {split: f"{content}-{config}-{split}" if content else rows._fingerprint for split, rows in splits.items()}
    return {split: Table(rows, f"{name} ({split})", f"{digests[split]}-{len(rows)}") for split, rows in splits.items()}


def columns_of(table: Table, column: str) -> list[str]:
    """`title,text` -> both, unless a column has that very name."""
    if column in table.rows.column_names:
        return [column]
    return [part for name in column.split(",") if (part := name.strip())]


def find_columns(table: Table, wanted: str | None, usual: tuple[str, ...], setting: str) -> tuple[str, ...]:
    """The columns that were named, several as `a,b`, or one with a usual name, or none. Raises UserError when a named
    one is missing."""
    columns = table.rows.column_names
    if wanted is None:
        lowered = {column.lower().strip(): column for column in reversed(columns)}
        return tuple(lowered[name] for name in usual if name in lowered)[:1]
    for name in (found := columns_of(table, wanted)):
        if name not in columns:
            raise UserError(
                f"{table.name} has no column {name!r}{did_you_mean(name, columns)}: it has "
                f"{listing(columns)}; name one with --{setting}{named_in(setting)}"
            )
    return tuple(found)
