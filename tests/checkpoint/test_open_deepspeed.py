"""`open_checkpoint` of DeepSpeed's files gives what was in memory, bit for bit."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.conftest import Made, names
from toolkit.checkpoint.read.open import open_checkpoint
from toolkit.checkpoint.tensor_index import CheckpointReader, TensorIndex

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64}

pytestmark = pytest.mark.multiprocess


def tensor_of(stored: TensorIndex) -> torch.Tensor:
    content = stored.read()
    empty = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
    return torch.frombuffer(content, dtype=empty.dtype).view(stored.shape) if content else empty


def everything_of(reader: CheckpointReader) -> dict[str, TensorIndex]:
    """By the reference file's names."""
    actual = {f"weight.{name}": stored for name, stored in reader.weights.items()}
    actual |= {f"buffer.{name}": stored for name, stored in reader.buffers.items()}
    for name, moments in reader.optimizer_state.items():
        actual |= {f"{key}.{name}": stored for key, stored in moments.items()}
    return actual


def read_reference(made: Made) -> dict[str, torch.Tensor]:
    truth = load_file(made.reference)
    trained = {name.replace("exp_avg.", "weight.", 1) for name in truth if name.startswith("exp_avg.")}
    frozen = {name for name in truth if name.startswith("weight.")} - trained - {"weight.nothing"}
    return {name: tensor for name, tensor in truth.items() if not (made.kind.exclude and name in frozen)}


@pytest.mark.parametrize("name", names())
def test_every_tensor_is_that_in_memory(made: Made) -> None:
    reader = open_checkpoint(made.folder)
    actual, expected = everything_of(reader), read_reference(made)
    assert set(actual) == set(expected)
    for key, tensor in expected.items():
        read = tensor_of(actual[key])
        assert read.dtype == tensor.dtype, key
        assert torch.equal(read, tensor), key
    assert (reader.world, reader.step) == (made.world, 2)
    assert reader.strategy == (f"zero{made.kind.stage}" if made.kind.stage else "ddp" if made.world > 1 else "single")
    assert reader.engine_dtype == {"bf16": "BF16", "fp16": "F16"}.get(made.kind.options[:4], "F32")
    assert reader.tied == ({} if made.kind.bert or made.kind.exclude else {"head.weight": "embed.weight"})
    if made.kind.stage:
        trained = {name for name in reader.weights if name not in reader.frozen}
        assert trained == set(reader.optimizer_state) == set(reader.step_counts())
        assert set(reader.step_counts().values()) == {2.0}
    for stored in actual.values():
        assert sum(span.count for span in stored.spans) == math.prod(stored.shape)


def test_the_config_next_to_latest(deepspeed_checkpoints: dict[str, Made], tmp_path: Path) -> None:
    shutil.copytree(deepspeed_checkpoints["zero2-bf16 x2"].folder, tmp_path / "saved")
    assert open_checkpoint(tmp_path / "saved").model_folder is None
    (tmp_path / "saved" / "config.json").write_text("{}")
    assert open_checkpoint(tmp_path / "saved").model_folder == tmp_path / "saved"
    tag = open_checkpoint(tmp_path / "saved" / "global_step2")
    assert (tag.model_folder, tag.weights) == (tmp_path / "saved", open_checkpoint(tmp_path / "saved").weights)
