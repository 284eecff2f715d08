"""`toolkit convert --inspect`: what a checkpoint holds, from its structure alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

from toolkit.checkpoint.convert.lora import is_lora
from toolkit.checkpoint.convert.outputs import clean_names
from toolkit.checkpoint.source import Source, Stored

_WRITERS = {
    "single": "one process", "ddp": "data parallel", "zero1": "DeepSpeed ZeRO-1", "zero2": "DeepSpeed ZeRO-2",
    "zero3": "DeepSpeed ZeRO-3", "fsdp2": "PyTorch FSDP2", "model": "a model's folder",
}  # fmt: skip


def describe(source: Source) -> dict[str, Any]:
    """What a checkpoint holds, as `--inspect --json` prints it."""
    weights, buffers = source.weights.values(), source.buffers.values()
    numbers = sum(stored.count for stored in weights)
    return {
        "checkpoint": str(source.path),
        "strategy": source.strategy,
        "world": source.world,
        "step": source.step,
        "engine_dtype": source.engine_dtype,
        "parameters": len(source.weights),
        "numbers": numbers,
        "dtypes": _dtypes(weights),
        "weights_bytes": sum(stored.size for stored in weights),
        "buffers": len(source.buffers),
        "frozen": len(source.frozen),
        "tied": dict(source.tied),
        "lora": is_lora(source),
        "moments": len(source.moments),
        "excluded": {name: list(shape) for name, shape in source.excluded.items()},
        "model_folder": str(source.model_folder) if source.model_folder else None,
        "missing": _missing(source),
        "output_bytes": {name: _output_bytes([*weights, *buffers], name) for name in ("F32", "BF16")},
        "shapes": {short: list(source.weights[name].shape) for name, short in clean_names(source.weights).items()},
        "details": {name: _plain(value) for name, value in source.details.items()},
    }


def lines(source: Source) -> list[str]:
    """The same for a reader."""
    facts = describe(source)
    step = "step not recorded" if source.step is None else f"step {source.step}"
    dtypes = ", ".join(f"{count} in {dtype.lower()}" for dtype, count in facts["dtypes"].items())
    text = [
        f"{source.path}: {_WRITERS.get(source.strategy, source.strategy)}, {_plural(source.world, 'process')}, {step}",
        f"  parameters  {facts['parameters']} with {facts['numbers']:,} numbers ({dtypes}), "
        f"{gigabytes(facts['weights_bytes'])}; the model computed in {source.engine_dtype.lower()}",
        f"  besides     {facts['buffers']} buffers, {facts['frozen']} frozen, {len(source.tied)} tied names"
        + (", a LoRA adapter" if facts["lora"] else ""),
        f"  optimizer   moments of {facts['moments']} parameters" if source.moments else "  optimizer   no state",
        f"  config      {source.model_folder or 'none'}",
        f"  converted   {gigabytes(facts['output_bytes']['F32'])} as fp32, "
        f"{gigabytes(facts['output_bytes']['BF16'])} as bf16",
    ]
    short = {
        name: value for name, value in facts["details"].items() if name != "folder" and not isinstance(value, dict)
    }
    if short:
        text.append("  details     " + ", ".join(f"{name} {value}" for name, value in short.items()))
    text += [f"  missing     {what}" for what in facts["missing"]]
    return text


def gigabytes(size: int) -> str:
    """`1.34 GB`, `12.5 MB`, of powers of ten."""
    for unit, power in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= power:
            return f"{size / power:.3g} {unit}" if size < 1000 * power else f"{size / power:.0f} {unit}"
    return f"{size} bytes"


def _missing(source: Source) -> list[str]:
    missing = []
    if source.model_folder is None:
        missing.append("config and tokenizer: --config_from FOLDER supplies them")
    if source.excluded:
        count = sum(math.prod(shape) for shape in source.excluded.values())
        missing.append(
            f"{len(source.excluded)} frozen parameters with {count:,} numbers: --base_model FOLDER supplies them"
        )
    return missing


def _dtypes(tensors: Iterable[Stored]) -> dict[str, int]:
    return dict(Counter(stored.dtype for stored in tensors).most_common())


def _output_bytes(tensors: Iterable[Stored], dtype: str) -> int:
    from toolkit.checkpoint.convert.outputs import Output

    return sum(Output(stored.name, stored).size(dtype) for stored in tensors)


def _plain(value: object) -> Any:
    """As JSON takes it."""
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(inner) for inner in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _plural(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}es"
