"""Frozen parameters that a run's checkpoint leaves out, and names that wrappers lengthen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoint.handmade import read_folder, same_bits, write_run
from tests.checkpoint.test_convert import convert
from toolkit.errors import UserError

HEAD = {"classifier.weight": torch.randn(3, 5)}
BASE = {"embeddings.weight": torch.randn(7, 5), "dense.bias": torch.randn(5)}
EXCLUDED = {f"bert.{name}": list(tensor.shape) for name, tensor in BASE.items()}


def base_folder(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_they_come_from_the_base_model(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", HEAD, excluded=EXCLUDED)
    with pytest.raises(UserError, match=r"leaves 2 frozen parameters out .*--base_model"):
        convert(run, tmp_path / "out")
    base = base_folder(tmp_path / "base", {**BASE, "pooler.bias": torch.ones(2)})
    convert(run, tmp_path / "out", base_model=base, verify=True)
    found = read_folder(tmp_path / "out")
    assert set(found) == {*HEAD, *EXCLUDED}  # and no pooler, which the run's model has not
    assert all(same_bits(found[f"bert.{name}"], tensor) for name, tensor in BASE.items())


def test_a_base_model_that_does_not_fit(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", HEAD, excluded=EXCLUDED)
    short = base_folder(tmp_path / "short", {"embeddings.weight": BASE["embeddings.weight"]})
    with pytest.raises(UserError, match=r"lacks 1 of the 2 parameters .*bert.dense.bias"):
        convert(run, tmp_path / "out", base_model=short)
    other = base_folder(tmp_path / "other", {**BASE, "dense.bias": torch.ones(6)})
    with pytest.raises(UserError, match=r"bert.dense.bias is of shape \[6\].*not the model that was trained"):
        convert(run, tmp_path / "out", base_model=other)
    assert not (tmp_path / "out").exists()


def test_the_runs_own_base_model_is_taken_when_it_is_a_folder(tmp_path: Path) -> None:
    base = base_folder(tmp_path / "base", BASE)
    (base / "config.json").write_text('{"model_type": "bert"}')
    run = write_run(tmp_path / "run", HEAD, excluded=EXCLUDED, base_model=str(base))
    convert(run, tmp_path / "out")
    assert set(read_folder(tmp_path / "out")) == {*HEAD, *EXCLUDED}


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_fsdp_wrapped_module."])
def test_wrappers_leave_no_trace(prefix: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {f"{prefix}a.weight": torch.ones(2), f"{prefix}b.bias": torch.ones(3)})
    convert(run, tmp_path / "out")
    assert set(read_folder(tmp_path / "out")) == {"a.weight", "b.bias"}


def test_a_module_of_that_name_keeps_it(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"module.weight": torch.ones(2), "b.bias": torch.ones(3)})
    convert(run, tmp_path / "out")
    assert set(read_folder(tmp_path / "out")) == {"module.weight", "b.bias"}


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"a.weight": torch.ones(2), "_orig_mod.a.weight": torch.ones(2)})
    with pytest.raises(UserError, match=r"several tensors under one name: a.weight"):
        convert(run, tmp_path / "out")


def test_integers_and_buffers_stay(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(5), "ids": torch.arange(9), "mask": torch.tensor([True, False]),
               "double": torch.randn(3, dtype=torch.float64), "none": torch.empty(0, 4)}  # fmt: skip
    convert(write_run(tmp_path / "run", tensors), tmp_path / "out", dtype="bf16", verify=True)
    found = read_folder(tmp_path / "out")
    for name, tensor in tensors.items():
        wanted = tensor.float().bfloat16() if tensor.is_floating_point() else tensor
        assert same_bits(found[name], wanted), name


def test_a_number_too_large_for_fp16_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"fine": torch.ones(5), "large.weight": torch.tensor([1.0, 7e4])})
    with pytest.raises(UserError, match=r"large.weight holds a number that f16 cannot hold.*--dtype bf16"):
        convert(run, tmp_path / "out", dtype="fp16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    convert(run, tmp_path / "out", dtype="bf16")
