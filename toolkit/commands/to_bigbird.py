"""The command line of `toolkit to-bigbird`; imports nothing heavy."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

from toolkit.errors import UserError
from toolkit.utils.features import Command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bert", metavar="BERT", help="a folder, a hub name (bert-base-chinese) or demo:minilm")
    parser.add_argument("out", metavar="OUT", help="the folder to make")
    parser.add_argument("--max_length", type=int, default=4096, metavar="TOKENS", help="it is to read [4096]")
    parser.add_argument("--block_size", type=int, default=64, metavar="TOKENS", help="of BigBird's attention [64]")
    parser.add_argument("--num_random_blocks", type=int, default=3, metavar="BLOCKS", help="of its attention [3]")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT, if it is as this command wrote it")


def run(arguments: argparse.Namespace) -> None:
    """Does what the command line asks. Raises UserError."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("toolkit to-bigbird runs in one process: start it without a launcher")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what was begun is removed
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # no accelerator is used: DeepSpeed does not warn that it has none
    from toolkit.models.to_bigbird import SparseSizes, to_bigbird

    sizes = SparseSizes(arguments.max_length, arguments.block_size, arguments.num_random_blocks)
    print("\n".join(to_bigbird(arguments.bert, Path(arguments.out), sizes, arguments.overwrite)))


COMMAND = Command(
    "to-bigbird",
    "make a BERT read long texts",
    run,
    add_arguments,
    description="Writes a BigBird with the weights and the tokenizer of BERT to OUT, for texts of --max_length.",
    epilog="OUT appears whole or not at all. Its vocabulary and language are BERT's.",
)
