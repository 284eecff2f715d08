"""What other programs write becomes a Hugging Face folder: torch.save, Lightning, torch.distributed.checkpoint,
transformers; a run's own checkpoint; real checkpoints of DeepSpeed and accelerate, which become what was in memory, bit
for bit. (Promise 4: any checkpoint, anywhere.)"""

import argparse
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from transformers import AutoModelForMaskedLM, AutoTokenizer, BertConfig, BertForMaskedLM
from transformers import AutoModelForSequenceClassification as Classifier

import toolkit
from tests.checkpoint.states import State, assert_same
from tests.checkpoint.test_folder import flip
from tests.conversion.conftest import NAMES
from tests.faults import refusal
from tests.runs import edit_json
from toolkit.checkpoint import folder as folders
from toolkit.checkpoint.safetensors_writer import Shapes, file_order


@pytest.fixture(scope="module")
def trained(tiny_model: Path) -> Any:
    """(a classifier after a step, its optimizer)."""
    torch.manual_seed(5)
    model = Classifier.from_pretrained(tiny_model, num_labels=3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4, dtype=torch.long)).logits.sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture(scope="module")
def state(trained: Any) -> State:
    return dict(trained[0].state_dict())


@pytest.fixture(scope="module")
def config(tiny_model: Path, tmp_path_factory: Any) -> Path:
    return bert_config(tiny_model, tmp_path_factory.mktemp("config") / "bert")


def under(prefix: str, state: State) -> State:
    return {f"{prefix}{name}": tensor for name, tensor in state.items()}


def old_names(state: State) -> State:
    """As in the published bert-base-chinese; of the encoder alone."""
    renamed = {}
    for name, tensor in state.items():
        name = name.replace("LayerNorm.weight", "LayerNorm.gamma").removeprefix("bert.")
        renamed[name.replace("LayerNorm.bias", "LayerNorm.beta")] = tensor
    return renamed


def lightning(state: State, optimizer: Any) -> dict[str, Any]:
    """As Lightning's `dump_checkpoint` makes it."""
    options = {"lr": 1e-5, "folder": Path("runs"), "options": argparse.Namespace(seed=1)}
    return {
        "global_step": 120,
        "state_dict": state,
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 3}}}},
        "callbacks": {"ModelCheckpoint": {"best_model_score": torch.tensor(0.5)}},
        "optimizer_states": [optimizer.state_dict()],
        "hyper_parameters": options,
    }


def loop(state: State, optimizer: Any) -> dict[str, Any]:
    """As a training loop's own."""
    others = {"best": torch.tensor(0.3), "rng": torch.get_rng_state(), "torch": torch.__version__}
    return {"model": state, "optimizer": optimizer.state_dict(), **others}


FILES: dict[str, Callable[[State, Any], Any]] = {
    "lightning.ckpt": lambda state, optimizer: lightning(under("model.", state), optimizer),
    "fabric.ckpt": lambda state, optimizer: lightning(under("_forward_module.", state), optimizer),
    "plain.pt": lambda state, _: state,
    "compiled.pth": lambda state, _: {"state_dict": under("module._orig_mod.model.", state)},
    "old.bin": lambda state, _: old_names(state),
    "loop.pt": loop,
}


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("name", FILES)
def test_a_file_of_torch_save(
    name: str, legacy: bool, state: Any, trained: Any, config: Path, tmp_path: Path
) -> None:
    content = FILES[name](state, trained[1])
    torch.save(content, tmp_path / name, _use_new_zipfile_serialization=not legacy)
    toolkit.convert(tmp_path / name, tmp_path / "out", config_from=config)
    assert_equal(read_folder(tmp_path / "out"), state)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_folder_of_dcp(state: State, trained: Any, config: Path, tmp_path: Path) -> None:
    optimizer, rng = get_optimizer_state_dict(*trained), torch.get_rng_state()
    contents = {
        "a loop's": {"model": state, "optim": optimizer, "rng": rng},
        "torch's example": {"app": {"model": under("net.", state), "optim": optimizer}},
    }
    for name, content in contents.items():
        folder = tmp_path / name / "pytorch_model_fsdp_0"  # as accelerate nests it
        dcp.save(content, checkpoint_id=str(folder))
        for source in (folder, folder.parent):
            out = tmp_path / "out" / name / source.name
            toolkit.convert(source, out, config_from=config)
            assert_equal(read_folder(out), state)
    refusal(toolkit.convert, next(folder.glob("*.distcp")), tmp_path / "no", says=[str(folder)])


