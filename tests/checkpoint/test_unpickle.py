"""Pickles that could execute code are refused by name; files of torch.save are read."""

import io
import os
import pickle
import re
import struct
import time
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.utils.serialization import config as serialization

from tests.checkpoint.handmade import rewritten
from tests.faults import Fault, refusal
from toolkit.checkpoint.convert.conversion import ConvertSettings, convert
from toolkit.checkpoint.read.open import open_checkpoint
from toolkit.checkpoint.read.torch_archive import open_torch_archive, zip_members
from toolkit.checkpoint.read.unpickle import ALLOWED, unpickle


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def name(module: str, attribute: str) -> bytes:
    return f"c{module}\n{attribute}\n".encode()


def stack_name(module: str, attribute: str) -> bytes:
    return text(module) + text(attribute) + b"\x93"


def called(function: bytes, *arguments: bytes) -> bytes:
    return b"\x80\x02" + function + b"(" + b"".join(arguments) + b"tR."


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.reduced = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.reduced


def hostile(mark: Path) -> dict[str, bytes]:
    command = f"touch {mark}"
    rebuild = name("torch._tensor", "_rebuild_from_type_v2")
    ordered = name("collections", "OrderedDict") + b")R"
    bombs = {
        "os.system": Bomb(os.system, command),
        "eval": Bomb(eval, f"open({str(mark)!r}, 'w')"),
        "getattr": Bomb(getattr, Path(mark), "touch"),
        "nested": OrderedDict(model={"weights": [0.0, Bomb(os.system, command)]}),
        "torch.load": Bomb(torch.load, str(mark)),
    }
    return {
        **{f"{kind} {number}": pickle.dumps(bomb, number) for kind, bomb in bombs.items() for number in (0, 2, 4)},
        "module with dots": called(stack_name("os.path", "os.system"), text(command)),
        "attribute with dots": called(stack_name("torch", "os.system"), text(command)),
        "attributes of an allowed name": called(name("collections", "OrderedDict.__init__.__globals__"), text("x")),
        "call of what is not a name": called(text("os.system"), text(command)),
        "call of a class": called(name("torch", "Tensor"), text(command)),
        "rebuilt by another name": called(rebuild, name("os", "system"), b"N", b"(" + text(command) + b"t", b"N"),
        "OrderedDict's attributes": b"\x80\x02" + ordered + b"}" + text("__reduce__") + name("os", "system") + b"sb.",
        "attributes for a global": b"\x80\x02" + name("torch", "Tensor") + b"}" + text("make") + text("x") + b"sb.",
        "a state that is no dict": b"\x80\x02" + name("torch", "device") + b")\x81" + ordered + text("x") + b"b.",
        "INST": b"(" + text(command) + b"ios\nsystem\n.",
        "OBJ": b"(" + name("os", "system") + text(command) + b"o.",
        "EXT1": b"\x80\x02\x82\x01.",
        "NEWOBJ_EX": b"\x80\x04" + name("torch", "device") + b")}\x92.",
        "a storage by another name": b"\x80\x02(" + text("storage") + name("os", "system") + text("0") + text("cpu")
        + b"K\x01tQ.",
        "not a pickle": b"MZ\x90\0" * 10,
    }  # fmt: skip


@pytest.mark.parametrize("kind", hostile(Path("mark")))
def test_hostile_pickles_are_refused(kind: str, tmp_path: Path) -> None:
    content = hostile(tmp_path / "mark")[kind]
    refusal(unpickle, content, "rank.pt", says=["rank.pt"])
    assert not (tmp_path / "mark").exists()


def test_a_hostile_file_is_refused(tmp_path: Path, fault: Fault) -> None:
    file = tmp_path / "mp_rank_00_model_states.pt"
    torch.save({"module": Bomb(os.system, f"touch {tmp_path / 'mark'}")}, file)
    message = refusal(open_torch_archive, file, match=r"mp_rank_00_model_states\.pt needs posix\.system, ")
    assert not (tmp_path / "mark").exists()
    fault("a checkpoint that would run a command", message)


