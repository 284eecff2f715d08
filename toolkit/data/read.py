"""Files, hub data sets and demos -> tables.

A file is parsed when its rows are first used, in blocks, into one Arrow file of the cache: a run
whose tokens are cached reads no rows, and no file has to fit into memory (but one of `.json`)."""

from __future__ import annotations

import bisect
import glob
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from natsort import natsorted

from toolkit import demo
from toolkit.config import TextSettings
from toolkit.data import text_files
from toolkit.data.table import Rows, Table
from toolkit.data.text_files import format_of
from toolkit.errors import UserError, did_you_mean, first_line, listing
from toolkit.pretrained import use_cache_if_unreachable
from toolkit.utils.cache import (
    cached_folder,
    digest_of_file,
    digest_of_files,
    digest_of_text,
)
from toolkit.utils.files import cache_folder

if TYPE_CHECKING:  # a process whose tokens are cached does not import it
    import pyarrow

_LAYOUT = 9  # increase when the files in a cached folder of rows change
_BATCH_BLOCKS = 4
"""Blocks of rows that are one batch in the cache."""
_FILE_SETTINGS = ("encoding", "encoding_errors", "delimiter", "quoting", "sample_by",
                  "column_names")  # fmt: skip
_SPLIT_NAMES = {
    "train": ("train",),
    "validation": ("validation", "valid", "dev"),
    "test": ("test",),
}
_LISTS = {"data", *itertools.chain(*_SPLIT_NAMES.values())}
"""The names of a list of rows in an object of JSON."""
_BY_CLASS = "for a folder of texts for each class pass --train_file "


def read_tables(settings: TextSettings) -> dict[str, Table]:
    """The splits that the settings name: `train`, and `validation` and `test` if given. Raises
    UserError."""
    if settings.dataset_name:
        return _splits_of_dataset(settings.dataset_name, settings)
    files = {split: getattr(settings, f"{split}_file") for split in _SPLIT_NAMES}
    return {split: read_file(file, settings) for split, file in files.items() if file}


def _splits_of_dataset(name: str, settings: TextSettings) -> dict[str, Table]:
    """The splits of `--dataset_name`. Raises UserError if there is none to train on, and for
    settings that have no effect on it."""
    is_demo = name.startswith(demo.PREFIX)
    splits = read_demo(name) if is_demo else read_hub(name, settings.dataset_config_name)
    tables: dict[str, Table] = {}
    for split, aliases in _SPLIT_NAMES.items():
        for alias in aliases:
            if alias in splits:
                tables.setdefault(split, splits[alias])
    if "train" not in tables:
        raise UserError(
            f"--dataset_name {name} has no train split: it has {listing(splits)}"
        )
    unused = list(_FILE_SETTINGS)
    if "validation" in tables:
        unused.append("validation_split")
    for setting in unused:
        value = getattr(settings, setting)
        if value != getattr(TextSettings(), setting):
            raise UserError(
                f"--{setting} {value} has no effect on --dataset_name: leave it out"
            )
    return tables


# --- files


def read_file(name: str, settings: TextSettings) -> Table:
    """The table of a file, of a folder with a folder of texts for each class, or of all files that
    match a pattern. Raises UserError when one is missing or empty, and, when rows are first used,
    for what cannot be parsed."""
    paths = files_of(name)
    contents = [f"{_digest_of(path)}{format_of(path)}" for path in paths]
    values = [str(getattr(settings, setting)) for setting in _FILE_SETTINGS]
    digest = digest_of_text(" ".join([f"{_LAYOUT}", *contents, *values]))
    return Table(cache(partial(_load, paths, settings, name, digest)), name, digest)


def replacement_notes(table: Table, settings: TextSettings) -> Iterator[str]:
    """A line on the rows in which `--encoding_errors replace` has replaced bytes."""
    if settings.encoding_errors == "strict":
        return
    rows: list[int] = []
    for numbers, columns in table.cells(table.rows.column_names):
        replaced = ["\ufffd" in str(cells) for cells in zip(*columns, strict=True)]
        rows += numbers[replaced].tolist()
    if rows:
        fault = f"have bytes that are not {settings.encoding}, read as U+FFFD"
        yield f"{len(rows)} of {len(table)} rows {fault} (rows {table.listing(rows)})"


