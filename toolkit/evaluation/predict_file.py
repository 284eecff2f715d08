"""`toolkit predict MODEL FILE`, or `--text`: the path of evaluation, for rows without labels."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from toolkit import launch
from toolkit.config import ModelSettings, TextSettings
from toolkit.data.labels import USUAL, Labels, problem_of
from toolkit.data.parse import format_of
from toolkit.data.prepare import prepare_texts
from toolkit.data.read import Table, columns_of, find_columns, read_file
from toolkit.data.rows import pair_column, text_column, texts_of
from toolkit.data.tokens import choose_max_length, load_tokenizer
from toolkit.errors import UserError, listing
from toolkit.evaluation.decisions import Decisions, saved_decisions
from toolkit.evaluation.outputs import predict
from toolkit.evaluation.titles import generate_titles
from toolkit.files import replace_file, writing
from toolkit.models import title_model
from toolkit.models.classifier import load_saved_classifier
from toolkit.pretrained import load_config

_SEPARATORS = {".csv": ",", ".tsv": "\t"}


def predict_file(options: Any) -> None:
    """Writes the rows of `options.file` with what the model says of each, or prints what it says of `options.text`; all
    processes call it.

    A classifier adds a prediction and its probabilities, an encoder-decoder a title. `options` holds the arguments
    of `toolkit predict`. Raises UserError for a model or file that cannot be read, an output that exists, or a
    column of the file that would be overwritten.
    """
    if bool(options.file) == bool(options.text):
        raise UserError("toolkit predict needs a FILE or --text, one of them")
    accelerator = launch.make_accelerator(options.mixed_precision)
    output = _output_of(options) if options.file else None
    named = ModelSettings(model_name_or_path=options.model)
    tokenizer, config = load_tokenizer(named), load_config(named)
    writes_titles = config.model_type == title_model.KIND
    model = title_model.load_saved_title_model(named) if writes_titles else load_saved_classifier(named)
    decisions = None if writes_titles else saved_decisions(options.model, labels_of(model.config))
    flat = output is not None and format_of(output) in _SEPARATORS
    nothing = np.zeros((0, decisions.labels.size if decisions else 0), np.float32)
    added = class_columns(nothing, decisions, flat) if decisions else ["prediction"]
    table = read_file(options.file, _reading(options)) if options.file else _table_of(options.text)
    _refuse_columns(table, added)
    column, pair = _columns_read(options, table)
    max_length = choose_max_length(options.max_length, tokenizer, model.config, pair is not None)
    if options.file:
        named_columns = f"columns {column} and {pair}" if pair else f"column {column}"
        for line in filter(None, [table.said, f"reading {named_columns}, at most {max_length} tokens of each text"]):
            launch.say(accelerator, line)
    split = prepare_texts(table, column, tokenizer, model.config, max_length, accelerator, pair)
    model = accelerator.prepare_model(model, evaluation_mode=True)
    started = time.monotonic()
    sizes = (options.per_device_batch_size, options.max_tokens_per_batch)
    predicts: Any = predict if decisions else generate_titles
    found = predicts(accelerator, model, split, tokenizer, *sizes)
    if found is None:  # not the main process
        return
    if output is None:
        for text, answer in zip(options.text, _answers(found, decisions), strict=True):
            print(f"{answer}  {text}")
        return
    columns = class_columns(found, decisions, flat) if decisions else {"prediction": found}
    write(table, columns, output, options.encoding)
    empty = sum(not text.strip() for text in texts_of(table, column, "\n"))
    if empty:
        print(f"{empty} rows have an empty text: their predictions mean nothing", file=sys.stderr)
    seconds = max(time.monotonic() - started, 1e-9)
    speed = f"{len(split) / seconds:.0f} a second"
    print(f"{len(split)} rows in {seconds:.1f} s ({speed}): {output}", file=sys.stderr)


def _reading(options: Any) -> TextSettings:
    names = ("encoding", "delimiter", "quoting", "column_names")
    return TextSettings(**{name: getattr(options, name) for name in names})


def _table_of(texts: list[str]) -> Table:
    import datasets

    return Table(datasets.Dataset.from_dict({"text": texts}), "--text", "")


def _columns_read(options: Any, table: Table) -> tuple[str, str | None]:
    """The column of texts and that of second texts: as asked, or those that the model's run learned from."""
    try:
        run = json.loads((Path(options.model).parent / "config.json").read_text(encoding="utf-8"))["data"]
    except (OSError, ValueError, KeyError, TypeError):
        run = {}  # not in a run's folder
    if options.text:
        if run.get("text_pair"):
            raise UserError(f"this model reads pairs: give a FILE with {run['text_column']} and {run['text_pair']}")
        return "text", None
    there = {
        setting: name
        for setting in ("text_column", "text_pair")
        if (name := run.get(setting)) and set(columns_of(table, name)) <= set(table.rows.column_names)
    }
    pair = options.text_pair or there.get("text_pair")
    usual = find_columns(table, None, USUAL, "label_column")
    column = text_column(table, options.text_column or there.get("text_column"), [*usual, pair])
    return column, pair_column(table, pair, column)