GREEDY = {
    "a text of 4 GB": b"\x80\x02X\xff\xff\xff\xff.",
    "a text of 2**63 bytes": b"\x80\x04\x8d" + b"\xff" * 7 + b"\x7f.",
    "bytes of 2**63": b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f.",
    "a long of 2 GB": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "deeply nested tuples as a key": b"\x80\x02})" + b"\x85" * 300_000 + b"Ns.",
    "doubled tuples as a key": b"\x80\x02})" + b"".join(b"q%ch%c\x86" % (i, i) for i in range(60)) + b"Ns.",
    "deeply nested lists": b"\x80\x02" + b"]" * 300_000 + b"a" * 299_999 + b".",
    "doubled lists": b"\x80\x02]" + b"".join(b"q%c]h%ch%c\x86a" % (i, i, i) for i in range(60)) + b".",
    "a long tuple as a key": b"\x80\x02})(" + b"K\1" * 999 + b"tNs.",
    "a long text as a key": b"\x80\x02})" + text("x" * 2000) + b"Ns.",
    "half a character": b"\x80\x02X\3\0\0\0\xed\xa0\x80.",
    "a list in itself": b"\x80\x02]q\0h\0a.",
    "a memo without end": b"\x80\x02" + b"]\x94" * 100_000,
    "marks without end": b"(" * 300_000,
    "a huge shape": b"\x80\x02" + name("torch", "Size") + b"((" + b"\x8a\x09" + b"\xff" * 8 + b"\x00" + b"ttR.",
}


@pytest.mark.parametrize("kind", GREEDY)
def test_greedy_pickles_cost_nothing(kind: str, fault: Fault) -> None:
    assert unpickle(b"\x80\x02]r\xff\xff\xff\xff.", "rank.pt") == []  # the memo's last place
    started = time.process_time()
    message = refusal(unpickle, GREEDY[kind], "rank.pt", says=["rank.pt"])
    assert time.process_time() - started < 5
    fault(f"a small pickle that wants all memory or hours: {kind}", message)


def test_what_is_called_copies_nothing() -> None:
    """Else repeated calls of four bytes would make 80 GB of a text of 4 MB."""
    for function, argument in {
        name("_codecs", "encode"): text("x" * 1000),
        name("builtins", "set"): b"]",
        name("collections", "Counter"): b"}",
        name("torch", "Size"): b"(K\1K\2K\3t",
    }.items():
        content = b"\x80\x02(" + function + argument + b"\x85q\0R" + function + b"h\0Rt."
        first, second = unpickle(content, "rank.pt")
        assert first is second


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ({"a": torch._neg_view(torch.ones(2))}, "a is stored with the bit 'neg'; save it again after"),
        ({"a": torch.ones(2), "more": {"b": [torch.ones(2)]}}, "more is a dict of tensors"),
        ({1: torch.ones(2), "1": torch.zeros(2)}, "a tensor's name is 1, not a string"),
        ({"a": torch.ones(2), "b\x1b[2J": torch.ones(2)}, r"'b\\x1b\[2J' is not a parameter's name"),
        (
            {"a": torch.nested.nested_tensor([torch.ones(2)], layout=torch.strided)},
            "needs torch._utils._rebuild_nested_tensor",
        ),
    ],
)
def test_a_tensor_that_would_be_wrong_or_lost_is_named(content: Any, match: str, tmp_path: Path, fault: Fault) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    message = refusal(open_checkpoint, tmp_path, match=match)
    fault(f"a tensor that would be wrong or lost: {match}".replace("\\", ""), message)


def test_a_file_without_checksums_is_read_and_named(tmp_path: Path) -> None:
    with serialization.patch("save.compute_crc32", False):
        torch.save({"a": torch.arange(3.0)}, tmp_path / "pytorch_model.bin")
    reader = open_checkpoint(tmp_path)
    assert reader.weights["a"].read() == torch.arange(3.0).numpy().tobytes()
    message = r"pytorch_model\.bin .*without checksums .*--without_checksums"
    refusal(convert, ConvertSettings(tmp_path, tmp_path / "out"), match=message)
    convert(ConvertSettings(tmp_path, tmp_path / "out", without_checksums=True))
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["a"], torch.arange(3.0))


