"""`toolkit convert`: parses its command line, and prints what a checkpoint contains (`--inspect`)."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any

from toolkit.checkpoint.convert.conversion import ConvertSettings, convert
from toolkit.checkpoint.read.open import open_checkpoint
from toolkit.checkpoint.tensor_index import CheckpointReader
from toolkit.demo import model_path
from toolkit.errors import UserError
from toolkit.utils.features import Command

_EPILOG = (
    "CHECKPOINT: a run's checkpoint, an accelerate save_state folder, a DeepSpeed save_checkpoint folder or one of "
    "its tags, a torch.distributed.checkpoint folder, a torch.save file (such as Lightning's .ckpt), an adapter's or a "
    "model's folder. No code in it is executed. OUT is written completely or not at all."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flag = functools.partial(parser.add_argument, action="store_true")
    folder = functools.partial(parser.add_argument, metavar="FOLDER", type=lambda name: Path(model_path(name)))
    parser.add_argument("checkpoint", type=Path, help="see below")
    parser.add_argument("out", nargs="?", type=Path, help="the folder to create")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help="dtype of the weights [fp32]")
    parser.add_argument("--max_shard_size", default="5GB", metavar="SIZE", dest="max_shard_bytes", type=parse_size,
                        help="maximum size of a file: 5GB, 500MB, 2GiB [5GB]")  # fmt: skip
    folder("--config_from", help="source of config.json and the tokenizer, or of the adapter's config")
    folder("--base_model", help="source of the frozen parameters that CHECKPOINT lacks")
    parser.add_argument("--prefix", default="", metavar="NAME", help="only the tensors NAME.*, renamed without NAME.")
    flag("--merge_lora", help="merge the adapter into the base model")
    flag("--keep_tied", help="write tied weights under all their names")
    flag("--overwrite", help="replace OUT if it exists")
    flag("--sync", help="flush OUT to the disk before exiting [only with --overwrite]")
    flag("--without_checksums", help="accept files without checksums")
    flag("--verify", help="read the output again and compare")
    flag("--dry_run", help="check everything and list the files without writing them")
    flag("--inspect", help="print what CHECKPOINT contains, without OUT")
    flag("--json", help="with --inspect: as JSON")


def run(arguments: argparse.Namespace) -> None:
    """Raises UserError."""
    # before numpy is imported: BLAS threads would take memory and speed up nothing
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    _check(arguments)
    if arguments.inspect:
        reader = open_checkpoint(arguments.checkpoint)
        facts = _facts(reader)
        lines = [f"{name:15} {value}" for name, value in facts.items() if name != "shapes"]
        print(json.dumps(facts, ensure_ascii=False, indent=1, default=str) if arguments.json else "\n".join(lines))
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: removes the draft
    settings = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(ConvertSettings)}
    print("\n".join(convert(ConvertSettings(**settings))))


def parse_size(text: str) -> int:
    """`5GB` (10^9), `500MiB` (2^20) -> bytes. Raises UserError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)(b?)", text.strip().lower())
    size = int(float(match[1]) * (1024 if match[3] else 1000) ** " kmgt".index(match[2] or " ")) if match else 0
    if match is None or size <= 0:
        raise UserError(f"--max_shard_size {text} is not a size: write 5GB, 500MB or 2GiB")
    if not match[2] + match[4] and size < 10**6:
        raise UserError(f"--max_shard_size {text} is {size} bytes: did you mean {match[1]}GB?")
    return size


def _check(arguments: argparse.Namespace) -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("toolkit convert runs in one process: start it without a launcher")
    if arguments.inspect == (arguments.out is not None) or (arguments.json and not arguments.inspect):
        usage = "toolkit convert CHECKPOINT OUT, with OUT the folder to create"
        raise UserError(f"pass either {usage}, or toolkit convert --inspect [--json] CHECKPOINT")


def _facts(reader: CheckpointReader) -> dict[str, Any]:
    """The output of `--inspect`, from the checkpoint's headers; no tensor is read."""
    shapes = {name: tensor.shape for name, tensor in reader.weights.items() if name not in reader.buffers}
    parameters = [reader.weights[name] for name in shapes]
    return {
        "checkpoint": str(reader.path),
        "strategy": reader.strategy,
        "world": reader.world,
        "step": reader.step,
        "engine_dtype": reader.engine_dtype,
        "parameters": len(parameters),
        "numbers": sum(each.count for each in parameters),
        "dtypes": dict(Counter(each.dtype for each in parameters).most_common()),
        "weights_bytes": sum(each.size for each in parameters),
        "buffers": len(reader.buffers),
        "frozen": len(reader.frozen),
        "excluded": len(reader.excluded),
        "tied": dict(reader.tied),
        "lora": reader.has_lora,
        "moments": len(reader.optimizer_state),
        "model_folder": str(reader.model_folder) if reader.model_folder else None,
        **{key: value for key, value in reader.details.items() if not isinstance(value, dict)},
        "shapes": shapes,
    }


COMMAND = Command(
    "convert", "turn any checkpoint into a folder that from_pretrained loads", run, add_arguments,
    description="Writes the weights of CHECKPOINT to OUT as safetensors, with config and tokenizer.", epilog=_EPILOG,
)  # fmt: skip
