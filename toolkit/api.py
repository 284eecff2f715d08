"""Functions for scripts and notebooks without a recipe: settings, predict, evaluate, convert.
docs/api.md lists all that `import toolkit` offers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit import launch
from toolkit.config import build, tasks
from toolkit.errors import UserError
from toolkit.evaluation.saved_model import SavedModel, training_columns


def settings(task: str = "cls", **values: Any) -> Any:
    """The settings of a recipe (`cls`, `bigbird`, or a feature's), by name. Raises UserError with
    all faults."""
    classes = tasks()
    if task not in classes:
        raise UserError(f"settings({task!r}): there are {', '.join(classes)}")
    return build(classes[task], values)


def predict(model: str | Path, texts: Any, **sizes: Any) -> list[dict[str, Any]]:
    """A saved model's answers to texts, in order: `prediction`, and `probabilities` in the order of
    its classes. A title model's `prediction` is a title. The model's decisions.json, if any, sets
    thresholds, a temperature and when it abstains (None).

    `texts`: a sequence of str (a list, a pandas Series, a numpy array, a column of a DataFrame or
    of `datasets`), or of (str, str) pairs. `sizes`:
    `per_device_batch_size`, `max_tokens`, `max_length`, `mixed_precision` and `self_test`, as for
    `toolkit predict`. All processes call this; only the main one gets the answers, the others an empty list.
    Raises UserError for a model that cannot be loaded, and for anything but texts."""
    saved, outputs = _outputs(model, _columns(texts), **sizes)
    if outputs is None:
        return []
    return list(saved.answers.answers(outputs))


def evaluate(
    model: str | Path, texts: Any, truth: Sequence[Any], **sizes: Any
) -> dict[str, Any]:
    """The metrics of eval.jsonl, without the loss, of a saved model on texts and their labels:
    class names, lists of them (multi-label), numbers, or titles. Otherwise as `predict`. Raises
    UserError, too, if the numbers of texts and labels differ, or are 0."""
    columns = _columns(texts)
    if not 0 < len(columns[0]) == len(truth):
        counts = f"{len(columns[0])} texts and {len(truth)} labels"
        raise UserError(f"{counts}: pass one label for each text, at least one")
    saved, outputs = _outputs(model, columns, **sizes)
    if outputs is None:
        return {}
    return saved.answers.metrics(outputs, truth)


def _outputs(
    model: str | Path,
    columns: Sequence[list[str]],
    per_device_batch_size: int = 64,
    max_tokens: int | None = None,
    max_length: int | None = None,
    mixed_precision: str | None = None,
    self_test: str = "error",
) -> tuple[SavedModel, Any]:
    """The model and its outputs: None without texts, and on all processes but the main one."""
    saved = SavedModel(str(model))
    pairs = len(columns) > 1
    if not columns[0]:
        return saved, None
    column = training_columns(str(model)).get("text_pair")
    if column and not pairs:
        raise UserError(
            f"{model} reads pairs (--text_pair {column}): pass a list of (str, str) pairs"
        )
    accelerator = launch.make_accelerator(mixed_precision)
    length = saved.choose_max_length(max_length, pairs)
    saved.load(accelerator, length, per_device_batch_size, max_tokens, self_test)
    return saved, saved.compute_outputs(saved.tokenize(columns))


def _columns(texts: Any) -> tuple[list[str], ...]:
    """The texts; for pairs the first and the second texts. Raises UserError for anything else."""
    hint = "pass a list of str, a list of (str, str) pairs, or a column of a data frame"
    is_sequence = hasattr(texts, "__len__") and hasattr(texts, "__getitem__")
    # the items of a dict or a DataFrame are its columns' names
    if (
        not is_sequence
        or isinstance(texts, str | bytes | Mapping)
        or getattr(texts, "ndim", 1) > 1
    ):
        raise UserError(f"the texts are of type {type(texts).__name__}: {hint}")
    rows = [tuple(item) if isinstance(item, tuple | list) else (item,) for item in texts]
    width = len(rows[0]) if rows else 1
    for number, row in enumerate(rows, 1):
        is_text = all(isinstance(text, str) for text in row)
        if not is_text or len(row) != width or width > 2:
            raise UserError(
                f"texts, row {number}: {repr(row)[:60]} is unlike the others: {hint}"
            )
        if re.search("[\ud800-\udfff]", "".join(row)):
            remedy = "decode the bytes as what they are, utf-8 or gb18030"
            raise UserError(
                f"texts, row {number}: {repr(row[0])[:60]} is no Unicode: {remedy}"
            )
    return tuple([str(row[place]) for row in rows] for place in range(width))


def convert(checkpoint: str | Path, out: str | Path, **options: Any) -> list[str]:
    """`toolkit convert CHECKPOINT OUT`, with its options by name (`dtype="bf16"`). Returns the
    lines it prints."""
    from toolkit.conversion import convert as conversion

    return conversion.convert(
        Path(checkpoint), Path(out), conversion.ConvertSettings(**options)
    )


def wait_for_all() -> None:
    """A barrier over all processes: call it last in the function that `notebook_launcher` runs."""
    launch.require_equal("the end of the notebook's function", {})
