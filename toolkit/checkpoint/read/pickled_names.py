"""The globals that checkpoints of torch, DeepSpeed and torch.distributed.checkpoint name in their pickles,
each with the inert value that is made of it here. Nothing else is accepted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from toolkit.checkpoint.read.unpickle import MalformedError, Name, Thing, call
from toolkit.checkpoint.reader import ITEM_BYTES

_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
_STORAGES = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}  # fmt: skip
_UNTYPED = "torch.storage.UntypedStorage"
STORAGE_NAMES = {dtype: name for name, dtype in _STORAGES.items()}
"""Of torch's class, by dtype."""


@dataclass(frozen=True, eq=False)
class Storage:
    """The bytes that tensors are views of: a member of the zip file."""

    key: str
    """The member's name under `data/`."""
    dtype: str | None
    """A key of `ITEM_BYTES`; None where each view says it."""
    count: int
    """Elements, or bytes where there is no dtype."""

    @property
    def size(self) -> int:
        """Bytes."""
        return self.count * (ITEM_BYTES[self.dtype] if self.dtype else 1)


@dataclass(frozen=True, eq=False)
class Tensor:
    """A view of a storage."""

    storage: Storage
    dtype: str
    offset: int
    """Elements from the storage's beginning."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def contiguous(self) -> bool:
        """Whether its elements follow one another in row-major order."""
        expected = 1
        for length, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if length != 1 and step != expected:
                return self.count == 0
            expected *= length
        return True


def storage_of(identity: Any) -> Storage:
    """torch's persistent id: ("storage", class, key, device, elements)."""
    kind, cls, key, _, count = identity
    if kind != "storage" or type(cls) is not Name or type(key) is not str:
        raise MalformedError("a storage that torch does not write")
    dtype = None if cls.path == _UNTYPED else _STORAGE_DTYPES[cls.path]
    return Storage(key, dtype, _count(count))


def _count(number: Any) -> int:
    if type(number) is not int or not 0 <= number < 1 << 62:
        raise MalformedError("a size that is not a whole number")
    return number


def _counts(numbers: Any) -> tuple[int, ...]:
    if type(numbers) is not tuple or len(numbers) > 64:
        raise MalformedError("a shape that torch does not write")
    return tuple(map(_count, numbers))


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> Tensor:
    if type(storage) is not Storage or storage.dtype is None:
        raise MalformedError("a tensor without a storage")
    return _checked(Tensor(storage, storage.dtype, _count(offset), _counts(shape), _counts(stride)))


def _tensor_of_dtype(
    storage: Any, offset: Any, shape: Any, stride: Any, requires_grad: Any, hooks: Any, dtype: Any, *_: Any
) -> Tensor:
    if type(storage) is not Storage or type(dtype) is not Name:
        raise MalformedError("a tensor without a storage")
    return _checked(Tensor(storage, dtype_of(dtype), _count(offset), _counts(shape), _counts(stride)))


def _checked(tensor: Tensor) -> Tensor:
    if len(tensor.shape) != len(tensor.stride):
        raise MalformedError("a shape and a stride of different length")
    last = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride, strict=True))
    if tensor.count and (tensor.offset + last + 1) * ITEM_BYTES[tensor.dtype] > tensor.storage.size:
        raise MalformedError("a tensor larger than its storage")
    return tensor


def dtype_of(name: Any) -> str:
    """`F32` from the pickled `torch.float32`."""
    found = _DTYPES.get(name.path.removeprefix("torch.")) if type(name) is Name else None
    if found is None:
        raise MalformedError("a dtype that is not supported")
    return found


def _parameter(data: Any, *_: Any) -> Tensor:
    if type(data) is not Tensor:
        raise MalformedError("a parameter without data")
    return data


def _from_type(make: Any, cls: Any, arguments: Any, state: Any) -> Any:
    return call(make, arguments)


def _size(*arguments: Any) -> tuple[int, ...]:
    return _counts(*arguments)


