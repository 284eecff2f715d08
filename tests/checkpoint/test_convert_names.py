"""Which tensors are written under which names, from handmade checkpoints; casts give torch's bits."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoint.handmade import assert_same, read_folder, write_run
from tests.checkpoint.test_convert import convert
from tests.faults import refusal
from toolkit.checkpoint.convert import model_files
from toolkit.checkpoint.convert.casts import narrow, widen
from toolkit.checkpoint.convert.model_files import check_config, verify_names
from toolkit.commands.convert import parse_size

HEAD = {"classifier.weight": torch.randn(3, 5)}
BASE = {"embeddings.weight": torch.randn(7, 5), "dense.bias": torch.randn(5)}
EXCLUDED = {f"bert.{name}": list(tensor.shape) for name, tensor in BASE.items()}

CONFIG = {
    "model_type": "bert", "num_hidden_layers": 2, "vocab_size": 9, "max_position_embeddings": 8, "type_vocab_size": 2,
    "architectures": ["BertForSequenceClassification"], "id2label": {"0": "a", "1": "b"},
}  # fmt: skip
SHAPES = {
    "bert.embeddings.word_embeddings.weight": (9, 4),
    "bert.embeddings.position_embeddings.weight": (8, 4),
    **{f"bert.encoder.layer.{layer}.{part}": (4,) for layer in range(2) for part in ("a.weight", "a.bias", "b.bias")},
    "classifier.weight": (2, 4),
}


def check(shapes: dict[str, tuple[int, ...]], **config: Any) -> None:
    check_config(shapes, {**CONFIG, **config}, Path("c/config.json"), "ckpt")


def without(*names: str) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape in SHAPES.items() if name not in names}


def test_what_is_missing_or_left_over_is_named() -> None:
    check(SHAPES)
    check({"x": (1,)}, model_type="mamba", architectures=["MambaModel"])  # not judged by BERT's rules
    whole = without(*(name for name in SHAPES if ".layer.1." in name))
    refusal(check, whole, says=["has the layers 0, and c/config.json has num_hidden_layers = 2"])
    check(SHAPES, num_hidden_layers=None)
    says = ["has the layers 0, 1, and c/config.json has num_hidden_layers = 1"]
    refusal(check, SHAPES, num_hidden_layers=1, says=says)
    words = without("bert.embeddings.word_embeddings.weight")
    refusal(check, words, match="lacks embeddings.word_embeddings.weight")
    refusal(check, without("classifier.weight"), match="lacks classifier.weight")

    says = ["classifier.weight of shape [2, 4], and c/config.json has 3 labels"]
    refusal(check, SHAPES, id2label={"0": 1, "1": 2, "2": 3}, says=says)
    says = ["score.weight of shape [3, 4], and c/config.json has 2 labels"]
    refusal(check, {"score.weight": (3, 4)}, says=says, lines=4)

    averaged = {"n_averaged": (), **{f"module.{name}": shape for name, shape in SHAPES.items()}}
    refusal(check, averaged, architectures=["BertForMaskedLM"], says=["--prefix module"])
    backbone = {name.replace("bert.", "backbone."): shape for name, shape in SHAPES.items()}
    refusal(check, backbone, architectures=["BertModel"], says=["--prefix backbone"])
    check(backbone, architectures=["MyClassifier"])  # its own names


def test_constants_of_older_transformers_are_no_difference(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built = json.dumps({"class": "BertModel", "shapes": {"a": [2]}, "tied": []})
    monkeypatch.setattr(model_files.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=built))
    assert "of BertModel" in verify_names(tmp_path, {"a": (2,), "embeddings.position_ids": (1, 512)}, ())


@pytest.mark.parametrize(("content", "message"), [("{", "is not JSON"), ('{"world": 2}', "has no model_type")])
def test_a_file_that_is_no_models_config(content: str, message: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"a": torch.ones(2)})
    other = tmp_path / "other"
    (other / "model").mkdir(parents=True)
    (other / "config.json").write_text(content)
    (other / "model" / "config.json").write_text("{}")
    answer = refusal(convert, run, tmp_path / "out", config_from=other, match=message)
    if "model_type" in message:
        assert f"did you mean {other / 'model'}?" in answer


def test_what_is_copied_and_what_stays(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"a": torch.ones(2)})
    names = ["tokenizer.json", "vocab.txt", "merges.txt", "special_tokens_map.json", "spiece.model", "spm.model",
             "modules.json", "sentence_xlm-roberta_config.json", "1_Pooling/config.json", "2_Dense/model.safetensors",
             "2_Dense/config.json"]  # fmt: skip
    for name in ("1_Pooling", "2_Dense"):  # of sentence-transformers, which modules.json names
        (run / "model" / name).mkdir()
    for name in [*names, "optimizer.pt", "training_args.bin", "model.safetensors.index.json", "README.md"]:
        (run / "model" / name).write_text("{}")
    (run / "model" / "config.json").write_text(json.dumps({"model_type": "new", "torch_dtype": "float64"}))
    for overwrite in (False, True):  # it removes what it has written
        convert(run, tmp_path / "out", dtype="fp16", overwrite=overwrite)
    files = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert files == {*names, "config.json", "model.safetensors"}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {"model_type": "new", "torch_dtype": "float16", "dtype": "float16"}
    # decisions of other weights are not copied
    (other := tmp_path / "other").mkdir()
    (other / "2_Dense").mkdir()
    for name in ("config.json", "decisions.json", "2_Dense/model.safetensors"):
        (other / name).write_text('{"model_type": "new"}')
    lines = convert(write_run(tmp_path / "bare", HEAD), tmp_path / "new", config_from=other)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["2_Dense", "config.json", "model.safetensors"]
    assert f"2_Dense/model.safetensors of {other} is copied with its own weights" in lines[0]


def test_sizes() -> None:
    sizes = {"5GB": 5 * 10**9, "1.5 MB": 1_500_000, "2GiB": 2**31, "7000000": 7_000_000, "10kb": 10_000}
    assert {text: parse_size(text) for text in sizes} == sizes
    for text in ("", "GB", "-1GB", "0", "5XB", "5GBs"):
        refusal(parse_size, text, match="--max_shard_size")


def base_folder(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_excluded_parameters_come_from_the_base_model(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", HEAD, excluded=EXCLUDED)
    base = base_folder(tmp_path / "base", {**BASE, "pooler.bias": torch.ones(2)})
    convert(run, tmp_path / "out", base_model=base, verify=True)
    # no pooler, which the run's model lacks
    assert_same(read_folder(tmp_path / "out"), HEAD | {f"bert.{name}": tensor for name, tensor in BASE.items()})
    # a run's base model is used if it is a folder
    (base / "config.json").write_text('{"model_type": "bert"}')
    convert(write_run(tmp_path / "named", HEAD, excluded=EXCLUDED, base_model=str(base)), tmp_path / "from the run")
    assert set(read_folder(tmp_path / "from the run")) == {*HEAD, *EXCLUDED}
    short = base_folder(tmp_path / "short", {"embeddings.weight": BASE["embeddings.weight"]})
    refusal(convert, run, tmp_path / "none", base_model=short, match=r"lacks 1 of the 2 parameters .*bert.dense.bias")
    other = base_folder(tmp_path / "other", {**BASE, "dense.bias": torch.ones(6)})
    refusal(convert, run, tmp_path / "none", base_model=other, match=r"bert.dense.bias has shape \[6\]")
    assert not (tmp_path / "none").exists()


TIED = {"tied": {"cls.weight": "bert.weight"}, "excluded": {"bert.weight": [2, 3]}}


@pytest.mark.parametrize(
    ("tensors", "manifest", "options", "match"),
    [
        ({"a.b": [1], "_orig_mod.a.b": [1]}, {}, {}, "several tensors of one name: a.b"),
        ({"a": [1]}, {}, {"merge_lora": True}, "has no LoRA adapter: drop --merge_lora"),
        ({"a": [5], "large.b": [1, 7e4]}, {}, {"dtype": "fp16"}, "large.b .* f16: .*--dtype bf16"),
        ({"a": [1]}, {"excluded": EXCLUDED}, {}, "lacks 2 frozen parameters .*--base_model"),
        ({"cls.bias": [1]}, TIED, {"prefix": "cls"}, r"lacks 1 frozen parameters \(weight\): .*--base_model"),
    ],
)
def test_what_is_refused(tensors: Any, manifest: Any, options: Any, match: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {name: torch.tensor(each, dtype=torch.float32) for name, each in tensors.items()},
                    **manifest)  # fmt: skip
    refusal(convert, run, tmp_path / "out", match=match, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_integers_and_buffers_stay(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(5), "ids": torch.arange(9), "mask": torch.tensor([True, False]),
               "double": torch.randn(3, dtype=torch.float64), "none": torch.empty(0, 4)}  # fmt: skip
    convert(write_run(tmp_path / "run", tensors), tmp_path / "out", dtype="bf16", verify=True)
    expected = {name: each.float().bfloat16() if each.is_floating_point() else each for name, each in tensors.items()}
    assert_same(read_folder(tmp_path / "out"), expected)


ALL_HALVES = np.arange(1 << 16, dtype=np.uint16)
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def patterns() -> np.ndarray:
    """fp32 bit patterns: all bf16 ones with every interesting tail, ties on both sides, and random ones."""
    tails = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
    exact = (ALL_HALVES.astype(np.uint32) << 16)[None] | np.array(tails, np.uint32)[:, None]
    return np.concatenate([exact.ravel(), np.random.default_rng(0).integers(0, 1 << 32, 100_003, dtype=np.uint32)])


def tensor_of(bits: np.ndarray, dtype: str) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16 if bits.itemsize == 2 else np.int32)).view(DTYPES[dtype])


def cast(tensor: torch.Tensor, source: str, target: str) -> torch.Tensor:
    done = narrow(widen(memoryview(tensor.view(torch.uint8).numpy().tobytes()), source), target)
    return tensor_of(np.frombuffer(done, np.uint32 if target == "F32" else np.uint16).copy(), target)


@pytest.mark.parametrize(
    ("source", "target"), [("F32", "BF16"), ("F32", "F16"), ("BF16", "F32"), ("F16", "F32"), ("BF16", "F16")]
)
def test_casts_are_torchs_to_the_bit(source: str, target: str) -> None:
    """Except a NaN's payload (the sign stays), and numbers that become infinite in fp16: they are refused."""
    values = tensor_of(patterns() if source == "F32" else ALL_HALVES, source)
    expected = values.to(DTYPES[target])
    numbers = ~values.isnan() & ~(expected.isinf() & ~values.isinf() if target == "F16" else torch.zeros(1).bool())
    assert torch.equal(cast(values[numbers], source, target).view(torch.uint8), expected[numbers].view(torch.uint8))
    nans = cast(values[values.isnan()], source, target)
    assert nans.isnan().all()
    assert torch.equal(nans.signbit(), values[values.isnan()].signbit())
