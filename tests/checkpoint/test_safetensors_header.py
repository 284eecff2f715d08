"""The header of a safetensors file: written with the bytes of the library; invalid ones are refused."""

import json
import struct
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from toolkit.checkpoint.live import DTYPE_NAMES as NAMES
from toolkit.checkpoint.save import bytes_of

from tests.checkpoint.handmade import write_run
from tests.faults import refusal
from toolkit.checkpoint.safetensors_header import Layout, read_header


def many() -> dict[str, torch.Tensor]:
    made: dict[str, torch.Tensor] = {"empty": torch.empty(0, 3), "scalar": torch.tensor(2.5)}
    for number, dtype in enumerate(NAMES):
        made[f"b{number}.权重"] = torch.ones(3, number + 1).to(dtype)
        made[f"a{number}"] = torch.arange(5).to(dtype)
    return made


def test_the_library_has_the_same_layout(tmp_path: Path) -> None:
    refusal(Layout, {"__metadata__": ("F32", (2,))}, {}, match="a tensor is named __metadata__")
    tensors, metadata, file = many(), {"who": "我"}, tmp_path / "theirs"
    save_file(tensors, file, metadata=metadata)
    described = {name: (NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}
    layout = Layout(dict(reversed(described.items())), metadata)
    content = layout.header() + b"".join(bytes_of(tensors[name]) for name in layout.offsets)
    assert content == file.read_bytes()
    assert layout.size == len(content)
    read, read_metadata = read_header(file)
    assert ({name: (each.dtype, each.shape) for name, each in read.items()}, read_metadata) == (described, metadata)
    for name, tensor in tensors.items():
        start = layout.offsets[name]
        assert read[name].read() == content[start : start + read[name].size] == bytes_of(tensor)
        assert start % tensor.element_size() == 0


def test_checksums_do_not_move_the_data(tmp_path: Path) -> None:
    described = {"a": ("F32", (2, 2)), "b": ("F16", (3,))}
    layout = Layout(described, {}, checksums=True)
    assert len(layout.header()) == len(layout.header({"a": 1, "b": 0xFFFFFFFF})) == min(layout.offsets.values())
    write_run(tmp_path / "run", many())
    written = tmp_path / "run" / "weights.safetensors"
    for stored in read_header(written)[0].values():
        assert stored.spans[0].member.crc32 == crc32(stored.read())
    assert set(load_file(written)) == set(many())
    with safe_open(written, "pt") as opened:
        assert set(json.loads(opened.metadata()["crc32"])) == set(many())


def write(path: Path, table: Any, data: bytes = bytes(16)) -> Path:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(start: int = 0, end: int = 16, dtype: Any = "F32", shape: Any = (4,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("table", "message"),
    [({"a": entry(), "b": entry()}, "b begins at data byte 0"),
     ({"a": entry(0, 8, shape=[2]), "b": entry(12, 16, shape=[1])}, "b begins at data byte 12"),
     ({"a": entry(4, 16, shape=[3])}, "a begins at data byte 4"), ({"a": entry(0, 12, shape=[3])}, "extra bytes"),
     ({"a": entry(0, 32, shape=[8])}, "truncated"), ({"a": entry(shape=[5])}, "does not fill"),
     ({"a": entry(dtype="F8")}, "unknown dtype 'F8'"), ({"a": entry(dtype=[])}, "cannot be read"),
     ({"a": entry(shape=[-4])}, "not integers"), ({"a": entry(shape=[True, 4])}, "not integers"),
     ({"a": entry(shape="4")}, "not integers"), ({"a": entry(shape=[2**61] * 300_000)}, "too many"),
     ({"a": entry(dtype="F" * 9_000_000)}, "unknown dtype 'FFFFFFFFFFFFFFFFFFFF';"), (b'{"a\0": 1}', "cannot be read"),
     (b"[" * 300_000, "cannot be read"), ({"a": {"dtype": "F32"}}, "'shape'"), ({"a": 3}, "cannot be read"),
     ([], "cannot be read"), (b'{"a": 1, "a": 2}', "a name occurs twice"), (b"{", "cannot be read"),
     (b"\xff\xfe", "cannot be read"), ({"__metadata__": {"a": 1}, "a": entry()}, "__metadata__"),
     ({"__metadata__": {"crc32": "no"}, "a": entry()}, "cannot be read"),
     ({"__metadata__": {"crc32": '{"a": "xyz"}'}, "a": entry()}, "xyz"),
     ({"__metadata__": {"crc32": "[" * 300_000}, "a": entry()}, "cannot be read")],
)  # fmt: skip
@pytest.mark.usefixtures("no_garbage_collection")
def test_an_invalid_header_is_refused(table: Any, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", table)
    refusal(read_header, path, match=message, says=[str(path)])


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", {"a": entry()}).read_bytes()
    cut = tmp_path / "cut"
    for size in range(len(whole)):
        cut.write_bytes(whole[:size])
        refusal(read_header, cut, match="cut")
    refusal(read_header, tmp_path / "none", match="cannot read")
