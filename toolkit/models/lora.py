"""LoRA (Hu et al., 2021, arXiv:2106.09685) by peft: trains low-rank matrices in place of the encoder."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from toolkit.config import ModelSettings
from toolkit.errors import UserError, did_you_mean, listing

ALL_LINEAR = "all-linear"  # peft's word


def add_lora(model: Any, settings: ModelSettings, new: Iterable[str] = ()) -> Any:
    """Freezes a classifier, adds LoRA to it in place, and returns the PeftModel around it.

    Modules outside the encoder are fully trained, and so is a pooler with parameters among `new`, those missing in the
    checkpoint. Seed torch's generator before. Raises UserError for target modules that the model lacks, or that are not
    linear layers.
    """
    import peft  # takes a second

    fully_trained = fully_trained_modules(model, new)
    config = peft.LoraConfig(
        task_type=peft.TaskType.SEQ_CLS,
        r=settings.lora_r,
        lora_alpha=settings.lora_alpha or 2 * (settings.lora_r or 0),
        lora_dropout=settings.lora_dropout if settings.dropout is None else settings.dropout,
        target_modules=target_modules(model, settings.lora_target_modules, fully_trained),
        modules_to_save=[
            name for name in fully_trained if name not in ("classifier", "score")
        ],  # peft adds these two
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft uses an old name of transformers
        return peft.get_peft_model(model, config)


def fully_trained_modules(model: Any, new: Iterable[str]) -> list[str]:
    """Modules to train without LoRA: the head, and a new pooler."""
    modules = [name for name, _ in model.named_children() if name != model.base_model_prefix]
    heads = [
        name for name in modules if next(model.get_submodule(name).parameters(), None) is not None
    ]
    poolers = {key[: key.index("pooler")] + "pooler" for key in new if "pooler" in key}
    poolers = {
        name for name in poolers if next(model.get_submodule(name).parameters()).requires_grad
    }
    return [*heads, *sorted(poolers - set(heads))]


def target_modules(model: Any, setting: str | None, fully_trained: Sequence[str]) -> list[str]:
    """Names for peft (suffixes of module paths): those of the setting, or peft's for this architecture, or those of
    all trainable linear layers of the encoder. Raises UserError for a wrong name."""
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as USUAL

    excluded = tuple(f"{name}." for name in fully_trained)
    linear = {
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and module.weight.requires_grad
        and not f"{name}.".startswith(excluded)
    }
    every = sorted({name.rsplit(".", 1)[-1] for name in linear})
    if setting is None:
        usual = USUAL.get(model.config.model_type)
        return (
            list(usual)
            if isinstance(usual, list) and any(_ends(name, usual) for name in linear)
            else every
        )
    names = [name for part in setting.split(",") if (name := part.strip())]
    if names == [ALL_LINEAR]:
        return every
    for name in names or [""]:
        paths = {path for path, _ in model.named_modules() if _ends(path, [name])}
        if not paths & linear or any(
            not isinstance(model.get_submodule(path), torch.nn.Linear) for path in paths
        ):
            raise UserError(
                f"--lora_target_modules {name}: not a name of only linear layers of the encoder"
                f"{did_you_mean(name, every)}; it has {listing(every, 20)}, or {ALL_LINEAR} for all of them"
            )
    return names


def _ends(path: str, names: Iterable[str]) -> bool:
    """Whether peft would apply one of these names to the module at this path."""
    return f".{path}".endswith(tuple(f".{name}" for name in names))


def describe(model: torch.nn.Module, settings: ModelSettings) -> str:
    """`LoRA r=8: 12,345 of 1,234,567 parameters are trained (1.0 %)`, also for a sharded model."""
    counts = [
        (getattr(parameter, "ds_numel", parameter.numel()), parameter.requires_grad)
        for name, parameter in model.named_parameters()
        if ".original_module." not in name  # a second copy of the head
    ]
    trained, total = (
        sum(count for count, trains in counts if trains),
        sum(count for count, _ in counts),
    )
    return f"LoRA r={settings.lora_r}: {trained:,} of {total:,} parameters are trained ({100 * trained / total:.1f} %)"