def files_of(name: str) -> list[Path]:
    """The path, or all files that match a pattern, in natural order. Raises UserError for none."""
    path = Path(name)
    if path.is_file() or not any(mark in name for mark in "*?["):
        return [path]
    matches = map(Path, natsorted(sorted(glob.glob(name))))  # noqa: PTH207
    paths = [path for path in matches if path.is_file()]
    if not paths:
        raise UserError(f"{name}: no file has such a name (looked in {Path.cwd()})")
    return paths


def form_of(path: Path, settings: TextSettings) -> str:
    """How a file is read: `.csv` (cells with any delimiter), `.json`, `.parquet`, `fasttext`,
    `conll`, `.txt` (texts); empty for a folder."""
    kind = format_of(path)
    if kind in ("", ".parquet"):
        return kind
    if kind.startswith(".json"):
        return ".json"
    if kind in text_files.CONLL:
        return "conll"
    is_plain = kind in (".txt", ".tsv") and settings.delimiter is None
    if is_plain and text_files.is_conll(text_files.first_lines(path, settings)):
        return "conll"
    if text_files.delimiter_of(path, settings):
        return ".csv"
    lines = text_files.first_lines(path, settings, 3)
    if text_files.is_json(lines):
        return ".json"
    return "fasttext" if text_files.is_fasttext(lines) else ".txt"


def _digest_of(path: Path) -> str:
    """The digest of a file's content. Raises UserError for a missing file."""
    if path.is_dir():
        return digest_of_files(path, text_files.files_by_class(path))
    if not path.is_file():
        siblings = [file.name for file in path.parent.glob("*")]
        hint = did_you_mean(path.name, siblings, 0.85)
        raise UserError(f"{path} does not exist{hint} (looked in {Path.cwd()})")
    return digest_of_file(path)


def _load(paths: list[Path], settings: TextSettings, name: str, digest: str) -> Rows:
    """The rows, parsed once per machine into the cache."""
    import datasets

    with cached_folder("rows", digest, None, name) as (folder, draft):
        if draft:
            starts = _write(paths, settings, draft / "rows.arrow")
            (draft / "starts.json").write_text(json.dumps(starts), encoding="utf-8")
    starts = json.loads((folder / "starts.json").read_text(encoding="utf-8"))
    rows = datasets.Dataset.from_file(str(folder / "rows.arrow"))
    files = list(zip(starts, map(str, paths), strict=True))
    form = form_of(paths[0], settings)
    advice = ""
    if form in (".csv", ".txt"):
        advice = text_files.advice(paths[0], settings)
    if form == ".csv" and not settings.header:
        advice = advice or "if the first line is a row, pass --column_names"
    if form == ".txt" and paths[0].parent != paths[-1].parent:
        advice = f"{_BY_CLASS}{paths[0].parent.parent}"
    return Rows(rows, files, advice)


def _write(paths: list[Path], settings: TextSettings, target: Path) -> list[int]:
    """Writes all rows as one Arrow stream, and returns the first row of each file. Raises UserError
    for invalid files."""
    import pyarrow

    schema: Any = None
    forms = {path: form_of(path, settings) for path in paths}
    for path, form in forms.items():
        schema = _unify(path, form, schema, _schema(path, form, settings))
    starts = []
    rows = 0
    with (
        pyarrow.OSFile(str(target), "wb") as file,
        pyarrow.ipc.new_stream(file, schema) as writer,
    ):
        for path, form in forms.items():
            starts.append(rows)
            batches = _blocks(path, form, settings)
            for blocks in text_files.in_blocks(batches, _BATCH_BLOCKS):
                tables = [pyarrow.Table.from_batches([block]) for block in blocks]
                # the empty one: columns that these rows lack, in the order of the schema
                tables.insert(0, schema.empty_table())
                table = pyarrow.concat_tables(tables, promote_options="permissive")
                writer.write_table(table.combine_chunks())
                rows += len(table)
    return starts


def _schema(path: Path, form: str, settings: TextSettings) -> pyarrow.Schema:
    """The columns of a file and their types, which may widen where rows are objects."""
    schema: Any = None
    for block in _blocks(path, form, settings):
        schema = _unify(path, form, schema, block.schema)
        if form in _BLOCKS:
            break
    if schema is None:
        raise UserError(f"{path} has no rows")
    return schema


