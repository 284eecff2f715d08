"""toolkit/checkpoint/model_folder.py with a model that is not from `transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import nn

from toolkit.checkpoint.model_folder import load_weights, save_model


class Own(nn.Module):
    """Not from `transformers`: no config, a save of its own, a tied weight, a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(13, 7)
        self.head = nn.Linear(7, 13, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(7)

    def save(self, folder: Path, state_dict: dict[str, torch.Tensor]) -> None:
        (folder / "own.txt").write_text(" ".join(f"{name}={state_dict[name].numel()}" for name in sorted(state_dict)))


class Bare(nn.Linear):
    """Nothing but a module."""


@pytest.mark.parametrize("make", [lambda seed: Own(seed), lambda seed: Bare(2 + seed, 3)])
def test_there_and_back(tmp_path: Path, make: Any) -> None:
    accelerator, model = Accelerator(cpu=True), make(1)
    for _ in range(2):  # the second takes the first one's place
        save_model(accelerator, model, None, tmp_path / "model")
    other = make(1)
    with torch.no_grad():
        for tensor in other.state_dict().values():
            tensor.zero_()
    load_weights(accelerator, other, tmp_path / "model")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_its_own_save_is_given_the_whole_state(tmp_path: Path) -> None:
    save_model(Accelerator(cpu=True), Own(1), None, tmp_path / "model")
    assert "embed.weight=91 head.weight=91" in (tmp_path / "model" / "own.txt").read_text()
    assert "head.weight" not in load_file(tmp_path / "model" / "model.safetensors")  # tied: once


@pytest.mark.parametrize(("dtype", "message"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_the_weights_are_of_the_asked_type_whatever_is_computed_in(
    dtype: str, message: torch.dtype, tiny_model: Path, tmp_path: Path
) -> None:
    from transformers import AutoModel

    model = AutoModel.from_pretrained(tiny_model, dtype=torch.bfloat16)
    save_model(Accelerator(cpu=True), model, None, tmp_path / "model", dtype=dtype)
    again = AutoModel.from_pretrained(tmp_path / "model", dtype="auto")
    assert {tensor.dtype for tensor in again.parameters()} == {message}
    assert torch.equal(next(again.parameters()).float(), next(model.parameters()).float())
