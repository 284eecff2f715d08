"""The facts that must be equal in a checkpoint and in the run that resumes from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate import Accelerator

from toolkit.checkpoint.checksums import crc32
from toolkit.checkpoint.tensor_index import crc32_of_range
from toolkit.config import ObjectiveSettings, section_in
from toolkit.data.prepare import Prepared


def identity_of(accelerator: Accelerator, settings: Any, data: Prepared, recipe: str) -> dict[str, Any]:
    """As JSON. A model's folder is identified by its content, and may be moved or copied."""
    model, training = settings.model, settings.training

    def content(name: str) -> str:
        return _checksum(Path(name)) if accelerator.is_main_process and Path(name).is_dir() else name

    distillation = getattr(settings, "distillation", None)
    return {
        "recipe": recipe,
        "model": content(str(model.model_name_or_path)),
        **({"teacher": content(distillation.teacher)} if distillation and distillation.teacher else {}),
        **({"num_hidden_layers": layers} if (layers := getattr(model, "num_hidden_layers", None)) else {}),
        **data.facts,
        "data": data.digest,
        "max_length": data.max_length,
        "global_batch_size": training.global_batch_size,
        "group_by_length": training.group_by_length,
        "seed": training.seed,
        "sampling": section_in(settings, ObjectiveSettings).sampling,
        **{name: getattr(model, name, None) for name in ("lora_r", "lora_alpha", "lora_target_modules")},
    }


def _checksum(model: Path) -> str:
    """Of the folder's config and weights."""
    files = sorted(
        path for path in model.iterdir() if path.name == "config.json" or path.suffix in (".safetensors", ".bin")
    )
    text = " ".join(f"{path.name} {crc32_of_range(path):08x}" for path in files)
    return f"{crc32(text.encode()):08x}"