def _answers(found: Any, decisions: Decisions | None) -> list[str]:
    """What is printed of each text: a title, numbers, or classes with their probabilities."""
    if decisions is None:
        return list(found)
    answers, labels = [], decisions.labels
    for line in decisions.answers(found):
        if labels.problem_type == "regression":
            numbers = np.atleast_1d(line["prediction"])
            answers.append(" ".join(f"{name} {number:.4g}" for name, number in zip(labels.names, numbers, strict=True)))
        else:
            chances = dict(zip(labels.names, line["probabilities"], strict=True))
            names = [line["prediction"]] if isinstance(line["prediction"], str) else line["prediction"] or []
            answers.append(" ".join(f"{name} {chances[name]:.4f}" for name in names) or "none")
    return answers


def labels_of(config: Any) -> Labels:
    """A saved model's labels, in the order of its outputs."""
    names = tuple(str(config.id2label[index]) for index in range(config.num_labels))
    return Labels(problem_of(config.problem_type), names, ())


def write(table: Table, columns: dict[str, Any], output: Path, encoding: str) -> None:
    """The input's rows and columns, with what was predicted, written whole or not at all."""
    frame = table.rows.to_pandas().assign(**columns)
    kind = format_of(output)
    packed: Any = "gzip" if output.suffix == ".gz" else None
    with writing(output), replace_file(output, flush=False) as draft:
        if kind in _SEPARATORS:
            try:
                frame.to_csv(draft, sep=_SEPARATORS[kind], index=False, encoding=encoding, compression=packed)
            except UnicodeEncodeError as error:
                raise UserError(f"--encoding {encoding} cannot write {output}: {error}; use utf-8") from error
        elif kind == ".parquet":
            frame.to_parquet(draft, index=False)
        else:
            lines = kind == ".jsonl"
            frame.to_json(draft, orient="records", lines=lines, force_ascii=False, compression=packed)


def class_columns(logits: np.ndarray, decisions: Decisions, flat: bool) -> dict[str, list[Any]]:
    """Columns for (N, C) logits: probabilities as lists where the format has them, else as a column per class."""
    labels, decided = decisions.labels, list(decisions.answers(logits))
    columns = {"prediction": [line["prediction"] for line in decided]}
    if labels.problem_type == "regression":
        if labels.size == 1 or not flat:
            return columns
        numbers = np.array(columns["prediction"]).reshape(-1, labels.size)
        return {f"prediction_{name}": numbers[:, place].tolist() for place, name in enumerate(labels.names)}
    if not flat:
        return columns | {"probabilities": [line["probabilities"] for line in decided]}
    if labels.problem_type == "multi_label_classification":
        columns["prediction"] = [json.dumps(names, ensure_ascii=False) for names in columns["prediction"]]
    for place, name in enumerate(labels.names):
        columns[f"probability_{name}"] = [line["probabilities"][place] for line in decided]
    return columns


def _refuse_columns(table: Table, columns: Iterable[str]) -> None:
    taken = [name for name in columns if name in table.rows.column_names]
    if taken:
        raise UserError(f"{table.name} already has a column {listing(taken)}: rename it, nothing is overwritten")


def _output_of(options: Any) -> Path:
    """Where to write. Raises UserError before any work when that is impossible."""
    source = Path(options.file)
    kind = format_of(source)
    stem = source.name[: source.name.lower().rindex(kind)]
    written = ".csv" if kind == ".txt" else kind
    output = Path(options.output) if options.output else source.with_name(f"{stem}.predictions{written}")
    if format_of(output) == ".txt":
        raise UserError(f"--output {output}: name it .csv, .tsv, .json, .jsonl or .parquet")
    if output.exists() and not options.overwrite:
        raise UserError(f"{output} exists: name another with --output, or pass --overwrite")
    if not output.parent.is_dir():
        raise UserError(f"--output {output}: there is no folder {output.parent}")
    if not os.access(output.parent, os.W_OK):
        raise UserError(f"{output.parent} cannot be written: name another file with --output")
    return output