def _dict(*arguments: Any) -> dict[Any, Any]:
    """An OrderedDict, a Counter or a defaultdict; their items may come as one argument or later."""
    given = arguments[-1] if arguments and type(arguments[-1]) in (dict, list) else {}
    if type(given) is list:  # pairs, as Python 2 wrote them
        return {key: value for key, value in given if type(key) in (str, int)}
    return dict(given)


def _set(*arguments: Any) -> set[Any]:
    (items,) = arguments or ([],)
    if not all(type(item) in (str, int, float, bool, type(None)) for item in items):
        raise MalformedError("a set of something else than strings and numbers")
    return set(items)


def _number(value: Any) -> Any:
    if type(value) not in (int, float, str):
        raise MalformedError("an enumeration's member without a value")
    return value


def _bytes(text: Any, encoding: Any = "latin1") -> bytes:
    if type(text) is not str or encoding != "latin1":
        raise MalformedError("bytes that Python does not write")
    return text.encode("latin1")


def _thing(path: str) -> Callable[..., Thing]:
    return lambda *arguments: Thing(path, arguments)


def _functions(functions: dict[str, Callable[..., Any]]) -> dict[str, Name]:
    return {path: Name(path, make) for path, make in functions.items()}


def _classes(*paths: str) -> dict[str, Name]:
    return {path: Name(path, _thing(path), is_class=True) for path in paths}


_STORAGE_DTYPES = {f"{module}.{name}": dtype for module in ("torch", "torch.cuda") for name, dtype in _STORAGES.items()}
_CONSTANTS = (*(f"torch.{name}" for name in _DTYPES), *_STORAGE_DTYPES, _UNTYPED, "torch.Tensor",
              "torch.nn.parameter.Parameter", "__builtin__.list", "__builtin__.dict", "__builtin__.int",
              "__builtin__.float", "builtins.list", "builtins.dict", "builtins.int", "builtins.float")  # fmt: skip

TORCH: dict[str, Name] = {
    **{path: Name(path) for path in _CONSTANTS},
    **_functions(
        {
            "torch._utils._rebuild_tensor": _tensor,
            "torch._utils._rebuild_tensor_v2": _tensor,
            "torch._utils._rebuild_tensor_v3": _tensor_of_dtype,
            "torch._utils._rebuild_parameter": _parameter,
            "torch._utils._rebuild_parameter_with_state": _parameter,
            "torch._tensor._rebuild_from_type_v2": _from_type,
            "torch.Size": _size,
            "torch.serialization._get_layout": _number,
            "collections.OrderedDict": _dict,
            "collections.Counter": _dict,
            "collections.defaultdict": _dict,
            "__builtin__.set": _set,
            "builtins.set": _set,
            "_codecs.encode": _bytes,
        }
    ),
    **_classes(
        "torch.device",
        # numpy's scalars, where a run's own state holds them
        "numpy.dtype",
        "numpy.core.multiarray.scalar",
        "numpy._core.multiarray.scalar",
    ),
}
"""In what torch.save writes."""

DEEPSPEED: dict[str, Name] = {
    **TORCH,
    **_functions({"deepspeed.runtime.zero.config.ZeroStageEnum": _number}),
    **_classes(
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.utils.tensor_fragment.fragment_address",
    ),
}
"""In the files of DeepSpeed's save_checkpoint."""

_DCP = "torch.distributed.checkpoint.metadata."
DISTRIBUTED: dict[str, Name] = {
    **TORCH,
    **_functions({f"{_DCP}_MEM_FORMAT_ENCODING": _number}),
    **_classes(
        *(_DCP + name for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties",
                                   "ChunkStorageMetadata", "MetadataIndex", "StorageMeta")),
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "pathlib.PosixPath",
        "pathlib._local.PosixPath",
    ),
}  # fmt: skip
"""In the `.metadata` of torch.distributed.checkpoint."""
