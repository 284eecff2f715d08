"""Files, hub data sets and demos -> tables."""

from __future__ import annotations

import glob
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from natsort import natsorted

from toolkit import demo
from toolkit.config import TextSettings
from toolkit.data import text_files
from toolkit.data.json_files import parse_json, read_json
from toolkit.data.table import BATCH_ROWS, FileRows, Table
from toolkit.errors import UserError, did_you_mean, first_line, listing
from toolkit.pretrained import check_reachable
from toolkit.utils.cache import cached_folder, digest_of_file, digest_of_files, digest_of_text
from toolkit.utils.files import cache_folder

if TYPE_CHECKING:  # a process whose tokens are cached does not import them
    import datasets
    import pyarrow

FORMATS = (".csv", ".tsv", ".json", ".jsonl", ".parquet", ".txt")
_LAYOUT = 4  # increase when the files in a cached folder of rows change
_OF_FILES = ("encoding", "delimiter", "quoting", "sample_by", "column_names")
IN_MEMORY_BYTES = 16 << 20
_WRITTEN_BYTES = 8 << 20
"""Rows are stored in batches of about this size: mapping the file costs 64 KB of memory for each."""
# split -> its names in data sets
_SPLITS = {"train": ("train",), "validation": ("validation", "valid", "dev"), "test": ("test",)}


def read_tables(settings: TextSettings, labelled: bool = True) -> dict[str, Table]:
    """The splits that the settings name: `train`, and `validation` and `test` if given. `labelled`: whether a label
    column is needed. Raises UserError."""
    name = settings.dataset_name
    if not name:
        files = {split: getattr(settings, f"{split}_file") for split in _SPLITS}
        for file in filter(None, files.values()):
            if labelled and Path(file).suffix == ".txt" and not settings.delimiter:
                raise UserError(
                    f"{file}: texts alone, without labels, are for `toolkit predict`: pass --delimiter where its lines "
                    "have several columns (and --column_names if the first line does not name them)"
                )
        return {split: read_file(file, settings) for split, file in files.items() if file}
    splits = (
        read_demo(name)
        if name.startswith(demo.PREFIX)
        else read_hub(name, settings.dataset_config_name)
    )
    tables = {
        split: next(splits[alias] for alias in aliases if alias in splits)
        for split, aliases in _SPLITS.items()
        if any(alias in splits for alias in aliases)
    }
    if "train" not in tables:
        raise UserError(f"--dataset_name {name} has no train split: it has {listing(splits)}")
    if others := splits.keys() - set(itertools.chain(*_SPLITS.values())):
        train = tables["train"]
        unread = [(0, train.name, f"its splits {listing(sorted(others))} are not used")]
        tables["train"] = replace(train, source=lambda: (train.rows, unread))
    for setting, value in _changed(
        settings, *_OF_FILES, *["validation_split"] * ("validation" in tables)
    ).items():
        why = "has a validation split" if setting == "validation_split" else "is not a text file"
        raise UserError(
            f"--{setting} {value} has no effect, since --dataset_name {name} {why}: leave it out"
        )
    return tables


def _changed(settings: TextSettings, *names: str) -> dict[str, Any]:
    """Those of these settings that do not have their default value."""
    return {
        name: value
        for name in names
        if (value := getattr(settings, name)) != getattr(TextSettings(), name)
    }


def read_file(name: str, settings: TextSettings) -> Table:
    """The table of a file, or of all files that match a pattern, in natural order. Raises UserError when one is missing
    or empty, and, when rows are first used, for what cannot be parsed."""
    paths = [Path(name)]
    if not paths[0].is_file() and any(mark in name for mark in "*?["):
        paths = [Path(file) for file in natsorted(sorted(glob.glob(name))) if Path(file).is_file()]  # noqa: PTH207
        if not paths:
            raise UserError(f"{name}: no file has such a name (looked in {Path.cwd()})")
    digests = [_digest_of(path) for path in paths]
    digest = digests[0] if len(digests) == 1 else digest_of_text(" ".join(digests))
    options = _changed(settings, "delimiter", "quoting", "column_names", "sample_by")
    digest = "-".join(
        [digest, settings.encoding, *(f"{option} {value}" for option, value in options.items())]
    )
    return Table(
        partial(_load, paths, settings, name, digest),
        str(paths[0]) if len(paths) == 1 else name,
        digest,
    )


