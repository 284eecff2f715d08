"""The structure of a pickle that torch wrote, read without executing anything of it.

`pickle.Unpickler` looks names up and calls them. Here `pickletools` takes the opcodes apart, and a machine of ours
obeys those that torch, DeepSpeed and torch.distributed.checkpoint write: it builds lists, dicts, tuples, sets, strings
and numbers, and for each allowed global calls a function of ours that makes an inert value. A global that is not
allowed is refused before anything is made of it; a deeply nested key or a structure without end is refused, too.
"""

from __future__ import annotations

import math
import pickletools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.checkpoint.reader import ITEM_BYTES
from toolkit.errors import UserError

MOST_BYTES = 256 << 20
"""A larger structure is refused. A model of 10,000 tensors takes about 1 MiB."""
_MOST_OPERATIONS = 10_000_000
_DEEPEST = 100
_SCALARS = (str, int, float, bytes, bool, type(None))


class MalformedError(Exception):
    """Not a pickle that torch writes."""


@dataclass(frozen=True, eq=False)
class Global:
    """An allowed global."""

    path: str
    """`module.name`"""
    make: Callable[..., Any] | None = None
    """Ours, called with the arguments that the pickle calls the global with; None where it must not call it."""
    is_class: bool = False
    """Whether objects of it may be made without a call."""


@dataclass(eq=False)
class Inert:
    """What stands in for an object of an allowed class: its arguments and its attributes."""

    name: str
    arguments: tuple[Any, ...] = ()
    state: Any = field(default_factory=dict)


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


def unpickle(content: bytes, where: Path | str, allowed: Mapping[str, Global]) -> Any:
    """The value that `content` describes, with a `Tensor` in place of each tensor.

    Args:
        where: the file, for messages.
        allowed: globals by `module.name`.

    Raises:
        UserError: a global that is not allowed, or a malformed or unbelievably large pickle.
    """
    if len(content) > MOST_BYTES:
        raise UserError(f"{where}: a structure of {len(content):,} bytes, more than is believable: damaged?")
    try:
        value = _Machine(where, allowed).run(content)
        _refuse_endless(value)
    except UserError:
        raise
    except Exception as error:  # whatever a stand-in says of arguments that torch does not write
        why = " ".join(f"{type(error).__name__}: {error}"[:200].split())
        raise UserError(f"{where}: its structure is damaged ({why}); copy it again or take another one") from None
    return value


def _refuse_endless(value: Any) -> None:
    """Refuses what a few bytes can describe and no one can walk through: a tree of shared or nested branches."""
    left, branches = _MOST_OPERATIONS, [(value, 0)]
    while branches:
        branch, depth = branches.pop()
        items: Collection[Any] = ()
        if type(branch) is Inert:
            items = (branch.arguments, branch.state)
        elif type(branch) is dict:
            items = [*branch, *branch.values()]
        elif type(branch) in (list, tuple, set):
            items = branch
        left -= 1 + len(items)
        if depth > _DEEPEST or left < 0:
            raise MalformedError("it is nested too deeply, or made to have no end")
        branches.extend((item, depth + 1) for item in items if type(item) in (dict, list, tuple, set, Inert))


_MARK = object()


