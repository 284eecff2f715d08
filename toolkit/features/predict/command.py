"""`toolkit predict MODEL FILE`, or `--text`: predictions for rows, each exactly once.

a window of rows -> tokens -> outputs -> answers -> a part on the disk
all parts, joined with the rows of the file -> the output
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from accelerate.utils import broadcast_object_list

from toolkit import api
from toolkit.data.read import format_of
from toolkit.data.table import Table
from toolkit.data.text_files import DELIMITERS, has_utf8_mark
from toolkit.data.tokens import Split
from toolkit.data.write import output_format, write_rows
from toolkit.errors import UserError, listing
from toolkit.evaluation.answers import DECISIONS
from toolkit.features.predict.columns import columns_of, new_columns
from toolkit.features.predict.job import Job, empty_rows, sibling
from toolkit.features.predict.parts import Parts
from toolkit.utils.files import replace_file

WINDOW_ROWS = 65536
WINDOW_BYTES = 64 << 20
"""A window ends at either limit: enough texts to sort by length, and little work to repeat after a
kill."""
_Item = TypeVar("_Item")


def predict_file(options: Any) -> None:
    """Writes the rows of `options.file` with predictions, or prints predictions for `options.text`;
    a collective.

    A classifier adds a prediction and probabilities, an encoder-decoder a title. `options` holds
    the arguments of `toolkit predict`. Raises UserError for a model or file that cannot be read, an
    output that exists, or a column of the file that would be overwritten."""
    if bool(options.file) == bool(options.text):
        raise UserError("toolkit predict needs a FILE or --text, one of them")
    if options.text:
        _print_answers(options)
    else:
        _predict_rows(options)


def _predict_rows(options: Any) -> None:
    output = _choose_output(options)
    job = Job(options)
    names = new_columns(job.table, job.saved.answers, options.probabilities == "all")
    parts = Parts(output, {**job.facts, "probabilities": options.probabilities})
    finished: dict[str, int] = {}
    if job.accelerator.is_main_process:
        finished = parts.open(options.overwrite)
    finished = broadcast_object_list([finished])[0]
    columns = f"{' and '.join(job.columns)} of the columns {listing(job.table.rows.column_names)}"
    job.log(f"reading {columns}, at most {job.max_length} tokens of each text")
    remaining = len(job.table) - sum(finished.values())
    job.log(f"{remaining} of {len(job.table)} rows remain; finished parts are in {parts.folder}")
    if remaining:
        job.load_model()
        _compute(job, parts, finished, names)
    if options.shard:
        then = "when all shards are, the same command without --shard joins them"
        job.log(f"shard {options.shard[0]}/{options.shard[1]} is done; {then}")
    elif job.accelerator.is_main_process:
        _join(job, parts)


def _print_answers(options: Any) -> None:
    if options.output or options.shard:
        raise UserError("--output and --shard have no effect with --text: give a FILE")
    answers = api.predict(
        options.model,
        options.text,
        per_device_batch_size=options.per_device_batch_size,
        max_tokens=options.max_tokens_per_batch,
        max_length=options.max_length,
        mixed_precision=options.mixed_precision,
    )
    for text, answer in zip(options.text, answers, strict=False):  # the main process has them
        print(json.dumps({"text": text, **answer}, ensure_ascii=False))


def _choose_output(options: Any) -> Path:
    """The file to write. Raises UserError for one that exists, or cannot be named."""
    source = Path(options.file)
    if options.output:
        output = Path(options.output)
    elif set("*?[") & set(source.name):
        raise UserError(f"{source}: name the output file with --output")
    else:
        output = sibling(source, f".predictions{format_of(source).replace('.txt', '.csv')}")
    output_format(output)
    if output.exists() and not options.overwrite:
        raise UserError(f"{output} exists: name another with --output, or pass --overwrite")
    return output


# --- windows of rows


@dataclass(frozen=True)
class Window:
    """Rows that are tokenized, computed and written at a time."""

    start: int
    """The first row, from 0."""
    rows: Any
    """A pyarrow table."""

    @property
    def part(self) -> str:
        """The name of the file with its predictions."""
        return f"part-{self.start:010d}-{self.start + len(self.rows):010d}.parquet"


def windows_of(table: Table) -> Iterator[Window]:
    """All rows; the limits of the windows depend on the file alone."""
    import pyarrow

    start = 0
    batches = []
    for batch in map(pyarrow.table, table.batches()):
        batches.append(batch)
        rows = sum(map(len, batches))
        if rows >= WINDOW_ROWS or sum(batch.nbytes for batch in batches) >= WINDOW_BYTES:
            yield Window(start, pyarrow.concat_tables(batches))
            start += rows
            batches = []
    if batches:
        yield Window(start, pyarrow.concat_tables(batches))


# --- computing


def _compute(job: Job, parts: Parts, finished: dict[str, int], names: list[str]) -> None:
    """Computes the windows of this shard whose parts are missing. One is tokenized while the one
    before it is computed. `names`: of the columns of predictions."""
    started = time.monotonic()
    rows = 0
    empty: list[int] = []
    unanswered = 0
    for window, texts, split in in_background(_tokenized(job, finished)):
        outputs = job.saved.compute_outputs(split)
        job.saved.remove_tokens(_identity(job, window))
        rows += len(split)
        empty += [window.start + row for row in empty_rows(texts)]
        if outputs is not None:
            columns = columns_of(job.saved.answers, outputs, names)
            parts.write(window.part, columns)
            unanswered += columns.get("prediction", []).count(None)
    job.warn_of_empty(empty, rows)
    if unanswered:
        reason = f"abstain_below in the model's {DECISIONS}"
        job.log(f"{unanswered} of {rows} rows have no answer: {reason}")
    seconds = max(time.monotonic() - started, 1e-9)
    job.log(f"{rows} rows in {seconds:.1f} s ({rows / seconds:.0f} a second)")


def _tokenized(
    job: Job, finished: dict[str, int]
) -> Iterator[tuple[Window, list[list[str]], Split]]:
    """(window, its texts, their tokens)."""
    import datasets

    number, shards = job.options.shard or (1, 1)
    for place, window in enumerate(windows_of(job.table)):
        if place % shards != number - 1 or window.part in finished:
            continue
        rows = Table.of(datasets.Dataset(window.rows, fingerprint="rows"), job.table.name)
        texts = job.saved.read_texts(rows, job.columns)
        split = job.saved.tokenize(texts, _identity(job, window))
        ids = window.start + np.arange(len(split))
        name = f"rows {ids[0] + 1} to {ids[-1] + 1} of {len(job.table)}"
        yield window, texts, replace(split, name=name, rows=ids)


def _identity(job: Job, window: Window) -> str:
    return f"{json.dumps(job.facts)} {window.part}"


def in_background(items: Iterator[_Item]) -> Iterator[_Item]:
    """Yields the items; a thread makes the next one meanwhile."""
    with ThreadPoolExecutor(1) as thread:
        following = thread.submit(next, items, None)
        while (item := following.result()) is not None:
            following = thread.submit(next, items, None)
            yield item


# --- joining


def _join(job: Job, parts: Parts) -> None:
    """Writes the rows of the input with their predictions, and removes the parts."""
    source, output = Path(job.options.file), parts.output
    kind = output_format(output)
    encoding = job.settings.encoding
    if kind in DELIMITERS and source.is_file() and has_utf8_mark(source):
        encoding = "utf-8-sig"  # as Excel's file, which shows Chinese as garbage without it
    same_kind = not job.settings.delimiter and format_of(source) == kind
    quoting = job.settings.quoting != "none" or not same_kind
    with parts.writing(), replace_file(output) as draft:
        write_rows(draft, output, _joined(job, parts), encoding, quoting)
    parts.remove()
    job.log(f"{len(job.table)} rows: {output}")


def _joined(job: Job, parts: Parts) -> Iterator[Any]:
    schema = parts.schema()
    for window in windows_of(job.table):
        rows = window.rows
        predictions = parts.read(window.part).cast(schema)
        for name in predictions.column_names:
            rows = rows.append_column(name, predictions.column(name))
        yield rows
