"""The safetensors library reads what is written tensor by tensor; the digest is that of the file. (Promise 4.)"""

import pytest
import torch
import xxhash
from safetensors.torch import load_file

from toolkit.checkpoint.safetensors_writer import SafetensorsWriter
from toolkit.errors import UserError


def write(path, tensors):
    shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    with SafetensorsWriter(path, shapes) as file:
        for name in file.names:
            file.write(name, tensors[name])
    return file.digest


def test_the_library_reads_each_dtype_and_shape(tmp_path):
    tensors = {
        "a flag": torch.tensor([True, False, True]),
        "权重": torch.randn(3, 5),
        "half": torch.randn(7).bfloat16(),
        "count": torch.tensor(12, dtype=torch.int64),
        "step": torch.tensor(3.0),
        "nothing": torch.empty(0, 4),
        "transposed": torch.randn(4, 2).T,
    }
    digest = write(tmp_path / "x.safetensors", tensors)
    read = load_file(tmp_path / "x.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(read[name], tensor)
        assert read[name].dtype == tensor.dtype
    assert digest == xxhash.xxh3_128_hexdigest((tmp_path / "x.safetensors").read_bytes())


def test_a_file_that_is_not_what_its_header_says_is_an_error(tmp_path):
    shapes = {"a": (torch.float32, (2,)), "b": (torch.float32, (1,))}
    with (
        pytest.raises(ValueError, match="b was not written"),
        SafetensorsWriter(tmp_path / "1", shapes) as file,
    ):
        file.write("a", torch.zeros(2))
    with (
        pytest.raises(ValueError, match="expected a"),
        SafetensorsWriter(tmp_path / "2", shapes) as file,
    ):
        file.write("a", torch.zeros(3))
    with pytest.raises(UserError, match="weight has the dtype"):
        SafetensorsWriter(tmp_path / "3", {"weight": (torch.complex64, (1,))})
