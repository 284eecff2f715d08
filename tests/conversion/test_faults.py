"""A checkpoint with a missing, truncated or changed file, or one of another step, and pickles that execute code, are
errors of one line that name the file; nothing is written, and nothing is executed. What is left after a full disk or a
signal, and memory. (Promises 4 and 5.)"""

import io
import os
import pickle
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import toolkit
from tests.faults import refusal
from tests.runs import ROOT, Process, begin, fork

Copy = Callable[..., Path]


@pytest.fixture
def copied(checkpoints: dict[str, Path], tmp_path: Path) -> Copy:
    """`copied("zero2-bf16 x2")` -> a copy of the folder."""

    def copy(name: str, suffix: str = "", to: str = "saved") -> Path:
        return Path(shutil.copytree(f"{checkpoints[name]}{suffix}", tmp_path / to))

    return copy


def assert_refused(folder: Path, *says: str) -> None:
    """By an error that says this; nothing is left."""
    out = folder.parent / "a" / "out"
    refusal(toolkit.convert, folder, out, says=says)
    assert not out.exists()


def files_of(root: Path) -> list[Path]:
    kinds = ("*.pt", "*.distcp", "*.bin", ".metadata")
    return sorted(file for kind in kinds for file in root.rglob(kind))


KINDS = ["zero0 x2", "zero2-bf16 x3", "zero3-bf16 x3", "fsdp-sharded x2", "fsdp-full x2"]


