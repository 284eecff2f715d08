"""The commands `toolkit predict` and `toolkit evaluate`."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolkit.data.options import add_reading_options, add_self_test_option
from toolkit.utils.features import Command, Feature

_EPILOG = (
    "Runs in one process, or in several: --config_file accelerate_configs/ddp.yaml, or "
    "`accelerate launch -m toolkit ...`, `torchrun --nproc_per_node 2 -m toolkit ...`."
)


def _add_predict(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "model",
        help="a run's model folder, any classifier or encoder-decoder, or a hub name",
    )
    files = (
        "CSV, TSV, JSON, JSONL, Parquet, also .gz, .bz2; 'part*.csv'; .txt: a text a line"
    )
    add("file", nargs="?", help=files)
    text = "print the answer for this text (may be repeated), without FILE"
    add("--text", action="append", help=text)
    output = "where to write [FILE.predictions.SUFFIX next to the input; .csv for .txt]"
    add("--output", help=output)
    add("--overwrite", action="store_true", help="replace an existing output")
    add(
        "--probabilities",
        choices=("all", "none"),
        default="all",
        help="which to write [all]",
    )
    part = "3/64: predict only this part of the file; without it, later, the rest, and join all"
    add("--shard", type=shard, help=part)
    _add_common(parser)


def _add_evaluate(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", help="a run's model folder, any classifier, or a hub name")
    add("file", help="labelled rows: CSV, TSV, JSON, JSONL or Parquet")
    add("--output_dir", help="where to write [FILE.evaluation next to the input]")
    add(
        "--label_column",
        help="the column of labels; default: as in training, or by its name",
    )
    _add_common(parser)


def _add_common(parser: argparse.ArgumentParser) -> None:
    """Options for reading the file and for the computation."""
    add = parser.add_argument
    add("--text_column", help="the column of texts; default: by its name")
    add("--text_pair", help="the second text's column; default: as in training")
    add_reading_options(parser)
    length = "longer texts are truncated; default: the model's limit"
    add("--max_length", type=int, help=length)
    add(
        "--per_device_batch_size",
        type=positive,
        default=64,
        help="maximum texts of a batch [64]",
    )
    tokens = "maximum tokens of a batch, with padding [2048 on a CPU, 16384 on a GPU]"
    add("--max_tokens_per_batch", type=positive, help=tokens)
    add_self_test_option(parser)
    precisions = ("auto", "no", "bf16", "fp16")
    add("--mixed_precision", choices=precisions, help="[the accelerate config's, or no]")


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def shard(text: str) -> tuple[int, int]:
    """`3/64` -> (3, 64)."""
    number, count = map(int, text.split("/"))
    if not 1 <= number <= count:
        raise ValueError
    return number, count


class PredictFeature(Feature):
    def results(
        self, folder: Path, settings: Any, data: Any, evaluation: Any, answers: Any
    ) -> Sequence[str]:
        # no run, or pretraining: nothing to predict
        if data is None or data.targets.column_setting is None:
            return ()
        from toolkit.report.model_class import architecture

        if not architecture(folder / "model"):
            return ()
        command = f"toolkit predict {shlex.quote(str(folder))}/model"
        return [f"  {command} YOUR_FILE.csv   labels the rows of a file"]


FEATURE = PredictFeature(
    Command(
        "predict",
        "label every row of a file, or give it a title",
        "toolkit.features.predict.command:predict_file",
        _add_predict,
        "Labels every row of FILE, or writes its title, exactly once, in its order and with its "
        "columns.",
        _EPILOG,
    ),
    Command(
        "evaluate",
        "evaluate a classifier on labelled rows: metrics, a report, predictions",
        "toolkit.features.predict.evaluate:evaluate_file",
        _add_evaluate,
        "Writes a folder with eval.jsonl, predictions.jsonl and report.html: each row of FILE "
        "counts once.",
        _EPILOG,
    ),
)
