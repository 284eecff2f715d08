"""Streams tensors from a checkpoint's members into safetensors files: one pass, in blocks, checked while it runs.

Each member that something is taken from is read once and whole, so that its CRC32 can be checked. The
work is cut into chunks that several threads take in turn; reading, checksums, casts and writing all
release the interpreter's lock.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.checkpoint.checksum import combine, crc32
from toolkit.checkpoint.convert.select import Output
from toolkit.checkpoint.reader import ITEM_BYTES, Member
from toolkit.checkpoint.tensors_file import Layout, lay_out
from toolkit.errors import UserError

if TYPE_CHECKING:  # numpy takes as long to import as a gigabyte to copy
    from toolkit.checkpoint.convert.casts import Caster

INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_model.safetensors"
# Bytes read at a time: with the buffers of a cast it fits a core's cache, so that memory is passed once.
BLOCK = 512 << 10
# Bytes of a thread's turn.
CHUNK = 32 << 20
# More do not gain on the disks we met, and each has buffers of its own (about 3 MB).
MOST_THREADS = 4


# the files


@dataclass(frozen=True)
class Shard:
    """One safetensors file."""

    name: str
    layout: Layout
    outputs: list[Output]


def into_shards(outputs: Iterable[Output], dtype: str, most: int, is_adapter: bool = False) -> list[Shard]:
    """Files of at most `most` bytes of tensors each, in the model's order; a larger tensor has one of its own."""
    groups: list[list[Output]] = [[]]
    size = 0
    for output in outputs:
        added = output.size(dtype)
        if groups[-1] and size + added > most and not is_adapter:
            groups.append([])
            size = 0
        groups[-1].append(output)
        size += added
    names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    if len(groups) == 1:
        names = [ADAPTER if is_adapter else "model.safetensors"]
    shards = []
    for name, group in zip(names, groups, strict=True):
        tensors = {output.name: (output.dtype(dtype), output.stored.shape) for output in group}
        shards.append(Shard(name, lay_out(tensors, {"format": "pt"}), group))
    return shards


def write_shards(
    folder: Path,
    shards: Sequence[Shard],
    dtype: str,
    checked: Iterable[Member] = (),
    progress: Callable[[int], object] = lambda size: None,
) -> int:
    """Writes the files, and the index of several, and returns the bytes read.

    Args:
        checked: members to check though nothing is copied from them.
        progress: called, by any thread, with the bytes read since.

    Raises:
        UserError: a checksum disagrees, a file is short, or a number does not fit; names the file and the member.
        OSError: a file cannot be written.
    """
    parts: dict[Member, list[_Part]] = defaultdict(list, {member: [] for member in checked})
    with ExitStack() as stack:
        for shard in shards:
            file = _create(folder / shard.name, shard.layout, stack)
            for output in shard.outputs:
                for member, part in _parts(output, output.dtype(dtype), file, shard.layout.offsets[output.name]):
                    parts[member].append(part)
        read = _transfer(_chunks(parts), progress)
    if len(shards) > 1:
        _write_index(folder, shards, dtype)
    return read


def _create(path: Path, layout: Layout, stack: ExitStack) -> int:
    """Descriptor of a new file of its full size that holds its header."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    stack.callback(os.close, file)
    os.ftruncate(file, layout.size)
    _write_at(file, memoryview(layout.header()), 0)
    return file


def _write_at(file: int, content: memoryview, place: int) -> None:
    while content:
        done = os.pwrite(file, content, place)
        content, place = content[done:], place + done


def _write_index(folder: Path, shards: Sequence[Shard], dtype: str) -> None:
    """The file that tells `from_pretrained` where each tensor is."""
    where = {output.name: shard.name for shard in shards for output in shard.outputs}
    outputs = [output for shard in shards for output in shard.outputs]
    metadata = {
        "total_parameters": sum(output.stored.count for output in outputs),
        "total_size": sum(output.size(dtype) for output in outputs),
    }
    text = json.dumps({"metadata": metadata, "weight_map": dict(sorted(where.items()))}, ensure_ascii=False, indent=2)
    (folder / INDEX).write_text(text + "\n", encoding="utf-8")


# the work


@dataclass(frozen=True)
class _Part:
    """Bytes of a member that belong to one tensor."""

    output: Output
    dtype: str
    """In the output."""
    file: int
    """Descriptor of the open output file."""
    offset: int
    """Of the tensor's first byte in it."""
    start: int
    """Bytes from the member's beginning."""
    end: int
    first: int
    """Which element of the tensor the part begins with."""

    def write(self, low: int, numbers: memoryview, buffers: _Buffers) -> None:
        """`numbers`: the member's bytes from `low` on."""
        output, dtype = self.output, self.dtype
        element = self.first + (low - self.start) // ITEM_BYTES[output.stored.dtype]
        if output.delta is not None or output.stored.dtype != dtype:
            numbers = converted(output, numbers, dtype, element, buffers.caster)
        _write_at(self.file, numbers, self.offset + element * ITEM_BYTES[dtype])


