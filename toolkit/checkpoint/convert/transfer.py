"""Moves tensors from a checkpoint's members into files: one pass, in blocks, checked while it runs.

Each member that something is taken from is read once and whole, so that its CRC32 can be checked. The
work is cut into chunks that several threads take in turn; reading, checksums, casts and writing all
release the interpreter's lock.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from toolkit.checkpoint.checksum import combine, crc32
from toolkit.checkpoint.reader import FLOATS, ITEM_BYTES, Member, TensorIndex
from toolkit.errors import UserError

if TYPE_CHECKING:  # numpy takes as long to import as a gigabyte to copy
    from toolkit.checkpoint.convert.casts import Caster
    from toolkit.checkpoint.convert.lora_delta import Delta

# Bytes read at a time: with the buffers of a cast it fits a core's cache, so that memory is passed once.
BLOCK = 512 << 10
# Bytes of a thread's turn.
CHUNK = 32 << 20
# More do not gain on the disks we met, and each has buffers of its own (about 3 MB).
MOST_THREADS = 4


@dataclass(frozen=True)
class Target:
    """Where a tensor goes."""

    name: str
    """In the output."""
    stored: TensorIndex
    dtype: str
    """In the output."""
    file: int
    """Descriptor of the open output file."""
    offset: int
    """Of the tensor's first byte in it."""
    delta: Delta | None = None
    """Added in fp32 on the way."""
    sink: Callable[[memoryview, int], object] | None = None
    """Takes (bytes, their place in the output file), by any thread, where there is no open file."""


@dataclass(frozen=True)
class _Part:
    """Bytes of a member that belong to one tensor."""

    start: int
    """Bytes from the member's beginning."""
    end: int
    first: int
    """Which element of the tensor the part begins with."""
    target: Target


@dataclass
class _Chunk:
    member: Member
    start: int
    """Bytes from the member's beginning."""
    end: int
    parts: list[_Part] = field(default_factory=list)


def transfer(
    targets: Iterable[Target],
    checked: Iterable[Member] = (),
    progress: Callable[[int], object] = lambda size: None,
    threads: int | None = None,
) -> int:
    """Writes every target and returns the bytes read. `checked`: members to check though nothing is taken.

    `progress` is called, by any thread, with the bytes read since. Raises UserError naming the file and
    the member where a checksum disagrees or a file is short, OSError where a file cannot be written.
    """
    chunks = _chunks(targets, checked)
    count = min(threads or min(MOST_THREADS, len(os.sched_getaffinity(0))), len(chunks)) or 1
    work = _Work(chunks, progress)
    with ThreadPoolExecutor(count) as pool:
        try:
            futures = [pool.submit(work.run) for _ in range(count)]
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            work.stopped = True  # after Ctrl-C or a fault the other threads end with their block
        for future in futures:
            future.result()
    _check(work.checksums)
    return sum(chunk.end - chunk.start for chunk in chunks)