class _Machine:
    def __init__(self, where: Path | str, allowed: Mapping[str, Global]) -> None:
        self.where, self.allowed = where, allowed
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, content: bytes) -> Any:
        for number, (opcode, argument, at) in enumerate(pickletools.genops(content)):
            operation = _OPERATIONS.get(opcode.name)
            if operation is None:
                raise MalformedError(f"opcode {opcode.name} at byte {at}, which torch does not write")
            if number > _MOST_OPERATIONS:
                raise MalformedError("more operations than is believable")
            operation(self, argument)
        return self.pop()

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        value = self.stack.pop()
        if value is _MARK:
            raise MalformedError("a mark where a value should be")
        return value

    def pop_to_mark(self) -> list[Any]:
        values = []
        while (value := self.stack.pop()) is not _MARK:
            values.append(value)
        return values[::-1]

    def top(self, kind: type) -> Any:
        if type(self.stack[-1]) is not kind:
            raise MalformedError(f"{type(self.stack[-1]).__name__} where {kind.__name__} should be")
        return self.stack[-1]

    def put(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def make_tuple(self, count: int) -> None:
        self.push(tuple(reversed([self.pop() for _ in range(count)])))

    def set_items(self, values: list[Any]) -> None:
        self.top(dict).update({_key(key): value for key, value in zip(values[::2], values[1::2], strict=True)})

    def set_item(self) -> None:
        value, key = self.pop(), self.pop()
        self.set_items([key, value])

    def append(self) -> None:
        value = self.pop()
        self.top(list).append(value)

    def append_all(self) -> None:
        values = self.pop_to_mark()
        self.top(list).extend(values)

    def add_items(self) -> None:
        values = self.pop_to_mark()
        self.top(set).update(map(_key, values))

    def find(self, path: str) -> None:
        if path not in self.allowed:
            shown = path[:200].encode("unicode_escape").decode()
            raise UserError(f"{self.where} wants {shown}, which no checkpoint needs: refused, and nothing was executed")
        self.push(self.allowed[path])

    def find_on_stack(self) -> None:
        name, module = self.pop(), self.pop()
        if type(module) is not str or type(name) is not str:
            raise MalformedError("a global whose name is not a text")
        self.find(f"{module}.{name}")

    def reduce(self) -> None:
        arguments, name = self.pop(), self.pop()
        self.push(_call(name, arguments))

    def new_object(self) -> None:
        arguments, name = self.pop(), self.pop()
        if type(name) is not Global or not name.is_class or type(arguments) is not tuple:
            raise MalformedError("an object of something that is not a class")
        self.push(Inert(name.path, arguments))

    def build(self) -> None:
        state = self.pop()
        target = self.stack[-1]
        if type(target) is Inert:
            target.state = _attributes(state)
        elif type(target) is not dict or type(state) is not dict:  # an OrderedDict's own attributes do not matter
            raise MalformedError(f"attributes for a {type(target).__name__}")

    def persistent(self) -> None:
        self.push(_storage(self.pop()))


def _key(value: Any) -> Any:
    """A key that is cheap to hash, however the pickle nests."""
    if isinstance(value, (*_SCALARS, Global, Inert)):
        return value
    if type(value) is tuple and len(value) < 1000 and all(isinstance(item, _SCALARS) for item in value):
        return value
    raise MalformedError(f"a {type(value).__name__} as a key")


def _call(name: Any, arguments: Any) -> Any:
    """What an allowed global makes of the arguments."""
    if type(name) is not Global or name.make is None or type(arguments) is not tuple:
        raise MalformedError("a call of something that is not a function")
    return name.make(*arguments)


def _attributes(state: Any) -> Any:
    """Attributes as they are pickled: a dict, or that and one of slots, or what a class makes of itself."""
    if type(state) is tuple and len(state) == 2 and all(type(part) in (dict, type(None)) for part in state):
        return {**(state[0] or {}), **(state[1] or {})}
    if type(state) not in (dict, tuple):
        raise MalformedError(f"attributes in a {type(state).__name__}")
    return state


_VALUES = ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
           "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES")  # fmt: skip
_OPERATIONS: dict[str, Callable[[_Machine, Any], object]] = {
    **dict.fromkeys(_VALUES, _Machine.push),
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda m, _: None),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _Machine.put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda m, index: m.push(m.memo[index])),
    "MEMOIZE": lambda m, _: m.put(len(m.memo)),
    "MARK": lambda m, _: m.push(_MARK),
    "NONE": lambda m, _: m.push(None),
    "NEWTRUE": lambda m, _: m.push(True),
    "NEWFALSE": lambda m, _: m.push(False),
    "EMPTY_TUPLE": lambda m, _: m.push(()),
    "EMPTY_DICT": lambda m, _: m.push({}),
    "EMPTY_LIST": lambda m, _: m.push([]),
    "EMPTY_SET": lambda m, _: m.push(set()),
    "TUPLE": lambda m, _: m.push(tuple(m.pop_to_mark())),
    "TUPLE1": lambda m, _: m.make_tuple(1),
    "TUPLE2": lambda m, _: m.make_tuple(2),
    "TUPLE3": lambda m, _: m.make_tuple(3),
    "SETITEM": lambda m, _: m.set_item(),
    "SETITEMS": lambda m, _: m.set_items(m.pop_to_mark()),
    "APPEND": lambda m, _: m.append(),
    "APPENDS": lambda m, _: m.append_all(),
    "ADDITEMS": lambda m, _: m.add_items(),
    "GLOBAL": lambda m, names: m.find(names.replace(" ", ".", 1)),
    "STACK_GLOBAL": lambda m, _: m.find_on_stack(),
    "REDUCE": lambda m, _: m.reduce(),
    "NEWOBJ": lambda m, _: m.new_object(),
    "BUILD": lambda m, _: m.build(),
    "BINPERSID": lambda m, _: m.persistent(),
}


