"""Reads the structure of a pickle that torch wrote, without executing anything of it.

`pickle.Unpickler` looks names up and calls them. This machine has neither: it knows the opcodes that
torch, DeepSpeed and torch.distributed.checkpoint write, builds lists, dicts, tuples, sets, strings and
numbers, and for each allowed name (`toolkit/checkpoint/read/pickled_names.py`) calls a function of ours that
makes an inert value. A name that is not allowed is refused before anything is made of it. Compared
with an Unpickler with `find_class` overridden, a hostile memo index or a deeply nested key cannot
exhaust memory or the C stack either.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.errors import UserError

MOST_BYTES = 256 << 20
"""A larger structure is refused. A model of 10,000 tensors takes about 1 MiB."""
_MOST_OPERATIONS = 10_000_000
_DEEPEST = 100
_SCALARS = (str, int, float, bytes, bool, type(None))


@dataclass(frozen=True, eq=False)
class Name:
    """An allowed global."""

    path: str
    """`module.name`"""
    make: Callable[..., Any] | None = None
    """Ours, called with the arguments that the pickle calls the global with; None where it must not call it."""
    is_class: bool = False
    """Whether objects of it may be made without a call."""


@dataclass(eq=False)
class Thing:
    """What stands in for an object of an allowed class: its arguments and its attributes."""

    name: str
    arguments: tuple[Any, ...] = ()
    state: Any = field(default_factory=dict)


class MalformedError(Exception):
    """Not a pickle that torch writes."""


_BRANCHES = {dict, list, tuple, set, Thing}


def unpickle(
    content: bytes, where: Path | str, names: Mapping[str, Name], storage: Callable[[Any], Any] | None = None
) -> Any:
    """The value that `content` describes.

    Args:
        where: the file, for messages.
        names: the allowed globals by `module.name`.
        storage: makes a value of a persistent id, torch's way to name a tensor's bytes.

    Raises:
        UserError: a global that is not in `names`, or a malformed or unbelievably large pickle.
    """
    if len(content) > MOST_BYTES:
        raise UserError(f"{where}: a structure of {len(content):,} bytes, more than is believable: damaged?")
    try:
        value = _Machine(content, where, names, storage).run()
        _refuse_monsters(value)
    except UserError:
        raise
    except Exception as error:  # whatever a stand-in says of arguments that torch does not write
        why = " ".join(f"{type(error).__name__}: {error}"[:200].split())
        raise UserError(f"{where}: its structure is damaged ({why}); copy it again or take another one") from None
    return value


def _refuse_monsters(value: Any) -> None:
    """Refuses what a few bytes can describe and no one can walk through: a tree of shared or nested branches."""
    left, branches = _MOST_OPERATIONS, [(value, 0)] if type(value) in _BRANCHES else []
    while branches:
        branch, depth = branches.pop()
        if type(branch) is Thing:
            items: Iterable[Any] = (branch.arguments, branch.state)
        else:
            items = [*branch, *branch.values()] if type(branch) is dict else branch
            left -= len(branch)
        if depth > _DEEPEST or left < 0:
            raise MalformedError("it is nested too deeply, or made to have no end")
        branches.extend((item, depth + 1) for item in items if type(item) in _BRANCHES)


class _Mark:
    pass


_MARK = _Mark()


class _Machine:
    def __init__(
        self, content: bytes, where: Path | str, names: Mapping[str, Name], storage: Callable[[Any], Any] | None
    ) -> None:
        self.content, self.where, self.names, self.storage = content, where, names, storage
        self.at = 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        content, operations = self.content, _OPERATIONS
        for _ in range(_MOST_OPERATIONS):
            opcode = content[self.at]  # IndexError where it ends early
            self.at += 1
            if opcode == 0x2E:  # STOP
                return self._pop_value()
            operation = operations.get(opcode)
            if operation is None:
                raise MalformedError(f"opcode {bytes([opcode])!r} at byte {self.at - 1}, which torch does not write")
            operation(self)
        raise MalformedError("more operations than is believable")

    # reading

    def _take(self, count: int) -> bytes:
        end = self.at + count
        if count < 0 or end > len(self.content):
            raise MalformedError("it ends early")
        taken = self.content[self.at : end]
        self.at = end
        return taken

    def _line(self) -> str:
        end = self.content.find(b"\n", self.at, self.at + 1000)
        if end < 0:
            raise MalformedError("a name without an end")
        line = self.content[self.at : end].decode("utf-8")
        self.at = end + 1
        return line

    # the stack

    def _pop_value(self) -> Any:
        value = self.stack.pop()
        if value is _MARK:
            raise MalformedError("a mark where a value should be")
        return value

    def _pop_to_mark(self) -> list[Any]:
        stack = self.stack
        for index in range(len(stack) - 1, -1, -1):
            if stack[index] is _MARK:
                values = stack[index + 1 :]
                del stack[index:]
                return values
        raise MalformedError("no mark")

    def _top(self, kind: type) -> Any:
        if type(self.stack[-1]) is not kind:
            raise MalformedError(f"{type(self.stack[-1]).__name__} where {kind.__name__} should be")
        return self.stack[-1]

    def _push(self, value: Any) -> None:
        self.stack.append(value)

    def _tuple(self, count: int) -> None:
        self._push(tuple(reversed([self._pop_value() for _ in range(count)])))

    # containers

    def _set_items(self, values: list[Any]) -> None:
        target = self._top(dict)
        if len(values) % 2:
            raise MalformedError("a key without a value")
        for index in range(0, len(values), 2):
            target[_key(values[index])] = values[index + 1]

    def _set_item(self) -> None:
        value, key = self._pop_value(), self._pop_value()
        self._top(dict)[_key(key)] = value

    def _append(self) -> None:
        value = self._pop_value()
        self._top(list).append(value)

    def _append_all(self) -> None:
        values = self._pop_to_mark()
        self._top(list).extend(values)

    def _add_items(self) -> None:
        values = self._pop_to_mark()
        self._top(set).update(_key(value) for value in values)

    # memo

    def _put(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    # names and what is made of them

    def _find(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise MalformedError("a global whose name is not a text")
        path = f"{module}.{name}"
        found = self.names.get(path)
        if found is None:
            shown = path[:200].encode("unicode_escape").decode()
            raise UserError(f"{self.where} wants {shown}, which no checkpoint needs: refused, and nothing was executed")
        self._push(found)

    def _stack_global(self) -> None:
        name, module = self._pop_value(), self._pop_value()
        self._find(module, name)

    def _reduce(self) -> None:
        arguments, name = self._pop_value(), self._pop_value()
        self._push(call(name, arguments))

    def _new_object(self) -> None:
        arguments, name = self._pop_value(), self._pop_value()
        if type(name) is not Name or not name.is_class or type(arguments) is not tuple:
            raise MalformedError("an object of something that is not a class")
        self._push(Thing(name.path, arguments))

    def _build(self) -> None:
        state = self._pop_value()
        target = self.stack[-1]
        if type(target) is Thing:
            target.state = _attributes(state)
        elif type(target) is not dict or type(state) is not dict:  # an OrderedDict's own attributes do not matter
            raise MalformedError(f"attributes for a {type(target).__name__}")

    def _persistent(self) -> None:
        if self.storage is None:
            raise MalformedError("a tensor where none can be")
        self._push(self.storage(self._pop_value()))


def call(name: Any, arguments: Any) -> Any:
    """What an allowed global makes of the arguments."""
    if type(name) is not Name or name.make is None or type(arguments) is not tuple:
        raise MalformedError("a call of something that is not a function")
    return name.make(*arguments)


def _key(value: Any) -> Any:
    """A key that is cheap to hash, however the pickle nests."""
    if isinstance(value, (*_SCALARS, Name, Thing)):
        return value
    if type(value) is tuple and len(value) < 1000 and all(isinstance(item, _SCALARS) for item in value):
        return value
    raise MalformedError(f"a {type(value).__name__} as a key")


def _attributes(state: Any) -> Any:
    """Attributes as they are pickled: a dict, or that and one of slots, or what a class makes of itself."""
    if type(state) is tuple and len(state) == 2 and all(type(part) in (dict, type(None)) for part in state):
        return {**(state[0] or {}), **(state[1] or {})}
    if type(state) not in (dict, tuple):
        raise MalformedError(f"attributes in a {type(state).__name__}")
    return state


def _pushes(value: Any) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(value)


def _reads(form: str) -> Callable[[_Machine], int]:
    """Reads a number; struct.error where the pickle ends first."""
    packed = struct.Struct(form)

    def read(machine: _Machine) -> int:
        at = machine.at
        machine.at = at + packed.size
        number: int = packed.unpack_from(machine.content, at)[0]
        return number

    return read


_u1, _u2, _u4, _u8, _i4, _f8 = map(_reads, ("<B", "<H", "<I", "<Q", "<i", ">d"))


def _pushes_number(read: Callable[[_Machine], int]) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(read(machine))


def _pushes_text(read: Callable[[_Machine], int], encoding: str = "utf-8") -> Callable[[_Machine], None]:
    errors = "surrogatepass" if encoding == "utf-8" else "strict"
    return lambda machine: machine.stack.append(machine._take(read(machine)).decode(encoding, errors))


def _gets(read: Callable[[_Machine], int]) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(machine.memo[read(machine)])


def _puts(read: Callable[[_Machine], int]) -> Callable[[_Machine], None]:
    return lambda machine: machine._put(read(machine))


_OPERATIONS: dict[int, Callable[[_Machine], None]] = {
    ord(opcode): operation
    for opcode, operation in {
        "\x80": lambda m: m._take(1),  # PROTO
        "\x95": lambda m: m._take(8),  # FRAME
        "(": _pushes(_MARK),
        "N": _pushes(None),
        "\x88": _pushes(True),
        "\x89": _pushes(False),
        ")": _pushes(()),
        "}": lambda m: m._push({}),
        "]": lambda m: m._push([]),
        "\x8f": lambda m: m._push(set()),
        "J": _pushes_number(_i4),
        "K": _pushes_number(_u1),
        "M": _pushes_number(_u2),
        "\x8a": lambda m: m._push(int.from_bytes(m._take(_u1(m)), "little", signed=True)),  # LONG1
        "G": _pushes_number(_f8),
        "X": _pushes_text(_u4),  # BINUNICODE
        "\x8c": _pushes_text(_u1),
        "\x8d": _pushes_text(_u8),
        "U": _pushes_text(_u1, "latin1"),  # SHORT_BINSTRING
        "B": lambda m: m._push(m._take(_u4(m))),
        "C": lambda m: m._push(m._take(_u1(m))),
        "a": _Machine._append,
        "e": _Machine._append_all,
        "s": _Machine._set_item,
        "u": lambda m: m._set_items(m._pop_to_mark()),
        "\x90": _Machine._add_items,
        "t": lambda m: m._push(tuple(m._pop_to_mark())),
        "\x85": lambda m: m._tuple(1),
        "\x86": lambda m: m._tuple(2),
        "\x87": lambda m: m._tuple(3),
        "q": _puts(_u1),
        "r": _puts(_u4),
        "\x94": lambda m: m._put(len(m.memo)),  # MEMOIZE
        "h": _gets(_u1),
        "j": _gets(_u4),
        "c": lambda m: m._find(m._line(), m._line()),
        "\x93": _Machine._stack_global,
        "R": _Machine._reduce,
        "\x81": _Machine._new_object,
        "b": _Machine._build,
        "Q": _Machine._persistent,
    }.items()
}
