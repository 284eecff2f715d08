"""A file of `torch.save`, opened: its structure, and where each tensor's bytes lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.checkpoint.read import pickled_names
from toolkit.checkpoint.read.archive import open_archive
from toolkit.checkpoint.read.pickled_names import Tensor
from toolkit.checkpoint.read.unpickle import MOST_BYTES, Name, unpickle
from toolkit.checkpoint.reader import ITEM_BYTES, Member, Span, TensorIndex
from toolkit.errors import UserError


@dataclass(frozen=True)
class TorchFile:
    """What a file holds, with a `Tensor` in place of each tensor."""

    file: Path
    content: Any
    members: Mapping[str, Member]
    """By the key of a storage."""
    written_as: str
    """The name without a suffix that it was written under, or `archive` where torch was not told one."""

    def span(self, tensor: Tensor, what: str) -> Span:
        """All elements of a tensor. Raises UserError where they do not follow one another, or are not there."""
        if not tensor.contiguous:
            raise UserError(f"{self.file}: {what} is not contiguous; save it again after .contiguous()")
        member = self.members.get(tensor.storage.key)
        if member is None:
            raise UserError(f"{self.file}: the bytes of {what} (data/{tensor.storage.key}) are missing: damaged")
        if member.size != tensor.storage.size:
            raise UserError(
                f"{self.file}: {member.name} holds {member.size:,} bytes and should hold "
                f"{tensor.storage.size:,} for {what}: damaged"
            )
        return Span(member, tensor.offset * ITEM_BYTES[tensor.dtype], tensor.count)

    def stored(self, name: str, tensor: Any) -> TensorIndex:
        """A tensor that lies in this file whole."""
        if type(tensor) is not Tensor:
            raise UserError(f"{self.file}: {name} is a {type(tensor).__name__} where a tensor should be")
        return TensorIndex(name, tensor.shape, tensor.dtype, (self.span(tensor, name),))


def open_torch_file(
    file: Path, names: Mapping[str, Name] = pickled_names.TORCH, start: int = 0, size: int | None = None
) -> TorchFile:
    """Opens a file of torch.save, or the range of one that holds it.

    Raises UserError for what is missing, truncated, damaged, of an old format, or asks for anything to be executed.
    """
    archive = open_archive(file, start, size)
    structures = [name for name in archive.members if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(structures) != 1:
        raise UserError(f"{file} is a zip file that torch.save did not write: it has no structure (data.pkl)")
    top = structures[0].removesuffix("data.pkl")
    order = f"{top}byteorder"
    if order in archive.members and archive.read(order, 100) != b"little":
        raise UserError(f"{file} was written on a big-endian machine, which is not supported")
    content = unpickle(archive.read(structures[0], MOST_BYTES), file, names, pickled_names.storage_of)
    data = f"{top}data/"
    members = {name.removeprefix(data): member for name, member in archive.members.items() if name.startswith(data)}
    return TorchFile(file, content, members, top.removesuffix("/"))
