"""Streams tensors from a checkpoint's members into safetensors files, in one pass, and checks the checksums meanwhile.

Each member with a tensor to convert is read once and completely, so that its CRC32 can be checked. Several threads
work on chunks of them; reading, checksums, casts and writing all release the GIL.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from toolkit.checkpoint.lora import LoraDelta
from toolkit.checkpoint.safetensors_header import Layout, read_header
from toolkit.checkpoint.tensor_index import ITEM_BYTES, Member, TensorIndex, blocks, crc32, crc32_combine
from toolkit.errors import UserError
from toolkit.utils.files import write_new

BLOCK = 512 << 10
"""Bytes read at a time: they and their cast fit a core's cache."""
CHUNK = 16 << 20
"""Bytes of a thread's task."""
MAX_THREADS = 4
"""More were no faster on the disks we measured, and each takes about 3 MB."""
_COMPARED = 1 << 16  # elements at a time


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor to write."""

    name: str
    tensor: TensorIndex
    dtype: str
    delta: LoraDelta | None = None
    """Added to the tensor."""

    @property
    def size(self) -> int:
        """Bytes."""
        return self.tensor.count * ITEM_BYTES[self.dtype]

    def convert(self, numbers: memoryview, first: int) -> memoryview:
        """The output's bytes of the tensor's elements `numbers`, from `first` on.

        Raises UserError if a finite number becomes infinite.
        """
        if self.delta is None and self.tensor.dtype == self.dtype:
            return numbers
        from toolkit.checkpoint.convert import casts  # importing numpy takes as long as copying a gigabyte

        values = casts.widen(numbers, self.tensor.dtype, self.tensor.name)
        if self.delta is not None:
            values = casts.add_delta(self.delta, values, first)
        return casts.narrow(values, self.dtype, self.tensor.name)


@dataclass(frozen=True)
class Shard:
    """One safetensors file."""

    name: str
    layout: Layout
    outputs: list[Output]


def split_into_shards(outputs: Iterable[Output], max_bytes: int, is_adapter: bool = False) -> list[Shard]:
    """Files of at most `max_bytes` of tensors each, in the model's order; a larger tensor gets its own file."""
    groups: list[list[Output]] = [[]]
    size = 0
    for output in outputs:
        if groups[-1] and size + output.size > max_bytes and not is_adapter:
            groups.append([])
            size = 0
        groups[-1].append(output)
        size += output.size
    names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    if len(groups) == 1:
        names = ["adapter_model.safetensors" if is_adapter else "model.safetensors"]
    shards = []
    for name, group in zip(names, groups, strict=True):
        tensors = {output.name: (output.dtype, output.tensor.shape) for output in group}
        shards.append(Shard(name, Layout(tensors, {"format": "pt"}), group))
    return shards


def write_shards(folder: Path, shards: Sequence[Shard]) -> None:
    """Writes the files, and the index of several.

    Raises UserError for a wrong checksum, a truncated file, or a number that becomes infinite; OSError if the disk
    cannot be written.
    """
    parts: dict[Member, list[_Part]] = defaultdict(list)
    with ExitStack() as stack:
        for shard in shards:
            file = stack.enter_context((folder / shard.name).open("xb")).fileno()
            os.ftruncate(file, shard.layout.size)
            _write_at(file, memoryview(shard.layout.header()), 0)
            for output in shard.outputs:
                offset, first = shard.layout.offsets[output.name], 0
                for span in output.tensor.spans:
                    end = span.start + span.count * ITEM_BYTES[output.tensor.dtype]
                    parts[span.member].append(_Part(output, file, offset, first, span.start, end))
                    first += span.count
                for factor in (output.delta.a, output.delta.b) if output.delta else ():
                    for span in factor.spans:
                        parts[span.member] += ()  # only checked: nothing is copied from it
        _transfer(parts)
    if len(shards) > 1:
        _write_index(folder, shards)


def _write_at(file: int, content: memoryview, offset: int) -> None:
    while content:
        written = os.pwrite(file, content, offset)
        content, offset = content[written:], offset + written


