"""LoRA (Hu et al., 2021, arXiv:2106.09685) by peft: trains low-rank matrices in place of the
encoder."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch

from toolkit.config import ModelSettings
from toolkit.errors import UserError, did_you_mean, listing

ALL_LINEAR = "all-linear"  # peft's word


def add_lora(model: Any, settings: ModelSettings, new: Iterable[str] = ()) -> Any:
    """Freezes a classifier, adds LoRA to it in place, and returns the PeftModel around it.

    Modules outside the encoder are fully trained, and so is a pooler with parameters among `new`,
    those missing in the checkpoint. Seed torch's generator before. Raises UserError for target
    modules that the model lacks, or that are not linear layers.
    """
    import peft  # takes a second

    fully_trained = fully_trained_modules(model, new)
    rank = settings.lora_r or 0
    dropout = settings.lora_dropout if settings.dropout is None else settings.dropout
    config = peft.LoraConfig(
        task_type=peft.TaskType.SEQ_CLS,
        r=rank,
        lora_alpha=settings.lora_alpha or 2 * rank,
        lora_dropout=dropout,
        target_modules=target_modules(model, settings.lora_target_modules, fully_trained),
        # peft adds the other two
        modules_to_save=[
            name for name in fully_trained if name not in ("classifier", "score")
        ],
    )
    with warnings.catch_warnings():
        # peft uses an old name of transformers
        warnings.simplefilter("ignore", FutureWarning)
        return peft.get_peft_model(model, config)


def fully_trained_modules(model: Any, new: Iterable[str]) -> list[str]:
    """Modules to train without LoRA: the head, and a new pooler."""
    heads = [
        name
        for name, part in model.named_children()
        if name != model.base_model_prefix and next(part.parameters(), None) is not None
    ]
    poolers = {
        key[: key.index("pooler")] + "pooler"
        for key in new
        if "pooler" in key and model.get_parameter(key).requires_grad
    }
    return [*heads, *sorted(poolers - set(heads))]


def target_modules(
    model: Any, setting: str | None, fully_trained: Collection[str]
) -> list[str]:
    """Names for peft (suffixes of module paths): those of the setting, or peft's for this
    architecture, or those of all trainable linear layers of the encoder. Raises UserError for a
    wrong name."""
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as USUAL

    linear = set(_linear_layers(model, fully_trained))
    every = sorted({path.rsplit(".", 1)[-1] for path in linear})
    if setting == ALL_LINEAR:
        return every
    if setting is None:
        usual = USUAL.get(model.config.model_type)
        if isinstance(usual, list) and any(
            _ends(path, name) for path in linear for name in usual
        ):
            return list(usual)
        return every
    names = [part.strip() for part in setting.split(",")]
    for name in names:
        if not any(_ends(path, name) for path in linear):
            raise UserError(
                f"--lora_target_modules {name}: no linear layer of the encoder has this name"
                f"{did_you_mean(name, every)}; it has {listing(every, 20)}, or {ALL_LINEAR} for "
                "all of them"
            )
    return names


def _linear_layers(model: torch.nn.Module, fully_trained: Collection[str]) -> Iterator[str]:
    """Paths of the encoder's trainable linear layers."""
    excluded = tuple(f"{name}." for name in fully_trained)
    for path, module in model.named_modules():
        is_linear = isinstance(module, torch.nn.Linear) and module.weight.requires_grad
        if is_linear and not f"{path}.".startswith(excluded):
            yield path


def _ends(path: str, name: str) -> bool:
    """Whether peft would apply this name to the module at this path."""
    return f".{path}".endswith(f".{name}")


def describe(model: torch.nn.Module, settings: ModelSettings) -> str:
    """`LoRA r=8: 12,345 of 1,234,567 parameters are trained (1.0 %)`, also for a sharded model."""
    trained = 0
    total = 0
    for name, parameter in model.named_parameters():
        if ".original_module." in name:  # a second copy of the head
            continue
        count = getattr(parameter, "ds_numel", parameter.numel())
        total += count
        if parameter.requires_grad:
            trained += count
    percent = 100 * trained / total
    return (
        f"LoRA r={settings.lora_r}: {trained:,} of {total:,} parameters are trained "
        f"({percent:.1f} %)"
    )
