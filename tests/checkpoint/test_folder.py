"""toolkit/checkpoint/{folder,model_folder}.py: what counts as a checkpoint, which are removed, what best and last name;
models that are not from `transformers`, tied weights, adapters, dtypes. (Promises 3 and 4.)"""

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModel

from tests.checkpoint.states import Odd, State, assert_same, make_peft
from toolkit.checkpoint import folder as folders
from toolkit.checkpoint.model_folder import DTYPES, load_weights, save_model

TABLES = {folders.WEIGHTS_FILE: {"weight": (torch.float32, (3,))}, folders.OPTIMIZER_FILE: {}}


def save(checkpoints: Path, step: int, at: float | None = None, **facts: Any) -> Path:
    """A small checkpoint, as if it was saved `at` that time."""
    folder = folders.step_folder(checkpoints, step)
    time = {} if at is None else {"saved_at": at}

    def write_others(draft: Path) -> None:
        (draft / "model").mkdir()
        (draft / "model" / "config.json").write_text("{}")

    folders.save(folder, TABLES, [torch.ones(3)], {"step": step, **time, **facts}, write_others)
    return folder


def names_in(checkpoints: Path) -> list[str]:
    return sorted(path.name for path in checkpoints.iterdir())


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


OLD = json.dumps({"format": 1, "files": {}})
DAMAGE: dict[str, Callable[[Path], object]] = {
    "a flipped bit": lambda folder: flip(folder / "weights.safetensors"),
    "a flipped bit of the state": lambda folder: flip(folder / "state.json"),
    "no state": lambda folder: (folder / "state.json").unlink(),
    "a missing file": lambda folder: (folder / "model" / "config.json").unlink(),
    "a truncated file": lambda folder: (folder / "optimizer.safetensors").write_bytes(b"123"),
    "another format": lambda folder: (folder / "state.json").write_text(OLD),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_noticed(tmp_path: Path, what: str) -> None:
    older, folder = save(tmp_path, 1), save(tmp_path, 2)
    assert folders.find_fault(folder) == ""
    DAMAGE[what](folder)
    assert str(folder) in folders.find_fault(folder)
    assert folders.newest_first(tmp_path) == [folder, older]


def test_the_newest_is_by_time_not_by_step(tmp_path: Path) -> None:
    """A run that resumed step 2 continues from what it saved then, not from step 8, saved in 2096."""
    old, new = save(tmp_path, 8, at=4e9), save(tmp_path, 4)
    assert folders.newest_first(tmp_path) == folders.readable(tmp_path) == [new, old]


@pytest.mark.parametrize("has_links", [True, False])
def test_the_best_is_never_removed(has_links: bool, tmp_path: Path, monkeypatch: Any) -> None:
    """Also on a disk without symbolic links: Google Drive, exFAT, SMB."""
    if not has_links:
        monkeypatch.setattr(Path, "symlink_to", Mock(side_effect=OSError(errno.EPERM, "no")))
    for step in range(1, 6):
        save(tmp_path, step, at=float(step))
    (tmp_path / "notes").mkdir()  # not of a run
    folders.set_links(tmp_path, best_step=2)
    folders.prune(tmp_path, keep=2, best_step=2)
    links = ["best", "last"] if has_links else []
    assert names_in(tmp_path) == [*links, "notes", *(f"step-{step:08d}" for step in (2, 4, 5))]


def test_a_checkpoint_on_another_disk_keeps_its_files(tmp_path: Path) -> None:
    folder = save(tmp_path / "run", 1)
    there = folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(there)
    assert folders.find_fault(folder) == ""
    folders.remove(folder)
    assert names_in(tmp_path / "run") == []
    assert folders.find_fault(there) == ""


class Own(Odd):
    """No config, its own save, a tied weight, buffers."""

    def save(self, folder: Path, state_dict: State) -> None:
        sizes = [f"{name}={state_dict[name].numel()}" for name in sorted(state_dict)]
        (folder / "own.txt").write_text(" ".join(sizes))


MODELS = [Own(), nn.Linear(3, 3), nn.ModuleDict({"lora_A": nn.Linear(3, 3)})]  # no LoRA of peft


@pytest.mark.parametrize("model", MODELS)
def test_there_and_back(tmp_path: Path, model: nn.Module) -> None:
    folder, accelerator = tmp_path / "model", Accelerator(cpu=True)
    for _ in range(2):  # the second replaces the first
        save_model(accelerator, model, None, folder)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.zero_()
    load_weights(accelerator, model, folder)
    assert_same(dict(model.state_dict()), expected)
    assert list(tmp_path.iterdir()) == [folder]
    if isinstance(model, Own):  # its own save gets all names, and a tied weight is written once
        assert "embed.weight=91 first.bias" in (folder / "own.txt").read_text()
        assert "head.weight=91" in (folder / "own.txt").read_text()
        assert "head.weight" not in load_file(folder / "model.safetensors")


def test_an_adapter_has_all_that_is_trained(tiny_model: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    live, other = make_peft(tiny_model, bias="all"), make_peft(tiny_model, bias="all")
    for model in (live, other):
        model.get_submodule("base_model.model.bert.embeddings.LayerNorm").requires_grad_(True)
    parameters = live.named_parameters()
    trained = {name: torch.randn_like(each) for name, each in parameters if each.requires_grad}
    live.load_state_dict(trained, strict=False)
    save_model(Accelerator(cpu=True), live, None, tmp_path / "model")
    load_weights(Accelerator(cpu=True), other, tmp_path / "model")
    theirs = PeftModel.from_pretrained(make_peft(tiny_model).unload(), tmp_path / "adapter")
    for model in (other, theirs):
        assert_same({name: model.state_dict()[name] for name in trained}, trained)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_saved_dtype(dtype: str, tiny_model: Path, tmp_path: Path) -> None:
    """Also of a weight that only the recipe ties."""
    model = AutoModel.from_pretrained(tiny_model, dtype=torch.bfloat16)
    first, second = (layer.output.dense for layer in model.encoder.layer)
    second.weight = first.weight
    save_model(Accelerator(cpu=True), model, None, tmp_path / "model", dtype=dtype)
    again = AutoModel.from_pretrained(tmp_path / "model", dtype="auto")
    assert {tensor.dtype for tensor in again.parameters()} == {DTYPES[dtype]}
    assert_same(dict(again.float().state_dict()), dict(model.float().state_dict()))