def _digest_of(path: Path) -> str:
    if not path.is_file():
        if (
            path.exists() and not path.is_dir()
        ):  # `<(zcat reviews.csv.gz)`: each process reads the data, some twice
            raise UserError(f"{path} is a pipe or a device, not a file: write the data to a file")
        what = "is a folder, not a file" if path.is_dir() else "does not exist"
        siblings = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UserError(
            f"{path} {what}{did_you_mean(path.name, siblings)} (looked in {Path.cwd()})"
        )
    if path.stat().st_size == 0:
        raise UserError(f"{path} is empty")
    kind = format_of(path)
    try:  # with the format, as the same bytes are other rows in another
        return digest_of_file(path) + kind * (kind != ".csv")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


def _load(
    paths: list[Path], settings: TextSettings, name: str, digest: str
) -> tuple[datasets.Dataset, list[FileRows]]:
    """The rows, in memory for small files, else parsed once per machine into the cache; and their files."""
    import datasets
    import pyarrow

    growth = (
        10
        if any(path.suffix in text_files.OPENERS or format_of(path) == ".parquet" for path in paths)
        else 1
    )
    try:
        if growth * sum(path.stat().st_size for path in paths) <= IN_MEMORY_BYTES:
            files, sink = _write_rows(paths, settings, None)
            return datasets.Dataset(pyarrow.ipc.open_stream(sink.getvalue()).read_all()), files
        with cached_folder("rows", digest_of_text(f"{_LAYOUT} {digest}"), None, name) as (
            folder,
            draft,
        ):
            if draft:
                files, _ = _write_rows(paths, settings, draft / "rows.arrow")
                (draft / "read.json").write_text(json.dumps(files), encoding="utf-8")
        read = json.loads((folder / "read.json").read_text(encoding="utf-8"))
        # the same content may have lain elsewhere when it was read
        files = [
            (start, str(path), note) for (start, _, note), path in zip(read, paths, strict=True)
        ]
        return datasets.Dataset.from_file(str(folder / "rows.arrow")), files
    except (ValueError, RecursionError) as error:
        why = "a field is nested deeper than a table can hold, or of a type that it cannot"
        raise UserError(f"{name}: {why} [{first_line(error)}]: leave it out") from error


def _write_rows(
    paths: list[Path], settings: TextSettings, output: Path | None
) -> tuple[list[FileRows], Any]:
    """Writes all rows as one Arrow stream, to `output` or to memory -> (the files, the sink). Raises UserError when a
    file is invalid, has no rows or is in another encoding."""
    import pyarrow

    schema = widest = None
    while (
        schema is None or schema != widest
    ):  # a second pass, if a later row had another column or a wider type
        files: list[FileRows] = []
        schema, rows = widest, 0
        writer: Any = None
        pending: list[pyarrow.Table] = []
        with pyarrow.OSFile(str(output), "wb") if output else pyarrow.BufferOutputStream() as sink:
            for path in paths:
                first_row = rows
                try:
                    note, batches = _parse(path, settings)
                    files.append((first_row, str(path), note))
                    for batch in batches:
                        widest = _widen(path, batch.schema, widest)
                        schema = schema or widest
                        writer = writer or pyarrow.ipc.new_stream(sink, schema)
                        if schema == widest:
                            pending.append(text_files.cast_batch(batch, schema))
                        if sum(part.nbytes for part in pending) >= _WRITTEN_BYTES:
                            _write(writer, pending)
                        rows += batch.num_rows
                except UnicodeError as error:
                    raise UserError(text_files.encoding_fault(path, settings.encoding)) from error
                if rows == first_row:
                    raise UserError(
                        f"{path} has {'a header and ' * (format_of(path) in ('.csv', '.tsv'))}no rows"
                    )
            _write(writer, pending)
            writer.close()
    return files, sink


def _write(writer: Any, tables: list[pyarrow.Table]) -> None:
    """Writes the tables as one batch, and empties the list."""
    import pyarrow

    if tables:
        writer.write_table(pyarrow.concat_tables(tables).combine_chunks())
        tables.clear()


