"""`open_checkpoint` of a run's checkpoints, and of DeepSpeed's, accelerate's, FSDP's and Hugging Face's files."""

import json
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model

from tests.checkpoint.conftest import Made, names
from tests.checkpoint.handmade import assert_same, write_manifest, write_run, write_tensors
from tests.checkpoint.test_damaged import fault_of
from tests.faults import refusal
from tests.runs import groups
from toolkit.checkpoint.read.open import open_checkpoint
from toolkit.checkpoint.tensor_index import TensorIndex
from toolkit.config import PretrainedSettings
from toolkit.pretrained import load_config

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64}
WEIGHTS = {"a.weight": torch.arange(21.0).view(7, 3), "a.bias": torch.arange(7.0), "scale": torch.tensor([2.5])}


@pytest.fixture(scope="module")
def accelerates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("accelerate")
    groups("tests.checkpoint.accelerate_worker", {2: [folder]})
    return folder


def tensor_of(stored: TensorIndex) -> torch.Tensor:
    content = stored.read()
    empty = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
    return torch.frombuffer(content, dtype=empty.dtype).view(stored.shape) if content else empty


def read_reference(made: Made) -> dict[str, torch.Tensor]:
    truth = load_file(f"{made.folder}.safetensors")
    absent = ("step.", "frozen.") if made.kind.exclude else ("step.",)
    return {key.replace("frozen.", "weight.", 1): truth[key] for key in truth if not key.startswith(absent)}


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", names())
def test_every_tensor_is_that_in_memory(made: Made) -> None:
    reader = open_checkpoint(made.folder)
    kinds = {name: "buffer" if name in reader.buffers else "weight" for name in reader.weights}
    actual = {f"{kinds[name]}.{name}": stored for name, stored in reader.weights.items()}
    for name, moments in reader.optimizer_state.items():
        actual |= {f"{key}.{name}": stored for key, stored in moments.items()}
    same(actual, read_reference(made))
    assert (reader.world, reader.step) == (made.world, 2)
    assert reader.strategy == (f"zero{made.kind.stage}" if made.kind.stage else "ddp" if made.world > 1 else "single")
    assert reader.engine_dtype == {"bf16": "BF16", "fp16": "F16"}.get(made.kind.options[:4], "F32")
    assert reader.tied == ({} if made.kind.bert or made.kind.exclude else {"head.weight": "embed.weight"})
    if made.kind.stage:
        trained = {name for name in reader.weights if name not in reader.frozen | reader.buffers}
        assert trained == set(reader.optimizer_state) == set(reader.step_counts())
        assert set(reader.step_counts().values()) == {2.0}
    for stored in actual.values():
        assert sum(span.count for span in stored.spans) == math.prod(stored.shape)


@pytest.mark.multiprocess
def test_the_config_next_to_latest(deepspeed_checkpoints: dict[str, Made], tmp_path: Path) -> None:
    shutil.copytree(deepspeed_checkpoints["zero2-bf16 x2"].folder, tmp_path / "saved")
    assert open_checkpoint(tmp_path / "saved").model_folder is None
    (tmp_path / "saved" / "config.json").write_text("{}")
    assert open_checkpoint(tmp_path / "saved").model_folder == tmp_path / "saved"
    tag = open_checkpoint(tmp_path / "saved" / "global_step2")
    assert (tag.model_folder, tag.weights) == (tmp_path / "saved", open_checkpoint(tmp_path / "saved").weights)


def same(stored: Mapping[str, TensorIndex], truth: Mapping[str, torch.Tensor]) -> None:
    assert_same({name: tensor_of(tensor) for name, tensor in stored.items()}, truth)


def write_whole(folder: Path, step: int = 4) -> Path:
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text("{}")
    moments = {f"{key}.{name}": tensor + step for name, tensor in WEIGHTS.items() for key in ("exp_avg", "exp_avg_sq")}
    steps = {f"step.{name}": torch.tensor(float(step)) for name in WEIGHTS}
    write_tensors(folder / "optimizer.safetensors", {**moments, **steps})
    return write_run(folder, {**WEIGHTS, "count": torch.tensor(5)}, buffers=["count"], step=step)


