"""The command `toolkit verify`."""

from __future__ import annotations

import argparse

from toolkit.utils.features import Command, Feature

CONFIGS = [f"accelerate_configs/{name}.yaml" for name in ("ddp", "zero2", "zero3", "fsdp2")]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("recipe", metavar="RECIPE.py")
    configs = "may be repeated [ddp, zero2, zero3 and fsdp2 of accelerate_configs/]"
    add("--config_file", action="append", metavar="FILE", help=configs)
    add("--max_steps", type=int, default=4, metavar="N", help="optimizer steps of each run [4]")
    add(
        "--mixed_precision",
        default="auto",
        metavar="auto|no|bf16|fp16",
        help="compared with fp32, too [auto]",
    )
    add("--tolerance", type=float, default=1e-5, help="largest relative difference in fp32 [1e-5]")
    add(
        "--output_dir",
        metavar="FOLDER",
        help="folder of the runs and verify.json [runs/verify-RECIPE]",
    )


FEATURE = Feature(Command(
    "verify", "check that a recipe trains the same under every config", "toolkit.features.verify.command:run",
    _add_arguments,
    description="Compares a few steps in one process and under each config. Other options go to the recipe.",
    relaunches=False, passes_rest=True,
))  # fmt: skip