def _widen(path: Path, schema: pyarrow.Schema, before: pyarrow.Schema | None) -> pyarrow.Schema:
    """The schema of these rows and those before. Raises UserError if the files do not fit together."""
    if before is None:
        return schema
    if not format_of(path).startswith(".json") and set(schema.names) != set(before.names):
        raise UserError(
            f"{path} has the columns {listing(schema.names)}, and the file before it {listing(before.names)}: give "
            "both the same columns, or use a pattern that leaves it out"
        )
    if schema.metadata != before.metadata and _class_features(schema) != _class_features(before):
        raise UserError(
            f"{path}: its class names, or their order, are not those of the file before it: write names"
        )
    try:
        return text_files.unify_schemas(before, schema)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise UserError(
            f"{path}: its columns are of other types than those before it [{first_line(error)}]"
        ) from error


def _class_features(schema: pyarrow.Schema) -> dict[str, str]:
    """The columns of class ids whose names `datasets` has stored in a Parquet file."""
    import datasets

    features = {
        name: str(kind) for name, kind in datasets.Features.from_arrow_schema(schema).items()
    }
    return {name: kind for name, kind in features.items() if "ClassLabel" in kind}


def format_of(path: Path) -> str:
    """`reviews.csv.gz` -> `.csv`. Raises UserError for an ending without a reader."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in text_files.OPENERS:
        suffixes.pop()
    if not suffixes or suffixes[-1] not in FORMATS:
        excel = "save it as `CSV UTF-8` in Excel; else "
        remedy = {".xlsx": excel, ".xls": excel, ".zip": "unpack it; else "}.get(
            path.suffix.lower(), ""
        )
        raise UserError(
            f"{path}: its format is unclear: {remedy}name it {', '.join(FORMATS)} (also with .gz after it)"
        )
    return suffixes[-1]


def _parse(path: Path, settings: TextSettings) -> tuple[str, Iterable[pyarrow.RecordBatch]]:
    """(how the file is read, if a setting or its form decides that, and which settings are ignored; its rows, at
    most BATCH_ROWS at a time)."""
    kind = format_of(path)
    if kind == ".parquet":
        note, batches, ignored = "", _read_parquet(path), list(_OF_FILES)
    elif kind in (".json", ".jsonl"):
        (note, batches), ignored = (
            read_json(path, settings, kind),
            ["delimiter", "quoting", "sample_by"],
        )
    elif kind == ".txt" and not settings.delimiter:
        note = {"line": "one text per line", "paragraph": "texts between blank lines"}[
            settings.sample_by
        ]
        batches, ignored = text_files.read_plain(path, settings), ["column_names", "quoting"]
    else:
        names = [name for name in ("delimiter", "column_names") if getattr(settings, name)]
        options = [f"--{name} {getattr(settings, name)}" for name in names]
        options += ["--quoting none: double quotes are part of the texts"] * (
            settings.quoting == "none"
        )
        note = f"read with {', '.join(options)}" * bool(options)
        batches, ignored = text_files.read_csv(path, settings, kind), ["sample_by"]
    if unused := [f"--{name} {value}" for name, value in _changed(settings, *ignored).items()]:
        note += "; " * bool(note) + f"without {', '.join(unused)}, which is not for {kind}"
    return note, batches


def read_class_names(name: str) -> dict[str, str]:
    """A file of class names -> {value in the label column: class name}, in the order of the numbers.

    `["joy", "anger"]`; `{"0": "joy", "1": "anger"}` or the other way round; or rows with a number and a name, as
    `{"label": "100", "label_desc": "news_story"}`. Raises UserError for anything else.
    """
    rows = _read_entries(Path(name))
    if len(rows) == 1 and isinstance(rows[0], dict):
        pairs = list(rows[0].items())
    else:
        rows = [
            row if isinstance(row, dict | list) else [place, row] for place, row in enumerate(rows)
        ]
        pairs = [tuple(row.values()) if isinstance(row, dict) else tuple(row) for row in rows]
    names_of: dict[str, str] = {}
    for place, pair in enumerate(pairs, 1):
        numbers = [str(part) for part in pair if re.fullmatch(r"-?\d+", str(part))]
        names = [
            part.strip()
            for part in pair
            if isinstance(part, str) and part.strip() and part not in numbers
        ]
        if (
            len(numbers) != 1
            or len(names) != 1
            or numbers[0] in names_of
            or names[0] in names_of.values()
        ):
            raise UserError(
                f"--label_names_file {name}, entry {place}: {str(pair)[:60]} is not a number and a name, each given "
                'once: write ["joy", "anger"], {"0": "joy", "1": "anger"}, or a line {"id": 0, "name": "joy"} for each'
            )
        names_of[numbers[0]] = names[0]
    return dict(sorted(names_of.items(), key=lambda item: int(item[0])))


def _read_entries(path: Path) -> list[Any]:
    """The entries of a JSON or JSONL file, or the lines of a text. Raises UserError for other formats."""
    kind = format_of(path)
    if kind not in (
        ".json",
        ".jsonl",
        ".txt",
    ):  # its header, or its numbers, would be parts of names
        raise UserError(
            f"--label_names_file {path}: write the names as .json, .jsonl, or a line each in .txt"
        )
    try:
        if kind in (".json", ".jsonl"):
            return list(parse_json(path, kind, "utf-8"))
        with text_files.open_text(path, "utf-8") as text:
            return [line.strip() for line in text_files.split_lines(path, text) if line.strip()]
    except UnicodeError as error:  # --encoding is of the texts
        raise UserError(
            f"--label_names_file {path} is not UTF-8 [{error}]: save it as UTF-8"
        ) from error


def _read_parquet(path: Path) -> Iterator[pyarrow.RecordBatch]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            text_files.check_column_names(path, file.schema_arrow.names)
            yield from file.iter_batches(batch_size=BATCH_ROWS)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read as parquet: {first_line(error)}") from error


def read_demo(name: str) -> dict[str, Table]:
    """`demo:rotten-tomatoes` -> its rows, cleaned. Raises UserError when it is not installed."""
    path = demo.locate(name, demo.DATASETS)
    source = demo.demo_entry(name)
    content = (
        digest_of_files(path, path.glob(source.files)) if source.files else digest_of_file(path)
    )
    return {"train": Table(partial(_load_demo, source, path), name, content)}


def _load_demo(source: demo.Demo, path: Path) -> tuple[datasets.Dataset, list[FileRows]]:
    import datasets

    rows = source.read(path)
    names = ("text", "label") if len(rows[0]) == 2 else ("text", "title", "label")
    return datasets.Dataset.from_dict(
        dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
    ), []


def read_hub(name: str, config: str | None = None) -> dict[str, Table]:
    """The splits of a hub data set or of a folder. A folder's cache is named by its content: `datasets` alone compares
    only the times of files. Raises UserError."""
    import datasets

    folder, content, cache = Path(name), "", None
    if folder.is_dir():
        files = [path for path in folder.rglob("*") if path.is_file()]
        content = digest_of_files(folder, files)
        cache = str(cache_folder() / "datasets" / content)
    else:
        check_reachable(
            name, "dataset", Path(datasets.config.HF_DATASETS_CACHE) / name.replace("/", "___")
        )
    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity_error()
    try:
        if folder.is_dir():
            _refuse_addresses(folder)
        splits = datasets.load_dataset(name, config, cache_dir=cache)
    except UserError:
        raise
    except Exception as error:
        hint = (
            "" if folder.exists() else "; without a network set HF_HUB_OFFLINE=1 and name a folder"
        )
        raise UserError(
            f"--dataset_name {name}: {' '.join(str(error).split())[:300]}{hint}"
        ) from error
    digests = {
        split: f"{content}-{config}-{split}" if content else rows._fingerprint
        for split, rows in splits.items()
    }
    return {
        split: Table(rows, f"{name} ({split})", f"{digests[split]}-{len(rows)}")
        for split, rows in splits.items()
    }


def _refuse_addresses(folder: Path) -> None:
    """Raises UserError if the README of a folder names a URL, which `datasets` would fetch."""
    from huggingface_hub import metadata_load

    readme, configs = folder / "README.md", folder / ".huggingface.yaml"
    text = str((metadata_load(readme) or {}).get("configs")) if readme.is_file() else ""
    text += configs.read_text(encoding="utf-8", errors="replace") if configs.is_file() else ""
    if address := re.search(r"[\w+]+://[^'\"\s]*", text):
        raise UserError(f"{folder} names {address[0][:200]}, outside it: put the file itself there")
