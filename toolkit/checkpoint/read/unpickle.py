"""Reads the structure of a pickle that torch wrote, without executing any code of it.

Python's unpickler (`pickle._Unpickler`) reads it, with only the opcodes that torch, DeepSpeed and
torch.distributed.checkpoint write. Operations that could execute code, or copy or hash without end, are replaced: a
global is looked up in a table and becomes an inert value, no call copies its arguments, keys are short and flat, and
the number of operations is limited.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from toolkit.checkpoint.tensor_index import DTYPES, ITEM_BYTES
from toolkit.errors import UserError

MAX_BYTES = 64 << 20
"""Largest size of a pickle; one of 10,000 tensors has about 1 MiB."""
_MAX_OPERATIONS = 5_000_000
_MAX_DEPTH = 100


class MalformedError(Exception):
    """Not a pickle that torch writes."""


class Global(NamedTuple):
    path: str
    """`module.name`, a key of `ALLOWED`."""


@dataclass(eq=False, slots=True)
class Inert:
    """Stands for an object of an allowed class, with its arguments and attributes."""

    name: str
    arguments: tuple[Any, ...] = ()
    state: Any = field(default_factory=dict)


class Storage(NamedTuple):
    """A member of the zip file, of which tensors are views."""

    key: str
    """The member's name under `data/`."""
    dtype: str
    """A key of `ITEM_BYTES`."""
    size: int
    """Bytes."""


@dataclass(frozen=True, eq=False, slots=True)
class Tensor:
    """A view of a storage."""

    storage: Storage
    offset: int
    """Elements from the storage's beginning."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    bits: str
    """The view bits that are set (`neg`, `conj`): torch changes the stored numbers when it reads them."""

    @property
    def dtype(self) -> str:
        return self.storage.dtype

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def contiguous(self) -> bool:
        """Whether elements are in row-major order."""
        expected = 1
        for length, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if length != 1 and step != expected:
                return self.count == 0
            expected *= length
        return True


def unpickle(content: bytes, where: Path | str) -> Any:
    """The pickled value, with a `Tensor` in place of each tensor. `where`: the file, for messages.

    Raises UserError for a global that is not allowed, and for a malformed pickle.
    """
    try:
        value = _Unpickler(content, where).load()
        for _ in walk([value]):  # raises where a few bytes make an endless structure
            pass
    except UserError:
        raise
    except Exception as error:  # whatever Python raises for a pickle that torch does not write
        why = " ".join(f"{type(error).__name__}: {error}"[:200].split())
        raise UserError(f"{where}: its structure is damaged ({why}); copy it again or take another one") from None
    return value


def walk(value: Any) -> Iterator[Any]:
    """All values in nested containers; those of a shared container each time it occurs."""
    budget, containers = _MAX_OPERATIONS, [(value, 0)]
    while containers:
        container, depth = containers.pop()
        items = (container.arguments, container.state) if type(container) is Inert else container
        items = [*items, *items.values()] if type(items) is dict else items
        budget -= 1 + len(items)
        if depth > _MAX_DEPTH or budget < 0:
            raise MalformedError("it is nested too deeply, or endless")
        for item in items:
            if type(item) in (dict, list, tuple, Inert):
                containers.append((item, depth + 1))
            else:
                yield item


class _Operations(dict[int, Callable[[Any], None]]):
    """Opcode -> its function; gives at most `_MAX_OPERATIONS` in all."""

    budget = _MAX_OPERATIONS

    def __getitem__(self, opcode: int) -> Callable[[Any], None]:
        self.budget -= 1
        if self.budget < 0 or opcode not in self:
            raise MalformedError(f"opcode {opcode:#04x}, which torch does not write, or not as often")
        return super().__getitem__(opcode)


_Python: Any = pickle._Unpickler


class _Unpickler(_Python):
    """Python's, without operations that execute code."""

    def __init__(self, content: bytes, where: Path | str) -> None:
        super().__init__(io.BytesIO(content))
        self.where, self.dispatch = where, _Operations(_OPERATIONS)

    def find_class(self, module: str, name: str) -> Global:
        path = f"{module}.{name}"
        if path not in ALLOWED:
            escaped = path[:200].encode("unicode_escape").decode()
            raise UserError(
                f"{self.where} needs {escaped}, which is not allowed in a checkpoint: nothing was executed; if you "
                "trust the file, save only its weights: torch.save(model.state_dict(), FILE)"
            )
        return Global(path)

    def persistent_load(self, pid: Any) -> Storage:
        """`pid`: ("storage", class, key, device, elements)."""
        kind, cls, key, _, count = pid
        if kind != "storage" or type(cls) is not Global or type(key) is not str:
            raise MalformedError("a storage that torch does not write")
        dtype = _STORAGE_DTYPES[cls.path]
        return Storage(key, dtype, _count(count) * ITEM_BYTES[dtype])

    def reduce(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = _call(self.stack[-1], arguments)

    def build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) is Inert:
            target.state = state
        elif type(target) is not dict or type(state) is not dict:  # an OrderedDict's attributes are ignored
            raise MalformedError(f"attributes for a {type(target).__name__}")

    def fill(self, items: list[Any]) -> None:
        """Adds alternating keys and values to the dict on the stack."""
        if type(self.stack[-1]) is not dict:
            raise MalformedError(f"items for a {type(self.stack[-1]).__name__}")
        self.stack[-1].update(zip(map(_key, items[::2]), items[1::2], strict=True))

    def text(self, length: str) -> None:
        (size,) = struct.unpack(length, self.read(struct.calcsize(length)))
        self.append(self.read(size).decode())