# what the allowed globals make

_STORAGES = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}  # fmt: skip
_STORAGE_DTYPES = {f"{module}.{name}": dtype for module in ("torch", "torch.cuda") for name, dtype in _STORAGES.items()}
_UNTYPED = "torch.storage.UntypedStorage"
_DTYPES = {
    "torch.float64": "F64", "torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16",
    "torch.int64": "I64", "torch.int32": "I32", "torch.int16": "I16", "torch.int8": "I8", "torch.uint8": "U8",
    "torch.bool": "BOOL",
}  # fmt: skip


def _storage(identity: Any) -> Storage:
    """torch's persistent id: ("storage", class, key, device, elements)."""
    kind, cls, key, _, count = identity
    if kind != "storage" or type(cls) is not Global or type(key) is not str:
        raise MalformedError("a storage that torch does not write")
    return Storage(key, None if cls.path == _UNTYPED else _STORAGE_DTYPES[cls.path], _count(count))


def _count(number: Any) -> int:
    if type(number) is not int or not 0 <= number < 1 << 62:
        raise MalformedError("a size that is not a whole number")
    return number


def _counts(numbers: Any) -> tuple[int, ...]:
    if type(numbers) is not tuple or len(numbers) > 64:
        raise MalformedError("a shape that torch does not write")
    return tuple(map(_count, numbers))


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> Tensor:
    return _tensor_of_dtype(storage, offset, shape, stride, None, None, None)


def _tensor_of_dtype(
    storage: Any, offset: Any, shape: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, *_: Any
) -> Tensor:
    if type(storage) is not Storage:
        raise MalformedError("a tensor without a storage")
    held = storage.dtype if dtype is None else _DTYPES.get(dtype.path)
    if held is None:
        raise MalformedError("a dtype that is not supported")
    tensor = Tensor(storage, held, _count(offset), _counts(shape), _counts(stride))
    last = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride, strict=True))
    if tensor.count and (tensor.offset + last + 1) * ITEM_BYTES[held] > storage.size:
        raise MalformedError("a tensor larger than its storage")
    return tensor


def _parameter(data: Any, *_: Any) -> Tensor:
    if type(data) is not Tensor:
        raise MalformedError("a parameter without data")
    return data


def _from_type(make: Any, cls: Any, arguments: Any, state: Any) -> Any:
    return _call(make, arguments)


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
    return {_key(item) for item in items}


def _number(value: Any) -> Any:
    if type(value) not in (int, float, str):
        raise MalformedError("an enumeration's member without a value")
    return value


def _bytes(text: Any, encoding: Any = "latin1") -> bytes:
    if type(text) is not str or encoding != "latin1":
        raise MalformedError("bytes that Python does not write")
    return text.encode("latin1")


def _class(path: str) -> Global:
    return Global(path, lambda *arguments: Inert(path, arguments), is_class=True)


def _allow(functions: dict[str, Callable[..., Any] | None], *classes: str) -> dict[str, Global]:
    return {path: Global(path, make) for path, make in functions.items()} | {path: _class(path) for path in classes}


_BUILTINS = [f"{module}.{name}" for module in ("__builtin__", "builtins") for name in ("list", "dict", "int", "float")]
_CONSTANTS = (*_DTYPES, *_STORAGE_DTYPES, _UNTYPED, *_BUILTINS, "torch.Tensor", "torch.nn.parameter.Parameter")
TORCH = _allow(
    {
        **dict.fromkeys(_CONSTANTS),
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
    },
    "torch.device",
    # numpy's scalars, where a run's own state holds them
    "numpy.dtype",
    "numpy.core.multiarray.scalar",
    "numpy._core.multiarray.scalar",
)
"""In what torch.save writes."""
DEEPSPEED = TORCH | _allow(
    {"deepspeed.runtime.zero.config.ZeroStageEnum": _number},
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
"""In the files of DeepSpeed's save_checkpoint."""
_DCP = "torch.distributed.checkpoint.metadata."
DISTRIBUTED = TORCH | _allow(
    {f"{_DCP}_MEM_FORMAT_ENCODING": _number},
    *(_DCP + name for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties",
                               "ChunkStorageMetadata", "MetadataIndex", "StorageMeta")),
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
)  # fmt: skip
"""In the `.metadata` of torch.distributed.checkpoint."""
