"""Files of torch.save: mapped into memory, and unpickled without executing anything.

torch's own unpickler for weights refuses every name but those of tensors. DeepSpeed and Lightning
write a few more; for these it gets stand-ins that hold nothing, so that neither package is
imported.
"""

from __future__ import annotations

import functools
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from toolkit.conversion.stored import Checkpoint, Stored, model_states
from toolkit.errors import UserError
from toolkit.utils.files import refuse_lfs_pointer


class _StandIn:
    """For an object on which no weight depends."""

    def __init__(self, *arguments: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...


# in Lightning's hyper_parameters
_DICTIONARIES = (
    "lightning.fabric.utilities.data.AttributeDict",
    "lightning_fabric.utilities.data.AttributeDict",
    "pytorch_lightning.utilities.parsing.AttributeDict",
)
# in the state of optimizers and loss scalers, and what loops save beside the weights
_IGNORED = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "torch.torch_version.TorchVersion",
    "argparse.Namespace",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
    "numpy.dtype",
    "numpy._core.multiarray.scalar",
    "numpy.core.multiarray.scalar",
)


def unpickle(file: Any, mmap: bool = False) -> Any:
    """The content of a file of torch.save; nothing is executed. Raises what torch raises."""
    known: list[Any] = [(_StandIn, name) for name in _IGNORED]
    known += [(OrderedDict, name) for name in _DICTIONARIES]
    with torch.serialization.safe_globals(known):
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)


def load(path: Path) -> Any:
    """The content of a file, its tensors as views of the mapped file.

    Raises UserError if it is missing, truncated, or needs more than tensors and plain values, or
    if the pickle that lists these has a wrong checksum."""
    try:
        refuse_lfs_pointer(path)
        is_zip = zipfile.is_zipfile(path)
        if is_zip:
            with zipfile.ZipFile(path) as file:
                file.read(
                    next(name for name in file.namelist() if name.endswith("/data.pkl"))
                )
        return unpickle(path, mmap=is_zip)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{path}: {_fault(error)}") from None


def _fault(error: Exception) -> str:
    _, is_global, rest = str(error).partition("GLOBAL ")
    if not is_global:
        return "missing, damaged, or not a file of torch.save: copy it again"
    return (
        f"it needs {rest.split()[0]}, which no weights need: nothing was executed. If you trust "
        "the file, load it yourself and save the weights alone: torch.save(model.state_dict(), …)"
    )


def check_tensors(path: Path, tensors: Iterable[torch.Tensor]) -> None:
    """Raises UserError if the bytes of tensors, views of the mapped file, do not have a checksum
    that the file lists. Files in torch's old format list none."""
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as file:
        known = {(entry.file_size, entry.CRC) for entry in file.infolist()}
    storages = {}
    for tensor in tensors:
        if tensor.numel():
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage
    for storage in storages.values():
        content: Any = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
        if (storage.nbytes(), zlib.crc32(content)) not in known:
            fault = f"{storage.nbytes():,} bytes have a wrong checksum"
            raise UserError(f"{path} is damaged: {fault}; copy it again")


def open_torch_file(path: Path) -> Checkpoint:
    """A state dict, or nested dicts with one or several, as Lightning's `.ckpt`. Raises
    UserError."""
    content = load(path)
    tensors = model_states(dict(flattened((), content)))
    if not tensors:
        raise UserError(f"{path} has no named tensors: it is not a model's state")
    check = functools.partial(check_tensors, path, list(tensors.values()))
    step = content.get("global_step")
    return Checkpoint(path, stored(tensors), step=step, checks=(check,))


def flattened(keys: tuple[object, ...], value: Any) -> Iterator[tuple[Any, torch.Tensor]]:
    """(keys, tensor) of nested dicts."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flattened((*keys, key), inner)
    elif isinstance(value, torch.Tensor) and keys:
        yield keys, value.detach()


def stored(tensors: Mapping[str, torch.Tensor]) -> dict[str, Stored]:
    """Tensors of mapped files. Those of the same elements of the same storage become one object."""
    first: dict[object, Stored] = {}
    every = {}
    for name, tensor in tensors.items():
        elements = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        each = Stored(tuple(tensor.shape), tensor.dtype, functools.partial(list, (tensor,)))
        every[name] = first.setdefault(elements, each)
    return every
