"""The safetensors library reads what is written tensor by tensor; the digest is that of the file.
(Promise 4.)"""

from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import load_file

from toolkit.checkpoint.safetensors_writer import Shapes, file_order, write_safetensors
from toolkit.errors import UserError


def test_the_library_reads_each_dtype_and_shape(tmp_path: Path) -> None:
    tensors = {
        "a flag": torch.tensor([True, False, True]),
        "权重": torch.randn(3, 5),
        "half": torch.randn(7).bfloat16(),
        "count": torch.tensor(12, dtype=torch.int64),
        "step": torch.tensor(3.0),
        "nothing": torch.empty(0, 4),
        "transposed": torch.randn(4, 2).T,
    }
    shapes: Shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    path = tmp_path / "x.safetensors"
    digest = write_safetensors(path, shapes, ([tensors[name]] for name in file_order(shapes)))
    read = load_file(path)
    torch.testing.assert_close(read, tensors, rtol=0, atol=0)
    assert digest == xxhash.xxh3_128_hexdigest(path.read_bytes())


def test_a_file_that_is_not_what_its_header_says_is_an_error(tmp_path: Path) -> None:
    shapes: Shapes = {"a": (torch.float32, (2,)), "b": (torch.float32, (1,))}
    wrong = ([torch.zeros(2)], [torch.zeros(3), torch.zeros(1)])
    for number, tensor in enumerate(wrong):
        with pytest.raises(ValueError, match=r"a in|shorter"):
            write_safetensors(tmp_path / str(number), shapes, [tensor])
    with pytest.raises(UserError, match="weight"):
        write_safetensors(tmp_path / "x", {"weight": (torch.complex64, (1,))}, [])
