"""The commands `toolkit predict` and `toolkit evaluate`."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolkit.utils.features import Command, Feature

_EPILOG = (
    "Runs in one process, or in several: --config_file accelerate_configs/ddp.yaml, or "
    "`accelerate launch -m toolkit ...`, `torchrun --nproc_per_node 2 -m toolkit ...`."
)


def _add_predict(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", help="a run's model folder, any classifier or encoder-decoder, or a hub name")
    add(
        "file",
        nargs="?",
        help="CSV, TSV, JSON, JSONL, Parquet, also .gz, .bz2; 'part*.csv'; .txt: a text a line",
    )
    add(
        "--text",
        action="append",
        help="print the answer for this text (may be repeated), without FILE",
    )
    add(
        "--output",
        metavar="FILE",
        help="where to write [FILE.predictions.SUFFIX next to the input; .csv for .txt]",
    )
    add("--overwrite", action="store_true", help="replace an existing output")
    add(
        "--probabilities",
        type=_probabilities,
        default="all",
        metavar="all|none|top-K",
        help="which to write [all]",
    )
    add(
        "--shard",
        type=_shard,
        metavar="3/64",
        help="predict only this part of the file; other processes do the rest",
    )
    add("--join", action="store_true", help="write the output from the finished shards")
    _add_common(parser)


def _add_evaluate(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", help="a run's model folder, any classifier, or a hub name")
    add("file", help="labelled rows: CSV, TSV, JSON, JSONL or Parquet")
    add("--output_dir", metavar="FOLDER", help="where to write [FILE.evaluation next to the input]")
    add("--overwrite", action="store_true", help="replace an existing output")
    add(
        "--label_column",
        metavar="NAME",
        help="the column of labels; default: as in training, or by its name",
    )
    _add_common(parser)


def _add_common(parser: argparse.ArgumentParser) -> None:
    """Options for reading the file and for the computation."""
    add = parser.add_argument
    add("--text_column", metavar="NAME", help="the column of texts; default: by its name")
    add("--text_pair", metavar="NAME", help="the second text's column; default: as in training")
    add("--encoding", default="utf-8", help="encoding of CSV, TSV and JSON files [utf-8]")
    add(
        "--delimiter", metavar="CHARACTER", help="delimiter of cells; default: by the file's suffix"
    )
    add(
        "--quoting",
        choices=("csv", "none"),
        help="none: a double quote is part of the text [as in training, or csv]",
    )
    add(
        "--column_names",
        metavar="NAMES",
        help="column names of a file without a header: label,text",
    )
    add(
        "--max_length",
        type=int,
        metavar="TOKENS",
        help="longer texts are truncated; default: the model's limit",
    )
    add(
        "--per_device_batch_size",
        type=_positive,
        default=64,
        metavar="SAMPLES",
        help="maximum texts of a batch [64]",
    )
    tokens = "maximum tokens of a batch, with padding [2048 on a CPU, 16384 on a GPU]"
    add("--max_tokens_per_batch", type=_positive, metavar="TOKENS", help=tokens)
    add(
        "--mixed_precision",
        choices=("auto", "no", "bf16", "fp16"),
        help="[the accelerate config's, or no]",
    )


def _probabilities(text: str) -> str:
    if not re.fullmatch(r"all|none|top-[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not all, none or top-3")
    return text


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1")
    return int(text)


def _shard(text: str) -> tuple[int, int]:
    """`3/64` -> (3, 64)."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(
            f"{text}: write 3/64 for the third of 64 shards; the first is 1/64"
        )
    return int(match[1]), int(match[2])


class PredictFeature(Feature):
    def results(
        self, folder: Path, settings: Any, data: Any, evaluation: Any, answers: Any
    ) -> Sequence[str]:
        # no run, or pretraining: nothing to predict
        if data is None or data.targets.column_setting is None:
            return ()
        from toolkit.report.files import architecture
        from toolkit.report.log import runnable_command

        if not architecture(folder / "model"):
            return ()
        command = f"{runnable_command('toolkit')} predict {shlex.quote(str(folder))}/model"
        return [f"  {command} YOUR_FILE.csv   labels the rows of a file"]


FEATURE = PredictFeature(
    Command(
        "predict", "label every row of a file, or give it a title", "toolkit.features.predict.command:predict_file",
        _add_predict, "Labels every row of FILE, or writes its title, exactly once, in its order and with its columns.",
        _EPILOG,
    ),
    Command(
        "evaluate", "evaluate a classifier on labelled rows: metrics, a report, predictions",
        "toolkit.features.predict.evaluate:evaluate_file", _add_evaluate,
        "Writes a folder with eval.jsonl, predictions.jsonl and report.html: each row of FILE counts once.", _EPILOG,
    ),
)  # fmt: skip
