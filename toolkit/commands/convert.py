"""`toolkit convert`: its command line."""

from __future__ import annotations

import argparse
import functools
import signal
from pathlib import Path

from toolkit.data.options import add_self_test_option
from toolkit.demo import model_path
from toolkit.utils.features import Command

_EPILOG = (
    "CHECKPOINT: a run's checkpoint, an accelerate save_state folder, a DeepSpeed save_checkpoint "
    "folder or one of its tags, a torch.distributed.checkpoint folder, a torch.save file (such as "
    "Lightning's .ckpt), an adapter's or a model's folder. No code in it is executed. OUT "
    "is written completely or not at all."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    folder = functools.partial(
        add, metavar="FOLDER", type=lambda name: Path(model_path(name))
    )
    add("checkpoint", type=Path, help="see below")
    add("out", type=Path, help="the folder to create")
    add(
        "--dtype",
        choices=("fp32", "bf16", "fp16"),
        default="fp32",
        help="of the weights [fp32]",
    )
    folder(
        "--config_from",
        help="source of config.json and the tokenizer, or of the adapter's config",
    )
    folder("--base_model", help="source of the frozen parameters that CHECKPOINT lacks")
    add(
        "--prefix",
        default="",
        metavar="NAME",
        help="only the tensors NAME.*, renamed without NAME.",
    )
    add_self_test_option(parser)


def run(arguments: argparse.Namespace) -> None:
    """Raises UserError."""
    from toolkit.conversion.convert import ConvertSettings, convert  # imports torch

    # like Ctrl-C: removes the draft
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    settings = ConvertSettings(
        arguments.dtype,
        arguments.config_from,
        arguments.base_model,
        arguments.prefix,
        arguments.self_test,
    )
    print("\n".join(convert(arguments.checkpoint, arguments.out, settings)))


COMMAND = Command(
    "convert", "turn any checkpoint into a folder that from_pretrained loads", run, add_arguments,
    description="Writes the weights of CHECKPOINT to OUT, with config and tokenizer.",
    epilog=_EPILOG,
)  # fmt: skip
