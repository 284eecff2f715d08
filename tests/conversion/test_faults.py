"""A checkpoint with a missing, truncated or changed file, or one of another step, and pickles that
execute code, are errors of one line that name the file; nothing is written, and nothing is
executed. (Promises 4 and 5.)"""

import io
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import toolkit
from tests.faults import refusal

pytestmark = pytest.mark.multiprocess
Copy = Callable[..., Path]


@pytest.fixture
def copied(checkpoints: dict[str, Path], tmp_path: Path) -> Copy:
    """`copied("zero2-bf16 x2")` -> a copy of the folder."""

    def copy(name: str, suffix: str = "", to: str = "saved") -> Path:
        return Path(shutil.copytree(f"{checkpoints[name]}{suffix}", tmp_path / to))

    return copy


def fault_of(folder: Path, *says: str) -> str:
    """The error of a conversion, which leaves nothing."""
    out = folder.parent / "a" / "out"
    message = refusal(toolkit.convert, folder, out, says=says)
    assert not out.exists()
    return message


def files_of(root: Path) -> list[Path]:
    files = [*root.rglob("*.pt"), *root.rglob("*.distcp"), *root.rglob("*.bin")]
    return sorted([*files, *root.rglob(".metadata")])


@pytest.mark.parametrize(
    "name", ["zero0 x2", "zero2-bf16 x3", "zero3-bf16 x3", "fsdp-sharded x2", "fsdp-full x2"]
)
def test_truncated_missing_or_flipped(name: str, copied: Copy) -> None:
    root = copied(name)
    for file in files_of(root):
        content = file.read_bytes()
        for size in (0, 21, len(content) // 2, len(content) - 1):
            file.write_bytes(content[:size])
            fault_of(root, file.name)
        if file.name != ".metadata":
            for place in weights_in(content):
                changed = bytes([content[place] ^ 0x10])
                file.write_bytes(content[:place] + changed + content[place + 1 :])
                fault_of(root, file.name)
        file.unlink()
        fault_of(root, str(root))
        file.write_bytes(content)
    toolkit.convert(root, root.parent / "whole")


def weights_in(content: bytes) -> list[int]:
    """A place in the middle of some of the tensors that are converted."""
    is_chunks = content[:2] != b"PK" or content.count(b"data.pkl") > 2  # several files in one
    if is_chunks:
        return [len(content) // 2]
    state = torch.load(io.BytesIO(content), weights_only=False)
    optimizer = state.get("optimizer_state_dict", {})
    tensors = optimizer.get("fp32_flat_groups") or optimizer.get("single_partition_of_fp32_groups")
    tensors = tensors or [state.get("module", state)["mean"]]
    return [content.index(tensor.detach().numpy().tobytes()) + 3 for tensor in tensors]


def test_a_run_without_checkpoints_names_its_model(tmp_path: Path) -> None:
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "model" / "model.safetensors").touch()
    fault_of(tmp_path / "run", "has no checkpoint", str(tmp_path / "run" / "model"))


@pytest.mark.parametrize("name", ["zero2-bf16 x3", "zero3-bf16 x3"])
def test_missing_ranks_are_named(name: str, copied: Copy) -> None:
    root = copied(name)
    missing = sorted((root / "global_step2").glob("*rank_[12]_*"))
    for file in missing:
        file.unlink()
    fault_of(root, *(file.name for file in missing))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_file_of_another_step(stage: int, copied: Copy) -> None:
    name = f"zero{stage}-bf16 x2"
    root, later = copied(name), copied(name, "-later", to="later")
    for file in files_of(root):
        content = file.read_bytes()
        shutil.copy(later / "global_step3" / file.name, file)
        fault_of(root, "save")
        file.write_bytes(content)
    for file in (later / "global_step3").glob("*optim*"):  # all of the later step
        shutil.copy(file, root / "global_step2")
    fault_of(root, "save")


@pytest.mark.parametrize("stage", [2, 3])
def test_files_of_another_world(stage: int, copied: Copy) -> None:
    two, three = copied(f"zero{stage}-bf16 x2"), copied(f"zero{stage}-bf16 x3", to="three")
    surplus = next((three / "global_step2").glob("*rank_2_*optim*"))
    shutil.copy(surplus, two / "global_step2")
    fault_of(two, surplus.name)
    (two / "global_step2" / surplus.name).unlink()
    shutil.copy(next((three / "global_step2").glob("*rank_1_*optim*")), two / "global_step2")
    fault_of(two, "save")


def test_latest_and_other_parallelism(copied: Copy) -> None:
    root = copied("zero3-frozen x2")
    for tag in ("global_step7", "", "/etc"):
        (root / "latest").write_text(tag)
        fault_of(root, str(root / "latest"))
    tag_folder = root / "epoch-1" / "step-2"  # any tag that save_checkpoint takes
    tag_folder.parent.mkdir()
    (root / "global_step2").rename(tag_folder)
    (root / "latest").write_text("epoch-1/step-2")
    toolkit.convert(root, root.parent / "out")
    for name in ("mp_rank_01_model_states.pt", "layer_00-model_states.pt", "expert_0_states.pt"):
        shutil.copy(next(tag_folder.glob("*model_states.pt")), tag_folder / name)
        fault_of(root, name)
        (tag_folder / name).unlink()


class Bomb:
    """An object whose unpickling leaves a file."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.trace}",)


@pytest.mark.parametrize(
    "name", ["zero0 x2", "zero2-bf16 x2", "zero3-bf16 x2", "ddp-bin x2", "fsdp-full x2"]
)
def test_no_code_of_a_torch_file_is_executed(name: str, copied: Copy) -> None:
    root = copied(name)
    for file in files_of(root):
        if "optimizer" in file.name:
            continue
        content = torch.load(file, weights_only=False)
        torch.save({**content, "bomb": Bomb(root / "trace")}, file)
        fault_of(root, file.name, "posix.system")
        assert not (root / "trace").exists()
        torch.save(content, file)


def test_no_code_of_other_pickles_is_executed(copied: Copy, tmp_path: Path) -> None:
    bomb = Bomb(tmp_path / "trace")
    root = copied("fsdp-sharded x2")
    metadata = root / "pytorch_model_fsdp_0" / ".metadata"
    whole = metadata.read_bytes()
    metadata.write_bytes(pickle.dumps(bomb))
    fault_of(root, str(metadata), "posix.system")
    metadata.write_bytes(whole)
    chunks = next(root.rglob("*.distcp"))
    payload = pickle.dumps(bomb, protocol=2)
    chunks.write_bytes(payload + bytes(chunks.stat().st_size - len(payload)))
    fault_of(root, chunks.name)
    state = {"weight": torch.ones(2)}
    old, lightning = tmp_path / "old.pt", tmp_path / "last.ckpt"
    torch.save({**state, "bomb": bomb}, old, _use_new_zipfile_serialization=False)
    fault_of(old, "old.pt", "posix.system")
    torch.save({"state_dict": state, "bomb": bomb}, lightning)
    fault_of(lightning, "last.ckpt", "posix.system")
    assert not bomb.trace.exists()


def test_not_a_checkpoint(tmp_path: Path) -> None:
    fault_of(tmp_path / "nowhere", "nowhere")
    empty = tmp_path / "empty"
    empty.mkdir()
    fault_of(empty, str(empty))
    (empty / "notes.txt").write_text("")
    fault_of(empty, "notes.txt")
    torch.save(torch.nn.Linear(2, 2), tmp_path / "whole.pt")
    fault_of(tmp_path / "whole.pt", "torch.nn.modules.linear.Linear")


def test_nothing_of_the_users_is_replaced(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    out, source = tmp_path / "out", checkpoints["zero2-fp32 x2"]
    out.mkdir()
    (out / "mine").write_text("x")
    refusal(toolkit.convert, source, out, says=[str(out)])
    assert [path.name for path in out.iterdir()] == ["mine"]
    (out / "mine").unlink()
    toolkit.convert(source, out)  # an empty folder is nobody's
    assert (out / "model.safetensors").is_file()
