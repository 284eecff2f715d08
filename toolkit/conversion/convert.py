"""`toolkit convert`: which tensors are written under which names, and whether all are there."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.conversion import lora, write
from toolkit.conversion.model_class import CONFIG, model_class
from toolkit.conversion.open import open_checkpoint
from toolkit.conversion.stored import Check, Checkpoint, Stored
from toolkit.demo import model_path
from toolkit.errors import UserError
from toolkit.utils.files import explain_write_errors, read_table, replace_folder


@dataclass(frozen=True)
class ConvertSettings:
    """The options of `toolkit convert`."""

    dtype: str = "fp32"
    """A key of `write.DTYPES`."""
    config_from: Path | None = None
    """The folder of the config and the tokenizer, if the checkpoint has none."""
    base_model: Path | None = None
    """The folder of the frozen parameters that the checkpoint leaves out."""
    prefix: str = ""
    """Converts only the tensors with this prefix, and removes it."""
    merge_lora: bool = False
    """Merges an adapter into its base model, in place of writing the adapter."""


@dataclass(frozen=True)
class _Output:
    """What is written."""

    tensors: Mapping[str, Stored]
    line: str
    """For the user."""
    folder: Path | None
    """Of the tokenizer and the like."""
    config: Mapping[str, Any] | None = None
    """Of a model."""
    checks: tuple[Check, ...] = ()
    """Of the base model."""


def convert(checkpoint: Path, out: Path, settings: ConvertSettings) -> list[str]:
    """Writes a checkpoint as a Hugging Face folder, and returns the lines to print.

    Raises UserError if the checkpoint is not complete, intact and as its config promises, or `out`
    exists; nothing is written then."""
    if out.is_symlink() or out.is_file() or any(out.glob("*")):
        raise UserError(f"{out} already exists: name another folder")
    opened = open_checkpoint(checkpoint).select(settings.prefix)
    adapter = _adapter_config(opened, settings)
    if adapter is None or settings.merge_lora:
        file, output = "model.safetensors", _model(opened, adapter, settings)
        adapter = None
    else:
        file, output = "adapter_model.safetensors", _adapter(opened, adapter)
    with ThreadPoolExecutor() as threads:
        for _ in threads.map(lambda check: check(), [*opened.checks, *output.checks]):
            pass  # raises the first error
    dtype = write.DTYPES[settings.dtype]
    with explain_write_errors(out), replace_folder(out) as draft:
        size = write.write_tensors(draft / file, output.tensors, dtype)
        if output.config is not None:
            write.write_config(draft, output.config, dtype)
        if adapter is not None:
            shutil.copyfile(adapter, draft / lora.ADAPTER_CONFIG)
        if output.folder is not None:
            write.copy_files(output.folder, draft, is_own=output.folder == opened.model_folder)
    step = ""
    if opened.step is not None:
        step = f" from step {opened.step}"
    return [output.line, f"wrote {out}{step}: {size} of {settings.dtype}"]


def _adapter_config(opened: Checkpoint, settings: ConvertSettings) -> Path | None:
    """The adapter's config; None without LoRA. Raises UserError if the adapter has none."""
    if not any(".lora_" in name for name in opened.tensors):
        if settings.merge_lora or any(name.startswith(lora.PREFIX) for name in opened.tensors):
            raise UserError(f"{opened.path} has no LoRA adapter: others cannot be converted")
        return None
    for folder in (opened.path, opened.model_folder, settings.config_from):
        if folder is not None and (folder / lora.ADAPTER_CONFIG).is_file():
            return folder / lora.ADAPTER_CONFIG
    file = lora.ADAPTER_CONFIG
    raise UserError(f"{opened.path} has no {file}: pass the folder that has it as --config_from")


def _adapter(opened: Checkpoint, config: Path) -> _Output:
    if config.parent == opened.path:
        remedy = "for the merged model pass --merge_lora --base_model FOLDER"
        raise UserError(f"{opened.path} is an adapter's folder already; {remedy}")
    line = "an adapter: PeftModel.from_pretrained(base, FOLDER) loads it; --merge_lora merges it"
    return _Output(lora.adapter_tensors(opened, config), line, config.parent)


def _model(opened: Checkpoint, adapter: Path | None, settings: ConvertSettings) -> _Output:
    """All parameters and persistent buffers of a model, with its adapter merged."""
    plain = opened if adapter is None else lora.without_lora(opened)
    choices = (settings.config_from, opened.model_folder, settings.base_model)
    folder = next((each for each in choices if each and (each / CONFIG).is_file()), None)
    if folder is None:
        line = f"weights only: {plain.path} has no config; pass a folder with one as --config_from"
        return _unchecked(plain, _Output(plain.tensors, line, None))
    config = read_table(folder / CONFIG, {})
    model = model_class(config, folder / CONFIG)
    if model is None:
        line = f"not compared with {folder / CONFIG}: its class is not in transformers"
        return _unchecked(plain, _Output(plain.tensors, line, folder, config))
    tensors = model.fit(plain)
    checks: tuple[Check, ...] = ()
    if base_folder := _base_folder(plain, settings):
        base = open_checkpoint(base_folder)
        others = model.fit(base)
        tensors |= {name: others[name] for name in model.lacks(tensors) if name in others}
        checks = base.checks
    model.check(tensors, plain.path)
    if adapter is not None:
        tensors |= lora.merged_layers(opened, adapter, model, tensors)
    line = f"the {len(tensors)} names and shapes are those of {model.promise}"
    return _Output(tensors, line, folder, config, checks)


def _base_folder(plain: Checkpoint, settings: ConvertSettings) -> Path | None:
    """The folder of the model with the parameters that the checkpoint leaves out, if it is known.
    Raises UserError if the run's base model has changed."""
    if settings.base_model is not None or not plain.excluded:
        return settings.base_model
    from toolkit.training.resume import digest_of_model  # imports all of training

    folder = Path(model_path(plain.base_model))
    if not folder.is_dir():
        return None
    if Path(plain.base_model).is_dir() and digest_of_model(folder) != plain.base_identity:
        raise UserError(f"{folder} has changed since the run: pass the old one as --base_model")
    return folder


def _unchecked(plain: Checkpoint, output: _Output) -> _Output:
    """Of no class that transformers has: all names stay as they are, those of tied weights too."""
    if plain.excluded:
        raise UserError(f"{output.line}, and {plain.path} has only a part of the weights")
    return output
