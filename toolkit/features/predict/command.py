"""`toolkit predict MODEL FILE`, or `--text`: predictions for rows, each exactly once.

a window of rows -> tokens -> outputs -> answers -> a part on the disk
all parts, joined with the rows of the file -> the output
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from accelerate.utils import broadcast_object_list

from toolkit import api
from toolkit.data.labels import REGRESSION
from toolkit.data.table import Table
from toolkit.data.text_files import DELIMITERS, encoding_of, format_of
from toolkit.data.tokens import Split
from toolkit.data.write import output_format, without_formula, write_rows
from toolkit.errors import UserError, listing
from toolkit.evaluation.answers import DECISIONS, Answers, ClassAnswers
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
    if options.text:
        _print_answers(options)
    elif options.file:
        _predict_rows(options)
    else:
        raise UserError("toolkit predict needs a FILE or --text")


def _print_answers(options: Any) -> None:
    if options.file or options.output or options.shard:
        raise UserError("--text prints its answers: leave out FILE, --output and --shard")
    answers = api.predict(
        options.model,
        options.text,
        per_device_batch_size=options.per_device_batch_size,
        max_tokens=options.max_tokens_per_batch,
        max_length=options.max_length,
        mixed_precision=options.mixed_precision,
        self_test=options.self_test,
    )
    # the main process has them
    for text, answer in zip(options.text, answers, strict=False):
        print(json.dumps({"text": text, **answer}, ensure_ascii=False))


def _predict_rows(options: Any) -> None:
    output = _choose_output(options)
    job = Job(options)
    table = job.table
    names = column_names(job.saved.answers, options.probabilities == "all")
    existing = [name for name in names if name in table.rows.column_names]
    if existing:
        remedy = "rename it, nothing is overwritten"
        raise UserError(f"{table.name} already has a column {listing(existing)}: {remedy}")
    parts = Parts(output, {**job.facts, "probabilities": options.probabilities})
    finished: dict[str, int] = {}
    if job.accelerator.is_main_process:
        finished = parts.open(options.overwrite)
    finished = broadcast_object_list([finished])[0]
    columns = (
        f"{' and '.join(job.columns)} of the columns {listing(table.rows.column_names)}"
    )
    job.log(f"reading {columns}, at most {job.max_length} tokens of each text")
    remaining = len(table) - sum(finished.values())
    job.log(
        f"{remaining} of {len(table)} rows remain; finished parts are in {parts.folder}"
    )
    if remaining:
        job.load_model()
        _compute(job, parts, finished, names)
    if options.shard:
        then = "when all shards are, the same command without --shard joins them"
        job.log(f"shard {options.shard[0]}/{options.shard[1]} is done; {then}")
    elif job.accelerator.is_main_process:
        _join(job, parts)


def _choose_output(options: Any) -> Path:
    """The file to write. Raises UserError for one that exists, or cannot be named."""
    source = Path(options.file)
    if options.output:
        output = Path(options.output)
    elif set("*?[") & set(source.name):
        raise UserError(f"{source}: name the output file with --output")
    else:
        kind = format_of(source)
        if kind in (".txt", ""):
            kind = ".csv"
        output = sibling(source, f".predictions{kind}")
    output_format(output)
    if output.exists() and not options.overwrite:
        raise UserError(f"{output} exists: name another with --output, or pass --overwrite")
    return output


def windows_of(table: Table) -> Iterator[tuple[str, int, Any]]:
    """(the file name of a part, its first row from 0, its rows as a pyarrow table): the rows that
    are tokenized, computed and written at a time. Their limits depend on the file alone."""
    import pyarrow

    last = len(table.rows)
    start = 0
    rows = []
    for batch in map(pyarrow.table, table.batches()):
        rows.append(batch)
        end = start + sum(map(len, rows))
        size = sum(batch.nbytes for batch in rows)
        if end - start >= WINDOW_ROWS or size >= WINDOW_BYTES or end == last:
            yield (
                f"part-{start:010d}-{end:010d}.parquet",
                start,
                pyarrow.concat_tables(rows),
            )
            start = end
            rows = []


# --- computing


def _compute(job: Job, parts: Parts, finished: dict[str, int], names: list[str]) -> None:
    """Computes the windows of this shard whose parts are missing. One is tokenized while the one
    before it is computed. `names`: of the columns of predictions."""
    started = time.monotonic()
    count = 0
    empty: list[int] = []
    unanswered = 0
    for part, start, texts, split in in_background(_tokenized(job, finished)):
        outputs = job.saved.compute_outputs(split)
        job.saved.remove_tokens(f"{job.identity} {part}")
        count += len(texts[0])
        empty += [start + row for row in empty_rows(texts)]
        if outputs is not None:
            columns = columns_of(job.saved.answers, outputs, names)
            if output_format(parts.output) in DELIMITERS:
                columns = {
                    name: [without_formula(cell) for cell in cells]
                    for name, cells in columns.items()
                }
            parts.write(part, columns)
            unanswered += columns[names[0]].count(None)
    job.warn_of_empty(empty, count)
    if unanswered:
        reason = f"abstain_below in the model's {DECISIONS}"
        job.log(f"{unanswered} of {count} rows have no answer: {reason}")
    seconds = max(time.monotonic() - started, 1e-9)
    job.log(f"{count} rows in {seconds:.1f} s ({count / seconds:.0f} a second)")


def _tokenized(
    job: Job, finished: dict[str, int]
) -> Iterator[tuple[str, int, list[list[str]], Split]]:
    """(the file name of a part, its first row, the texts of its rows, their tokens)."""
    import datasets

    number, shards = job.options.shard or (1, 1)
    for place, (part, start, rows) in enumerate(windows_of(job.table)):
        if place % shards != number - 1 or part in finished:
            continue
        table = Table.of(datasets.Dataset(rows, fingerprint="rows"), job.table.name)
        texts = job.saved.read_texts(table, job.columns)
        split = job.saved.tokenize(texts, f"{job.identity} {part}")
        name = f"rows {start + 1} to {start + len(texts[0])} of {len(job.table)}"
        yield part, start, texts, replace(split, name=name, rows=start + split.rows)


def in_background(items: Iterator[_Item]) -> Iterator[_Item]:
    """Yields the items; a thread makes the next one meanwhile."""
    with ThreadPoolExecutor(1) as thread:
        following = thread.submit(next, items, None)
        while (item := following.result()) is not None:
            following = thread.submit(next, items, None)
            yield item


# --- the columns of predictions


def column_names(answers: Answers, with_probabilities: bool) -> list[str]:
    """`prediction`, and `probability_A` for each class A; of several numbers `prediction_A` for
    each."""
    names = ["prediction"]
    if not isinstance(answers, ClassAnswers):
        return names
    labels = answers.labels
    if labels.problem_type == REGRESSION:
        if labels.size > 1:
            return [f"prediction_{name}" for name in labels.names]
    elif with_probabilities:
        names += [f"probability_{name}" for name in labels.names]
    return names


def columns_of(answers: Answers, outputs: Any, names: list[str]) -> dict[str, list[Any]]:
    """The columns with these names, for titles or (N, C) logits."""
    rows = []
    for line in answers.answers(outputs):
        cells = line["prediction"]
        if names[0] == "prediction":  # otherwise it is a list of numbers
            cells = [cells, *line.get("probabilities", ())]
        rows.append(cells)
    return {name: [cells[place] for cells in rows] for place, name in enumerate(names)}


# --- joining


def _join(job: Job, parts: Parts) -> None:
    """Writes the rows of the input with their predictions, and removes the parts."""
    source, output = Path(job.options.file), parts.output
    kind = output_format(output)
    encoding = job.settings.encoding
    if kind in DELIMITERS and source.is_file():
        # Excel shows Chinese as garbage where its byte order mark is lacking
        encoding = encoding_of(source, job.settings)
    same_kind = not job.settings.delimiter and format_of(source) == kind
    quoting = job.settings.quoting != "none" or not same_kind
    with parts.writing(), replace_file(output) as draft:
        write_rows(draft, output, _joined(job, parts), encoding, quoting)
    parts.remove()
    job.log(f"{len(job.table)} rows: {output}")


def _joined(job: Job, parts: Parts) -> Iterator[Any]:
    schema = parts.schema()
    for part, _, rows in windows_of(job.table):
        predictions = parts.read(part).cast(schema)
        for name in predictions.column_names:
            rows = rows.append_column(name, predictions.column(name))
        yield rows