def test_every_allowed_name_makes_something_inert() -> None:
    for make in ALLOWED.values():
        assert make is None or make.__module__ == unpickle.__module__


def test_structures_of_torch(tmp_path: Path) -> None:
    plain = {
        "numbers": [0, -1, 255, 65536, -(2**31), 2**70, 1.5, True, None],
        "texts": ("", "模型", "x" * 300),
        "ordered": OrderedDict(a=1),
        "shape": torch.Size([2, 3]),
        5: {"nested": {"deeper": []}},
    }
    tensors = {
        "plain": torch.arange(12.0).view(3, 4),
        "view": torch.arange(12.0)[3:7],
        "transposed": torch.arange(6.0).view(2, 3).t(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "scalar": torch.tensor(3),
        "flags": torch.tensor([True]),
    }
    inert = {"set": {1, 2}, "bytes": b"\0bytes", "numpy": np.float64(1.5), "random states": np.random.get_state()}
    torch.save({**plain, **tensors, **inert}, tmp_path / "a.pt")
    opened = open_torch_archive(tmp_path / "a.pt")
    expected = {**plain, "set": [1, 2], "bytes": "\0bytes"}
    assert {key: opened.content[key] for key in expected} == expected
    assert all(opened.content[key].shape == tuple(value.shape) for key, value in tensors.items())
    assert opened.index("view", opened.content["view"]).read() == tensors["view"].numpy().tobytes()
    refusal(opened.index, "transposed", opened.content["transposed"], match="not contiguous")


def test_compressed_big_endian_and_foreign_zip_files(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("archive/data.pkl", pickle.dumps({}, 2))
    refusal(open_torch_archive, tmp_path / "packed.pt", match=r"packed\.pt.*compressed")
    with zipfile.ZipFile(tmp_path / "other.pt", "w") as other:
        other.writestr("notes.txt", "x")
    refusal(open_torch_archive, tmp_path / "other.pt", match=r"other\.pt.*torch\.save did not write")
    refusal(open_torch_archive, tmp_path / "nowhere.pt", match=r"nowhere\.pt: No such file")
    file = tmp_path / "big.pt"
    torch.save({}, file)
    file.write_bytes(rewritten(file, lambda name, old: b"big" if name.endswith("byteorder") else old))
    refusal(open_torch_archive, file, match=r"big\.pt was written on a big-endian machine")


def test_a_tensor_larger_than_its_bytes(tmp_path: Path) -> None:
    file = tmp_path / "a.pt"
    torch.save(torch.arange(7.0), file)
    longer = rewritten(file, lambda name, old: old.replace(b"K\x07", b"K\x70") if name.endswith("data.pkl") else old)
    file.write_bytes(longer)
    opened = open_torch_archive(file)
    refusal(opened.index, "x", opened.content, match=r"a\.pt.*has 28 bytes and should have 448")


def test_64_bit_offsets(tmp_path: Path) -> None:
    file = tmp_path / "wide.pt"
    with file.open("wb") as opened:
        opened.seek(5 << 30)  # a hole
        with zipfile.ZipFile(opened, "w") as written, written.open("a/data/1", "w", force_zip64=True) as member:
            member.write(b"1234567")
    (actual,) = zip_members(file).values()
    with file.open("rb") as opened:
        opened.seek(actual.offset)
        assert (actual.offset > 5 << 30, opened.read(actual.size)) == (True, b"1234567")
    os.truncate(file, file.stat().st_size - 1)
    refusal(zip_members, file, match=re.escape(str(file)))


def test_a_file_inside_a_file(tmp_path: Path) -> None:
    """As torch.distributed.checkpoint writes them."""
    content = io.BytesIO()
    torch.save(torch.arange(5.0), content)
    inner = content.getvalue()
    file = tmp_path / "rows"
    file.write_bytes(b"#" * 77 + inner + b"#" * 10)
    opened = open_torch_archive(file, start=77, size=len(inner))
    assert opened.index("x", opened.content).read() == torch.arange(5.0).numpy().tobytes()
    for member in opened.members.values():
        member.verify()
    refusal(open_torch_archive, file, start=76, size=len(inner), match="rows")
    refusal(open_torch_archive, file, start=77, size=len(inner) + 11, match="truncated")