def _key(value: Any) -> Any:
    """Returns a dict's key, or raises MalformedError if it could be slow to hash."""
    parts = value if type(value) is tuple and len(value) <= 16 else (value,)
    for part in parts:
        kind = type(part)
        if kind not in (str, int, float, bool, type(None), Inert, Global) or (kind is str and len(part) > 1000):
            raise MalformedError(f"a {kind.__name__} as a key, or one that is too long")
    return value


def _call(function: Any, arguments: Any) -> Any:
    """Calls an allowed global."""
    make = ALLOWED[function.path] if type(function) is Global else None
    if make is None or type(arguments) is not tuple:
        raise MalformedError("a call of something that is not a function")
    return Inert(function.path, arguments) if make is Inert else make(*arguments)


_INHERITED = (
    "PROTO FRAME STOP MARK BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 "
    "LONG1 BINFLOAT BINBYTES SHORT_BINBYTES EMPTY_TUPLE EMPTY_DICT EMPTY_LIST TUPLE TUPLE1 TUPLE2 TUPLE3 APPEND "
    "APPENDS GLOBAL STACK_GLOBAL BINPERSID"
)
_OPERATIONS = {code: _Python.dispatch[code] for name in _INHERITED.split() for code in getattr(pickle, name)} | {
    pickle.SETITEM[0]: lambda unpickler: unpickler.fill([unpickler.stack.pop(-2), unpickler.stack.pop()]),
    pickle.SETITEMS[0]: lambda unpickler: unpickler.fill(unpickler.pop_mark()),
    pickle.REDUCE[0]: _Unpickler.reduce,
    pickle.NEWOBJ[0]: _Unpickler.reduce,
    pickle.BUILD[0]: _Unpickler.build,
    pickle.SHORT_BINUNICODE[0]: lambda unpickler: unpickler.text("<B"),
    pickle.BINUNICODE[0]: lambda unpickler: unpickler.text("<I"),
    pickle.BINUNICODE8[0]: lambda unpickler: unpickler.text("<Q"),
}


_STORAGE_DTYPES = {
    f"torch.{place}{name}Storage": dtype for place in ("", "cuda.") for dtype, (_, _, name) in DTYPES.items()
}