def write_slices(folder: Path, cut: int, steps: tuple[float, float] = (4.0, 4.0)) -> Path:
    """Two ranks' files; the first has `cut` elements of each tensor."""
    folder.mkdir(parents=True)
    for rank in range(2):
        tensors, places = {}, {}
        for name, tensor in WEIGHTS.items():
            start = min(cut, tensor.numel()) if rank else 0
            part = tensor.flatten()[start:] if rank else tensor.flatten()[:cut]
            for key in ("weight", "exp_avg", "exp_avg_sq"):
                tensors[f"{key}.{name}"] = part.clone()
                places[f"{key}.{name}"] = {"shape": list(tensor.shape), "start": start}
            tensors[f"step.{name}"] = torch.tensor([steps[rank]])
        write_tensors(folder / f"slices-rank-{rank:05d}.safetensors", tensors, slices=json.dumps(places))
    return write_manifest(folder, state="slices", strategy="fsdp2", world=2, step=4)


@pytest.mark.parametrize("cut", [0, 1, 4, 7, 20, 21])
def test_slices_are_joined(cut: int, tmp_path: Path) -> None:
    reader = open_checkpoint(write_slices(tmp_path / "step-00000004", cut))
    same(reader.weights, WEIGHTS)
    same({name: state["exp_avg_sq"] for name, state in reader.optimizer_state.items()}, WEIGHTS)
    assert reader.step_counts() == dict.fromkeys(WEIGHTS, 4.0)


def test_slices_that_do_not_fit(tmp_path: Path) -> None:
    good = write_slices(tmp_path / "good", 4)
    other = write_slices(tmp_path / "other", 5)
    shutil.copy(other / "slices-rank-00001.safetensors", good)
    write_manifest(good, state="slices", world=2, step=4)
    assert "slices-rank-0000" in fault_of(good)
    (good / "slices-rank-00001.safetensors").unlink()
    write_manifest(good, state="slices", world=2, step=4)
    assert "of 2 processes" in fault_of(good)
    write_manifest(good, state="slices", world=1, step=4)
    assert str(good) in fault_of(good)
    one, other = write_slices(tmp_path / "a", 4, (4.0, 3.0)), write_slices(tmp_path / "b", 4, (9.0, 9.0))
    fault_of(one, "slices-rank-00001.safetensors and ", "optimizer step (3.0 and 4.0)")
    fault_of(other, "of step 9")


def test_the_newest_complete_one_and_the_links(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (2, 10, 9):
        write_whole(run / "checkpoints" / f"step-{step:08d}", step)
    (run / "checkpoints" / "step-00000011").mkdir()  # the run was killed inside this save
    (run / "checkpoints" / "best").symlink_to("step-00000002")
    (run / "checkpoints" / "last").symlink_to("step-00000010")
    for path, step in (("", 10), ("checkpoints", 10), ("checkpoints/best", 2), ("checkpoints/last", 10)):
        assert open_checkpoint(run / path).step == step
    assert "manifest.json" in fault_of(run / "checkpoints" / "step-00000011")


def test_files_are_compared_with_the_manifest(tmp_path: Path) -> None:
    folder = write_whole(tmp_path / "step-00000004")
    for name in ("weights.safetensors", "optimizer.safetensors", "model/config.json"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:-1])
        assert name in fault_of(folder)
        (folder / name).unlink()
        assert name in fault_of(folder)
        (folder / name).write_bytes(content)
    (folder / "model" / "config.json").write_text("[]")  # of the same size
    assert "model/config.json" in fault_of(folder)
    (folder / "manifest.json").write_text("{}")
    assert "manifest.json" in fault_of(folder)


