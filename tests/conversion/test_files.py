"""What other programs write becomes a Hugging Face folder: torch.save, Lightning, torch.distributed.checkpoint,
transformers; and a run's own checkpoint. (Promise 4.)"""

import argparse
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import toolkit
from tests.conversion.test_real_folders import State, assert_equal, bert_config, read_folder
from tests.faults import refusal
from tests.runs import edit_json
from toolkit.checkpoint import folder as folders
from toolkit.checkpoint.safetensors_writer import file_order


@pytest.fixture(scope="module")
def trained(tiny_model: Path) -> Any:
    """(a classifier after a step, its optimizer)."""
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(5)
    model = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4, dtype=torch.long)).logits.sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture(scope="module")
def config(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bert_config(tiny_model, tmp_path_factory.mktemp("config") / "bert")


def old_names(state: State) -> State:
    """As in the published bert-base-chinese."""
    pairs = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    renamed = {}
    for name, tensor in state.items():
        for new, old in pairs.items():
            name = name.replace(new, old)
        renamed[name] = tensor
    return renamed


def begin_with(prefix: str, state: State) -> State:
    return {f"{prefix}{name}": tensor for name, tensor in state.items()}


def lightning(state: State, optimizer: Any) -> dict[str, Any]:
    """As Lightning's `dump_checkpoint` makes it."""
    return {
        "epoch": 3,
        "global_step": 120,
        "pytorch-lightning_version": "2.5.1",
        "state_dict": state,
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 3}}}},
        "callbacks": {
            "ModelCheckpoint": {"best_model_score": torch.tensor(0.5), "dirpath": "runs"}
        },
        "optimizer_states": [optimizer.state_dict()],
        "hyper_parameters": {
            "lr": 1e-5,
            "folder": Path("runs"),
            "options": argparse.Namespace(seed=1),
        },
    }


FILES: dict[str, Callable[[State, Any], Any]] = {
    "lightning.ckpt": lambda state, optimizer: lightning(begin_with("model.", state), optimizer),
    "fabric.ckpt": lambda state, optimizer: lightning(begin_with("_forward_module.net.", state), optimizer),
    "plain.pt": lambda state, _: state,
    "compiled.pth": lambda state, _: {"state_dict": begin_with("module._orig_mod.model.", state)},
    "encoder.bin": lambda state, _: {name.removeprefix("bert."): tensor for name, tensor in state.items()},
    "gamma.bin": lambda state, _: old_names(state),
    "loop.pt": lambda state, optimizer: {
        "model": state, "optimizer": optimizer.state_dict(), "opt2": optimizer.state_dict(), "epoch": 1,
        "best": torch.tensor(0.3), "rng": torch.get_rng_state(), "torch": torch.__version__,
    },
}  # fmt: skip


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("name", FILES)
def test_a_file_of_torch_save(
    name: str, legacy: bool, trained: Any, config: Path, tmp_path: Path
) -> None:
    state = dict(trained[0].state_dict())
    content = FILES[name](state, trained[1])
    torch.save(content, tmp_path / name, _use_new_zipfile_serialization=not legacy)
    lines = toolkit.convert(tmp_path / name, tmp_path / "out", config_from=config)
    assert_equal(read_folder(tmp_path / "out"), state)
    assert ("step 120" in lines[-1]) == (name.endswith(".ckpt"))


FOLDERS: dict[str, Callable[[State, Any], Any]] = {
    "the state itself": lambda state, _: state,
    "a loop's": lambda state, optimizer: {
        "model": state,
        "optim": optimizer,
        "step": 3,
        "rng": torch.get_rng_state(),
    },
    "torch's example": lambda state, optimizer: {
        "app": {"model": begin_with("net.", state), "optim": optimizer}
    },
}


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_folder_of_torch_distributed_checkpoint(
    name: str, trained: Any, config: Path, tmp_path: Path
) -> None:
    state = dict(trained[0].state_dict())
    folder = tmp_path / "saved" / "pytorch_model_fsdp_0"
    dcp.save(FOLDERS[name](state, get_optimizer_state_dict(*trained)), checkpoint_id=str(folder))
    for number, source in enumerate((folder, folder.parent)):  # as accelerate nests them
        toolkit.convert(source, tmp_path / f"out{number}", config_from=config)
        assert_equal(read_folder(tmp_path / f"out{number}"), state)
    refusal(
        toolkit.convert,
        next(folder.glob("*.distcp")),
        tmp_path / "out",
        says=[f"name its folder, {folder}"],
    )


def test_several_models_in_a_file(trained: Any, config: Path, tmp_path: Path) -> None:
    state = dict(trained[0].state_dict())
    older = {name: tensor * 2 for name, tensor in state.items()}
    torch.save({"model": state, "ema": older}, tmp_path / "ema.pt")
    torch.save(
        lightning(begin_with("net.", state) | {"loss.weight": torch.ones(3)}, trained[1]),
        tmp_path / "a.ckpt",
    )
    out = tmp_path / "out"
    refusal(
        toolkit.convert,
        tmp_path / "ema.pt",
        out,
        config_from=config,
        lines=3,
        says=["--prefix", "ema.", "model."],
    )
    refusal(
        toolkit.convert,
        tmp_path / "a.ckpt",
        out,
        config_from=config,
        lines=3,
        says=["net.bert", "--prefix"],
    )
    refusal(toolkit.convert, tmp_path / "a.ckpt", out, prefix="nett", says=["nett.", "net.bert"])
    refusal(
        toolkit.convert, tmp_path, tmp_path.with_name("out"), says=["ema.pt", "a.ckpt"]
    )  # name the file
    for prefix, name in {"ema": "ema.pt", "model.": "ema.pt", "net": "a.ckpt"}.items():
        toolkit.convert(tmp_path / name, tmp_path / prefix, config_from=config, prefix=prefix)
        assert_equal(read_folder(tmp_path / prefix), older if prefix == "ema" else state)


