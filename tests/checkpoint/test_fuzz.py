"""Real files with random damage: what comes out is a UserError, or a checkpoint; never anything else."""

import pickle
import random
import shutil
from pathlib import Path

import pytest

from tests.checkpoint.conftest import Made
from tests.checkpoint.handmade import rewritten
from toolkit.checkpoint.read.open import open_checkpoint
from toolkit.checkpoint.read.torch_archive import read_member, zip_members
from toolkit.checkpoint.read.unpickle import unpickle
from toolkit.errors import UserError

pytestmark = pytest.mark.multiprocess
KINDS = ("zero0 x2", "zero1-frozen x3", "zero2-aligned x2", "zero2-elastic x2", "zero3-frozen x2", "zero3-subgroups x3")
_OPCODES = b"".join(getattr(pickle, name) for name in pickle.__all__ if name.isupper() and len(name) > 2 and
                    isinstance(getattr(pickle, name), bytes))  # fmt: skip


def damaged(content: bytes, chance: random.Random) -> bytes:
    actual = bytearray(content)
    for _ in range(chance.choice((1, 1, 1, 2, 5, 20))):
        at, other = chance.randrange(len(actual) + 1), chance.randrange(len(actual) + 1)
        size = chance.choice((1, 1, 2, 4, 8, 100))
        byte = bytes([chance.choice((*_OPCODES, 0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))])
        change = chance.choice(((size, b""), (0, chance.randbytes(size)), (0, actual[other : other + size]), (1, byte)))
        actual[at : at + change[0]] = change[1]
    return bytes(actual)


def structure_of(file: Path) -> bytes:
    members = zip_members(file)
    return read_member(next(member for name, member in members.items() if name.endswith("/data.pkl")), 1 << 20)


def read_whole(root: Path) -> None:
    """Raises AssertionError where anything but a UserError comes out, or one that names no file."""
    try:
        for stored in open_checkpoint(root).weights.values():
            stored.read()
            for span in stored.spans:
                span.member.verify()
    except UserError as error:
        assert str(root) in str(error).partition("\n")[0]  # noqa: PT017


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("seed", "times"), [(1, 1), pytest.param(2, 16, marks=pytest.mark.slow)])
def test_damage(made: Made, seed: int, times: int, tmp_path: Path) -> None:
    chance, root = random.Random(seed), tmp_path / "saved"
    shutil.copytree(made.folder, root)
    files = sorted((root / "global_step2").glob("*.pt"))
    structures = [structure_of(file) for file in files]
    for _ in range(times * 500):
        try:
            unpickle(damaged(chance.choice(structures), chance), "rank.pt")
        except UserError as error:
            assert "rank.pt" in str(error)  # noqa: PT017
    for number in range(times * 200):
        file = chance.choice(files)
        content = file.read_bytes()
        if number % 2:
            structure = damaged(structure_of(file), chance)
            file.write_bytes(rewritten(file, lambda name, old, new=structure: new if "data.pkl" in name else old))
        else:
            file.write_bytes(damaged(content, chance))
        read_whole(root)
        file.write_bytes(content)
