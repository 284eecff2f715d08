"""`toolkit convert --inspect`: what a checkpoint holds, from its structure alone."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from toolkit.checkpoint.convert.select import Output, clean_names, is_lora
from toolkit.checkpoint.reader import CheckpointReader
from toolkit.units import size_text

_WRITERS = {
    "single": "one process", "ddp": "data parallel", "zero1": "DeepSpeed ZeRO-1", "zero2": "DeepSpeed ZeRO-2",
    "zero3": "DeepSpeed ZeRO-3", "fsdp2": "PyTorch FSDP2", "model": "a model's folder",
}  # fmt: skip


def describe(reader: CheckpointReader) -> dict[str, Any]:
    """What a checkpoint holds, as `--inspect --json` prints it."""
    weights, buffers = reader.weights.values(), reader.buffers.values()
    numbers = sum(stored.count for stored in weights)
    return {
        "checkpoint": str(reader.path),
        "strategy": reader.strategy,
        "world": reader.world,
        "step": reader.step,
        "engine_dtype": reader.engine_dtype,
        "parameters": len(reader.weights),
        "numbers": numbers,
        "dtypes": dict(Counter(stored.dtype for stored in weights).most_common()),
        "weights_bytes": sum(stored.size for stored in weights),
        "buffers": len(reader.buffers),
        "frozen": len(reader.frozen),
        "tied": dict(reader.tied),
        "lora": is_lora(reader),
        "moments": len(reader.optimizer_state),
        "excluded": {name: list(shape) for name, shape in reader.excluded.items()},
        "model_folder": str(reader.model_folder) if reader.model_folder else None,
        "missing": _missing(reader),
        "output_bytes": {
            dtype: sum(Output(stored.name, stored).size(dtype) for stored in (*weights, *buffers))
            for dtype in ("F32", "BF16")
        },
        "shapes": {short: list(reader.weights[name].shape) for name, short in clean_names(reader.weights).items()},
        "details": {name: _plain(value) for name, value in reader.details.items()},
    }


def lines(reader: CheckpointReader) -> list[str]:
    """The same for a reader."""
    facts = describe(reader)
    step = "step not recorded" if reader.step is None else f"step {reader.step}"
    processes = f"{reader.world} process" + "es" * (reader.world > 1)
    dtypes = ", ".join(f"{count} in {dtype.lower()}" for dtype, count in facts["dtypes"].items())
    text = [
        f"{reader.path}: {_WRITERS.get(reader.strategy, reader.strategy)}, {processes}, {step}",
        f"  parameters  {facts['parameters']} with {facts['numbers']:,} numbers ({dtypes}), "
        f"{size_text(facts['weights_bytes'])}; the model computed in {reader.engine_dtype.lower()}",
        f"  besides     {facts['buffers']} buffers, {facts['frozen']} frozen, {len(reader.tied)} tied names"
        + (", a LoRA adapter" if facts["lora"] else ""),
        f"  optimizer   moments of {facts['moments']} parameters"
        if reader.optimizer_state
        else "  optimizer   no state",
        f"  config      {reader.model_folder or 'none'}",
        f"  converted   {size_text(facts['output_bytes']['F32'])} as fp32, "
        f"{size_text(facts['output_bytes']['BF16'])} as bf16",
    ]
    short = {
        name: value for name, value in facts["details"].items() if name != "folder" and not isinstance(value, dict)
    }
    if short:
        text.append("  details     " + ", ".join(f"{name} {value}" for name, value in short.items()))
    text += [f"  missing     {what}" for what in facts["missing"]]
    return text


def _missing(reader: CheckpointReader) -> list[str]:
    missing = []
    if reader.model_folder is None:
        missing.append("config and tokenizer: --config_from FOLDER supplies them")
    if reader.excluded:
        count = sum(math.prod(shape) for shape in reader.excluded.values())
        missing.append(
            f"{len(reader.excluded)} frozen parameters with {count:,} numbers: --base_model FOLDER supplies them"
        )
    return missing


def _plain(value: object) -> Any:
    """As JSON takes it."""
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(inner) for inner in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
