"""A checkpoint with a missing, truncated or changed file, or one of another step, and pickles that execute code, are
errors of one line that name the file; nothing is written, and nothing is executed. (Promises 4 and 5.)"""

import io
import os
import pickle
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import toolkit
from tests.conversion.test_real_folders import read_folder
from tests.faults import Fault, refusal

pytestmark = pytest.mark.multiprocess
Copy = Callable[..., Path]


@pytest.fixture
def copied(checkpoints: dict[str, Path], tmp_path: Path) -> Copy:
    """`copied("zero2-bf16 x2")` -> a copy of the folder."""

    def copy(name: str, suffix: str = "", to: str = "saved") -> Path:
        return Path(shutil.copytree(f"{checkpoints[name]}{suffix}", tmp_path / to))

    return copy


def fault_of(folder: Path, *says: str, **options: Any) -> str:
    """The error of a conversion, which leaves nothing."""
    out = folder.parent / "a" / "out"
    message = refusal(toolkit.convert, folder, out, says=says, **options)
    assert not out.exists()
    return message


def files_of(root: Path) -> list[Path]:
    return sorted(
        path
        for path in root.rglob("*")
        if path.suffix in (".pt", ".distcp", ".bin") or path.name[0] == "."
    )


@pytest.mark.parametrize(
    "name", ["zero0 x2", "zero2-bf16 x3", "zero3-bf16 x3", "fsdp-sharded x2", "fsdp-full x2"]
)
def test_truncated_missing_or_flipped(name: str, copied: Copy) -> None:
    root = copied(name)
    for file in files_of(root):
        content = file.read_bytes()
        for size in (0, 21, len(content) // 2, len(content) - 1):
            file.write_bytes(content[:size])
            assert file.name in fault_of(root), size
        if file.name != ".metadata":
            for place in weights_in(content):
                file.write_bytes(
                    content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :]
                )
                assert file.name in fault_of(root)
        file.unlink()
        fault_of(root, str(root))
        file.write_bytes(content)
    toolkit.convert(root, root.parent / "whole")


