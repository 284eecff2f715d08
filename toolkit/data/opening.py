"""A file -> its bytes, unpacked, and its text, with errors that name the line that does not decode."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import itertools
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from toolkit.errors import UserError
from toolkit.utils.units import size_text

OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_UNPACKED_BYTES, _UNPACKED_RATIO = 1 << 30, 100
"""A packed file may become so many bytes, or so many times its size if that is more; texts become 3 to 20 times it."""
MOST_CELL = 1 << 26
"""Characters of one cell, and of one line: a long document has fewer, and a quote that is not closed takes no more
memory."""
_LIKELY_ENCODINGS = ("utf-8", "gb18030", "big5")
_CHUNK_BYTES = 1 << 20


def most_bytes(*paths: Path) -> int:
    """What packed files may become: more is more likely a trap than data."""
    setting = os.environ.get("TOOLKIT_MAX_UNPACKED_BYTES", "")
    packed = sum(path.stat().st_size for path in paths)
    return int(setting) if setting.isdecimal() else max(_UNPACKED_BYTES, _UNPACKED_RATIO * packed)


def too_large(path: Path, most: int) -> UserError:
    """The error for a file that unpacks to more."""
    return UserError(
        f"{path} ({size_text(path.stat().st_size)}) becomes more than {size_text(most)} unpacked: if you trust it, set "
        f"TOOLKIT_MAX_UNPACKED_BYTES to what it may become (now {most})"
    )


class _Unpacked(io.RawIOBase):
    """The bytes of a file, unpacked where it is packed. Reading raises UserError."""

    def __init__(self, path: Path) -> None:
        opener = OPENERS.get(path.suffix.lower())
        self.path, self.read_so_far = path, 0
        self.most = most_bytes(path) if opener else None
        try:
            self.file = (opener or open)(path, "rb")
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}") from error

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            count: int = self.file.readinto(buffer)
        except (OSError, EOFError, lzma.LZMAError, zlib.error, ValueError) as error:
            if self.most is None:
                raise UserError(f"{self.path} cannot be read: {error}") from error
            raise UserError(f"{self.path} is not a whole {self.path.suffix} file: {error}") from error
        self.read_so_far += count
        if self.most is not None and self.read_so_far > self.most:
            raise too_large(self.path, self.most)
        return count

    def close(self) -> None:
        self.file.close()
        super().close()


def open_text(path: Path, encoding: str, newline: str = "") -> io.TextIOWrapper:
    """As `open` does. Raises UserError, and UnicodeError while it is read."""
    # a byte order mark is no part of the first column's name
    codec = "utf-8-sig" if encoding.lower().replace("_", "-") in ("utf-8", "utf8") else encoding
    try:
        return io.TextIOWrapper(io.BufferedReader(_Unpacked(path), _CHUNK_BYTES), codec, newline=newline)
    except LookupError as error:
        raise UserError(f"--encoding {encoding}: Python has no such encoding") from error


def lines_of(path: Path, text: io.TextIOWrapper) -> Iterator[str]:
    """Raises UserError for one that is too long to be a line."""
    for number in itertools.count(1):
        line = text.readline(MOST_CELL)
        if not line:
            return
        if len(line) == MOST_CELL:
            raise UserError(
                f"{path}, line {number}: longer than {MOST_CELL} characters: put each row, or each text, on a line of "
                "its own"
            )
        yield line


def bad_encoding(path: Path, encoding: str) -> str:
    """Names the line that does not decode, and an encoding in which all of them do, unless it is the file that is
    damaged: of what is not ASCII in it, most is text in `encoding`."""
    decoders = {name: codecs.getincrementaldecoder(name)() for name in (encoding, *_LIKELY_ENCODINGS)}
    replacing = codecs.getincrementaldecoder(encoding)("replace")
    fed = line = bad = foreign = 0
    begins, fault = b"", ""
    with io.BufferedReader(_Unpacked(path), _CHUNK_BYTES) as file:
        while chunk := file.read(_CHUNK_BYTES):
            begins = begins or chunk[:4]
            final, fed = not file.peek(1), fed + len(chunk)
            for name, decoder in list(decoders.items()):
                try:
                    decoder.decode(chunk, final)
                except UnicodeError as error:
                    del decoders[name]
                    if name == encoding:
                        decoded, start = getattr(error, "object", chunk), getattr(error, "start", 0)
                        place = fed - len(decoded) + start
                        number = line + chunk.count(b"\n", 0, max(0, place - fed + len(chunk))) + 1
                        where = f"{path}, line {number}, byte {place + 1} of the file"
                        fault = f"{where}: not {encoding} (0x{decoded[start]:02x})"
            line += chunk.count(b"\n")
            text = replacing.decode(chunk, final)
            bad, foreign = bad + text.count("\ufffd"), foreign + sum(not character.isascii() for character in text)
    if begins == b"PK\x03\x04":
        return f"{path} is an Excel book (or another zip), not text: save it as `CSV UTF-8` there"
    if begins[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return f"{fault}: pass --encoding utf-16"
    fits = next((name for name in decoders if name != encoding), None)
    if fits != "utf-8" and (bad == 1 or bad < foreign / 2):
        return f"{fault}; {bad} such places in the file, which is {encoding} otherwise: mend those"
    return f"{fault}: {f'pass --encoding {fits}' if fits else 'convert it, or pass its --encoding'}"
