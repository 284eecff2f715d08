"""The command `toolkit verify`."""

from __future__ import annotations

import argparse

from toolkit.utils.features import Command, Feature

CONFIGS = [f"accelerate_configs/{name}.yaml" for name in ("ddp", "zero2", "zero3", "fsdp2")]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("recipe", metavar="RECIPE.py|MODEL_FOLDER")
    configs = "may be repeated [ddp, zero2, zero3 and fsdp2 of accelerate_configs/]"
    add("--config_file", action="append", metavar="FILE", help=configs)
    add(
        "--max_steps",
        type=int,
        default=8,
        metavar="N",
        help="optimizer steps of each run [8]",
    )
    precision = "compared with fp32, too [auto]"
    add("--mixed_precision", default="auto", metavar="auto|no|bf16|fp16", help=precision)
    tolerance = "largest relative difference in fp32 [1e-5]"
    add("--tolerance", type=float, default=1e-5, help=tolerance)
    limit = "a run that has not ended after these seconds hangs [600]"
    add("--time_limit", type=float, default=600.0, metavar="SECONDS", help=limit)
    folder = "new folder of the runs and verify.json [runs/verify-RECIPE-TIME]"
    add("--output_dir", metavar="FOLDER", help=folder)


FEATURE = Feature(
    Command(
        "verify",
        "check that a recipe trains the same under every config, or a model answers as saved",
        "toolkit.features.verify.command:run",
        _add_arguments,
        description=(
            "Compares a few steps in one process and under each config, and a resumed run with an "
            "uninterrupted one. Other options go to the recipe. Of a MODEL_FOLDER: whether it "
            "answers as when it was saved, by its self_test.json."
        ),
        relaunches=False,
        passes_rest=True,
    )
)
