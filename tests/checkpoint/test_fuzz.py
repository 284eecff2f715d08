"""Real files with random damage: what comes out is a UserError, or a checkpoint; never anything else.

Seeded. The slow one takes other seeds and more rounds.
"""

from __future__ import annotations

import pickle
import random
import shutil
import zipfile
import zlib
from pathlib import Path

import pytest

from tests.checkpoint.conftest import Made
from toolkit.checkpoint.read.open import open_checkpoint
from toolkit.checkpoint.read.torch_file import open_torch_file, read_member, verify_member, zip_members
from toolkit.checkpoint.read.unpickle import DEEPSPEED, unpickle
from toolkit.errors import UserError

pytestmark = pytest.mark.multiprocess
KINDS = ("zero0 x2", "zero1-frozen x3", "zero2-aligned x2", "zero2-elastic x2", "zero3-frozen x2", "zero3-subgroups x3")
_OPCODES = b"".join(getattr(pickle, name) for name in pickle.__all__ if name.isupper() and len(name) > 2 and
                    isinstance(getattr(pickle, name), bytes))  # fmt: skip


def damaged(content: bytes, chance: random.Random) -> bytes:
    """Bytes changed, cut, put in, moved or doubled."""
    found = bytearray(content)
    for _ in range(chance.choice((1, 1, 1, 2, 5, 20))):
        at = chance.randrange(len(found) + 1)
        length = min(chance.choice((1, 1, 2, 4, 8, 100)), len(found) - at)
        kind = chance.randrange(6)
        if kind == 0:
            del found[at : at + length]
        elif kind == 1:
            found[at:at] = chance.randbytes(length)
        elif kind == 2:
            other = chance.randrange(len(found) + 1)
            found[at:at] = found[other : other + length]
        elif kind == 3 and length:
            found[at] = chance.choice(_OPCODES)
        elif kind == 4 and length:
            found[at] = chance.choice((0, 1, 0x7F, 0x80, 0xFF))
        elif length:
            found[at] ^= 1 << chance.randrange(8)
    return bytes(found)


def structures_damaged(seed: int, rounds: int, made: Made) -> None:
    chance = random.Random(seed)
    contents = [_structure(file) for file in sorted(made.tag.glob("*.pt"))]
    for _ in range(rounds):
        content = damaged(chance.choice(contents), chance)
        try:
            unpickle(content, "rank.pt", DEEPSPEED)
        except UserError as error:
            assert "rank.pt" in str(error)  # noqa: PT017


def _structure(file: Path) -> bytes:
    members = zip_members(file)
    return read_member(next(member for name, member in members.items() if name.endswith("/data.pkl")), 1 << 20)


def files_damaged(seed: int, rounds: int, made: Made, folder: Path) -> None:
    chance = random.Random(seed)
    contents = {file.name: file.read_bytes() for file in sorted(made.tag.glob("*.pt"))}
    for _ in range(rounds):
        name = chance.choice(sorted(contents))
        file = folder / name
        file.write_bytes(damaged(contents[name], chance))
        try:
            for member in open_torch_file(file, DEEPSPEED).members.values():
                verify_member(member)
        except UserError as error:
            assert str(file) in str(error)  # noqa: PT017


def checkpoints_damaged(seed: int, rounds: int, made: Made, folder: Path) -> None:
    """The structure is changed and its checksum mended, so that each file is sound in itself."""
    chance = random.Random(seed)
    root = folder / made.folder.name
    shutil.copytree(made.folder, root)
    files = sorted((root / "global_step2").glob("*.pt"))
    for _ in range(rounds):
        file = chance.choice(files)
        content = file.read_bytes()
        file.write_bytes(_with_structure(file, damaged(_structure(file), chance)))
        try:
            for stored in open_checkpoint(root).weights.values():
                stored.read()
        except UserError as error:
            assert str(root) in str(error).partition("\n")[0]  # noqa: PT017
        file.write_bytes(content)


def _with_structure(file: Path, structure: bytes) -> bytes:
    """A torch file with another data.pkl in place."""
    target = file.with_suffix(".zip")
    with zipfile.ZipFile(file) as read, zipfile.ZipFile(target, "w") as written:
        for name in read.namelist():
            written.writestr(name, structure if name.endswith("/data.pkl") else read.read(name))
    content = target.read_bytes()
    target.unlink()
    assert zlib.crc32(structure).to_bytes(4, "little") in content
    return content


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    ("seed", "times"), [(1, 1), *(pytest.param(seed, 8, marks=pytest.mark.slow) for seed in (2, 3))]
)
def test_damage(name: str, seed: int, times: int, deepspeed_checkpoints: dict[str, Made], tmp_path: Path) -> None:
    made = deepspeed_checkpoints[name]
    structures_damaged(seed, times * 500, made)
    files_damaged(seed, times * 300, made, tmp_path)
    checkpoints_damaged(seed, times * 150, made, tmp_path)
