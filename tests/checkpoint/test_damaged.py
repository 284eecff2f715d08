"""Every fault of a checkpoint's files is an error of one line that names the file."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.checkpoint.conftest import Made
from tests.faults import Fault, refusal
from toolkit.checkpoint.read.open import open_checkpoint

pytestmark = pytest.mark.multiprocess


@pytest.fixture
def copied(deepspeed_checkpoints: dict[str, Made], tmp_path: Path) -> Callable[..., Path]:
    """`copied("zero2-bf16 x2")` -> a copy of the folder of save_checkpoint."""

    def copy(name: str, which: str = "", to: str = "saved") -> Path:
        return Path(shutil.copytree(f"{deepspeed_checkpoints[name].folder}{which}", tmp_path / to))

    return copy


def fault_of(folder: Path, *says: str) -> str:
    return refusal(open_checkpoint, folder, says=says)


def tag_of(root: Path) -> Path:
    return next(entry for entry in root.iterdir() if entry.is_dir())


def files_of(root: Path) -> list[Path]:
    return sorted(tag_of(root).glob("*.pt"))


@pytest.mark.parametrize("name", ["zero0 x2", "zero2-bf16 x3", "zero3-bf16 x3"])
def test_truncated_longer_or_missing(name: str, copied: Callable[..., Path]) -> None:
    root = copied(name)
    for file in files_of(root):
        content = file.read_bytes()
        for size in (0, 1, 21, 22, 1000, len(content) // 2, len(content) - 100, len(content) - 1):
            file.write_bytes(content[:size])
            assert str(file) in fault_of(root), size
        file.write_bytes(content + b"\0")
        assert str(file) in fault_of(root)
        file.write_bytes(content)
    open_checkpoint(root)
    for file in files_of(root):
        file.rename(root / "away")
        assert re.search("missing|lacks|not a checkpoint", fault_of(root, str(root)))
        (root / "away").rename(file)
    (root / "latest").unlink()
    assert str(root / "global_step2") in fault_of(root)


@pytest.mark.parametrize(
    ("name", "gone", "lacks"),
    [
        ("zero2-bf16 x3", "*rank_[12]_*", "optimizer files of ranks 1, 2 (3 processes saved it)"),
        ("zero2-bf16 x3", "mp_*|*_[01]_mp*", "model files of ranks 0 and the optimizer files of ranks 0, 1 (3 proc"),
        ("zero3-bf16 x3", "*rank_2_*", "model files of ranks 2 and the optimizer files of ranks 2 (3 processes saved"),
        ("zero3-bf16 x3", "*rank_1_*optim*", "optimizer files of ranks 1 (3 processes saved it)"),
        ("zero3-bf16 x3", "*model_states.pt", "model files of ranks 0, 1, 2 (3 processes saved it)"),
    ],
)
def test_missing_ranks_are_named(name: str, gone: str, lacks: str, copied: Callable[..., Path], fault: Fault) -> None:
    root = copied(name)
    for file in {file for pattern in gone.split("|") for file in tag_of(root).glob(pattern)}:
        file.unlink()
    message, tag = fault_of(root), tag_of(root)
    assert message.startswith(f"{tag} lacks the {lacks}")
    assert f"`rsync -a OTHER_MACHINE:{tag}/ {tag}/`" in message
    fault(f"files of ranks are missing ({name}: {gone})", message.replace(str(tag), "CHECKPOINT"))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_rank_of_another_step_and_swapped_ranks(stage: int, copied: Callable[..., Path]) -> None:
    root, later = copied(f"zero{stage}-bf16 x2"), copied(f"zero{stage}-bf16 x2", "-later", to="later")
    for file in files_of(root):
        content = file.read_bytes()
        shutil.copy(tag_of(later) / file.name, file)
        if stage == 3 or "optim" in file.name:
            assert re.search("step|differ", fault_of(root, ".pt"))
        file.write_bytes(content)
    first, second = sorted(tag_of(root).glob("*optim*"))
    first.rename(root / "away")
    second.rename(first)
    (root / "away").rename(second)
    assert f"{first} was written as {second.name}" in fault_of(root)
    for file in tag_of(later).glob("*optim*"):
        shutil.copy(file, tag_of(root))
    assert "step 2" in fault_of(root)


@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_of_another_world(stage: int, copied: Callable[..., Path]) -> None:
    two, three = copied(f"zero{stage}-bf16 x2"), copied(f"zero{stage}-bf16 x3", to="three")
    surplus = [file for file in files_of(three) if "rank_2" in file.name]
    for file in surplus:
        shutil.copy(file, tag_of(two))
        assert tag_of(two).name in fault_of(two)
    for file in surplus:
        (tag_of(two) / file.name).unlink()
    open_checkpoint(two)
    for file in files_of(two):
        content = file.read_bytes()
        shutil.copy(tag_of(three) / file.name, file)
        assert str(tag_of(two)) in fault_of(two)
        file.write_bytes(content)
    for file in surplus:
        (tag_of(three) / file.name).unlink()
    assert "3 processes" in fault_of(three)


def test_two_saves_in_one_folder(copied: Callable[..., Path]) -> None:
    root, other = copied("zero2-bf16 x2"), copied("zero2-fp32 x2", to="other")
    third = tag_of(copied("zero3-bf16 x2", to="third")) / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    surplus = Path(shutil.copy(third, tag_of(root)))
    assert surplus.name in fault_of(root)
    surplus.unlink()
    for file in tag_of(other).glob("*optim*"):
        shutil.copy(file, tag_of(root))
    assert "different saves" in fault_of(root)
    for file in tag_of(root).glob("bf16_*rank_1_*"):
        file.unlink()
    for file in tag_of(root).glob("zero_pp_rank_0_*optim*"):
        file.unlink()
    assert "bf16_" in fault_of(root)


def test_two_models_of_accelerates_save_state(copied: Callable[..., Path]) -> None:
    root = copied("zero1-bf16 x2")
    for name in ("pytorch_model", "pytorch_model_1"):
        shutil.copytree(root / "global_step2", root / name)
        (root / "latest").write_text(name)
    fault_of(root, f"{root / 'pytorch_model'}, {root / 'pytorch_model_1'}")
    open_checkpoint(root / "pytorch_model")


def test_a_wrong_latest(copied: Callable[..., Path]) -> None:
    root = copied("zero3-frozen x2")
    for content in ("global_step7", "", "../saved/global_step2", "/etc", "a\nb", "\0"):
        (root / "latest").write_text(content)
        fault_of(root, str(root / "latest"), str(root / "global_step2"))
    (root / "epoch-1").mkdir()
    (root / "global_step2").rename(root / "epoch-1" / "step-2")
    assert "there is no other" in fault_of(root)
    (root / "latest").write_text("epoch-1/step-2")  # any tag that save_checkpoint takes
    open_checkpoint(root)


def test_parallelism_and_the_old_format_are_not_supported(copied: Callable[..., Path]) -> None:
    root = copied("zero1-bf16 x2")
    for name in ("mp_rank_01_model_states.pt", "layer_00-model_states.pt", "expert_0_mp_rank_00_model_states.pt"):
        shutil.copy(tag_of(root) / "mp_rank_00_model_states.pt", tag_of(root) / name)
        fault_of(root, name, "not supported")
        (tag_of(root) / name).unlink()
    file = files_of(root)[0]
    torch.save(torch.load(file, weights_only=False), file, _use_new_zipfile_serialization=False)
    assert re.search(f"{file}: .*old format", fault_of(root))


def test_no_checkpoint(tmp_path: Path) -> None:
    assert "does not exist" in fault_of(tmp_path / "nowhere")
    assert "contains nothing" in fault_of(tmp_path)
    (tmp_path / "notes.txt").write_text("")
    assert "notes.txt" in fault_of(tmp_path)
    assert "name its folder" in fault_of(tmp_path / "notes.txt")
    (tmp_path / "latest").write_text("global_step1")
    assert "latest" in fault_of(tmp_path)
    (tmp_path / "tag" / "zero").mkdir(parents=True)
    (tmp_path / "tag" / "zero" / "optimizer_state.pt").touch()
    assert "universal format" in fault_of(tmp_path)
    (tmp_path / "runs").mkdir()
    assert "did you mean runs?" in fault_of(tmp_path / "run")
    (tmp_path / "runs" / "model").mkdir()
    (tmp_path / "runs" / "model" / "model.safetensors").touch()
    assert str(tmp_path / "runs" / "model") in fault_of(tmp_path / "runs")