def test_a_class_of_the_users(trained: Any, config: Path, tmp_path: Path) -> None:
    torch.save(trained[0].state_dict(), tmp_path / "model.pt")
    own = shutil.copytree(config, tmp_path / "own")
    edit_json(own / "config.json", architectures=["MyReviews"])
    lines = toolkit.convert(tmp_path / "model.pt", tmp_path / "out", config_from=own)
    assert "not in transformers" in lines[0]


def test_the_config_promises_every_name_and_shape(
    trained: Any, config: Path, tmp_path: Path
) -> None:
    state = dict(trained[0].state_dict())
    changes: dict[str, State] = {
        "has extra.weight": state | {"extra.weight": torch.ones(2)},
        "lacks classifier.bias": {
            name: tensor for name, tensor in state.items() if name != "classifier.bias"
        },
        "has classifier.weight of shape [5, 33]": state | {"classifier.weight": torch.ones(5, 33)},
    }
    for fault, content in changes.items():
        torch.save(content, tmp_path / "model.pt")
        refusal(
            toolkit.convert,
            tmp_path / "model.pt",
            tmp_path / "out",
            config_from=config,
            says=[fault],
        )
    assert not (tmp_path / "out").exists()


def test_tied_weights_are_written_once_and_tied_again(config: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForMaskedLM, BertConfig, BertForMaskedLM

    settings = BertConfig.from_pretrained(config)
    model: Any = BertForMaskedLM(settings)
    assert "cls.predictions.decoder.weight" in model.state_dict()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    settings.architectures = ["BertForMaskedLM"]
    settings.save_pretrained(tmp_path)
    toolkit.convert(tmp_path, tmp_path / "out")
    assert "cls.predictions.decoder.weight" not in read_folder(tmp_path / "out")
    loaded, report = AutoModelForMaskedLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert_equal(loaded.state_dict(), model.state_dict())


@pytest.mark.parametrize("most", ["5GB", "30KB"])
def test_a_model_in_any_dtype(most: str, trained: Any, tmp_path: Path) -> None:
    """A Hugging Face folder, whole or in shards, and back."""
    from transformers import AutoModelForSequenceClassification

    trained[0].save_pretrained(tmp_path / "model", max_shard_size=most)
    toolkit.convert(tmp_path / "model", tmp_path / "bf16", dtype="bf16")
    for name, tensor in read_folder(tmp_path / "bf16").items():
        assert torch.equal(tensor, trained[0].state_dict()[name].bfloat16())
    model: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path / "bf16")
    assert model.dtype == torch.bfloat16
    for shard in list((tmp_path / "model").glob("*-00002-of-*")):
        shard.unlink()
        refusal(toolkit.convert, tmp_path / "model", tmp_path / "out", says=[shard.name])
    big = {"a.weight": torch.tensor([1e5, 2.0]), "b.weight": torch.tensor([float("inf")])}
    save_file(big, tmp_path / "big.safetensors")
    refusal(
        toolkit.convert,
        tmp_path / "big.safetensors",
        tmp_path / "out",
        dtype="fp16",
        says=["a.weight", "bf16"],
    )
    toolkit.convert(tmp_path / "big.safetensors", tmp_path / "out", dtype="bf16")


def write_run(
    folder: Path, tensors: Mapping[str, torch.Tensor], config: Path, **facts: Any
) -> Path:
    """A run's checkpoint (docs/checkpoints.md)."""
    tables = {
        "weights.safetensors": {
            name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()
        },
        "optimizer.safetensors": {"step.x": (torch.float32, ())},
    }
    every = [
        *(tensors[name] for name in file_order(tables["weights.safetensors"])),
        torch.tensor(7.0),
    ]
    known = {
        "step": 7,
        "tied": {},
        "excluded": {},
        "base_model": None,
        "settings": {},
        "identity": {"model": ""},
    }
    folders.save(
        folder,
        tables,
        every,
        {**known, **facts},
        lambda draft: shutil.copytree(config, draft / "model"),
    )
    return folder


def test_a_runs_checkpoint(trained: Any, config: Path, tmp_path: Path) -> None:
    state = dict(trained[0].state_dict())
    run = tmp_path / "run"
    older = write_run(run / "checkpoints" / "step-00000003", {"older": torch.ones(1)}, config)
    folder = write_run(run / "checkpoints" / "step-00000007", state, config)
    (run / "checkpoints" / "best").symlink_to(folder.name)
    for number, path in enumerate((run, run / "checkpoints", run / "checkpoints" / "best", folder)):
        lines = toolkit.convert(path, tmp_path / f"out{number}")
        assert "step 7" in lines[-1]
        assert_equal(read_folder(tmp_path / f"out{number}"), state)
    for name in ("weights.safetensors", "model/config.json", "optimizer.safetensors"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:-40] + bytes([content[-40] ^ 1]) + content[-39:])
        refusal(toolkit.convert, folder, tmp_path / "out", says=[str(folder / name)])
        (folder / name).unlink()
        refusal(toolkit.convert, folder, tmp_path / "out", says=[str(folder), name])
        (folder / name).write_bytes(content)
    shutil.copy(older / "weights.safetensors", folder)
    refusal(toolkit.convert, folder, tmp_path / "out", lines=3, says=["older"])
    assert not (tmp_path / "out").exists()
