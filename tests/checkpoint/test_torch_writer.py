"""Files that `torch_writer` makes are what torch, Python and we ourselves read."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from toolkit.checkpoint.checksum import crc32
from toolkit.checkpoint.convert.torch_writer import lay_out, new_tensor, pickled
from toolkit.checkpoint.read.archive import verify_member
from toolkit.checkpoint.read.pickled_names import TORCH
from toolkit.checkpoint.read.torch_file import open_torch_file
from toolkit.checkpoint.read.unpickle import unpickle

VALUES = [
    None, True, False, 0, 1, -1, 255, 2**31 - 1, -(2**31), 2**31, -(2**40), 2**63, 0.1, float("inf"), "", "ü\n'",
    b"a\xff", [], [1, [2]], (), (1,), (1, 2, 3, (4,)), {}, {"a": {1: 2}}, {1, "x"},
    {"betas": (0.9, 0.999), "params": [0], "fused": None},
]  # fmt: skip


def write(path: Path, value: Any, blobs: list[bytes]) -> Path:
    layout = lay_out("archive", value, [len(blob) for blob in blobs])
    content = bytearray(layout.size)
    parts = [*zip(layout.data, blobs, strict=True), *layout.around([crc32(blob) for blob in blobs])]
    for place, part in parts:
        content[place : place + len(part)] = part
    assert len(content) == layout.size
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_come_back(value: Any, tmp_path: Path) -> None:
    assert unpickle(pickled(value), "here", TORCH) == value
    assert torch.load(write(tmp_path / "x.pt", value, []), weights_only=False) == value


def test_what_has_no_place_is_refused() -> None:
    with pytest.raises(TypeError, match="no place"):
        pickled({"a": object()})


def test_tensors_are_torchs(tmp_path: Path) -> None:
    numbers = torch.randn(3, 5)
    value = {
        "w": new_tensor("0", "F32", (3, 5)),
        "none": new_tensor("1", "BF16", (0, 3)),
        "step": new_tensor("2", "F32", ()),
    }
    path = write(tmp_path / "x.pt", value, [numbers.numpy().tobytes(), b"", struct.pack("<f", 7.0)])
    for only, mapped in ((True, False), (False, False), (True, True)):
        found = torch.load(path, weights_only=only, mmap=mapped)
        assert torch.equal(found["w"], numbers)
        assert found["none"].shape == (0, 3)
        assert found["none"].dtype == torch.bfloat16
        assert found["step"].item() == 7.0
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    opened = open_torch_file(path)
    assert all(member.offset % 64 == 0 for member in opened.members.values())
    for member in opened.members.values():
        verify_member(member)


def test_a_tensor_above_4_gib(tmp_path: Path) -> None:
    """Of which only the end is written: a file with a hole."""
    count = (5 << 30) // 4
    layout = lay_out("archive", {"param": new_tensor("0", "F32", (count,))}, [count * 4])
    path = tmp_path / "large.pt"
    with path.open("wb") as file:
        for place, content in layout.around([0]):
            file.seek(place)
            file.write(content)
        file.seek(layout.data[0] + count * 4 - 4)
        file.write(struct.pack("<f", 3.0))
    assert path.stat().st_size == layout.size
    assert torch.load(path, mmap=True)["param"][-1].item() == 3.0
    stored = open_torch_file(path).stored("param", open_torch_file(path).content["param"])
    assert stored.read(count - 1) == struct.pack("<f", 3.0)
