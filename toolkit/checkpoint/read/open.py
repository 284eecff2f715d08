"""Any checkpoint, recognised by what lies in the folder, as a `CheckpointReader`. Imports no torch.

Opening reads the structure of the files; whether they belong together is checked afterwards, on the reader.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from toolkit.checkpoint.folder import MANIFEST, complete, step_number
from toolkit.checkpoint.read.deepspeed import find_tag_folder, is_tag_folder, open_deepspeed
from toolkit.checkpoint.read.run_checkpoint import check_files, open_run_checkpoint
from toolkit.checkpoint.read.weights import SUFFIXES, open_weights
from toolkit.checkpoint.tensor_index import CheckpointReader
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
        reader, folder = _open(path)
        _check(reader, folder)
        return reader
    except OSError as error:
        raise UserError(f"cannot read {error.filename or path}: {error.strerror}") from None
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError) as error:
        # each file is sound in itself, with content that no known version writes
        fault = f"{type(error).__name__}: {error}"
        raise UserError(f"{path}: its files are damaged, or of a version that is not known ({fault})") from error


def _open(path: Path) -> tuple[CheckpointReader, Path]:
    """(the reader, the folder that all its files are to lie in)."""
    if path.is_file():
        is_part = (path.parent / MANIFEST).is_file() or is_tag_folder(path.parent) or _SHARD.search(path.name)
        if is_part or path.suffix not in SUFFIXES:
            raise UserError(f"{path} is a part of a checkpoint, or none; name the folder it lies in, {path.parent}")
        reader = open_weights(path)
        assert reader is not None
        return reader, path.resolve().parent  # a link that was named itself may lead anywhere
    if not path.exists():
        names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UserError(f"{path} does not exist{did_you_mean(path.name, names)}; expected {_EXPECTED}")
    if (path / MANIFEST).is_file() or step_number(path) is not None:
        return open_run_checkpoint(path, path), path
    # DeepSpeed's universal format lies in files of other meaning under names that `save_checkpoint` uses
    if (path / "zero" / "optimizer_state.pt").is_file() or any(path.glob("*/zero/optimizer_state.pt")):
        raise UserError(f"{path} is in DeepSpeed's universal format: name the checkpoint that it was made of")
    if is_tag_folder(path):
        return open_deepspeed(path, path, _model_folder(path, path.parent)), path
    for checkpoints in (path / "checkpoints", path):
        if checkpoints.is_dir() and (newest := complete(checkpoints)[:1]):
            return open_run_checkpoint(path, newest[0]), newest[0]
    if tag := find_tag_folder(path):
        return open_deepspeed(path, tag, _model_folder(path)), path
    if weights := open_weights(path):
        return weights, path
    return _open(_only_checkpoint_in(path))


def _model_folder(*folders: Path) -> Path | None:
    return next((folder for folder in folders if os.path.lexists(folder / "config.json")), None)


def _only_checkpoint_in(path: Path) -> Path:
    """The one `checkpoint-N` of transformers' Trainer, or the one file that may be a model's state, in a folder that is
    no checkpoint itself. Raises UserError where there is none, or several."""
    if any((path / "model").glob("*.safetensors")):
        raise UserError(
            f"{path} is a run without a complete checkpoint (--checkpoint_every N saves them): its trained model, a "
            f"Hugging Face folder, is {path / 'model'}"
        )
    entries = sorted(path.iterdir(), key=lambda entry: (len(entry.name), entry.name))
    inside = [entry for entry in entries if entry.name.startswith("checkpoint-") and entry.is_dir()]
    inside = inside or [entry for entry in entries if entry.suffix in SUFFIXES and not _NO_MODEL.match(entry.name)]
    if len(inside) > 1:
        raise UserError(f"{path} holds several checkpoints; name one of them: {listing(inside, 5)}")
    if not inside:
        names = listing((entry.name for entry in entries), 5)
        raise UserError(f"{path} holds no checkpoint; expected {_EXPECTED}; it holds {names or 'nothing'}")
    return inside[0]


def _check(reader: CheckpointReader, folder: Path) -> None:
    """Raises UserError where the files of an opened checkpoint do not belong together, or one lies elsewhere."""
    files = {span.member.file for tensor in reader.tensors() for span in tensor.spans} | {reader.model_folder or folder}
    for file in sorted(file for file in files if file.is_relative_to(folder)):
        refuse_link_out(file, folder)
    if strange := [name for name in reader.names() if not name.isprintable()]:  # half a character, an escape sequence
        raise UserError(f"{reader.path}: {strange[0][:100]!a} is no name of a parameter: its files are damaged")
    if (folder / MANIFEST).is_file():
        check_files(reader, folder)
    most = max(reader.step_counts().values(), default=0)
    if reader.step is not None and most > reader.step:
        steps = f"{reader.path} is of optimizer step {reader.step} and the optimizer's state of step {most:g}"
        raise UserError(f"{steps}: files of two checkpoints are mixed; copy it again or take another one")