def _unify(path: Path, form: str, before: Any, schema: pyarrow.Schema) -> pyarrow.Schema:
    """The columns of both, of types that hold both. Raises UserError if there is none."""
    import pyarrow

    if before is None:
        return schema
    same_names = set(schema.names) == set(before.names)
    if not same_names and form != ".json":
        raise UserError(
            f"{path} has the columns {listing(schema.names)}, and the file before it "
            f"{listing(before.names)}: give both the same columns, or use a pattern without it"
        )
    try:
        return pyarrow.unify_schemas([before, schema], promote_options="permissive")
    except (pyarrow.ArrowException, TypeError) as error:
        why = (
            f"a column's values are of another type than those before [{first_line(error)}]"
        )
        raise UserError(f"{path}: {why}: make them all numbers, or all strings") from error


def _blocks(path: Path, form: str, settings: TextSettings) -> Iterator[pyarrow.RecordBatch]:
    """The rows of a file, in batches of at most BLOCK_ROWS. Raises UserError naming what cannot be
    parsed."""
    import pyarrow

    try:
        if form in _ROWS:
            yield from _batches(_ROWS[form](path, settings), path)
        else:
            yield from _BLOCKS[form](path, settings)
    except UnicodeError as error:
        raise UserError(text_files.encoding_fault(path, settings.encoding)) from error
    except (pyarrow.ArrowException, OSError, EOFError, zlib.error) as error:
        kind = format_of(path)
        raise UserError(f"{path} cannot be read as {kind}: {first_line(error)}") from error


