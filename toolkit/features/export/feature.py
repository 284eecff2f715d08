"""The command `toolkit export`."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

from toolkit.utils.features import Command, Feature


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", help="a run's model folder, any classifier, or a hub name")
    add("out", help="the folder to create")
    add("--to", choices=("openvino", "onnx"), required=True, help="the runtime")
    add(
        "--int8",
        action="store_true",
        help="8-bit weights and activations, calibrated on real texts",
    )
    points = functools.partial(parser.add_argument, type=float, metavar="POINTS")
    points(
        "--max_drop",
        default=0.5,
        help="allowed drop of accuracy (regression: explained variance) in points [0.5]",
    )
    points(
        "--max_changed", default=2.0, help="how many of 100 answers may change, right or wrong [2]"
    )
    add(
        "--validation_file",
        metavar="FILE",
        help="rows to check on; default: the run's validation rows",
    )
    add(
        "--calibration_file",
        metavar="FILE",
        help="texts for --int8; default: the run's training rows",
    )
    for name in ("text_column", "text_pair", "label_column"):
        add(f"--{name}", metavar="NAME", help="the column in these files")
    add(
        "--max_length",
        type=int,
        metavar="TOKENS",
        help="longer texts are truncated; default: the model's limit",
    )


class ExportFeature(Feature):
    """The command, and the models that it writes."""

    def load_model(self, model: str, config: Any) -> Any:
        from toolkit.features.export.runtimes import ExportedClassifier, export_format

        folder = Path(model)
        return ExportedClassifier(folder, config) if export_format(folder) else None


FEATURE = ExportFeature(Command(
    "export", "export a classifier to OpenVINO or ONNX Runtime, optionally in 8 bits",
    "toolkit.features.export.command:export", _add_arguments,
    "Writes OUT, a folder that `toolkit predict` reads like any model. It is compared with MODEL on the "
    "validation rows of its run (or --validation_file), and not written if its predictions differ.",
))  # fmt: skip