def _chunks(targets: Iterable[Target], checked: Iterable[Member]) -> list[_Chunk]:
    """In the order of the files' bytes, so that a disk reads ahead."""
    parts: dict[Member, list[_Part]] = defaultdict(list)
    for target in targets:
        for member, part in _parts(target):
            parts[member].append(part)
    for member in checked:
        parts.setdefault(member, [])
    found = []
    for member in sorted(parts, key=lambda member: (str(member.file), member.offset)):
        chunks = [_Chunk(member, start, min(start + CHUNK, member.size)) for start in range(0, member.size, CHUNK)]
        for part in parts[member]:
            for chunk in chunks[part.start // CHUNK : -(-part.end // CHUNK)]:
                chunk.parts.append(part)
        found.extend(chunks)
    return found


def _parts(target: Target) -> Iterator[tuple[Member, _Part]]:
    item, first = ITEM_BYTES[target.stored.dtype], 0
    if sum(span.count for span in target.stored.spans) != target.stored.count:
        raise UserError(f"{target.stored.name} is not whole in the checkpoint: the output would have a hole")
    for span in target.stored.spans:
        end = span.start + span.count * item
        if span.start % item or end > span.member.size:
            where = f"{span.member.name} of {span.member.file}"
            raise UserError(f"{target.stored.name} does not lie within {where}: the checkpoint is damaged")
        if span.count:
            yield span.member, _Part(span.start, end, first, target)
        first += span.count


class _Work:
    """The chunks still to do, shared by the threads, and the checksums of those done."""

    def __init__(self, chunks: list[_Chunk], progress: Callable[[int], object]) -> None:
        self.stopped = False
        self.checksums: dict[Member, list[tuple[int, int, int]]] = defaultdict(list)  # (start, bytes, CRC32)
        self._chunks = iter(chunks)
        self._lock = threading.Lock()
        self._progress = progress

    def run(self) -> None:
        """One thread's work: chunks until there are none."""
        block, caster = memoryview(bytearray(BLOCK)), functools.cache(_make_caster)
        with ExitStack() as stack:
            files: dict[Path, int] = {}
            try:
                while (chunk := self._next()) is not None:
                    file = files.get(chunk.member.file)
                    if file is None:
                        file = files[chunk.member.file] = _open(chunk.member.file)
                        stack.callback(os.close, file)
                    self._do(chunk, file, block, caster)
            except BaseException:
                self.stopped = True
                raise

    def _next(self) -> _Chunk | None:
        with self._lock:
            return None if self.stopped else next(self._chunks, None)

    def _do(self, chunk: _Chunk, file: int, block: memoryview, caster: Callable[[], Caster]) -> None:
        value = 0
        for start in range(chunk.start, chunk.end, BLOCK):
            if self.stopped:
                return
            view = block[: min(BLOCK, chunk.end - start)]
            _fill(file, chunk.member, start, view)
            if chunk.member.crc32 is not None:
                value = crc32(view, value)
            for part in chunk.parts:
                low, high = max(part.start, start), min(part.end, start + len(view))
                if low < high:
                    _write(part, low, view[low - start : high - start], caster)
            self._progress(len(view))
        with self._lock:
            self.checksums[chunk.member].append((chunk.start, chunk.end - chunk.start, value))


def _write(part: _Part, low: int, numbers: memoryview, caster: Callable[[], Caster]) -> None:
    target = part.target
    element = part.first + (low - part.start) // ITEM_BYTES[target.stored.dtype]
    content = numbers
    if changes(target.stored, target.dtype, target.delta):
        content = converted(numbers, target.stored, target.dtype, element, target.delta, caster())
    place = target.offset + element * ITEM_BYTES[target.dtype]
    if target.sink is not None:
        target.sink(content, place)
        return
    while content:
        done = os.pwrite(target.file, content, place)
        content, place = content[done:], place + done


def _make_caster() -> Caster:
    from toolkit.checkpoint.convert.casts import Caster

    return Caster(BLOCK // 2)


def changes(stored: TensorIndex, dtype: str, delta: Delta | None) -> bool:
    """Whether the output's bytes are others than the checkpoint's."""
    return delta is not None or (stored.dtype != dtype and stored.dtype in FLOATS)


def converted(
    numbers: memoryview, stored: TensorIndex, dtype: str, first: int, delta: Delta | None, caster: Caster
) -> memoryview:
    """Elements of `stored`, from `first` on, as the output holds them.

    Raises UserError where a finite number would become infinite.
    """
    from toolkit.checkpoint.convert.casts import TooLargeError

    try:
        if delta is None:
            return caster.cast(numbers, stored.dtype, dtype)
        values = delta.added(caster.widen(numbers, stored.dtype), first)
        return caster.narrow(values, dtype)
    except TooLargeError:
        raise UserError(
            f"{stored.name} holds a number that {dtype.lower()} cannot hold, it would become infinite: use --dtype bf16"
        ) from None


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def _fill(file: int, member: Member, start: int, view: memoryview) -> None:
    done = 0
    while done < len(view):
        try:
            count = os.preadv(file, [view[done:]], member.offset + start + done)
        except OSError as error:
            raise UserError(f"cannot read {member.name} of {member.file}: {error.strerror}") from None
        if count == 0:
            raise UserError(f"{member.file} ends within {member.name}: truncated")
        done += count


def _check(checksums: dict[Member, list[tuple[int, int, int]]]) -> None:
    for member, pieces in checksums.items():
        value = 0
        for _, size, piece in sorted(pieces):
            value = combine(value, piece, size)
        if member.crc32 is not None and value != member.crc32:
            _refuse(member, value)


def _refuse(member: Member, value: int) -> NoReturn:
    raise UserError(
        f"{member.name} of {member.file} is damaged: its checksum is {value:08x} and should be "
        f"{member.crc32:08x}; take another copy of this file, or another checkpoint"
    )
