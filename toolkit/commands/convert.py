"""`toolkit convert`: parses its command line, and prints what a checkpoint contains (`--inspect`)."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import os
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any

from toolkit.checkpoint.convert.conversion import ConvertSettings, convert, model_names, written_dtype
from toolkit.checkpoint.read.open import open_checkpoint
from toolkit.checkpoint.tensor_index import ITEM_BYTES, CheckpointReader
from toolkit.demo import model_path
from toolkit.errors import UserError, size_text
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
        as_json = arguments.json and json.dumps(facts, ensure_ascii=False, indent=1, default=str)
        print(as_json or "\n".join(_lines(reader, facts)))
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
    if arguments.inspect and arguments.out is not None:
        raise UserError("toolkit convert --inspect CHECKPOINT writes nothing: leave OUT out")
    if arguments.json and not arguments.inspect:
        raise UserError("--json needs --inspect")
    if not arguments.inspect and arguments.out is None:
        raise UserError("toolkit convert CHECKPOINT OUT: name the folder to create, or pass --inspect")


def _facts(reader: CheckpointReader) -> dict[str, Any]:
    """The output of `--inspect --json`, from the checkpoint's headers; no tensor is read."""
    parameters = {name: tensor for name, tensor in reader.weights.items() if name not in reader.buffers}
    names, weights = model_names(reader), parameters.values()
    missing = []
    if reader.model_folder is None:
        missing.append("config and tokenizer: --config_from FOLDER supplies them")
    if reader.excluded:
        count = sum(math.prod(shape) for shape in reader.excluded.values())
        what = f"{len(reader.excluded)} frozen parameters with {count:,} elements"
        missing.append(f"{what}: --base_model FOLDER supplies them")
    return {
        "checkpoint": str(reader.path),
        "strategy": reader.strategy,
        "world": reader.world,
        "step": reader.step,
        "engine_dtype": reader.engine_dtype,
        "parameters": len(weights),
        "numbers": sum(each.count for each in weights),
        "dtypes": dict(Counter(each.dtype for each in weights).most_common()),
        "weights_bytes": sum(each.size for each in weights),
        "buffers": len(reader.buffers),
        "frozen": len(reader.frozen),
        "tied": dict(reader.tied),
        "lora": reader.has_lora,
        "moments": len(reader.optimizer_state),
        "excluded": dict(reader.excluded),
        "model_folder": str(reader.model_folder) if reader.model_folder else None,
        "missing": missing,
        "output_bytes": {
            dtype: sum(each.count * ITEM_BYTES[written_dtype(each, dtype)] for each in reader.weights.values())
            for dtype in ("F32", "BF16")
        },
        "shapes": {names[name]: tensor.shape for name, tensor in parameters.items()},
        "details": reader.details,
    }


def _lines(reader: CheckpointReader, facts: dict[str, Any]) -> list[str]:
    """The output of `--inspect`."""
    step = "step not recorded" if reader.step is None else f"step {reader.step}"
    dtypes = ", ".join(f"{count} in {dtype.lower()}" for dtype, count in facts["dtypes"].items())
    sizes = [size_text(size) for size in facts["output_bytes"].values()]
    return [
        f"{reader.path}: {reader.strategy}, {reader.world} process{'es' * (reader.world > 1)}, {step}",
        f"  parameters  {facts['parameters']} with {facts['numbers']:,} elements ({dtypes}), "
        f"{size_text(facts['weights_bytes'])}; the model computed in {reader.engine_dtype.lower()}",
        f"  also        {facts['buffers']} buffers, {facts['frozen']} frozen, {len(reader.tied)} tied names"
        + (", a LoRA adapter" if facts["lora"] else ""),
        f"  optimizer   moments of {facts['moments']} parameters",
        f"  config      {reader.model_folder or 'none'}",
        f"  converted   {sizes[0]} as fp32, {sizes[1]} as bf16",
        "  details     "
        + ", ".join(f"{key} {value}" for key, value in reader.details.items() if not isinstance(value, dict)),
        *(f"  missing     {what}" for what in facts["missing"]),
    ]


COMMAND = Command(
    "convert", "turn any checkpoint into a folder that from_pretrained loads", run, add_arguments,
    description="Writes the weights of CHECKPOINT to OUT as safetensors, with config and tokenizer.", epilog=_EPILOG,
)  # fmt: skip
