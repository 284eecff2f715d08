"""`toolkit convert --inspect`: what a checkpoint holds, from its structure alone."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from toolkit.checkpoint.convert.conversion import with_model_names, written_dtype
from toolkit.checkpoint.lora import is_lora
from toolkit.checkpoint.reader import ITEM_BYTES, CheckpointReader
from toolkit.units import size_text


def describe(reader: CheckpointReader) -> dict[str, Any]:
    """What `--json` prints."""
    weights, stored = reader.weights.values(), (*reader.weights.values(), *reader.buffers.values())
    missing = []
    if reader.model_folder is None:
        missing.append("config and tokenizer: --config_from FOLDER supplies them")
    if reader.excluded:
        count = sum(math.prod(shape) for shape in reader.excluded.values())
        missing.append(
            f"{len(reader.excluded)} frozen parameters with {count:,} numbers: --base_model FOLDER supplies them"
        )
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
        "lora": is_lora(reader),
        "moments": len(reader.optimizer_state),
        "excluded": dict(reader.excluded),
        "model_folder": str(reader.model_folder) if reader.model_folder else None,
        "missing": missing,
        "output_bytes": {
            dtype: sum(each.count * ITEM_BYTES[written_dtype(each, dtype)] for each in stored)
            for dtype in ("F32", "BF16")
        },
        "shapes": {name: stored.shape for name, stored in with_model_names(reader).weights.items()},
        "details": reader.details,
    }


def lines(reader: CheckpointReader) -> list[str]:
    """The same for a person."""
    facts = describe(reader)
    step = "step not recorded" if reader.step is None else f"step {reader.step}"
    dtypes = ", ".join(f"{count} in {dtype.lower()}" for dtype, count in facts["dtypes"].items())
    sizes = [size_text(size) for size in facts["output_bytes"].values()]
    return [
        f"{reader.path}: {reader.strategy}, {reader.world} process{'es' * (reader.world > 1)}, {step}",
        f"  parameters  {facts['parameters']} with {facts['numbers']:,} numbers ({dtypes}), "
        f"{size_text(facts['weights_bytes'])}; the model computed in {reader.engine_dtype.lower()}",
        f"  besides     {facts['buffers']} buffers, {facts['frozen']} frozen, {len(reader.tied)} tied names"
        + (", a LoRA adapter" if facts["lora"] else ""),
        f"  optimizer   moments of {facts['moments']} parameters",
        f"  config      {reader.model_folder or 'none'}",
        f"  converted   {sizes[0]} as fp32, {sizes[1]} as bf16",
        "  details     "
        + ", ".join(f"{key} {said}" for key, said in reader.details.items() if not isinstance(said, dict)),
        *(f"  missing     {what}" for what in facts["missing"]),
    ]