@pytest.mark.multiprocess
def test_accelerate_save_state(accelerates: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(accelerates / "ddp", tmp_path / "saved")
    truth = load_file(folder / "truth.safetensors")
    del truth["head.weight"]  # tied; accelerate omits it from safetensors
    for kind in ("safe", "bin"):
        reader = open_checkpoint(folder / kind)
        same(reader.weights, truth)
        assert reader.tied == ({"head.weight": "embed.weight"} if kind == "bin" else {})
        assert not reader.optimizer_state  # it has no names
        assert (reader.strategy, reader.world) == ("ddp", 2)
    (folder / "bin" / "pytorch_model_1.bin").write_bytes(b"")
    assert "several models" in fault_of(folder / "bin")


@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_fsdp(kind: str, accelerates: Path) -> None:
    reader = open_checkpoint(accelerates / "fsdp" / kind)
    same(reader.weights, load_file(accelerates / "fsdp" / "truth.safetensors"))
    assert reader.strategy == "fsdp2"


@pytest.mark.multiprocess
def test_damaged_fsdp(accelerates: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(accelerates / "fsdp" / "sharded", tmp_path / "saved")
    for file in sorted((folder / "pytorch_model_fsdp_0").iterdir()):
        content = file.read_bytes()
        for size in (0, 100, len(content) - 1):
            file.write_bytes(content[:size])
            assert str(file) in fault_of(folder), size
        file.unlink()
        assert str(file) in fault_of(folder)
        file.write_bytes(content)
    open_checkpoint(folder)
    (folder / "pytorch_model_fsdp_1").mkdir()
    assert "several models (also pytorch_model_fsdp_1)" in fault_of(folder)
    (folder / "pytorch_model_fsdp_1").rmdir()
    shutil.rmtree(folder / "pytorch_model_fsdp_0")
    (folder / "pytorch_model_fsdp_0_rank0.bin").write_bytes(b"")
    assert "SHARDED_STATE_DICT" in fault_of(folder)


def test_tied_names_in_safetensors_metadata(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    save_model(model, str(tmp_path / "model.safetensors"))
    reader = open_checkpoint(tmp_path)
    assert set(reader.weights) | set(reader.tied) == {"a.weight", "a.bias", "b.weight", "b.bias"}
    assert set(reader.tied.values()) < set(reader.weights)


def test_tied_weights_in_shards_of_torch_save(tmp_path: Path) -> None:
    """As zero_to_fp32.py and older versions of transformers write them."""
    weight = torch.ones(3)
    torch.save({"a": weight, "b": weight}, tmp_path / "pytorch_model-00001-of-00001.bin")
    index = {"weight_map": dict.fromkeys("ab", "pytorch_model-00001-of-00001.bin")}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert open_checkpoint(tmp_path).tied == {"b": "a"}


def test_hugging_face(tiny_model: Path, tmp_path: Path) -> None:
    truth = load_file(tiny_model / "model.safetensors")
    reader = open_checkpoint(tiny_model)
    same(reader.weights, truth)
    assert (reader.strategy, reader.step, reader.model_folder) == ("model", None, tiny_model)
    from transformers import AutoModel

    model = AutoModel.from_pretrained(tiny_model)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    same(open_checkpoint(tmp_path / "sharded").weights, truth)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_clone_without_git_lfs(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 134695774\n")
    assert f"{tmp_path / name} is a Git LFS pointer" in fault_of(tmp_path)
    model = PretrainedSettings(model_name_or_path=str(tmp_path))
    refusal(load_config, model, says=[f"{tmp_path / name} is a Git LFS pointer", "git lfs pull"])


def test_damaged_hugging_face(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    for content in ("", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": "../../etc/passwd"}}'):
        index.write_text(content)
        assert str(index) in fault_of(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    assert "one.safetensors, two.safetensors" in fault_of(tmp_path)
    save_file({"a": torch.ones(3)}, tmp_path / "one.safetensors")
    save_file({"a": torch.ones(3)}, tmp_path / "two.safetensors")
    assert re.search(r"two\.safetensors: a .*another file", fault_of(tmp_path))
    save_file({"c": torch.ones(3)}, tmp_path / "two.safetensors")
    assert "index.json names b" in fault_of(tmp_path)
    (tmp_path / "one.safetensors").write_bytes(b"\xff" * 20)
    assert "one.safetensors" in fault_of(tmp_path)


@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.safetensors"])
def test_a_file_of_another_save_is_refused(name: str, tmp_path: Path) -> None:
    """It has the same size and valid checksums."""
    folder, other = write_whole(tmp_path / "one", 4), write_whole(tmp_path / "other", 2)
    (other / "weights.safetensors").unlink()
    tensors = {key: value + 1 for key, value in WEIGHTS.items()}
    write_tensors(other / "weights.safetensors", {**tensors, "count": torch.tensor(5)}, format="pt")
    assert (folder / name).stat().st_size == (other / name).stat().st_size
    (folder / name).write_bytes((other / name).read_bytes())
    refusal(open_checkpoint, folder, match=rf"{name} and .*manifest.json differ")