def test_several_models_in_a_file(state: State, trained: Any, config: Path, tmp_path: Path) -> None:
    older = {name: tensor * 2 for name, tensor in state.items()}
    ema, net = tmp_path / "ema.pt", tmp_path / "a.ckpt"
    torch.save({"model": state, "ema": older}, ema)
    beside = under("net.", state) | {"loss.weight": torch.ones(3)}
    torch.save(lightning(beside, trained[1]), net)
    for file in (ema, net):
        refusal(toolkit.convert, file, tmp_path / "x", config_from=config, match="--prefix")
    refusal(toolkit.convert, net, tmp_path / "x", prefix="nett", says=["net.bert"])
    parts = {"ema": (ema, older), "model.": (ema, state), "net": (net, state)}
    for prefix, (file, expected) in parts.items():
        toolkit.convert(file, tmp_path / prefix, config_from=config, prefix=prefix)
        assert_equal(read_folder(tmp_path / prefix), expected)


def test_the_config_promises_names_and_shapes(state: State, config: Path, tmp_path: Path) -> None:
    less = dict(state)
    less.pop("classifier.bias")
    changes: dict[str, State] = {
        "extra.weight": state | {"extra.weight": torch.ones(2)},
        "lacks classifier.bias": less,
        "classifier.weight of shape [5, 33]": state | {"classifier.weight": torch.ones(5, 33)},
    }
    model, out = tmp_path / "model.pt", tmp_path / "out"
    for fault, content in changes.items():
        torch.save(content, model)
        refusal(toolkit.convert, model, out, config_from=config, says=[fault])
    assert not out.exists()
    # a class that is not in transformers promises nothing
    own = shutil.copytree(config, tmp_path / "own")
    edit_json(own / "config.json", architectures=["MyReviews"])
    toolkit.convert(model, out, config_from=own)
    assert_equal(read_folder(out), content)
    promise, other = json.loads((config / "config.json").read_text()), tmp_path / "other"
    for change in ({"architectures": 5}, {"model_type": []}, {"vocab_size": "9"}, {"id2label": 1}):
        (own / "config.json").write_text(json.dumps(promise | change))
        refusal(toolkit.convert, model, other, config_from=own, says=["cannot build a model"])
    for index in ({}, {"weight_map": []}, {"weight_map": {"a": 5}}):
        (own / "model.safetensors.index.json").write_text(json.dumps(index))
        refusal(toolkit.convert, own, other, says=["index.json is damaged"])


def test_tied_weights_are_written_once_and_tied_again(config: Path, tmp_path: Path) -> None:
    settings = BertConfig.from_pretrained(config)
    model: Any = BertForMaskedLM(settings)
    assert "cls.predictions.decoder.weight" in model.state_dict()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    settings.architectures = ["BertForMaskedLM"]
    settings.save_pretrained(tmp_path)
    out = tmp_path / "out"
    toolkit.convert(tmp_path, out)
    assert "cls.predictions.decoder.weight" not in read_folder(out)
    loaded, report = AutoModelForMaskedLM.from_pretrained(out, output_loading_info=True)
    assert not any(report.values())
    assert_equal(loaded.state_dict(), model.state_dict())


