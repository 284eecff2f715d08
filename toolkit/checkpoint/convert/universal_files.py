"""The files of a universal checkpoint: thousands of small ones, filled piece by piece by several threads."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.checkpoint.checksum import combine, crc32
from toolkit.checkpoint.convert.torch_writer import TorchLayout, lay_out, new_tensor
from toolkit.checkpoint.read.archive import open_archive
from toolkit.checkpoint.reader import Span, TensorIndex

# Open at a time by each thread. They are filled in the order of what is read, so that few are needed at once.
_MOST_OPEN = 16
_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class Small:
    """A file that is made of what is known beforehand."""

    path: str
    """Within the output."""
    layout: TorchLayout
    blobs: tuple[bytes, ...]
    """The bytes of its storages."""

    @property
    def size(self) -> int:
        return self.layout.size


@dataclass(frozen=True)
class Streamed:
    """A file of one tensor that comes from the checkpoint."""

    path: str
    layout: TorchLayout
    stored: TensorIndex
    dtype: str
    """In the output."""

    @property
    def size(self) -> int:
        return self.layout.size


@dataclass(frozen=True)
class Copied:
    """A file that is copied as it is, but for its name."""

    path: str
    origin: Path
    twin: str | None = None
    """The same file under another name."""

    @property
    def size(self) -> int:
        return self.origin.stat().st_size

    def members(self) -> list[TensorIndex]:
        """Each member as a row of bytes, so that it is checked on the way like any tensor."""
        members = open_archive(self.origin).members.values()
        return [TensorIndex(member.name, (member.size,), "U8", (Span(member, 0, member.size),)) for member in members]


def small(path: str, value: Any, blobs: list[bytes]) -> Small:
    """A file of `value`, whose tensors lie in `blobs`."""
    return Small(path, lay_out(_stem(path), value, [len(blob) for blob in blobs]), tuple(blobs))


def streamed(path: str, stored: TensorIndex, whole: bool = True) -> Streamed:
    """A file as ds_to_universal writes it: a dictionary of a tensor. `whole`: not of a parameter without moments."""
    dtype = stored.dtype if whole or stored.dtype not in _FLOATS else "F32"
    tensor = new_tensor("0", dtype, stored.shape)
    value = {"cat_dim": 0, "param": tensor} if whole else {"param": tensor}
    return Streamed(path, lay_out(_stem(path), value, [tensor.storage.size]), stored, dtype)


def _stem(path: str) -> str:
    return path.rpartition("/")[2].removesuffix(".pt")


class Writer:
    """Fills files below a folder from any thread, and keeps the checksums of what it wrote."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._mine = threading.local()
        self._all: list[dict[str, int]] = []
        # path -> {end of a run of bytes: (its beginning, its CRC32)}
        self._runs: dict[str, dict[int, tuple[int, int]]] = {}

    def sink(self, path: str, checked: bool) -> Callable[[memoryview, int], None]:
        """What `transfer` gives the bytes of a file to. `checked`: their checksum is wanted."""
        runs: dict[int, tuple[int, int]] | None = self._runs.setdefault(path, {}) if checked else None

        def write(content: memoryview, place: int) -> None:
            if runs is not None:
                # a thread continues its own run; its keys are no one else's, but at a boundary of chunks
                start, value = runs.pop(place, (place, 0))
                runs[place + len(content)] = (start, crc32(content, value))
            self.write(path, content, place)

        return write

    def write(self, path: str, content: memoryview | bytes, place: int) -> None:
        """Raises OSError."""
        content = memoryview(content)
        while content:
            done = os.pwrite(self._descriptor(path), content, place)
            content, place = content[done:], place + done

    def _descriptor(self, path: str) -> int:
        """Of the file, made if it is not there; this thread's longest unused one is closed for it."""
        files: dict[str, int] | None = getattr(self._mine, "files", None)
        if files is None:
            files = self._mine.files = {}
            self._all.append(files)
        file = files.pop(path, None)
        if file is None:
            if len(files) >= _MOST_OPEN:
                os.close(files.pop(next(iter(files))))
            file = os.open(self.folder / path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        files[path] = file  # the last one now
        return file

    def checksum(self, path: str, start: int, end: int) -> int:
        """Of the bytes from `start` to `end`, each written once. Raises OSError where one was not."""
        value = 0
        for stop, (begin, piece) in sorted(self._runs.get(path, {}).items()):
            if begin != start:
                break
            value, start = combine(value, piece, stop - begin), stop
        if start != end:
            raise OSError(0, f"{path} was not written whole")
        return value

    def close(self) -> None:
        """When no thread writes any more."""
        for files in self._all:
            while files:
                os.close(files.popitem()[1])


def finish(writer: Writer, file: Small | Streamed) -> None:
    """Writes what stands around the tensors of a file."""
    if isinstance(file, Streamed):
        start = file.layout.data[0]
        size = new_tensor("0", file.dtype, file.stored.shape).storage.size
        checksums = [writer.checksum(file.path, start, start + size)]
    else:
        checksums = [crc32(blob) for blob in file.blobs]
        for place, blob in zip(file.layout.data, file.blobs, strict=True):
            writer.write(file.path, blob, place)
    for place, content in file.layout.around(checksums):
        writer.write(file.path, content, place)


def copy_rest(writer: Writer, file: Copied) -> None:
    """What of a copied file lies between its members: headers, padding and the directory."""
    place = 0
    with file.origin.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        for start, end in [*sorted(_range(stored) for stored in file.members()), (size, size)]:
            while place < start:
                content = os.pread(opened.fileno(), min(1 << 20, start - place), place)
                if not content:
                    break
                writer.write(file.path, content, place)
                place += len(content)
            place = max(place, end)


def _range(stored: TensorIndex) -> tuple[int, int]:
    member = stored.spans[0].member
    return member.offset, member.offset + member.size


def link_twin(folder: Path, file: Copied) -> None:
    """The second name of a copied file: no bytes of its own, where the disk can do that."""
    if file.twin is None:
        return
    with suppress(OSError):
        os.link(folder / file.path, folder / file.twin)
        return
    shutil.copyfile(folder / file.path, folder / file.twin)