def weights_in(content: bytes) -> list[int]:
    """A place in the middle of some of the tensors that are converted."""
    if (
        content[:2] != b"PK" or content.count(b"data.pkl") > 2
    ):  # several files of torch.save: chunks
        return [len(content) // 2]
    state = torch.load(io.BytesIO(content), weights_only=False)
    optimizer = state.get("optimizer_state_dict", {})
    tensors = optimizer.get("fp32_flat_groups") or optimizer.get("single_partition_of_fp32_groups")
    tensors = tensors or [state.get("module", state)["mean"]]
    return [content.index(tensor.detach().numpy().tobytes()) + 3 for tensor in tensors]


@pytest.mark.parametrize(
    ("name", "gone", "lacks"),
    [
        (
            "zero2-bf16 x3",
            "*rank_[12]_*",
            "lacks bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt, bf16_zero_pp_rank_2",
        ),
        (
            "zero3-bf16 x3",
            "*rank_2_*",
            "lacks zero_pp_rank_2_mp_rank_00_model_states.pt, bf16_zero_pp_rank_2",
        ),
        (
            "zero3-bf16 x3",
            "*rank_1_*optim*",
            "lacks bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
        ),
        (
            "zero3-bf16 x3",
            "*model_states.pt",
            "zero_pp_rank_0_mp_rank_00_model_states.pt: No such file",
        ),
    ],
)
def test_missing_ranks_are_named(
    name: str, gone: str, lacks: str, copied: Copy, fault: Fault
) -> None:
    root = copied(name)
    for file in (root / "global_step2").glob(gone):
        file.unlink()
    message = fault_of(root, lacks, "copy it again")
    fault(f"files of ranks are missing ({name}: {gone})", message.replace(str(root), "CHECKPOINT"))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_file_of_another_step_and_exchanged_ranks(stage: int, copied: Copy) -> None:
    root, later = (
        copied(f"zero{stage}-bf16 x2"),
        copied(f"zero{stage}-bf16 x2", "-later", to="later"),
    )
    for file in files_of(root):
        content = file.read_bytes()
        shutil.copy(later / "global_step3" / file.name, file)
        assert "save" in fault_of(root)
        file.write_bytes(content)
    first, second = sorted(root.glob("*/*optim*"))
    first.rename(root / "away")
    second.rename(first)
    (root / "away").rename(second)
    fault_of(root, f"{first} was written as {second.name}")
    for file in (later / "global_step3").glob("*optim*"):  # all of the later step
        shutil.copy(file, root / "global_step2")
    assert "save" in fault_of(root)


@pytest.mark.parametrize("stage", [2, 3])
def test_files_of_another_world_or_save(stage: int, copied: Copy) -> None:
    two, three = copied(f"zero{stage}-bf16 x2"), copied(f"zero{stage}-bf16 x3", to="three")
    surplus = next((three / "global_step2").glob("*rank_2_*optim*"))
    shutil.copy(surplus, two / "global_step2")
    fault_of(two, surplus.name)
    (two / "global_step2" / surplus.name).unlink()
    shutil.copy(next((three / "global_step2").glob("*rank_1_*optim*")), two / "global_step2")
    fault_of(two, "save")
    other = copied("zero2-fp32 x2", to="other")
    for file in (other / "global_step2").glob("*rank_0_*optim*"):
        shutil.copy(file, three / "global_step2")
    fault_of(three, "save")


def test_latest_and_other_parallelism(copied: Copy) -> None:
    root = copied("zero3-frozen x2")
    for tag in ("global_step7", "", "/etc"):
        (root / "latest").write_text(tag)
        fault_of(root, str(root / "latest"), str(root / "global_step2"))
    (root / "epoch-1").mkdir()
    (root / "global_step2").rename(root / "epoch-1" / "step-2")
    (root / "latest").write_text("epoch-1/step-2")  # any tag that save_checkpoint takes
    toolkit.convert(root, root.parent / "out")
    tag = root / "epoch-1" / "step-2"
    for name in (
        "mp_rank_01_model_states.pt",
        "layer_00-model_states.pt",
        "expert_0_mp_rank_00_model_states.pt",
    ):
        shutil.copy(next(tag.glob("*model_states.pt")), tag / name)
        fault_of(root, name, "not supported")
        (tag / name).unlink()


class Bomb:
    """An object whose unpickling leaves a file."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.trace}",)


@pytest.mark.parametrize(
    "name", ["zero0 x2", "zero2-bf16 x2", "zero3-bf16 x2", "ddp-bin x2", "fsdp-full x2"]
)
def test_no_code_of_a_torch_file_is_executed(name: str, copied: Copy, fault: Fault) -> None:
    root = copied(name)
    for file in files_of(root):
        if "optimizer" in file.name:
            continue
        content = torch.load(file, weights_only=False)
        torch.save({**content, "bomb": Bomb(root / "trace")}, file)
        message = fault_of(root, file.name, "posix.system", "nothing was executed")
        assert not (root / "trace").exists()
        torch.save(content, file)
    fault(
        "a pickle in a checkpoint executes a command",
        message.replace(str(root), "CHECKPOINT"),
        "nothing: it is refused",
    )


def test_no_code_of_other_pickles_is_executed(copied: Copy, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    root = copied("fsdp-sharded x2")
    metadata = root / "pytorch_model_fsdp_0" / ".metadata"
    whole = metadata.read_bytes()
    metadata.write_bytes(pickle.dumps(Bomb(trace)))
    fault_of(root, str(metadata), "posix.system")
    metadata.write_bytes(whole)
    torch.save(
        {"weight": torch.ones(2), "bomb": Bomb(trace)},
        tmp_path / "old.pt",
        _use_new_zipfile_serialization=False,
    )
    fault_of(tmp_path / "old.pt", "old.pt", "posix.system")
    torch.save(
        {"state_dict": {"weight": torch.ones(2)}, "bomb": Bomb(trace)}, tmp_path / "last.ckpt"
    )
    fault_of(tmp_path / "last.ckpt", "last.ckpt", "posix.system")
    assert not trace.exists()


def test_a_damaged_pickle_does_not_take_the_memory(copied: Copy) -> None:
    """One byte of the index under which a pickle remembers a value: 2 GB, if space is made for it.
    (With a larger index one such process took 20 GB, and was killed.)"""
    root = copied("fsdp-sharded x2")
    metadata = root / "pytorch_model_fsdp_0" / ".metadata"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    metadata.write_bytes(b"\x80\x02}r\x00\x00\x00\x08.")
    fault_of(root, str(metadata), "damaged")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB


def test_the_list_of_tensors_is_checked_before_it_is_read(copied: Copy) -> None:
    """A pickle in a file of torch.save that is valid, and not the one that was written."""
    root = copied("fsdp-full x2")
    file = root / "pytorch_model_fsdp.bin"
    content = file.read_bytes()
    assert content.count(b"first.weight") == 1
    file.write_bytes(content.replace(b"first.weight", b"first.height"))
    fault_of(root, str(file), "data.pkl")


def test_no_code_of_a_chunk_is_executed(copied: Copy) -> None:
    """A chunk of the same length, with a pickle that executes a command."""
    root = copied("fsdp-sharded x2")
    file = next(root.rglob("*.distcp"))
    payload = pickle.dumps(Bomb(root / "trace"), protocol=2)
    file.write_bytes(payload + bytes(file.stat().st_size - len(payload)))
    fault_of(root, file.name)
    assert not (root / "trace").exists()


def test_not_a_checkpoint(tmp_path: Path) -> None:
    fault_of(tmp_path / "nowhere", "does not exist")
    empty = tmp_path / "empty"
    empty.mkdir()
    fault_of(empty, "contains nothing")
    (empty / "notes.txt").write_text("")
    fault_of(empty, "notes.txt")
    torch.save(torch.nn.Linear(2, 2), tmp_path / "whole.pt")
    fault_of(tmp_path / "whole.pt", "torch.nn.modules.linear.Linear", "state_dict()")


def test_nothing_of_the_users_is_replaced(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    out, source = tmp_path / "out", checkpoints["zero2-fp32 x2"]
    out.mkdir()
    (out / "mine").write_text("x")
    refusal(toolkit.convert, source, out, says=[str(out), "already exists"])
    assert [path.name for path in out.iterdir()] == ["mine"]
    (out / "mine").unlink()
    toolkit.convert(source, out)  # an empty folder is nobody's
    assert read_folder(out)