@dataclass
class _Chunk:
    member: Member
    start: int
    """Bytes from the member's beginning."""
    end: int
    parts: list[_Part] = field(default_factory=list)


def _chunks(parts: Mapping[Member, list[_Part]]) -> list[_Chunk]:
    """In the order of the files' bytes, so that a disk reads ahead."""
    found = []
    for member in sorted(parts, key=lambda member: (str(member.file), member.offset)):
        chunks = [_Chunk(member, start, min(start + CHUNK, member.size)) for start in range(0, member.size, CHUNK)]
        for part in parts[member]:
            for chunk in chunks[part.start // CHUNK : -(-part.end // CHUNK)]:
                chunk.parts.append(part)
        found.extend(chunks)
    return found


def _parts(output: Output, dtype: str, file: int, offset: int) -> Iterator[tuple[Member, _Part]]:
    stored, first = output.stored, 0
    item = ITEM_BYTES[stored.dtype]
    if sum(span.count for span in stored.spans) != stored.count:
        raise UserError(f"{stored.name} is not whole in the checkpoint: the output would have a hole")
    for span in stored.spans:
        end = span.start + span.count * item
        if span.start % item or end > span.member.size:
            where = f"{span.member.name} of {span.member.file}"
            raise UserError(f"{stored.name} does not lie within {where}: the checkpoint is damaged")
        if span.count:
            yield span.member, _Part(output, dtype, file, offset, span.start, end, first)
        first += span.count


class _Buffers(threading.local):
    """Each thread's own."""

    def __init__(self) -> None:
        self.block = memoryview(bytearray(BLOCK))

    @functools.cached_property
    def caster(self) -> Caster:
        from toolkit.checkpoint.convert.casts import Caster

        return Caster(BLOCK // 2)


def _transfer(chunks: list[_Chunk], progress: Callable[[int], object]) -> int:
    """Does all the work in threads, and returns the bytes read."""
    count = min(MOST_THREADS, len(os.sched_getaffinity(0)), len(chunks)) or 1
    stop, buffers = threading.Event(), _Buffers()
    with ThreadPoolExecutor(count) as pool:
        try:
            futures = [pool.submit(_copy, chunk, buffers, stop, progress) for chunk in chunks]
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()  # after Ctrl-C or a fault the other threads end with their block
        values = [future.result() for future in futures]
    for member, group in itertools.groupby(zip(chunks, values, strict=True), key=lambda pair: pair[0].member):
        _compare_checksum(member, [(chunk.end - chunk.start, value) for chunk, value in group])
    return sum(chunk.end - chunk.start for chunk in chunks)


def _copy(chunk: _Chunk, buffers: _Buffers, stop: threading.Event, progress: Callable[[int], object]) -> int:
    """Does a chunk, and returns the CRC32 of its bytes."""
    value = 0
    for start, view in _blocks(chunk, buffers.block):
        if stop.is_set():
            break
        if chunk.member.crc32 is not None:
            value = crc32(view, value)
        for part in chunk.parts:
            low, high = max(part.start, start), min(part.end, start + len(view))
            if low < high:
                part.write(low, view[low - start : high - start], buffers)
        progress(len(view))
    return value


def _blocks(chunk: _Chunk, buffer: memoryview) -> Iterator[tuple[int, memoryview]]:
    """(bytes from the member's beginning, what is there); `buffer` holds one block at a time."""
    member = chunk.member
    try:
        with member.file.open("rb", buffering=0) as file:
            for start in range(chunk.start, chunk.end, BLOCK):
                view, done = buffer[: min(BLOCK, chunk.end - start)], 0
                while done < len(view):
                    count = os.preadv(file.fileno(), [view[done:]], member.offset + start + done)
                    if count == 0:
                        raise UserError(f"{member.file} ends within {member.name}: truncated")
                    done += count
                yield start, view
    except OSError as error:
        raise UserError(f"cannot read {member.name} of {member.file}: {error.strerror}") from None


def _compare_checksum(member: Member, pieces: Iterable[tuple[int, int]]) -> None:
    """Of a whole member, put together from its chunks' (bytes, CRC32). Raises UserError."""
    value = 0
    for size, piece in pieces:
        value = combine(value, piece, size)
    if member.crc32 is not None and value != member.crc32:
        raise UserError(
            f"{member.name} of {member.file} is damaged: its checksum is {value:08x} and should be "
            f"{member.crc32:08x}; take another copy of this file, or another checkpoint"
        )


def converted(output: Output, numbers: memoryview, dtype: str, first: int, caster: Caster) -> memoryview:
    """Elements of a tensor, from `first` on, as the output holds them.

    Raises UserError where a finite number would become infinite.
    """
    from toolkit.checkpoint.convert.casts import TooLargeError

    try:
        if output.delta is None:
            return caster.cast(numbers, output.stored.dtype, dtype)
        return caster.narrow(output.delta.added(caster.widen(numbers, output.stored.dtype), first), dtype)
    except TooLargeError:
        raise UserError(
            f"{output.stored.name} holds a number that {dtype.lower()} cannot hold, it would become infinite: "
            "use --dtype bf16"
        ) from None
