"""`toolkit to-bigbird`: parses its command line without heavy imports."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

from toolkit.data.options import add_self_test_option
from toolkit.utils.features import Command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "bert",
        metavar="BERT",
        help="a folder, a hub name (bert-base-chinese) or demo:minilm",
    )
    add("out", metavar="OUT", help="the folder to create")
    longest = "the longest text that OUT reads, in tokens [4096]"
    add("--max_length", type=int, metavar="N", default=4096, help=longest)
    add_self_test_option(parser)


def run(arguments: argparse.Namespace) -> None:
    """Raises UserError."""
    # like Ctrl-C: removes the draft
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # or DeepSpeed warns of a missing accelerator
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from toolkit.evaluation.self_test import check_folder, write_self_test
    from toolkit.models.to_bigbird import SparseSizes, to_bigbird

    check_folder(arguments.bert, arguments.self_test)
    sizes = SparseSizes(arguments.max_length)
    lines = to_bigbird(arguments.bert, Path(arguments.out), sizes)
    write_self_test(Path(arguments.out))
    print("\n".join(lines))


COMMAND = Command(
    "to-bigbird",
    "make a BERT that reads long texts",
    run,
    add_arguments,
    "Writes a BigBird with the weights and the tokenizer of BERT to OUT, for long texts.",
    "OUT is written completely or not at all. Its vocabulary and language are BERT's.",
)
