"""Conversion of what other tools write: Lightning, torch.save, torch.distributed.checkpoint, Trainer, peft."""

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from tests.checkpoint.handmade import assert_same, read_folder
from tests.checkpoint.test_convert import convert
from tests.faults import Fault, refusal
from tests.runs import edit_json
from toolkit.config import PretrainedSettings
from toolkit.pretrained import load_config

State = dict[str, torch.Tensor]


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
def config(trained: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("config")
    trained[0].config.save_pretrained(folder)
    edit_json(folder / "config.json", architectures=["BertForSequenceClassification"])
    return folder


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
        "callbacks": {"ModelCheckpoint{'monitor': 'loss'}": {"best_model_score": torch.tensor(0.5), "dirpath": "runs"}},
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [{"_step_count": 1}],
        "hparams_name": "kwargs",
        "hyper_parameters": {"lr": 1e-5, "folder": Path("runs"), "options": argparse.Namespace(seed=1)},
    }


FILES: dict[str, Callable[[State, Any], Any]] = {
    "lightning.ckpt": lambda state, optimizer: lightning(begin_with("model.", state), optimizer),
    "fabric.ckpt": lambda state, optimizer: lightning(begin_with("_forward_module.net.", state), optimizer),
    "plain.pt": lambda state, _: state,
    "compiled.pth": lambda state, _: {"state_dict": begin_with("module._orig_mod.model.", state)},
    "loop.pt": lambda state, optimizer: {
        "model": state, "optimizer": optimizer.state_dict(), "opt2": optimizer.state_dict(), "epoch": 1,
        "best": torch.tensor(0.3), "rng": torch.get_rng_state(), "torch": torch.__version__,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_torch_save(name: str, trained: Any, config: Path, tmp_path: Path) -> None:
    state = dict(trained[0].state_dict())
    torch.save(FILES[name](state, trained[1]), tmp_path / name)
    message = convert(tmp_path / name, tmp_path / "out", config_from=config)
    assert_same(read_folder(tmp_path / "out"), state)
    assert ("step 120" in message[-1]) == (name.endswith(".ckpt"))
    convert(tmp_path, tmp_path / "again", config_from=config)  # the only file of its folder
    renamed = (tmp_path / name).rename(tmp_path / "model.tar")
    convert(renamed, tmp_path / "again", config_from=config, overwrite=True)
    assert_same(read_folder(tmp_path / "again"), state)
    convert(renamed, tmp_path / "bare")  # without config prefixes are not removed
    assert len(read_folder(tmp_path / "bare")) == len(state)


def test_a_classifier_with_the_config_of_its_base_model(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    sizes: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    base = BertConfig(vocab_size=9, architectures=["BertForMaskedLM"], **sizes)
    base.save_pretrained(tmp_path / "base")
    torch.save(BertForSequenceClassification(BertConfig(**{**base.to_dict(), "num_labels": 3})).state_dict(),
               tmp_path / "model.pt")  # fmt: skip
    convert(tmp_path / "model.pt", tmp_path / "out", config_from=tmp_path / "base", verify=True)
    assert BertConfig.from_pretrained(tmp_path / "out").num_labels == 3
    base.id2label = {0: "bad", 1: "fair", 2: "good"}  # as in the checkpoints of a run from a BertForMaskedLM
    base.save_pretrained(tmp_path / "base")
    convert(tmp_path / "model.pt", tmp_path / "names", config_from=tmp_path / "base")
    assert BertConfig.from_pretrained(tmp_path / "names").id2label == base.id2label
    base.architectures = ["BertForReviews"]  # a user's class keeps its name
    base.save_pretrained(tmp_path / "base")
    convert(tmp_path / "model.pt", tmp_path / "own", config_from=tmp_path / "base")
    assert BertConfig.from_pretrained(tmp_path / "own").architectures == ["BertForReviews"]


FOLDERS: dict[str, Callable[[State, Any], Any]] = {
    "the state itself": lambda state, _: state,
    "a loop's": lambda state, optimizer: {"model": state, "optim": optimizer, "step": 3, "rng": torch.get_rng_state()},
    "torch's example": lambda state, optimizer: {"app": {"model": begin_with("net.", state), "optim": optimizer}},
    "Lightning's": lambda state, optimizer: {
        "model": begin_with("_forward_module.model.", state),
        "optimizer_0": optimizer,
    },
}


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_folder_of_torch_distributed_checkpoint(name: str, trained: Any, config: Path, tmp_path: Path) -> None:
    state = dict(trained[0].state_dict())
    folder = tmp_path / "saved" / "pytorch_model_fsdp_0"
    dcp.save(FOLDERS[name](state, get_optimizer_state_dict(*trained)), checkpoint_id=str(folder))
    for number, named in enumerate((folder, folder.parent)):  # as accelerate nests them
        convert(named, tmp_path / f"out{number}", config_from=config)
        assert_same(read_folder(tmp_path / f"out{number}"), state)
    refusal(convert, next(folder.glob("*.distcp")), tmp_path / "out", says=[f"name its folder, {folder}"])


def test_ambiguous_files(trained: Any, config: Path, tmp_path: Path) -> None:
    state = dict(trained[0].state_dict())
    older = {name: tensor * 2 for name, tensor in state.items()}
    torch.save({"model": state, "ema": older}, tmp_path / "ema.pt")
    torch.save(lightning(begin_with("net.", state) | {"loss.weight": torch.ones(3)}, trained[1]), tmp_path / "a.ckpt")
    shared = begin_with("encoder.", state) | begin_with("model.", state)  # self.encoder = self.model
    torch.save(lightning(shared, trained[1]), tmp_path / "shared.ckpt")
    out = tmp_path / "out"
    refusal(convert, tmp_path / "ema.pt", out, config_from=config, says=["--prefix", "ema., model."])
    refusal(convert, tmp_path / "a.ckpt", out, config_from=config, says=["net.*", "--prefix net"])
    refusal(convert, tmp_path / "a.ckpt", out, config_from=config, prefix="nett", says=["nett.", "loss., net."])
    refusal(convert, tmp_path, out, config_from=config, says=["ema.pt", "a.ckpt", "shared.ckpt"])
    files = {"ema": "ema.pt", "model.": "ema.pt", "net": "a.ckpt", "model": "shared.ckpt"}
    for prefix, name in files.items():
        convert(tmp_path / name, tmp_path / f"out-{prefix}", config_from=config, prefix=prefix)
        assert_same(read_folder(tmp_path / f"out-{prefix}"), older if prefix == "ema" else state)


def test_a_pickled_module_is_refused(tmp_path: Path, fault: Fault) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "whole.pt")
    says = ["torch.nn.modules.linear.Linear", "state_dict()"]
    message = refusal(convert, tmp_path / "whole.pt", tmp_path / "out", says=says)
    fault("a file holds a whole pickled module, not its weights", message, "nothing: no code of it runs")


def test_trainers_output_folder(trained: Any, tmp_path: Path) -> None:
    model, optimizer = trained
    for step in (500, 1000):
        model.save_pretrained(tmp_path / "run" / f"checkpoint-{step}")
        torch.save(optimizer.state_dict(), tmp_path / "run" / f"checkpoint-{step}" / "optimizer.pt")
    refusal(convert, tmp_path / "run", tmp_path / "out", says=["checkpoint-500,", "checkpoint-1000"])
    shutil.rmtree(tmp_path / "run" / "checkpoint-500")
    convert(tmp_path / "run", tmp_path / "out")
    assert_same(read_folder(tmp_path / "out"), load_file(tmp_path / "run" / "checkpoint-1000" / "model.safetensors"))


def test_a_foreign_adapter(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A classifier's, on a language model: its config has no labels."""
    peft = pytest.importorskip("peft")
    from transformers import AutoConfig, AutoModelForSequenceClassification, BertForMaskedLM

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    base, adapter, out = tmp_path / "base", tmp_path / "adapter", tmp_path / "out"
    BertForMaskedLM(AutoConfig.from_pretrained(tiny_model)).save_pretrained(base)
    plain = AutoModelForSequenceClassification.from_pretrained(base, num_labels=4)
    options = {"task_type": "SEQ_CLS", "r": 2, "target_modules": ["query", "word_embeddings"]}
    live = peft.get_peft_model(plain, peft.LoraConfig(init_lora_weights=False, **options))
    live.save_pretrained(adapter, save_embedding_layers=False)
    torch.save(theirs := load_file(adapter / "adapter_model.safetensors"), tmp_path / "lora.pt")
    convert(tmp_path / "lora.pt", tmp_path / "again", config_from=adapter)
    assert_same(read_folder(tmp_path / "again"), theirs)
    refusal(convert, adapter, out, says=["--merge_lora", "--base_model"])
    refusal(convert, adapter, out, merge_lora=True, says=[str(base), "--base_model"])
    convert(adapter, out, merge_lora=True, base_model=base)
    actual, expected = read_folder(out), live.merge_and_unload().state_dict()
    assert set(expected) - set(actual) == {"bert.pooler.dense.weight", "bert.pooler.dense.bias"}  # in neither file
    assert all(torch.allclose(tensor, expected[name], atol=1e-6) for name, tensor in actual.items())
    written = AutoConfig.from_pretrained(out)
    assert (written.architectures, written.num_labels) == (["BertForSequenceClassification"], 4)


@pytest.mark.parametrize(
    "files", [["latest", "global_step2/mp_rank_00_model_states.pt"], ["zero_pp_rank_0_mp_rank_00_model_states.pt"],
              ["checkpoint-500/config.json"], ["pytorch_model_fsdp_0/.metadata"], [".metadata"], ["last.ckpt"],
              ["adapter_config.json"]],
)  # fmt: skip
def test_a_checkpoint_is_not_a_model(files: list[str], tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    for path in (tmp_path, *tmp_path.glob("*.ckpt")):
        settings = PretrainedSettings(model_name_or_path=str(path))
        refusal(load_config, settings, says=["--model_name_or_path", f"toolkit convert {path} OUT"])
