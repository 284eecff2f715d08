"""`toolkit convert`: which tensors are written under which names, and whether all are there."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.conversion import lora, write
from toolkit.conversion.model_class import CONFIG, ModelClass, model_class, read_config
from toolkit.conversion.open import open_checkpoint
from toolkit.conversion.stored import Checkpoint, Stored
from toolkit.demo import model_path
from toolkit.errors import UserError, listing
from toolkit.utils.files import explain_write_errors, replace_folder


@dataclass(frozen=True)
class ConvertSettings:
    """The options of `toolkit convert`."""

    dtype: str = "fp32"
    """A key of `write.DTYPES`."""
    max_shard_bytes: int = 5 * 10**9
    """Of one file."""
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
    folder: Path | None = None
    """Of the tokenizer and the like."""
    config: Mapping[str, Any] | None = None
    """Of a model."""
    stem: str = "model"
    """Of the file of weights."""
    checks: tuple[Callable[[], None], ...] = ()
    """Of the base model."""
    line: str = ""
    """For the user."""


def convert(checkpoint: Path, out: Path, settings: ConvertSettings) -> list[str]:
    """Writes a checkpoint as a Hugging Face folder, and returns the lines to print.

    Raises UserError if the checkpoint is not complete, intact and as its config promises, or `out` exists; nothing is
    written then.
    """
    _check_out(checkpoint, out)
    opened = open_checkpoint(checkpoint).select(settings.prefix)
    adapter = _adapter_config(opened, settings)
    if adapter is not None and not settings.merge_lora:
        tensors = lora.adapter_tensors(opened, adapter)
        output = _Output(tensors, adapter.parent, stem="adapter_model")
    else:
        output = _model(opened, adapter, settings)
    with ThreadPoolExecutor() as threads:
        for _ in threads.map(lambda check: check(), (*opened.checks, *output.checks)):
            pass  # raises the first error
    with explain_write_errors(out), replace_folder(out) as draft:
        size = _write(draft, output, settings, output.folder == opened.model_folder)
    step = "" if opened.step is None else f" from step {opened.step}"
    return [*filter(None, [output.line]), f"wrote {out}{step}: {size}, {settings.dtype}"]


def _write(draft: Path, output: _Output, settings: ConvertSettings, is_own: bool) -> str:
    dtype = write.DTYPES[settings.dtype]
    if output.config is not None:
        write.write_config(draft, output.config, dtype)
    if output.folder is not None:
        write.copy_files(output.folder, draft, is_own)
    if output.stem == "adapter_model" and output.folder is not None:
        shutil.copyfile(output.folder / lora.ADAPTER_CONFIG, draft / lora.ADAPTER_CONFIG)
    return write.write_tensors(draft, output.tensors, dtype, settings.max_shard_bytes, output.stem)


def _check_out(checkpoint: Path, out: Path) -> None:
    """Raises UserError if writing `out` could replace anything, or be lost with the checkpoint."""
    if out.is_symlink() or out.is_file() or any(out.glob("*")):
        raise UserError(f"{out} already exists: name another folder")
    if (checkpoint / "state.json").is_file() and out.resolve().is_relative_to(checkpoint.resolve()):
        raise UserError(f"{out} is in the checkpoint {checkpoint}: name another folder")


def _adapter_config(opened: Checkpoint, settings: ConvertSettings) -> Path | None:
    """The adapter's config; None without LoRA. Raises UserError if there is none, or nothing to convert."""
    if not opened.has_lora:
        if settings.merge_lora or any(name.startswith(lora.PREFIX) for name in opened.tensors):
            raise UserError(f"{opened.path} has no LoRA adapter, of which alone --merge_lora is")
        return None
    if (opened.path / lora.ADAPTER_CONFIG).is_file() and not settings.merge_lora:
        raise UserError(
            f"{opened.path} is an adapter's folder, which PeftModel.from_pretrained(base, FOLDER) loads; for the "
            f"merged model: toolkit convert {opened.path} OUT --merge_lora --base_model FOLDER"
        )
    for folder in (opened.path, opened.model_folder, settings.config_from):
        if folder is not None and (folder / lora.ADAPTER_CONFIG).is_file():
            return folder / lora.ADAPTER_CONFIG
    raise UserError(f"{opened.path} has no {lora.ADAPTER_CONFIG}: pass the folder that has it as --config_from")


def _model(opened: Checkpoint, adapter: Path | None, settings: ConvertSettings) -> _Output:
    """All parameters and persistent buffers of a model, with its adapter merged."""
    plain = opened if adapter is None else lora.without_lora(opened)
    folders = (settings.config_from, opened.model_folder, settings.base_model)
    folder = next((each for each in folders if each is not None and (each / CONFIG).is_file()), None)
    config = None if folder is None else read_config(folder, plain.tensors)
    model = None if folder is None else model_class(config, folder / CONFIG)
    if model is None:
        return _unchecked(plain, folder, config, adapter)
    tensors = model.fit(plain)
    base = _base_model(plain, model.lacks(tensors), settings)
    checks = base.checks if base is not None else ()
    if base is not None:
        others = model.fit(base)
        tensors |= {name: others[name] for name in model.lacks(tensors) if name in others}
    if adapter is not None:
        lora.check_mergeable(adapter, has_base=base is None)
        tensors |= lora.merged_layers(opened, adapter, model, tensors)
    model.check(tensors, plain.path)
    tensors = {name: tensors[name] for name in model.shapes if name in tensors}
    line = f"the {len(tensors)} names and shapes are those of {model.promise}"
    return _Output(tensors, folder, config, checks=checks, line=line)


def _base_model(plain: Checkpoint, lacks: list[str], settings: ConvertSettings) -> Checkpoint | None:
    """The model with the parameters that the checkpoint lacks; None if it lacks none, or none is known."""
    folder = settings.base_model
    if folder is None and plain.excluded and plain.base_model:
        folder = Path(model_path(plain.base_model))
    if not lacks or (folder is None and not plain.excluded and not settings.merge_lora):
        return None
    if folder is None or not (folder / CONFIG).is_file():
        raise UserError(
            f"{plain.path} lacks {len(lacks)} frozen parameters ({listing(lacks, 3)}): pass the folder of the base "
            f"model {plain.base_model} as --base_model FOLDER"
        )
    return open_checkpoint(folder)


def _unchecked(plain: Checkpoint, folder: Path | None, config: Any, adapter: Path | None) -> _Output:
    """Of no class that transformers has: the names stay as they are, tied ones are written once."""
    line = f"weights only: {plain.path} has no config; pass a folder that has one as --config_from"
    if folder is not None:
        line = f"not compared with {folder / CONFIG}: its class is not in transformers"
    if plain.excluded or adapter is not None:
        raise UserError(f"{line}, and {plain.path} has only a part of the weights")
    if plain.tied:
        pairs = listing(f"{other} (tied to {name})" for other, name in plain.tied.items())
        line += f"; left out: {pairs}"
    return _Output(plain.tensors, folder, config, line=line)