def _write_index(folder: Path, shards: Sequence[Shard]) -> None:
    files = {output.name: shard.name for shard in shards for output in shard.outputs}
    metadata = {"total_size": sum(output.size for shard in shards for output in shard.outputs)}
    text = json.dumps({"metadata": metadata, "weight_map": dict(sorted(files.items()))}, ensure_ascii=False, indent=2)
    write_new(folder / "model.safetensors.index.json", text + "\n")


@dataclass(frozen=True, slots=True)
class _Part:
    """A member's bytes [start, end), which are a tensor's elements from `first` on."""

    output: Output
    file: int
    """Descriptor of the output file."""
    offset: int
    """The tensor's first byte in the output file."""
    first: int
    start: int
    end: int

    def write(self, low: int, numbers: memoryview) -> None:
        """Converts and writes `numbers`, the member's bytes from `low` on."""
        element = self.first + (low - self.start) // ITEM_BYTES[self.output.tensor.dtype]
        offset = self.offset + element * ITEM_BYTES[self.output.dtype]
        _write_at(self.file, self.output.convert(numbers, element), offset)


def _transfer(parts: Mapping[Member, list[_Part]]) -> None:
    """Copies all parts in threads."""
    members = sorted(parts, key=lambda member: (str(member.file), member.offset))  # sequential reads
    chunks = [
        (member, start, min(start + CHUNK, member.size)) for member in members for start in range(0, member.size, CHUNK)
    ]
    checksums = dict.fromkeys(members, 0)
    with _threads(len(chunks)) as pool:
        # Ctrl-C or an error cancels the chunks that have not begun
        values = pool.map(lambda chunk: _copy(parts[chunk[0]], *chunk), chunks)
        for (member, start, end), value in zip(chunks, values, strict=True):
            checksums[member] = crc32_combine(checksums[member], value, end - start)
    for member, value in checksums.items():
        member.check(value)


def _threads(tasks: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0)), tasks) or 1)


def _copy(parts: list[_Part], member: Member, start: int, end: int) -> int:
    """Copies bytes [start, end) of a member and returns their CRC32."""
    value, begin = 0, start
    parts = [part for part in parts if part.start < end and part.end > start]
    for view in blocks(member.file, member.offset + start, end - start, BLOCK):
        if member.crc32 is not None:
            value = crc32(view, value)
        for part in parts:
            low, high = max(part.start, begin), min(part.end, begin + len(view))
            if low < high:
                part.write(low, view[low - begin : high - begin])
        begin += len(view)
    return value


def verify_numbers(folder: Path, shards: Sequence[Shard]) -> str:
    """Compares the written files with the checkpoint; returns a line for the user.

    It reads the files by their headers, tensor by tensor, not by the layout that they were written with. Raises
    UserError naming the first tensor that differs.
    """
    outputs = [output for shard in shards for output in shard.outputs]
    for shard in shards:
        path = folder / shard.name
        with path.open("rb") as file:  # drop it from the page cache: compare what is on the disk
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        written, _ = read_header(path)
        if set(written) != {output.name for output in shard.outputs}:
            raise UserError(f"{path} does not have the tensors that were written: the disk or memory is faulty")
        with _threads(len(shard.outputs)) as pool:
            same = pool.map(lambda output: _same(output, written[output.name]), shard.outputs)  # noqa: B023 (read here)
            for output, is_same in zip(shard.outputs, same, strict=True):
                if not is_same:
                    raise UserError(f"{output.name} in {path} differs from {output.tensor.name} of the checkpoint")
    merged = sum(output.delta is not None for output in outputs)
    summed = f", {merged} of them the sum with their adapter" if merged else ""
    return f"verified: {len(outputs)} tensors are the checkpoint's, bit for bit{summed}"


def _same(output: Output, written: TensorIndex) -> bool:
    for first in range(0, written.count, _COMPARED):
        count = min(_COMPARED, written.count - first)
        if written.read(first, count) != output.convert(memoryview(output.tensor.read(first, count)), first):
            return False
    return True
