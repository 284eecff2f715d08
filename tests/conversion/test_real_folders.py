"""Real checkpoints of DeepSpeed, accelerate and torch.distributed.checkpoint become what was in memory, bit for bit,
and `from_pretrained` loads them. (Promise 4: any checkpoint, anywhere.)"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import toolkit
from tests.conversion.conftest import NAMES
from tests.runs import edit_json

pytestmark = pytest.mark.multiprocess
State = dict[str, torch.Tensor]


def read_folder(folder: Path) -> State:
    return {
        name: tensor
        for path in folder.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


def assert_equal(actual: State, expected: State) -> None:
    """Floating tensors in fp32."""
    expected = {
        name: each.float() if each.is_floating_point() else each for name, each in expected.items()
    }
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def truth_of(folder: Path) -> State:
    return load_file(f"{folder}.safetensors")


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_in_memory(
    name: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    lines = toolkit.convert(checkpoints[name], tmp_path / "out")
    truth = truth_of(checkpoints[name])
    actual = read_folder(tmp_path / "out")
    tied = truth.get("embed.weight")  # DeepSpeed may write it under its other name
    assert_equal(actual, {key: truth.get(key, tied) for key in actual})
    left_out = {"embed.weight", "first.weight", "first.bias"} if "excluded" in name else set()
    assert truth.keys() - actual.keys() <= left_out | {"head.weight"}
    assert "--config_from" in lines[0]


def bert_config(model: Path, folder: Path) -> Path:
    """A folder with the tiny BERT's config as a classifier of three labels, and its tokenizer."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    labels = {str(number): f"label {number}" for number in range(3)}
    edit_json(folder / "config.json", architectures=["BertForSequenceClassification"], id2label=labels,
              label2id={label: int(number) for number, label in labels.items()})  # fmt: skip
    return folder


@pytest.mark.parametrize("name", ["zero2-bert x2", "zero3-bert x2"])
def test_from_pretrained_loads_it(
    name: str, checkpoints: dict[str, Path], tiny_model: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    out, config = tmp_path / "out", bert_config(tiny_model, tmp_path / "config")
    lines = toolkit.convert(checkpoints[name], out, config_from=config)
    assert "BertForSequenceClassification" in lines[0]
    model: Any
    model, report = AutoModelForSequenceClassification.from_pretrained(
        out, output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), (
        report
    )
    state, truth = model.state_dict(), truth_of(checkpoints[name])
    assert_equal({key: state[key] for key in truth}, truth)
    assert model.config.id2label[2] == "label 2"
    assert AutoTokenizer.from_pretrained(out)("good film")["input_ids"]


@pytest.mark.parametrize("name", ["zero2-bf16 x3", "zero3-bf16 x3", "zero3-frozen x3"])
def test_equal_to_zero_to_fp32(name: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Where DeepSpeed's own script is right."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    theirs = get_fp32_state_dict_from_zero_checkpoint(str(checkpoints[name]))
    toolkit.convert(checkpoints[name], tmp_path / "out")
    ours = read_folder(tmp_path / "out")
    assert_equal(ours, {key: theirs[key] for key in ours})


def test_what_was_left_out_comes_from_the_base_model(
    checkpoints: dict[str, Path], tiny_model: Path, tmp_path: Path
) -> None:
    """Of a state with a classifier alone, the encoder's parameters; strictly, without it the error names them."""
    from tests.faults import refusal

    config = bert_config(tiny_model, tmp_path / "config")
    head = {
        key: each
        for key, each in truth_of(checkpoints["zero2-bert x2"]).items()
        if "encoder" not in key
    }
    torch.save(head, tmp_path / "head.pt")
    refusal(
        toolkit.convert,
        tmp_path / "head.pt",
        tmp_path / "out",
        config_from=config,
        says=["lacks bert.encoder"],
    )
    toolkit.convert(
        tmp_path / "head.pt", tmp_path / "out", config_from=config, base_model=tiny_model
    )
    base = load_file(tiny_model / "model.safetensors")
    actual = read_folder(tmp_path / "out")
    assert_equal(
        actual, {key: head.get(key, base.get(key.removeprefix("bert."))) for key in actual}
    )