@pytest.mark.parametrize("name", KINDS)
def test_truncated_missing_or_flipped(name: str, copied: Copy) -> None:
    root = copied(name)
    for file in files_of(root):
        content = file.read_bytes()
        for size in (0, 21, len(content) // 2, len(content) - 1):
            file.write_bytes(content[:size])
            assert_refused(root, file.name)
        if file.name != ".metadata":
            changed = bytearray(content)
            changed[place_of_a_weight(content)] ^= 0x10
            file.write_bytes(changed)
            assert_refused(root, file.name)
        file.unlink()
        assert_refused(root, file.name if "_rank_1" in file.name else str(root))
        file.write_bytes(content)
    toolkit.convert(root, root.parent / "whole")


def place_of_a_weight(content: bytes) -> int:
    """In the middle of a tensor that is converted."""
    is_chunks = content[:2] != b"PK" or content.count(b"data.pkl") > 2  # several files in one
    if is_chunks:
        return len(content) // 2
    state = torch.load(io.BytesIO(content), weights_only=False)
    optimizer = state.get("optimizer_state_dict", {})
    masters = optimizer.get("fp32_flat_groups") or optimizer.get("single_partition_of_fp32_groups")
    tensor = masters[-1] if masters else state.get("module", state)["mean"]
    return content.index(tensor.detach().numpy().tobytes()) + 3


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_file_of_another_step(stage: int, copied: Copy) -> None:
    name = f"zero{stage}-bf16 x2"
    root, later = copied(name), copied(name, "-later", to="later")
    for file in files_of(root):
        content = file.read_bytes()
        shutil.copy(later / "global_step3" / file.name, file)
        assert_refused(root, "save")
        file.write_bytes(content)
    for file in (later / "global_step3").glob("*optim*"):  # all of the later step
        shutil.copy(file, root / "global_step2")
    assert_refused(root, "save")


@pytest.mark.parametrize("stage", [2, 3])
def test_files_of_another_world(stage: int, copied: Copy) -> None:
    folder = copied(f"zero{stage}-bf16 x2") / "global_step2"
    other = copied(f"zero{stage}-bf16 x3", to="three") / "global_step2"
    (surplus,) = other.glob("*rank_2_*optim*")
    shutil.copy(surplus, folder)
    assert_refused(folder.parent, surplus.name)
    (folder / surplus.name).unlink()
    shutil.copy(next(other.glob("*rank_1_*optim*")), folder)
    assert_refused(folder.parent, "save")


def test_latest_and_other_parallelism(copied: Copy) -> None:
    root = copied("zero3-bf16-frozen x2")
    for tag in ("global_step7", "", "/etc"):
        (root / "latest").write_text(tag)
        assert_refused(root, str(root / "latest"))
    folder = root / "epoch-1" / "step-2"  # any tag that save_checkpoint takes
    folder.parent.mkdir()
    (root / "global_step2").rename(folder)
    (root / "latest").write_text("epoch-1/step-2")
    toolkit.convert(root, root.parent / "out")
    for name in ("mp_rank_01_model_states.pt", "layer_00-model_states.pt", "expert_0_states.pt"):
        surplus = shutil.copy(next(folder.glob("*model_states.pt")), folder / name)
        assert_refused(root, name)
        surplus.unlink()


class Bomb:
    """An object whose unpickling leaves a file."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.trace}",)


@pytest.mark.parametrize("name", [*KINDS[:3], "ddp-bin x2", *KINDS[3:]])
def test_no_code_of_a_folder_is_executed(name: str, copied: Copy) -> None:
    """Of torch's files, and of a DCP's list and chunks."""
    root = copied(name)
    bomb = Bomb(root / "trace")
    for file in files_of(root):
        content = file.read_bytes()
        if file.suffix in (".pt", ".bin"):
            torch.save({**torch.load(file, weights_only=False), "bomb": bomb}, file)
        else:
            payload = pickle.dumps(bomb, protocol=2)
            file.write_bytes(payload + bytes(max(0, len(content) - len(payload))))
        if "optimizer" not in file.name:
            assert_refused(root, file.name)
            file.write_bytes(content)
    assert not bomb.trace.exists()


def test_not_a_checkpoint(tmp_path: Path) -> None:
    """Torch's old format and Lightning's with code in them, a pickled model, an empty folder,
    nothing, a run without checkpoints, whose model is named."""
    bomb, state = Bomb(tmp_path / "trace"), {"weight": torch.ones(2)}
    old, lightning, model = (tmp_path / name for name in ("old.pt", "last.ckpt", "whole.pt"))
    torch.save({**state, "bomb": bomb}, old, _use_new_zipfile_serialization=False)
    torch.save({"state_dict": state, "bomb": bomb}, lightning)
    torch.save(torch.nn.Linear(2, 2), model)
    for file in (old, lightning):
        assert_refused(file, file.name, "posix.system")
    assert_refused(model, "torch.nn.modules.linear.Linear")
    assert not bomb.trace.exists()
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "nowhere", tmp_path / "empty"):
        assert_refused(folder, str(folder))
    saved = tmp_path / "run" / "model" / "model.safetensors"
    saved.parent.mkdir(parents=True)
    saved.touch()
    assert_refused(tmp_path / "run", "has no checkpoint", str(saved.parent))


def test_nothing_of_the_users_is_replaced(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    out, source = tmp_path / "out", checkpoints["zero2 x2"]
    out.mkdir()
    toolkit.convert(source, out)  # an empty folder is nobody's
    (out / "model.safetensors").write_text("mine")
    refusal(toolkit.convert, source, out, says=[str(out)])
    assert (out / "model.safetensors").read_text() == "mine"


BIG = 1 << 28
"""Bytes of a model of 32 tensors."""


@pytest.fixture(scope="module")
def big(tmp_path_factory: Any) -> Path:
    path = tmp_path_factory.mktemp("big") / "model.pt"
    torch.save({f"layer.{number}.weight": torch.randn(BIG // 128, 1) for number in range(32)}, path)
    return path


def python(*words: Any) -> Process:
    return begin([sys.executable, *words], {"PYTHONPATH": str(ROOT)})


def peak_of(*words: Any) -> int:
    """The largest anonymous memory of a Python process, in bytes."""
    peak = 0
    with python(*words) as process:
        while process.poll() is None:
            for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
                if "RssAnon" in line:
                    peak = max(peak, int(line.split()[1]) * 1024)
            time.sleep(0.01)
        process.finish().succeeded()
    return peak


def test_its_memory_is_not_the_models(big: Path, tmp_path: Path) -> None:
    """Beyond that of torch itself: some copies of a tensor, of 32."""
    torchs = peak_of("-c", "import time, torch, toolkit.conversion.convert; time.sleep(1)")
    whole = peak_of("-m", "toolkit", "convert", big, tmp_path / "out", "--dtype", "bf16")
    assert whole - torchs < BIG // 3
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > BIG // 2


def test_a_full_disk_leaves_nothing(big: Path, tmp_path: Path) -> None:
    command = ["-m", "toolkit", "convert", big, tmp_path / "out"]
    with fork(command, largest_file=BIG // 2) as process:
        process.finish().says_in_one_line(str(tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_nothing(sent: signal.Signals, big: Path, tmp_path: Path) -> None:
    with python("-m", "toolkit", "convert", big, tmp_path / "out") as process:
        while not list(tmp_path.glob(".out.draft-*/*.safetensors")):
            time.sleep(0.002)
        process.send_signal(sent)
        process.finish()
    assert list(tmp_path.iterdir()) == []
