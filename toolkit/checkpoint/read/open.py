"""Any checkpoint, recognised by what lies in the folder, as a `CheckpointReader`. Imports no torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

from toolkit.checkpoint.folder import MANIFEST, complete, step_number
from toolkit.checkpoint.read.deepspeed_files import find_tag_folder, is_tag_folder
from toolkit.checkpoint.read.deepspeed_reader import open_deepspeed
from toolkit.checkpoint.read.run_reader import open_run_checkpoint
from toolkit.checkpoint.read.weights_reader import STATES, open_weights
from toolkit.checkpoint.reader import CheckpointReader
from toolkit.errors import UserError, did_you_mean, listing
from toolkit.utils.files import refuse_link_out

_EXPECTED = (
    "a run or its checkpoint, a folder of DeepSpeed's save_checkpoint, of accelerator.save_state or of "
    "torch.distributed.checkpoint, a file of torch.save, or a Hugging Face model"
)
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.")
_NO_MODEL = re.compile(r"optim|sched|rng_|random_|scaler|training_args")  # what Trainer and accelerate put beside one


def open_checkpoint(path: Path) -> CheckpointReader:
    """Opens a checkpoint: the structure of its files is read, none of the data.

    Args:
        path: a run's folder (its newest complete checkpoint is taken), its `checkpoints` or one of them, also
            through the links `best` and `last`; a folder of DeepSpeed's save_checkpoint or a tag in it; a folder
            of accelerator.save_state or of torch.distributed.checkpoint; a folder with a Hugging Face model, or
            with one `checkpoint-N` or one state of a model; a file of torch.save or safetensors.

    Raises:
        UserError: the folder is none of these, or a file of it is missing, damaged, of another save, or
            would have to be executed to be read. One line that names the file.
    """
    try:
        if not path.exists():
            raise UserError(_not_there(path))
        reader, folder = _open(path)
        states = [stored for kept in reader.optimizer_state.values() for stored in kept.values()]
        tensors = (*reader.weights.values(), *reader.buffers.values(), *states)
        files = {span.member.file for stored in tensors for span in stored.spans} | {reader.model_folder or folder}
        for file in sorted(file for file in files if file.is_relative_to(folder)):
            refuse_link_out(file, folder)
        names = (*reader.weights, *reader.buffers, *reader.tied, *reader.excluded)
        if strange := [name for name in names if not name.isprintable()]:  # half a character, a terminal's command
            raise UserError(f"{path}: {strange[0][:100]!a} is no name of a parameter: its files are damaged")
        most = max(reader.step_counts().values(), default=0)
        if reader.step is not None and most > reader.step:
            raise UserError(
                f"{path} is of optimizer step {reader.step} and the optimizer's state of step {most:g}: files of two "
                "checkpoints are mixed; copy it again or take another one"
            )
        return reader
    except OSError as error:
        raise UserError(f"cannot read {error.filename or path}: {error.strerror}") from None
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError) as error:
        # each file is sound in itself, and says what none that we know says
        raise UserError(
            f"{path}: its files are damaged, or of a version that is not known ({type(error).__name__}: {error})"
        ) from error


def _open(path: Path) -> tuple[CheckpointReader, Path]:
    """(what is opened, the folder that all its files are to lie in)."""
    if path.is_file():
        is_part = (path.parent / MANIFEST).is_file() or is_tag_folder(path.parent) or _SHARD.search(path.name)
        if is_part or path.suffix not in STATES:
            raise UserError(f"{path} is a part of a checkpoint, or none; name the folder it lies in, {path.parent}")
        opened = open_weights(path)
        assert opened is not None
        return opened, path.resolve().parent  # a link that was named itself may lead anywhere
    if (path / MANIFEST).is_file() or step_number(path) is not None:
        return open_run_checkpoint(path, path), path
    _refuse_universal(path)
    if is_tag_folder(path):
        return open_deepspeed(path, path, _model_folder(path, path.parent)), path
    for checkpoints in (path / "checkpoints", path):
        if checkpoints.is_dir() and (found := complete(checkpoints)):
            return open_run_checkpoint(path, found[0]), found[0]  # the newest
    if tag := find_tag_folder(path):
        return open_deepspeed(path, tag, _model_folder(path)), path
    if weights := open_weights(path):
        return weights, path
    if any((path / "model").glob("*.safetensors")):
        raise UserError(
            f"{path} is a run without a whole checkpoint (--checkpoint_every N takes them): its trained model is "
            f"{path / 'model'}, a Hugging Face folder already"
        )
    inside = [entry for entry in path.glob("checkpoint-*") if entry.is_dir()]  # transformers' Trainer's
    inside = inside or [entry for entry in path.glob("*") if entry.suffix in STATES and not _NO_MODEL.match(entry.name)]
    if len(inside) == 1:
        return _open(inside[0])
    if inside:
        inside.sort(key=lambda entry: (len(entry.name), entry.name))
        raise UserError(f"{path} holds several checkpoints; name one of them: {listing(inside, 5)}")
    names = sorted(entry.name for entry in path.iterdir())
    raise UserError(f"{path} holds no checkpoint; expected {_EXPECTED}; it holds {listing(names, 5) or 'nothing'}")


def _refuse_universal(path: Path) -> None:
    """DeepSpeed's universal format lies in files of other meaning under names that `save_checkpoint` uses."""
    if (path / "zero" / "optimizer_state.pt").is_file() or any(path.glob("*/zero/optimizer_state.pt")):
        raise UserError(
            f"{path} is in DeepSpeed's universal format, which only DeepSpeed loads: name what it was made of"
        )


def _model_folder(*folders: Path) -> Path | None:
    return next((folder for folder in folders if os.path.lexists(folder / "config.json")), None)


def _not_there(path: Path) -> str:
    beside = path.parent
    names = [entry.name for entry in beside.iterdir()] if beside.is_dir() else []
    return f"{path} does not exist{did_you_mean(path.name, names)}; expected {_EXPECTED}"
