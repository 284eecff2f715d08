"""LoRA on disk: the names peft gives the parameters of a model, and the sum that makes them one again.

With peft's default adapter a live model holds, under the prefix `base_model.model.`,

    X.base_layer.weight                            frozen (and X.base_layer.bias), of a layer with LoRA
    X.lora_A.default.weight (r, in)                trained
    X.lora_B.default.weight (out, r)               trained
    H.original_module.*, H.modules_to_save.default.*    the head before training, and the trained one
    everything else                                frozen, under its own name

Nothing here imports peft: a checkpoint can be read where it is not installed.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

FOLDER = "adapter"  # beside the run's model/
_PREFIX = "base_model.model."
_TRAINED = (".lora_A.default.", ".lora_B.default.", ".modules_to_save.default.")
_BASE, _LORA_A, _LORA_B = ".base_layer.weight", ".lora_A.default.weight", ".lora_B.default.weight"


def config_of(model: torch.nn.Module) -> Any | None:
    """The LoraConfig of an unwrapped model, or None for one without LoRA."""
    configs = getattr(model, "peft_config", None)
    return configs.get("default") if isinstance(configs, dict) and hasattr(model, "get_base_model") else None


def is_adapters(name: str) -> bool:
    """Whether a parameter of a live model belongs to the adapter: the rest is the base model's."""
    return any(part in name for part in _TRAINED)


def saved_name(name: str) -> str:
    """A live parameter's name in `adapter_model.safetensors`, as peft has it there."""
    return name.replace(".modules_to_save.default.", ".").replace(".default.", ".")


def merge(state: Mapping[str, torch.Tensor], scaling: float) -> dict[str, torch.Tensor]:
    """A whole state dict with LoRA -> the plain model's: W + scaling * B A (Hu et al., 2021, section 4.1).

    `scaling` is lora_alpha / r. The sum is made in float32, the result has the base weight's type.
    """
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if ".lora_A." in name or ".lora_B." in name or ".original_module." in name:
            continue
        layer = name.removesuffix(_BASE)
        if layer != name and layer + _LORA_A in state:
            change = state[layer + _LORA_B].float() @ state[layer + _LORA_A].float()  # (out, in)
            tensor = (tensor.float() + scaling * change).to(tensor.dtype)
        short = name.removeprefix(_PREFIX).replace(".base_layer.", ".")
        plain[short.replace(".modules_to_save.default.", ".")] = tensor
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
