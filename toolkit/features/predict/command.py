"""`toolkit predict MODEL FILE`, or `--text`: predictions for rows, each exactly once."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from toolkit import launch
from toolkit.config import TextSettings
from toolkit.data.read import format_of, read_file
from toolkit.data.table import USUAL_TEXT, Table
from toolkit.data.text_files import DELIMITERS, has_utf8_mark, is_utf8
from toolkit.data.tokens import Split
from toolkit.data.write import output_format, write_rows
from toolkit.errors import UserError, listing
from toolkit.evaluation.answers import ClassAnswers
from toolkit.evaluation.saved_model import (
    SavedModel,
    choose_columns,
    empty_text_warning,
    training_quoting,
    training_run,
)
from toolkit.features.predict.columns import columns_of, line_of
from toolkit.features.predict.parts import Parts
from toolkit.pretrained import model_digest
from toolkit.utils.files import replace_file
from toolkit.utils.log import logger
from toolkit.utils.progress import Progress

WINDOW_ROWS = 65536
WINDOW_BYTES = 64 << 20
"""A window ends at either limit: enough texts to sort by length, and little work to repeat after a
kill."""
_OF_FILES = ("output", "overwrite", "shard", "join", "text_column", "text_pair", "delimiter",
             "quoting", "column_names")  # fmt: skip


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
        return
    output = _choose_output(options)
    saved = SavedModel(options.model)
    accelerator = launch.make_accelerator(options.mixed_precision)
    table = read_file(options.file, read_settings(options))
    prediction = Prediction(options, accelerator, saved, table, output)
    prediction.refuse_existing_columns()
    launch.require_equal(accelerator, "the file, the model and the options", prediction.parts.facts)
    if accelerator.is_main_process:
        prediction.parts.open(options.overwrite)
    try:
        prediction.run()
    except KeyboardInterrupt:
        finished = sum(end - start for start, end in prediction.parts.finished().items())
        progress = f"{finished} of {len(table)} rows are finished, in {prediction.parts.folder}"
        command = launch.launch_info()["command"]
        launch.log_on_main(accelerator, f"stopped: {progress}; to continue: {command}")
        raise


def _print_answers(options: Any) -> None:
    for name in _OF_FILES:
        if getattr(options, name):
            raise UserError(f"--{name} has no effect with --text: give a FILE, or leave it out")
    pair = training_run(options.model)["data"].get("text_pair")
    if pair:
        needed = "give a FILE with both columns"
        raise UserError(f"this model reads pairs (--text_pair {pair}): {needed}")
    saved = SavedModel(options.model)
    accelerator = launch.make_accelerator(options.mixed_precision)
    length = saved.choose_max_length(options.max_length)
    saved.load(accelerator, length, options.per_device_batch_size, options.max_tokens_per_batch)
    outputs = saved.compute_outputs(saved.tokenize(options.text))
    if outputs is None:
        return
    empty = empty_rows([(text,) for text in options.text])
    if empty:
        logger.warning(empty_text_warning(empty, len(options.text)))
    for text, line in zip(options.text, saved.answers.answers(outputs), strict=True):
        print(f"{line_of(line, saved.answers)}  {text}")


class Window(NamedTuple):
    """Rows that are tokenized, computed and written at a time."""

    start: int
    size: int
    split: Split
    """The distinct texts of the rows."""
    places: np.ndarray
    """(size,): the index in the split of each row's text."""
    empty: list[int]
    """Rows of the file without a text."""


