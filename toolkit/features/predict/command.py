"""`toolkit predict MODEL FILE`, or `--text`: predictions for rows without labels, each exactly once."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shlex
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
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
from toolkit.errors import UserError, listing
from toolkit.evaluation.answers import Answers, ClassAnswers
from toolkit.evaluation.saved_model import (
    SavedModel,
    choose_columns,
    empty_text_warning,
    training_quoting,
    training_run,
)
from toolkit.features.predict.parts import Parts
from toolkit.pretrained import model_digest
from toolkit.utils.log import logger
from toolkit.utils.progress import Progress

WINDOW_ROWS, WINDOW_BYTES = 65536, 64 << 20
"""A window ends at either limit: enough texts to sort by length, and little work to repeat after a kill."""
_OF_FILES = ("output", "overwrite", "probabilities", "shard", "join", "text_column", "text_pair", "encoding",
             "delimiter", "quoting", "column_names")  # fmt: skip
_FILE_DEFAULTS = (None, False, "all", "utf-8")
_EXISTS = "exists: name another with --output, or pass --overwrite"


def predict_file(options: Any) -> None:
    """Writes the rows of `options.file` with predictions, or prints predictions for `options.text`; a collective.

    A classifier adds a prediction and probabilities, an encoder-decoder a title. `options` holds the arguments of
    `toolkit predict`. Raises UserError for a model or file that cannot be read, an output that exists, or a column of
    the file that would be overwritten.
    """
    if bool(options.file) == bool(options.text):
        raise UserError("toolkit predict needs a FILE or --text, one of them")
    if options.text and (
        unused := [name for name in _OF_FILES if getattr(options, name) not in _FILE_DEFAULTS]
    ):
        raise UserError(
            f"--{unused[0]} has no effect with --text, whose answers are printed: give a FILE, or drop it"
        )
    saved = SavedModel(options.model)
    accelerator = launch.make_accelerator(options.mixed_precision)
    if options.text:
        _print_answers(options, accelerator, saved)
        return
    output, settings = _choose_output(options), read_settings(options)
    same_format = not settings.delimiter and format_of(Path(options.file)) == format_of(output)
    table = read_file(options.file, settings)
    _refuse_existing_columns(table, saved.answers, output, options)
    column, pair = choose_columns(options.model, table, options.text_column, options.text_pair)
    # everything that must be equal for all parts of an output
    facts = {"layout": 3, "file": table.digest, "rows": len(table), "model": model_digest(options.model),
             "columns": [column, pair], "max_length": saved.choose_max_length(options.max_length, pair is not None),
             "precision": accelerator.mixed_precision, "probabilities": options.probabilities,
             "encoding": options.encoding}  # fmt: skip
    launch.require_equal(accelerator, "the file, the model and the options", facts)
    encoding = settings.encoding
    if format_of(output) in DELIMITERS and is_utf8(encoding) and has_utf8_mark(Path(options.file)):
        encoding = "utf-8-sig"  # as Excel's file, which shows Chinese as garbage without it
    parts = Parts(output, encoding, settings.quoting == "none" and same_format, facts)
    if _is_already_joined(options, accelerator, parts):
        return
    if accelerator.is_main_process:
        parts.open(
            options.overwrite and not options.join
        )  # --join computes nothing: it must not remove parts
    prediction = _Prediction(
        options, accelerator, saved, table, [column, *([pair] if pair else [])], parts
    )
    try:
        prediction.run()
    except KeyboardInterrupt:
        finished = sum(end - start for start, end in parts.finished().items())
        progress = f"{finished} of {len(table)} rows are finished, in {parts.folder}"
        launch.log_on_main(
            accelerator, f"stopped: {progress}; to continue: {launch.launch_info()['command']}"
        )
        raise


def _is_already_joined(options: Any, accelerator: Accelerator, parts: Parts) -> bool:
    """Whether this is a shard of a finished job, which a scheduler has started again. Raises UserError for another
    output."""
    in_shards = options.shard or options.join
    exists, joined = broadcast_object_list(
        [parts.output.exists(), in_shards and parts.are_joined()]
    )
    if options.overwrite or not exists:
        return False
    if not joined:
        raise UserError(f"{parts.output} {_EXISTS}")
    launch.log_on_main(
        accelerator, f"{parts.output} is complete: its shards are joined, nothing is left to do"
    )
    return True


def _print_answers(options: Any, accelerator: Accelerator, saved: SavedModel) -> None:
    texts = options.text
    if pair := training_run(options.model)["data"].get("text_pair"):
        raise UserError(
            f"this model reads pairs (--text_pair {pair}): give a FILE with both columns"
        )
    sizes = options.per_device_batch_size, options.max_tokens_per_batch
    saved.load(accelerator, saved.choose_max_length(options.max_length), *sizes)
    outputs = saved.compute_outputs(saved.tokenize(texts))
    if outputs is not None:
        if note := empty_text_warning(
            [row for row, text in enumerate(texts) if not text.strip()], len(texts)
        ):
            logger.info(note)
        for text, line in zip(texts, saved.answers.answers(outputs), strict=True):
            print(f"{_format_answer(line, saved.answers)}  {text}")


class _Window(NamedTuple):
    """Rows that are read, tokenized, computed and written at a time."""

    start: int
    rows: Any  # an Arrow table
    split: Split  # the distinct texts of the rows
    places: np.ndarray  # (rows,): the index in the split of each row's text
    empty: list[int]  # rows of the file without a text


def _update(bar: Progress, before: int, size: int, _: int, part: float) -> None:
    """Shows the progress of a window of `size` rows, after `before` others."""
    rows = before + part * size
    bar.update(round(rows), rows / bar.total)


@dataclass(frozen=True)
class _Prediction:
    """Predicts a file window by window."""

    options: Any
    accelerator: Accelerator
    saved: SavedModel
    table: Table
    columns: list[str]
    """The column of texts, and of second texts if they are pairs."""
    parts: Parts

    def run(self) -> None:
        """Computes the missing parts of this shard, and joins all parts once they are complete."""
        options, parts, rows = self.options, self.parts, len(self.table)
        done: dict[int, int] = broadcast_object_list([parts.finished()])[0]
        missing = rows - sum(end - start for start, end in done.items())
        if options.join and missing:
            lacking = listing(parts.missing(rows))
            raise UserError(
                f"{parts.folder} lacks rows {lacking} of {rows}: run the shards that are not done"
            )
        if missing:
            self._compute(done, missing)
        if not self.accelerator.is_main_process:
            return
        absent = parts.missing(rows)
        if not absent and (not options.shard or parts.claim_joining()):
            parts.join(in_shards=bool(options.shard or options.join))
            logger.info(f"{rows} rows: {parts.output}")
        elif not parts.are_joined():  # by another process in the meantime
            status = (
                f"still missing: rows {listing(absent)} (the last shard joins all)" if absent else
                "another process is joining the shards; if it was killed, use --join instead of --shard"
            )  # fmt: skip
            logger.info(f"shard {'/'.join(map(str, options.shard))} is done; {status}")

    def _compute(self, done: dict[int, int], missing: int) -> None:
        """Computes a window while one thread reads and tokenizes the next, and another writes the previous one."""
        options, saved, total = self.options, self.saved, len(self.table)
        names, max_length = " and ".join(self.columns), self.parts.facts["max_length"]
        columns = f"reading column{'s' * (len(self.columns) > 1)} {names}, at most {max_length} tokens of each text"
        name, trained = self.columns[0], training_run(options.model)["data"].get("text_column")
        usual = (
            name in (options.text_column, trained)
            or options.column_names
            or name.lower().strip() in USUAL_TEXT
        )
        if format_of(Path(options.file)) in (".csv", ".tsv") and not usual:
            header = enumerate(self.table.rows.column_names, 1)
            each = ["text" if other == name else f"column_{place}" for place, other in header]
            columns += (
                f"; if the first line is a row, not a header, pass --column_names {','.join(each)}"
            )
        resumed = (
            f"{total - missing} of {total} rows are done in {self.parts.folder}: continuing"
            if done
            else ""
        )
        for line in filter(None, [columns, resumed]):
            launch.log_on_main(self.accelerator, line)
        saved.load(
            self.accelerator,
            max_length,
            options.per_device_batch_size,
            options.max_tokens_per_batch,
        )
        rows_left = max(1, min(missing, round(total / (options.shard or (1, 1))[1])))
        bar = Progress(Path(options.file).name, rows_left)
        rows = computed = unanswered = 0
        empty: list[int] = []
        windows = self._windows(done)
        with (
            ThreadPoolExecutor(1, "read") as reader,
            ThreadPoolExecutor(1, "write") as writer,
            contextlib.closing(bar),
        ):
            following = reader.submit(next, windows, None)
            written: Future[Any] = writer.submit(int)
            while (window := following.result()) is not None:
                following = reader.submit(next, windows, None)
                outputs = saved.compute_outputs(
                    window.split, partial(_update, bar, rows, window.rows.num_rows)
                )
                rows, computed = rows + window.rows.num_rows, computed + len(window.split)
                empty += window.empty
                if self.accelerator.is_main_process:
                    unanswered += written.result()
                    written = writer.submit(self._write, window, outputs)
            unanswered += written.result()
        seconds = max(time.monotonic() - bar.started, 1e-9)
        if self.accelerator.is_main_process:
            if empty:
                logger.warning(empty_text_warning(empty, rows))
            if unanswered:
                logger.warning(
                    f"{unanswered} of {rows} rows have no answer: {saved.answers.no_answer_reason}"
                )
            repeated = (
                f", {rows - computed} of them repeat another's text" if computed < rows else ""
            )
            logger.info(f"{rows} rows in {seconds:.1f} s ({rows / seconds:.0f} a second{repeated})")

    def _windows(self, done: dict[int, int]) -> Iterator[_Window]:
        """The unfinished windows of this shard; their limits depend on the file alone."""
        import pyarrow

        shard, shards = self.options.shard or (1, 1)
        start = number = 0
        waiting: list[Any] = []
        for batch in itertools.chain(self.table.batches(), [None]):
            if batch is not None:
                waiting.append(
                    batch
                    if isinstance(batch, pyarrow.Table)
                    else pyarrow.Table.from_batches([batch])
                )
            rows = sum(map(len, waiting))
            if rows and (
                batch is None
                or rows >= WINDOW_ROWS
                or sum(part.nbytes for part in waiting) >= WINDOW_BYTES
            ):
                if start not in done and number % shards == shard - 1:
                    yield self._tokenize(start, pyarrow.concat_tables(waiting))
                start, number, waiting = start + rows, number + 1, []

    def _tokenize(self, start: int, rows: Any) -> _Window:
        import datasets

        table = replace(self.table, source=datasets.Dataset(rows, fingerprint="rows"))
        columns = [self.saved.read_texts(table, column) for column in self.columns]
        distinct: dict[tuple[str, ...], int] = {}
        places = np.array(
            [distinct.setdefault(row, len(distinct)) for row in zip(*columns, strict=True)],
            np.int64,
        )
        texts, *pairs = (list(column) for column in zip(*distinct, strict=True))
        split = self.saved.tokenize(
            texts, pairs[0] if pairs else None, f"{json.dumps(self.parts.facts)} {start}"
        )
        split = replace(
            split, name=self.table.name, rows=start + np.unique(places, return_index=True)[1]
        )
        blank = np.array([not all(map(str.strip, row)) for row in distinct])[places]
        return _Window(start, rows, split, places, (start + np.flatnonzero(blank)).tolist())

    def _write(self, window: _Window, outputs: Any) -> int:
        """Writes a part, and returns the number of rows without an answer. `outputs`: logits or title of each text."""
        outputs = np.asarray(outputs)[window.places]
        columns = _columns(
            self.saved.answers, outputs, self.parts.output, self.options.probabilities
        )
        self.parts.write(window.start, window.rows, columns)
        return sum(answer is None for answer in columns.get("prediction", ()))


def read_settings(options: Any) -> TextSettings:
    """The options for reading the file; `--quoting` by default as in training."""
    names = ("encoding", "delimiter", "column_names")
    quoting = options.quoting or training_quoting(options.model, options.file)
    return TextSettings(**{name: getattr(options, name) for name in names}, quoting=quoting)


def _format_answer(line: dict[str, Any], answers: Answers) -> str:
    """A title, numbers, or classes with their probabilities."""
    prediction = line["prediction"]
    if not isinstance(answers, ClassAnswers):
        return str(prediction)
    labels = answers.labels
    if labels.problem_type == "regression":
        numbers = zip(labels.names, np.atleast_1d(prediction), strict=True)
        return " ".join(f"{name} {number:.4g}" for name, number in numbers)
    probabilities = dict(zip(labels.names, line["probabilities"], strict=True))
    if prediction is None:
        best = max(probabilities, key=lambda name: probabilities[name])
        return f"no answer (most probable: {best} {probabilities[best]:.4f})"
    names = [prediction] if isinstance(prediction, str) else prediction
    return " ".join(f"{name} {probabilities[name]:.4f}" for name in names) or "none"


def _columns(
    answers: Answers, outputs: Any, output: Path, probabilities: str
) -> dict[str, list[Any]]:
    """The columns of predictions for titles, or (N, C) logits: for probabilities (`all`, `none`, or `top-3`: names and
    probabilities of the three most probable) a column for each class in CSV, one of lists in other formats."""
    no_classes = (
        not isinstance(answers, ClassAnswers) or answers.labels.problem_type == "regression"
    )
    if no_classes and probabilities.startswith("top"):
        raise UserError(f"--probabilities {probabilities}: the model has no classes: leave it out")
    lines, flat = list(answers.answers(outputs)), format_of(output) in DELIMITERS
    predictions = [line["prediction"] for line in lines]
    columns: dict[str, list[Any]] = {"prediction": predictions}
    if not isinstance(answers, ClassAnswers):
        return columns
    labels = answers.labels
    if labels.problem_type == "regression":
        return (
            _by_name("prediction", labels.names, predictions)
            if flat and labels.size > 1
            else columns
        )
    if probabilities == "none":
        return columns
    rows = [line["probabilities"] for line in lines]
    if probabilities == "all":
        return columns | (
            _by_name("probability", labels.names, rows) if flat else {"probabilities": rows}
        )
    most = min(int(probabilities.removeprefix("top-")), labels.size)
    order = np.argsort(-outputs, axis=1, kind="stable")[:, :most].tolist()  # (N, most)
    names = [[labels.names[place] for place in row] for row in order]
    best = [[row[place] for place in places] for row, places in zip(rows, order, strict=True)]
    if not flat:
        return columns | {"top_classes": names, "top_probabilities": best}
    for place in range(most):
        columns[f"top_{place + 1}"] = [row[place] for row in names]
        columns[f"top_{place + 1}_probability"] = [row[place] for row in best]
    return columns


def _by_name(
    prefix: str, names: Sequence[str], rows: Sequence[Sequence[float]]
) -> dict[str, list[Any]]:
    return {f"{prefix}_{name}": [row[place] for row in rows] for place, name in enumerate(names)}


def _refuse_existing_columns(table: Table, answers: Answers, output: Path, options: Any) -> None:
    no_outputs: Any = (
        np.zeros((0, answers.labels.size), np.float32) if isinstance(answers, ClassAnswers) else []
    )
    columns = _columns(answers, no_outputs, output, options.probabilities)
    if existing := [name for name in columns if name in table.rows.column_names]:
        raise UserError(
            f"{table.name} already has a column {listing(existing)}: rename it, nothing is overwritten"
        )


def sibling(source: Path, ending: str) -> Path:
    """`rows.csv.gz`, `.evaluation` -> `rows.evaluation`, in the same folder."""
    return source.with_name(source.name[: source.name.lower().rindex(format_of(source))] + ending)


def _choose_output(options: Any) -> Path:
    """The file to write. Raises UserError if that is impossible, before any work."""
    source = Path(options.file)
    if source.is_dir():
        raise UserError(f"{source} is a folder: toolkit predict MODEL FILE, in this order")
    if not source.suffix and not source.exists():
        raise UserError(
            f"there is no {source}; for a text: toolkit predict MODEL --text {shlex.quote(options.file)}"
        )
    if not options.output and not source.is_file() and any(mark in source.name for mark in "*?["):
        raise UserError(f"{source}: name the output file with --output")
    kind = format_of(source)
    output = Path(
        options.output or sibling(source, f".predictions{'.csv' if kind == '.txt' else kind}")
    )
    if format_of(output) == ".txt":
        raise UserError(f"--output {output}: name it .csv, .tsv, .json, .jsonl or .parquet")
    if output.exists() and not (options.overwrite or options.shard or options.join):
        raise UserError(f"{output} {_EXISTS}")
    if not output.parent.is_dir():
        raise UserError(f"--output {output}: there is no folder {output.parent}")
    if not os.access(output.parent, os.W_OK):
        raise UserError(f"{output.parent} cannot be written: name another file with --output")
    return output
