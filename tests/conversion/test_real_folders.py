"""Real checkpoints of DeepSpeed, accelerate and torch.distributed.checkpoint become what was in memory, bit for bit,
and `from_pretrained` loads them. (Promise 4: any checkpoint, anywhere.)"""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import toolkit
from tests.checkpoint.states import State, assert_same
from tests.conversion.conftest import NAMES
from tests.runs import edit_json


def read_folder(folder: Path) -> State:
    return load_file(folder / "model.safetensors")


def assert_equal(actual: State, expected: State) -> None:
    """Floating tensors in fp32."""
    in_fp32 = {}
    for name, tensor in expected.items():
        in_fp32[name] = tensor.float() if tensor.is_floating_point() else tensor
    assert_same(actual, in_fp32)


def truth_of(folder: Path) -> State:
    return load_file(f"{folder}.safetensors")


@pytest.mark.parametrize("name", NAMES)
def test_weights_of_the_memory(name: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    toolkit.convert(checkpoints[name], tmp_path / "out")
    truth, actual = truth_of(checkpoints[name]), read_folder(tmp_path / "out")
    tied = {"head.weight": "embed.weight"}  # DeepSpeed may write it under its other name
    assert_equal(actual, {key: truth[tied.get(key, key)] for key in actual})
    left_out = {"embed.weight", "first.weight", "first.bias"} if "excluded" in name else set()
    assert truth.keys() - {tied.get(key, key) for key in actual} <= left_out


def bert_config(model: Path, folder: Path) -> Path:
    """A folder with the tiny BERT's config as a classifier of three labels, and its tokenizer."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    labels = {str(number): f"label {number}" for number in range(3)}
    numbers = {label: int(number) for number, label in labels.items()}
    kind = ["BertForSequenceClassification"]
    edit_json(folder / "config.json", architectures=kind, id2label=labels, label2id=numbers)
    return folder


@pytest.mark.parametrize("name", ["zero2-bert x2", "zero3-bert x2"])
def test_from_pretrained_loads_it(
    name: str, checkpoints: dict[str, Path], tiny_model: Path, tmp_path: Path
) -> None:
    out, config = tmp_path / "out", bert_config(tiny_model, tmp_path / "config")
    toolkit.convert(checkpoints[name], out, config_from=config)
    load = AutoModelForSequenceClassification.from_pretrained
    model, report = load(out, output_loading_info=True)
    assert not any(report.values())
    state, truth = model.state_dict(), truth_of(checkpoints[name])
    assert_equal({key: state[key] for key in truth}, truth)
    assert model.config.id2label[2] == "label 2"
    assert AutoTokenizer.from_pretrained(out)("good film")["input_ids"]