class Prediction:
    """Predicts a file window by window."""

    def __init__(
        self,
        options: Any,
        accelerator: Accelerator,
        saved: SavedModel,
        table: Table,
        output: Path,
    ) -> None:
        self.options = options
        self.accelerator = accelerator
        self.saved = saved
        self.table = table
        self.output = output
        self.kind = output_format(output)
        text, pair = choose_columns(options.model, table, options.text_column, options.text_pair)
        self.columns = [text]
        if pair:
            self.columns.append(pair)
        self.max_length = saved.choose_max_length(options.max_length, pair is not None)
        # everything that must be equal for all parts of an output
        facts = {
            "file": table.digest,
            "rows": len(table),
            "model": model_digest(options.model),
            "columns": ", ".join(self.columns),
            "max_length": self.max_length,
            "precision": accelerator.mixed_precision,
            "probabilities": options.probabilities,
        }
        self.parts = Parts(output, facts)

    def refuse_existing_columns(self) -> None:
        """Raises UserError if the file has a column that the predictions would get."""
        outputs: Any = []
        answers = self.saved.answers
        if isinstance(answers, ClassAnswers):
            outputs = np.zeros((0, answers.labels.size), np.float32)
        names = set(self._columns(outputs)).intersection(self.table.rows.column_names)
        if names:
            remedy = "rename it, nothing is overwritten"
            raise UserError(f"{self.table.name} already has a column {listing(names)}: {remedy}")

    def _columns(self, outputs: Any) -> dict[str, list[Any]]:
        flat = self.kind in DELIMITERS
        with_probabilities = self.options.probabilities == "all"
        return columns_of(self.saved.answers, outputs, flat, with_probabilities)

    def run(self) -> None:
        """Computes the parts that are missing (of this shard), and joins all unless there are
        shards."""
        finished: dict[int, int] = broadcast_object_list([self.parts.finished()])[0]
        if not self.options.join:
            self._compute(finished)
        if not self.accelerator.is_main_process:
            return
        missing = self.parts.missing(len(self.table))
        if self.options.shard:
            number, count = self.options.shard
            remaining = f"rows {listing(missing)} are missing"
            if not missing:
                remaining = "all rows are there: join them by the same command with --join"
            logger.info(f"shard {number}/{count} is done; {remaining}")
        elif missing:
            rows = f"rows {listing(missing)} of {len(self.table)}"
            raise UserError(f"{self.parts.folder} lacks {rows}: run the shards that are not done")
        else:
            self._join()

    # --- computing

    def _compute(self, finished: dict[int, int]) -> None:
        """Computes the missing windows of this shard."""
        missing = len(self.table) - sum(end - start for start, end in finished.items())
        if not missing:
            return
        for line in self._start_lines(missing):
            launch.log_on_main(self.accelerator, line)
        options = self.options
        sizes = (options.per_device_batch_size, options.max_tokens_per_batch)
        self.saved.load(self.accelerator, self.max_length, *sizes)
        shards = options.shard[1] if options.shard else 1
        bar = Progress(Path(options.file).name, max(1, missing // shards))
        with contextlib.closing(bar):
            rows, empty, unanswered = self._compute_windows(self._windows(finished), bar)
        if not self.accelerator.is_main_process:
            return
        if empty:
            logger.warning(empty_text_warning(empty, rows))
        if unanswered:
            reason = self.saved.answers.no_answer_reason
            logger.warning(f"{unanswered} of {rows} rows have no answer: {reason}")
        seconds = max(time.monotonic() - bar.started, 1e-9)
        logger.info(f"{rows} rows in {seconds:.1f} s ({rows / seconds:.0f} a second)")

    def _compute_windows(
        self, windows: Iterator[Window], bar: Progress
    ) -> tuple[int, list[int], int]:
        """Computes a window while one thread tokenizes the next, and another writes the previous.
        Returns the number of rows, those with an empty text, and the number without an answer."""
        rows = 0
        empty: list[int] = []
        unanswered = 0
        with ThreadPoolExecutor(1, "read") as reader, ThreadPoolExecutor(1, "write") as writer:
            following = reader.submit(next, windows, None)
            written: Future[int] = writer.submit(int)
            while (window := following.result()) is not None:
                following = reader.submit(next, windows, None)
                report = partial(_report_progress, bar, rows, window.size)
                outputs = self.saved.compute_outputs(window.split, report)
                rows += window.size
                empty += window.empty
                if self.accelerator.is_main_process:
                    unanswered += written.result()
                    written = writer.submit(self._write, window, outputs)
            unanswered += written.result()
        return rows, empty, unanswered

    def _start_lines(self, missing: int) -> Iterator[str]:
        names = " and ".join(self.columns)
        yield f"reading {names}, at most {self.max_length} tokens of each text{self._header_hint()}"
        if missing < len(self.table):
            done = f"{len(self.table) - missing} of {len(self.table)} rows are done"
            yield f"{done} in {self.parts.folder}: continuing"

    def _header_hint(self) -> str:
        """For a CSV whose first line may be a row, and not names of columns."""
        name = self.columns[0]
        trained = training_run(self.options.model)["data"].get("text_column")
        is_named = name in (self.options.text_column, trained) or self.options.column_names
        is_text_file = format_of(Path(self.options.file)) in DELIMITERS
        if not is_text_file or is_named or name.lower().strip() in USUAL_TEXT:
            return ""
        names = [f"column_{place}" for place, _ in enumerate(self.table.rows.column_names, 1)]
        names[self.table.rows.column_names.index(name)] = "text"
        option = f"--column_names {','.join(names)}"
        return f"; if the first line is a row, not a header, pass {option}"

    def _windows(self, finished: dict[int, int]) -> Iterator[Window]:
        """The unfinished windows of this shard."""
        number, shards = self.options.shard or (1, 1)
        for place, (start, rows) in enumerate(windows_of(self.table)):
            if start not in finished and place % shards == number - 1:
                yield self._tokenize(start, rows)

    def _tokenize(self, start: int, rows: Any) -> Window:
        import datasets

        table = Table.of(datasets.Dataset(rows, fingerprint="rows"), self.table.name)
        columns = [self.saved.read_texts(table, column) for column in self.columns]
        distinct: dict[tuple[str, ...], int] = {}
        texts = list(zip(*columns, strict=True))
        places = np.array([distinct.setdefault(row, len(distinct)) for row in texts], np.int64)
        firsts, *seconds = (list(column) for column in zip(*distinct, strict=True))
        identity = f"{json.dumps(self.parts.facts)} {start}"
        split = self.saved.tokenize(firsts, seconds[0] if seconds else None, identity)
        ids = start + np.unique(places, return_index=True)[1]
        split = replace(split, name=self.table.name, rows=ids)
        empty = [start + row for row in empty_rows(texts)]
        return Window(start, len(texts), split, places, empty)

    def _write(self, window: Window, outputs: Any) -> int:
        """Writes a part, and returns the number of rows without an answer. `outputs`: the logits or
        the title of each text."""
        columns = self._columns(np.asarray(outputs)[window.places])
        self.parts.write(window.start, columns)
        return sum(answer is None for answer in columns.get("prediction", ()))

    # --- joining

    def _join(self) -> None:
        """Writes the rows of the input with their predictions, and removes the parts."""
        settings = read_settings(self.options)
        encoding = settings.encoding
        is_table = self.kind in DELIMITERS
        if is_table and is_utf8(encoding) and has_utf8_mark(Path(self.options.file)):
            encoding = "utf-8-sig"  # as Excel's file, which shows Chinese as garbage without it
        same_kind = not settings.delimiter and format_of(Path(self.options.file)) == self.kind
        quoting = settings.quoting != "none" or not same_kind
        with self.parts.writing(), replace_file(self.output) as draft:
            write_rows(draft, self.output, self._joined(), encoding, quoting)
        self.parts.remove()
        logger.info(f"{len(self.table)} rows: {self.output}")

    def _joined(self) -> Iterator[Any]:
        windows = windows_of(self.table)
        for (_, rows), predictions in zip(windows, self.parts.read(), strict=True):
            for name in predictions.column_names:
                rows = rows.append_column(name, predictions.column(name))
            yield rows


def windows_of(table: Table) -> Iterator[tuple[int, Any]]:
    """(first row, pyarrow table) of each window; their limits depend on the file alone."""
    import pyarrow

    start = 0
    waiting: list[Any] = []
    for batch in table.batches():
        if not isinstance(batch, pyarrow.Table):
            batch = pyarrow.Table.from_batches([batch])
        waiting.append(batch)
        rows = sum(map(len, waiting))
        if rows >= WINDOW_ROWS or sum(part.nbytes for part in waiting) >= WINDOW_BYTES:
            yield start, pyarrow.concat_tables(waiting)
            start += rows
            waiting = []
    if waiting:
        yield start, pyarrow.concat_tables(waiting)


def empty_rows(texts: Sequence[Sequence[str]]) -> list[int]:
    """The rows in which the text, or one text of a pair, is empty."""
    return [row for row, parts in enumerate(texts) if not all(map(str.strip, parts))]


def _report_progress(bar: Progress, before: int, size: int, _: int, part: float) -> None:
    """Of a window of `size` rows, after `before` others."""
    rows = before + part * size
    bar.update(round(rows), rows / bar.total)


# --- options


def read_settings(options: Any) -> TextSettings:
    """The options for reading the file; `--quoting` by default as in training."""
    quoting = options.quoting or training_quoting(options.model, options.file)
    return TextSettings(
        encoding=options.encoding,
        delimiter=options.delimiter,
        column_names=options.column_names,
        quoting=quoting,
    )


def sibling(source: Path, ending: str) -> Path:
    """`rows.csv.gz`, `.evaluation` -> `rows.evaluation`, in the same folder."""
    stem = source.name[: source.name.lower().rindex(format_of(source))]
    return source.with_name(stem + ending)


def _choose_output(options: Any) -> Path:
    """The file to write. Raises UserError if that is impossible, before any work."""
    source = Path(options.file)
    if source.is_dir() or not source.suffix:
        usage = "toolkit predict MODEL FILE, or toolkit predict MODEL --text TEXT"
        raise UserError(f"{source} is no file of rows: {usage}")
    if options.output:
        output = Path(options.output)
    elif not source.is_file() and any(mark in source.name for mark in "*?["):
        raise UserError(f"{source}: name the output file with --output")
    else:
        kind = format_of(source).replace(".txt", ".csv")
        output = sibling(source, f".predictions{kind}")
    output_format(output)
    if output.exists() and not options.overwrite:
        raise UserError(f"{output} exists: name another with --output, or pass --overwrite")
    require_writable(output, "--output")
    return output


def require_writable(path: Path, option: str) -> None:
    """Raises UserError if `path` cannot be created."""
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not os.access(folder, os.W_OK):
        raise UserError(f"{folder} cannot be written: name another place with {option}")