def _read_parquet(path: Path, settings: TextSettings) -> Iterator[pyarrow.RecordBatch]:
    """The rows of a Parquet file."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        text_files.check_columns(path, file.schema_arrow.names)
        schema = file.schema_arrow
        # older Spark, Hive and Impala: text without a type
        for place, field in enumerate(schema):
            if pyarrow.types.is_binary(field.type):
                schema = schema.set(place, field.with_type(pyarrow.string()))
        for batch in file.iter_batches(batch_size=text_files.BLOCK_ROWS):
            yield batch.cast(schema)


def _batches(values: Iterable[Any], path: Path) -> Iterator[pyarrow.RecordBatch]:
    """Objects as rows; each batch has the columns and types of its own rows."""
    import pyarrow

    first_row = 1
    for rows in text_files.in_blocks(values):
        for number, row in enumerate(rows, first_row):
            if not isinstance(row, dict) or not row:
                fault = f"{str(row)[:40]!r} is no object with named fields"
                raise UserError(f"{path}, row {number}: {fault}")
        names = list(dict.fromkeys(name for row in rows for name in row))
        arrays = []
        for name in names:
            values = [_as_arrow(row.get(name)) for row in rows]
            arrays.append(_array(values, path, first_row, name))
        yield pyarrow.record_batch(arrays, names)
        first_row += len(rows)


def _as_arrow(cell: Any) -> Any:
    """Lists of numbers and texts, as `[[0, 2, "PER"]]`, become texts: Arrow has no such lists."""
    if not isinstance(cell, list):
        return cell
    items = []
    for item in cell:
        if isinstance(item, list) and {str, int}.issubset(map(type, item)):
            item = list(map(str, item))
        items.append(item)
    return items


def parse_json(path: Path, settings: TextSettings) -> Iterator[Any]:
    """The values of a file of JSON lines; or the items of a list, or of the only list of rows in an
    object, as `{"data": [items]}`. Raises UserError."""
    starts = [line.lstrip()[0] for line in text_files.first_lines(path, settings, 2)]
    is_lines = starts in (["{", "{"], ["[", "["])
    if is_lines or (format_of(path) == ".jsonl" and starts[:1] != ["["]):
        yield from _json_lines(path, settings)
        return
    with text_files.open_text(path, settings) as text:
        content = text.read()
    try:
        loaded = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error})") from error
    yield from _rows_in(path, loaded) if isinstance(loaded, dict) else loaded


def _rows_in(path: Path, loaded: dict[str, Any]) -> list[Any]:
    """The list of rows in an object, or the object as a row. Raises UserError for several lists,
    and for an object of columns."""
    lists = []
    for name, value in loaded.items():
        if isinstance(value, list) and all(isinstance(row, dict) for row in value):
            lists.append(name)
    if len(lists) == 1 and (len(loaded) == 1 or lists[0] in _LISTS):
        return list(loaded[lists[0]])
    if any(isinstance(value, dict | list) for value in loaded.values()):
        raise UserError(
            f"{path} is one object, of {listing(loaded)}: write a file for each list of rows, "
            '[{"text": "a"}, ...], as pandas does with to_json(orient="records")'
        )
    return [loaded]


def _json_lines(path: Path, settings: TextSettings) -> Iterator[Any]:
    """A value for each line that is not blank."""
    with text_files.open_text(path, settings) as text:
        for number, line in enumerate(text, 1):
            if line.strip():
                try:
                    yield json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise UserError(f"{path}, line {number}: not JSON ({error})") from error


def _array(values: list[Any], path: Path, first_row: int, name: str) -> pyarrow.Array:
    """The values of a column. Raises UserError naming the first whose type is not that of those
    before it."""
    import pyarrow

    def fails(count: int) -> bool:
        try:
            pyarrow.array(values[:count])
        except (pyarrow.ArrowException, ValueError, TypeError, OverflowError):
            return True
        return False

    if not fails(len(values)):
        return pyarrow.array(values)
    places = range(len(values))
    place = bisect.bisect_left(places, True, key=lambda place: fails(place + 1))
    fault = f"field {name!r} is {str(values[place])[:40]!r}, unlike the rows before it, or no text"
    remedy = "make them all numbers, or all strings, or leave the field out"
    raise UserError(f"{path}, row {first_row + place}: {fault}: {remedy}")


_ROWS: dict[str, Callable[[Path, TextSettings], Iterator[Any]]] = {
    "": text_files.rows_by_class,
    ".json": parse_json,
    "fasttext": text_files.fasttext_rows,
    "conll": text_files.conll_rows,
}
_BLOCKS: dict[str, Callable[[Path, TextSettings], Iterator[Any]]] = {
    ".csv": text_files.read_csv,
    ".parquet": _read_parquet,
    ".txt": text_files.read_plain,
}


# --- demos, the hub, folders


def read_demo(name: str) -> dict[str, Table]:
    """`demo:rotten-tomatoes` -> its rows, cleaned. Raises UserError when it is not installed."""
    path = demo.locate(name, demo.DATASETS)
    source = demo.demo_entry(name)
    files = path.glob(source.files) if source.files else [path]
    # several are rows of one file
    digest = digest_of_text(f"{name} {digest_of_files(path, files)}")
    return {"train": Table(cache(partial(_load_demo, source, path)), name, digest)}


def _load_demo(source: demo.Demo, path: Path) -> Rows:
    import datasets

    rows = source.read(path)
    columns = map(list, zip(*rows, strict=True))
    return Rows(datasets.Dataset.from_dict(dict(zip(source.columns, columns, strict=True))))


def read_hub(name: str, config: str | None = None) -> dict[str, Table]:
    """The splits of a hub data set or of a folder, whose cache is named by its content: `datasets`
    alone compares only the times of files. Raises UserError."""
    import datasets

    folder = Path(name)
    content = ""
    cache = None
    if folder.is_dir():
        _refuse_addresses(folder)
        content = digest_of_files(folder, folder.rglob("*"))
        cache = str(cache_folder() / "datasets" / content)
    else:
        cached = Path(datasets.config.HF_DATASETS_CACHE) / name.replace("/", "___")
        use_cache_if_unreachable(name, "dataset", cached)
    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity_error()
    try:
        splits = datasets.load_dataset(name, config, cache_dir=cache)
    except Exception as error:
        hint = ""
        if not folder.exists():
            hint = "; without a network set HF_HUB_OFFLINE=1 and name a folder"
        raise UserError(f"--dataset_name {name}: {first_line(error)}{hint}") from error
    advice = ""
    for path in (folder, folder / "train"):
        if any(path.glob("*/*.txt")):
            advice = f"{_BY_CLASS}{path}"
    tables = {}
    for split, rows in splits.items():
        digest = f"{content}-{config}-{split}" if content else rows._fingerprint
        loaded = partial(Rows, rows, advice=advice)
        tables[split] = Table(loaded, f"{name} ({split})", f"{digest}-{len(rows)}")
    return tables


def _refuse_addresses(folder: Path) -> None:
    """Raises UserError if the README of a folder names an address, which `datasets` would fetch."""
    from huggingface_hub import metadata_load

    readme = folder / "README.md"
    if not readme.is_file():
        return
    text = str((metadata_load(readme) or {}).get("configs"))
    address = re.search(r"[\w+]+://[^'\"\s]*", text)
    if address:
        raise UserError(
            f"{folder} names {address[0][:200]}, outside it: put the file itself there"
        )