def _count(number: Any) -> int:
    if type(number) is not int or not 0 <= number < 1 << 62:
        raise MalformedError("a size that is not an integer")
    return number


def _counts(numbers: Any) -> tuple[int, ...]:
    if type(numbers) is not tuple or len(numbers) > 64 or any(_count(number) != number for number in numbers):
        raise MalformedError("a shape that torch does not write")
    return numbers


def _tensor(
    storage: Any, offset: Any, shape: Any, stride: Any, _grad: Any = None, _hooks: Any = None, bits: Any = None
) -> Tensor:
    if type(storage) is not Storage:
        raise MalformedError("a tensor without a storage")
    if bits is not None and (type(bits) is not dict or len(bits) > 8):
        raise MalformedError("a tensor with bits that torch does not write")
    bits_set = ", ".join(str(_key(name)) for name, is_set in (bits or {}).items() if is_set)
    tensor = Tensor(storage, _count(offset), _counts(shape), _counts(stride), bits_set)
    last = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride, strict=True))
    if tensor.count and (tensor.offset + last + 1) * ITEM_BYTES[tensor.dtype] > storage.size:
        raise MalformedError("a tensor larger than its storage")
    return tensor


def _dict(*arguments: Any) -> dict[Any, Any]:
    """An OrderedDict, a Counter or a defaultdict; their items are a dict argument, or set later."""
    items = arguments[-1] if arguments else None
    if type(items) not in (dict, Global, type(None)):
        raise MalformedError("a dict made of something else")
    return items if type(items) is dict else {}


def _first(value: Any, *_: Any) -> Any:
    """The list of a set's items, the text of bytes, or the value of an enum's member."""
    return value


_BUILTINS = [f"{module}.{name}" for module in ("__builtin__", "builtins") for name in ("list", "dict", "int", "float")]
_DTYPES = [f"torch.{name}" for _, name, _ in DTYPES.values()]
_CONSTANTS = (*_DTYPES, *_STORAGE_DTYPES, *_BUILTINS, "torch.Tensor", "torch.nn.parameter.Parameter")
_LIGHTNING = (
    "lightning.fabric.utilities.data",
    "lightning_fabric.utilities.data",
    "pytorch_lightning.utilities.parsing",
)
_DCP = "torch.distributed.checkpoint.metadata."
_INERT = (
    "torch.device",
    # numpy's scalars and arrays in a training state
    "numpy.dtype",
    "numpy.ndarray",
    *(f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("scalar", "_reconstruct")),
    # in the files of DeepSpeed's save_checkpoint
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.utils.tensor_fragment.fragment_address",
    # in the `.metadata` of torch.distributed.checkpoint
    *(_DCP + name for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties",
                               "ChunkStorageMetadata", "MetadataIndex", "StorageMeta")),
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    # in Lightning's hyper_parameters
    "argparse.Namespace",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
)  # fmt: skip
ALLOWED: Mapping[str, Callable[..., Any] | None] = {
    **dict.fromkeys(_CONSTANTS),
    **dict.fromkeys(_INERT, Inert),
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": _first,
    "torch._utils._rebuild_parameter_with_state": _first,
    "torch._tensor._rebuild_from_type_v2": lambda make, _cls, arguments, _state: _call(make, arguments),
    "torch.Size": _counts,
    "torch.torch_version.TorchVersion": _first,
    "torch.serialization._get_layout": _first,
    **dict.fromkeys(("collections.OrderedDict", "collections.Counter", "collections.defaultdict"), _dict),
    **dict.fromkeys((f"{path}.AttributeDict" for path in _LIGHTNING), _dict),
    **dict.fromkeys(("__builtin__.set", "builtins.set", "_codecs.encode"), _first),
    "deepspeed.runtime.zero.config.ZeroStageEnum": _first,
    f"{_DCP}_MEM_FORMAT_ENCODING": _first,
}
"""The globals in files of torch.save, DeepSpeed and torch.distributed.checkpoint -> the function that replaces calls,
or `Inert` for a class; None for constants."""
