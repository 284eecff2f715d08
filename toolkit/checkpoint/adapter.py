"""LoRA on disk: the adapter's folder beside the model's, and the sum that makes them one (names in `lora`).

Nothing here imports peft: a checkpoint can be read where it is not installed.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from toolkit.checkpoint.lora import is_adapters, merged_name, saved_name, stays, weight_change

FOLDER = "adapter"  # beside the run's model/
_BASE, _LORA_A, _LORA_B = ".base_layer.weight", ".lora_A.default.weight", ".lora_B.default.weight"


def config_of(model: torch.nn.Module) -> Any | None:
    """The LoraConfig of an unwrapped model, or None for one without LoRA."""
    configs = getattr(model, "peft_config", None)
    return configs.get("default") if isinstance(configs, dict) and hasattr(model, "get_base_model") else None


def merge(state: Mapping[str, torch.Tensor], scaling: float) -> dict[str, torch.Tensor]:
    """A whole state dict with LoRA -> the plain model's: W + scaling * B A (Hu et al., 2021, section 4.1).

    `scaling` is lora_alpha / r. The sum is made in float32, the result has the base weight's type.
    """
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if not stays(name):
            continue
        layer = name.removesuffix(_BASE)
        if layer != name and layer + _LORA_A in state:
            change = weight_change(state[layer + _LORA_A].float(), state[layer + _LORA_B].float(), scaling)
            tensor = (tensor.float() + change).to(tensor.dtype)
        plain[merged_name(name)] = tensor
    return plain


def write(model: torch.nn.Module, state: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Writes the adapter alone, as `PeftModel.from_pretrained(base_model, folder)` reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    trained = {saved_name(name): tensor.contiguous() for name, tensor in state.items() if is_adapters(name)}
    save_file(trained, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    write_config(model, folder)


def write_config(model: torch.nn.Module, folder: Path) -> None:
    """adapter_config.json of a model with LoRA: rank, scaling and layers, as they are used, not trained on."""
    config: Any = copy.copy(config_of(model))
    config.inference_mode = True
    config.save_pretrained(folder)


def reader(model: torch.nn.Module, folder: Path) -> tuple[Path, dict[str, str]]:
    """(the folder to load a live model from, a tensor's name there -> its name in the model).

    With LoRA that is the adapter beside the merged model: the base weights are as they were.
    """
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    names += [name for name, _ in model.named_buffers()]
    if config_of(model) is None:
        return folder, {name: name for name in names}
    return folder.with_name(FOLDER), {saved_name(name): name for name in names if is_adapters(name)}
