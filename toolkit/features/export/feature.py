"""The command `toolkit export`, and how its models are loaded."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from toolkit.data.options import add_self_test_option
from toolkit.utils.features import Command, Feature


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", help="the model folder of a classifier's run")
    add("out", help="the folder to create")
    kinds = ("openvino", "onnx", "server")
    add("--to", choices=kinds, required=True, help="the runtime")
    add(
        "--int8", action="store_true", help="8 bits, calibrated on the run's training texts"
    )
    changed = (
        "how many of 100 answers may change; regression: %% of unexplained variance [2]"
    )
    add("--max_changed", type=float, default=2.0, metavar="PERCENT", help=changed)
    add_self_test_option(parser)


class ExportFeature(Feature):
    """The command, and the models that it writes."""

    def load_model(self, model: str, config: Any) -> Any:
        from toolkit.features.export.runtimes import ExportedClassifier, export_format

        folder = Path(model)
        return ExportedClassifier(folder, config) if export_format(folder) else None


FEATURE = ExportFeature(
    Command(
        name="export",
        help="export a classifier to OpenVINO or ONNX Runtime, or for a server",
        run="toolkit.features.export.command:export",
        add_arguments=_add_arguments,
        description="Writes OUT, a folder that `toolkit predict` reads like any model. For "
        "openvino and onnx it is compared with MODEL on the validation rows of its run, and not "
        "written if its answers differ. `--to server` puts the temperature and the thresholds of "
        "decisions.json into the weights, since servers do not read that file.",
    )
)