@pytest.mark.parametrize("most", ["5GB", "30KB"])
def test_a_model_in_any_dtype(most: str, trained: Any, tmp_path: Path) -> None:
    """A Hugging Face folder, whole or in shards, and back."""
    model, source = trained[0], tmp_path / "model"
    model.save_pretrained(source, max_shard_size=most)
    toolkit.convert(source, tmp_path / "bf16", dtype="bf16")
    for name, tensor in read_folder(tmp_path / "bf16").items():
        assert torch.equal(tensor, model.state_dict()[name].bfloat16())
    loaded: Any = Classifier.from_pretrained(tmp_path / "bf16")
    assert loaded.dtype == torch.bfloat16
    for shard in list(source.glob("*-00002-of-*")):
        shard.unlink()
        refusal(toolkit.convert, source, tmp_path / "out", says=[shard.name])


def test_a_number_too_large_for_fp16(tmp_path: Path) -> None:
    big = {"a.weight": torch.tensor([1e5, 2.0]), "b.weight": torch.tensor([float("inf")])}
    file = tmp_path / "big.safetensors"
    save_file(big, file)
    refusal(toolkit.convert, file, tmp_path / "out", dtype="fp16", says=["a.weight", "bf16"])
    toolkit.convert(file, tmp_path / "out", dtype="bf16")


def write_run(
    folder: Path, tensors: Mapping[str, torch.Tensor], config: Path, **facts: Any
) -> Path:
    """A run's checkpoint (docs/checkpoints.md)."""
    weights: Shapes = {name: (each.dtype, tuple(each.shape)) for name, each in tensors.items()}
    optimizer: Shapes = {"step.x": (torch.float32, ())}
    tables = {"weights.safetensors": weights, "optimizer.safetensors": optimizer}
    content = [*(tensors[name] for name in file_order(weights)), torch.tensor(7.0)]
    usual = {"step": 7, "tied": {}, "excluded": {}, "base_model": None, "settings": {}}

    def write_others(draft: Path) -> None:
        shutil.copytree(config, draft / "model")

    folders.save(folder, tables, content, {**usual, **facts}, write_others)
    return folder


def test_a_runs_checkpoint(state: State, config: Path, tmp_path: Path) -> None:
    """Named in each way; damage to it: tests/checkpoint/test_folder.py."""
    checkpoints, out = tmp_path / "run" / "checkpoints", tmp_path / "out"
    older = write_run(checkpoints / "step-00000003", {"older": torch.ones(1)}, config)
    folder = write_run(checkpoints / "step-00000007", state, config)
    (checkpoints / "best").symlink_to(folder.name)
    for number, path in enumerate((tmp_path / "run", checkpoints, checkpoints / "best", folder)):
        toolkit.convert(path, tmp_path / str(number))
        assert_equal(read_folder(tmp_path / str(number)), state)
    flip(folder / "weights.safetensors")
    refusal(toolkit.convert, folder, out, says=[str(folder / "weights.safetensors")])
    shutil.copy(older / "weights.safetensors", folder)
    refusal(toolkit.convert, folder, out, lines=3, says=["older"])
    assert not out.exists()


def read_folder(folder: Path) -> State:
    return load_file(folder / "model.safetensors")


def assert_equal(actual: State, expected: State) -> None:
    """Floating tensors in fp32."""
    in_fp32 = {}
    for name, tensor in expected.items():
        in_fp32[name] = tensor.float() if tensor.is_floating_point() else tensor
    assert_same(actual, in_fp32)


@pytest.mark.parametrize("name", NAMES)
def test_weights_of_the_memory(name: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    toolkit.convert(checkpoints[name], tmp_path / "out")
    truth, actual = load_file(f"{checkpoints[name]}.safetensors"), read_folder(tmp_path / "out")
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
def test_from_pretrained(name: str, checkpoints: Any, tiny_model: Path, tmp_path: Path) -> None:
    out, config = tmp_path / "out", bert_config(tiny_model, tmp_path / "config")
    toolkit.convert(checkpoints[name], out, config_from=config)
    load = Classifier.from_pretrained
    model, report = load(out, output_loading_info=True)
    assert not any(report.values())
    state, truth = model.state_dict(), load_file(f"{checkpoints[name]}.safetensors")
    assert_equal({key: state[key] for key in truth}, truth)
    assert model.config.id2label[2] == "label 2"
    assert AutoTokenizer.from_pretrained(out)("good film")["input_ids"]
