"""What a model's config tells about its parameters, without the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.handmade import write_run
from tests.checkpoint.test_convert import convert
from toolkit.checkpoint.convert.command import parse_size
from toolkit.checkpoint.convert.model_files import check_config
from toolkit.checkpoint.convert.transfer import Output, into_shards
from toolkit.checkpoint.reader import TensorIndex
from toolkit.errors import UserError

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


def faults(shapes: dict[str, tuple[int, ...]], **config: Any) -> str:
    try:
        check_config(shapes, {**CONFIG, **config}, Path("c/config.json"), "ckpt")
    except UserError as error:
        return str(error)
    return ""


def without(*names: str) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape in SHAPES.items() if name not in names}


def test_what_fits_passes() -> None:
    assert faults(SHAPES) == ""


def test_what_is_missing_or_left_over_is_named() -> None:
    whole = without(*(name for name in SHAPES if ".layer.1." in name))
    assert "holds the layers 0, and c/config.json has num_hidden_layers = 2" in faults(whole)
    assert "holds the layers 0, 1, and c/config.json has num_hidden_layers = 1" in faults(SHAPES, num_hidden_layers=1)
    assert "lacks embeddings.word_embeddings.weight" in faults(without("bert.embeddings.word_embeddings.weight"))
    assert "lacks classifier.weight" in faults(without("classifier.weight"))


def test_what_has_other_sizes_is_named() -> None:
    assert "position_embeddings.weight with 8 rows, and c/config.json has max_position_embeddings = 512" in faults(
        SHAPES, max_position_embeddings=512
    )
    assert "classifier.weight with 2 rows, and c/config.json has 3 labels" in faults(
        SHAPES, id2label={"0": 1, "1": 2, "2": 3}
    )


def test_unknown_models_are_not_judged_by_berts_rules() -> None:
    assert faults({"x": (1,)}, model_type="mamba", architectures=["MambaModel"]) == ""


@pytest.mark.parametrize(("content", "message"), [("{", "is not JSON"), ('{"world": 2}', "has no model_type")])
def test_a_file_that_is_no_models_config(content: str, message: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"a": torch.ones(2)})
    other = tmp_path / "other"
    (other / "model").mkdir(parents=True)
    (other / "config.json").write_text(content)
    (other / "model" / "config.json").write_text("{}")
    with pytest.raises(UserError, match=message) as caught:
        convert(run, tmp_path / "out", config_from=other)
    if "model_type" in message:
        assert f"did you mean {other / 'model'}?" in str(caught.value)


def test_what_is_copied_and_what_stays(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"a": torch.ones(2)})
    names = ["tokenizer.json", "vocab.txt", "merges.txt", "special_tokens_map.json", "spiece.model"]
    for name in [*names, "optimizer.pt", "training_args.bin", "model.safetensors.index.json", "README.md"]:
        (run / "model" / name).write_text("{}")
    (run / "model" / "config.json").write_text(json.dumps({"model_type": "new", "torch_dtype": "float64"}))
    convert(run, tmp_path / "out", dtype="fp16")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*names, "config.json", "model.safetensors"}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {"model_type": "new", "torch_dtype": "float16", "dtype": "float16"}


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("1.5 MB", 1_500_000), ("2GiB", 2**31), ("7000000", 7_000_000), ("10kb", 10_000)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0", "5XB", "5GBs"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UserError, match="--max_shard_size"):
        parse_size(text)


def test_shards_are_no_larger_than_asked() -> None:
    outputs = [Output(f"x.{size}", TensorIndex("", (size,), "F32", ()), "F32") for size in (10, 10, 50, 5, 5, 5)]
    shards = into_shards(outputs, 80)
    assert [[output.stored.count for output in shard.outputs] for shard in shards] == [[10, 10], [50], [5, 5, 5]]
    assert [shard.name for shard in shards] == [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert len(into_shards(outputs, 10**6)) == 1
