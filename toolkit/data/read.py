"""Files and hub data sets -> tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.cache import digest_of_file
from toolkit.data.parse import format_of, parse_file
from toolkit.errors import UserError, did_you_mean, listing

if TYPE_CHECKING:  # a process whose tokens are made already needs neither the library nor the rows
    import datasets


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
    format_of(path)
    return Table(partial(_load, path, encoding), str(path), f"{digest_of_file(path)}-{encoding}")


def _load(path: Path, encoding: str) -> datasets.Dataset:
    import datasets

    return datasets.Dataset(parse_file(path, encoding))


def read_hub(name: str, config: str | None = None) -> dict[str, Table]:
    """A hub data set, or a folder `datasets` reads -> its splits by name. Raises UserError."""
    import datasets

    with _quiet():
        try:
            splits = datasets.load_dataset(name, config)
        except Exception as error:
            hint = "" if Path(name).exists() else "; without a network set HF_HUB_OFFLINE=1 and name a folder"
            raise UserError(f"--dataset_name {name}: {' '.join(str(error).split())[:300]}{hint}") from error
    return {
        split: Table(rows, f"{name} ({split})", f"{rows._fingerprint}-{len(rows)}") for split, rows in splits.items()
    }


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
