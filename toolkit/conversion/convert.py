"""`toolkit convert`: which tensors are written under which names, and whether all are there."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.checkpoint.safetensors_writer import DTYPES
from toolkit.conversion import lora, write
from toolkit.conversion.model_class import CONFIG, ModelClass, model_class
from toolkit.conversion.open import open_checkpoint
from toolkit.conversion.stored import Checkpoint, Stored
from toolkit.errors import UserError
from toolkit.pretrained import load_plain_tokenizer, refuse_foreign_tokenizer
from toolkit.utils.files import explain_write_errors, replace_folder


@dataclass(frozen=True)
class ConvertSettings:
    """The options of `toolkit convert`."""

    dtype: str = "fp32"
    """A key of `DTYPES`."""
    config_from: Path | None = None
    """The folder of the config and the tokenizer, if the checkpoint has none."""
    base_model: Path | None = None
    """The folder of the frozen parameters that the checkpoint leaves out."""
    prefix: str = ""
    """Converts only the tensors with this prefix, and removes it."""
    self_test: str = "error"
    """If OUT answers otherwise than the self_test.json of the checkpoint's folder says: `error`,
    `warn`, `off`."""


def convert(checkpoint: Path, out: Path, settings: ConvertSettings) -> list[str]:
    """Writes a checkpoint as a Hugging Face folder, and returns the lines to print.

    Raises UserError if the checkpoint is not complete, intact and as its config promises, or `out`
    exists; nothing is written then."""
    if out.is_symlink() or out.is_file() or any(out.glob("*")):
        raise UserError(f"{out} already exists: name another folder")
    opened = open_checkpoint(checkpoint).select(settings.prefix)
    base = None
    if settings.base_model is not None:
        base = open_checkpoint(settings.base_model)
        if lora.is_adapted(base):
            raise UserError(f"--base_model {base.path} is an adapter: merge it first")
    own = (opened.model_folder, opened.path, opened.path.parent)
    adapter = None
    if lora.is_adapted(opened):
        place = _find_folder(lora.ADAPTER_CONFIG, *own, settings.config_from)
        adapter = lora.read_config(opened, place)
    folder = _find_folder(CONFIG, settings.config_from, *own, settings.base_model)
    model, line = _promised_class(folder, opened, adapter)
    tensors = dict(opened.tensors)
    if model is not None:
        if adapter is not None:
            lora.refuse_without_head(opened, adapter, model)
        tensors = _model_tensors(opened, base, model)
        if adapter is not None:
            tensors |= lora.merged_layers(opened, adapter, model, tensors)
    checks = [*opened.checks]
    if base is not None:
        checks += base.checks
    with ThreadPoolExecutor() as threads:  # raises the first error
        list(threads.map(lambda check: check(), checks))
    dtype = DTYPES[settings.dtype]
    with explain_write_errors(out), replace_folder(out) as draft:
        size = write.write_tensors(draft / "model.safetensors", tensors, dtype)
        if folder is not None:
            source = folder
            if adapter is not None:  # new tokens
                source = (
                    _find_folder("tokenizer_config.json", opened.path, folder) or folder
                )
            write.copy_files(source, draft, is_own=folder == opened.path)
            write.write_config(folder / CONFIG, draft / CONFIG, dtype, model)
            if model is not None and source != folder:
                tokenizer = load_plain_tokenizer(str(source))
                refuse_foreign_tokenizer(tokenizer, model.model.config)
            if model is not None:
                _test(opened, draft, settings)
    lines = [line]
    if adapter is None and (opened.path / lora.ADAPTER_CONFIG).is_file():
        lines.append(f"the adapter beside the weights in {opened.path} is not merged")
    is_classifier = model is not None and model.classifies()
    if adapter is not None and is_classifier and folder == settings.base_model:
        lines.append(
            "no file of the adapter names its classes, or says whether several can hold for a text: "
            f"write id2label and problem_type into {out / CONFIG}"
        )
    step = f" from step {opened.step}" if opened.step is not None else ""
    return [*lines, f"wrote {out}{step}: {size} of {settings.dtype}"]


def _test(opened: Checkpoint, draft: Path, settings: ConvertSettings) -> None:
    """Compares a model folder that was cast with its self test, and writes one for it, or for what
    was a run's checkpoint, if there is a tokenizer."""
    source = opened.path / "self_test.json"
    is_run = opened.model_folder is not None
    if not (draft / "tokenizer_config.json").is_file() or not (is_run or source.is_file()):
        return
    from toolkit.evaluation import self_test  # imports what trains

    if source.is_file():
        shutil.copyfile(source, draft / source.name)
        precision = "no" if settings.dtype == "fp32" else settings.dtype
        loaded = self_test.load_plainly(draft)
        self_test.check_self_test(loaded, settings.self_test, precision)
        (draft / source.name).unlink()
    self_test.try_self_test(draft)


def _find_folder(file: str, *folders: Path | None) -> Path | None:
    """The first folder with this file."""
    for folder in folders:
        if folder is not None and (folder / file).is_file():
            return folder
    return None


def _promised_class(
    folder: Path | None, opened: Checkpoint, adapter: Any
) -> tuple[ModelClass | None, str]:
    """The class in the folder's config, and a line for the user. Raises UserError if there is none
    and it is needed."""
    model = None
    line = f"weights only: {opened.path} has no config; pass a folder with one as --config_from"
    if folder is not None:
        model = model_class(folder / CONFIG, lora.without_lora(opened), adapter)
        line = f"not compared with {folder / CONFIG}: its class is not in transformers"
    if model is not None:
        line = f"the names and shapes are those of {model.promise}"
    elif adapter is not None or opened.base_model:
        name = opened.base_model or adapter.base_model_name_or_path
        raise UserError(
            f"{opened.path} has only a part of the weights: pass the folder of its base model "
            f"({name}), with a config of a class of transformers, as --base_model"
        )
    return model, line


def _model_tensors(
    opened: Checkpoint, base: Checkpoint | None, model: ModelClass
) -> dict[str, Stored]:
    """All parameters and persistent buffers of a model, without an adapter."""
    tensors = model.fit(lora.without_lora(opened))
    if base is not None:
        others = model.fit(base)
        for name in model.lacks(tensors):
            if name in others:
                tensors[name] = others[name]
    where = str(opened.path)
    if opened.base_model:
        where += f" (without what was frozen in {opened.base_model})"
    remedy = "if they were frozen, pass the base model as --base_model"
    if base is not None:
        remedy = f"--base_model {base.path} lacks them, too"
    model.check(tensors, where, remedy)
    return tensors
