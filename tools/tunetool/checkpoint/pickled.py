"""Reads untrusted pickles without Python's unpickler: nothing that a file names is imported, called or set.

Python's unpickler, even if restricted to a few classes, lets a file set attributes of these classes (the opcode BUILD
on a class) and hashes nested values from the file (hashing a tuple that contains another one twice, 60 levels deep,
never ends; 100,000 levels crash the process). Here each opcode makes a plain value, or calls a function that the caller
has registered under that name. Supports the output of Python's pickler in protocols 2 to 5. Pure: no torch.
"""

from __future__ import annotations

import collections
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from tunetool.checkpoint.plain import Malformed, check_key, count_hash, hashable

_I32 = struct.Struct("<i").unpack_from
_U32 = struct.Struct("<I").unpack_from
_STACK = 1 << 20
"""Largest number of values on the stack. The pickler writes containers in parts of 1000."""
_STEPS = 1 << 16
"""Opcodes between two checks of the stack."""
_INTEGER_BYTES = 9
"""Longest integer in bytes (unsigned, 64 bits): arithmetic on longer ones could take any time."""


class Refused(Exception):
    """The pickle names something that is not in the vocabulary."""


class Call:
    """A function that a pickle may call: ``make`` receives the arguments and must check them."""

    __slots__ = ("make",)

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make


class Kind:
    """A class whose objects a pickle may make and fill.

    ``new`` makes an empty object of the class ``of``; ``fill`` receives the object and its state from the pickle, must
    check the state, and returns whether it accepted it. None: the object has no state.
    """

    __slots__ = ("fill", "new", "of")

    def __init__(self, of: type, new: Callable[[], Any], fill: Callable[[Any, Any], bool] | None) -> None:
        self.of, self.new, self.fill = of, new, fill


Tables = Mapping[int, Callable[[Sequence[Any], dict[Any, Any]], int]]


@dataclass(frozen=True)
class Vocabulary:
    """The names that a pickle may use.

    ``names``: by module and name, a ``Call``, a ``Kind``, or an immutable value. ``find``: called for any other name;
    raises ``Refused`` or returns such a value. ``keys``: classes, besides plain ones, whose filled objects may be keys.
    ``persistent``: returns the value of a persistent id. ``tables``: functions that may read what fills a table,
    by where that begins: each gets the memo and the empty table, and returns where the rest begins.
    """

    names: Mapping[tuple[str, str], Any]
    find: Callable[[str, str], Any] | None = None
    keys: frozenset[type] = frozenset()
    persistent: Callable[[Any], Any] | None = None
    tables: Callable[[bytes], Tables] = lambda content: {}


def load(content: bytes, vocabulary: Vocabulary) -> Any:
    """The value that the pickle describes.

    Raises ``Refused`` for a name that is not in the vocabulary, ``Malformed`` for a pickle that Python's pickler would
    not write, and the exceptions of the vocabulary's functions.
    """
    return _Loading(content, vocabulary).run()


class _Loading:
    """Loads one pickle. ``_run`` handles the opcodes that occur for every tensor, ``_HANDLERS`` all others."""

    def __init__(self, content: bytes, vocabulary: Vocabulary) -> None:
        self.content, self.vocabulary = content, vocabulary
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: list[Any] = []
        self.fills = {
            kind.of: kind.fill for kind in vocabulary.names.values() if isinstance(kind, Kind) and kind.fill is not None
        }
        self.empty: dict[int, Any] = {}
        """Objects that were made but not filled yet, by id; kept alive here."""
        self.hashes: dict[int, tuple[Any, dict[int, int]]] = {}
        """Tables and sets by id, kept alive here, and the hashes of their keys but for texts, whose hashes no file can
        know."""

    def run(self) -> Any:
        try:
            return self._run()
        except IndexError:
            # Past the end of the file, of the stack or of the memo.
            raise Malformed("it is cut short, or not a pickle") from None
        except (struct.error, UnicodeDecodeError):
            raise Malformed("it is not a pickle") from None

    # One loop without calls: each of 100,000 tensors takes dozens of these opcodes, and they determine how long loading
    # metadata takes. So an opcode also handles those that the pickler always writes after it.
    def _run(self) -> Any:  # noqa: C901, PLR0912, PLR0915
        content, memo, marks = self.content, self.memo, self.marks
        remember, empty, fills = memo.append, self.empty, self.fills
        stack, at, tables = self.stack, 0, self.vocabulary.tables(content)
        while True:
            if len(stack) > _STACK or len(marks) > _STACK:
                raise Malformed("it holds too many values at a time")
            for _ in repeat(None, _STEPS):
                op = content[at]
                at += 1
                if op == 0x68:  # BINGET
                    stack.append(memo[content[at]])
                    at += 1
                    continue
                if op == 0x6A:  # LONG_BINGET
                    stack.append(memo[_U32(content, at)[0]])
                    at += 4
                    continue
                if op == 0x4B:  # BININT1
                    stack.append(content[at])
                    at += 1
                    continue
                if op == 0x29:  # EMPTY_TUPLE
                    if content[at] != 0x81:
                        stack.append(())
                        continue
                    at += 1  # NEWOBJ
                    kind = stack[-1]
                    if type(kind) is not Kind:
                        raise Malformed("it makes an object from something that is not a class")
                    value = stack[-1] = kind.new()
                    if kind.fill is not None:
                        empty[id(value)] = value
                elif op == 0x75:  # SETITEMS
                    items, stack = stack, marks.pop()
                    self.stack = stack
                    self._set_items(stack[-1], items)
                    if content[at] != 0x62:
                        continue
                    at += 1  # BUILD
                    state = stack.pop()
                    value = stack[-1]
                    # Once for each object that NEWOBJ made: never a class, nor an object that was checked before.
                    if empty.pop(id(value), None) is None or not fills[type(value)](value, state):
                        raise Malformed(f"it sets attributes of a `{type(value).__name__}`")
                    continue
                elif op == 0x7D:  # EMPTY_DICT
                    value = {}
                    stack.append(value)
                    if at in tables:
                        at = tables[at](memo, value)
                elif op == 0x86:  # TUPLE2
                    value = stack.pop()
                    value = stack[-1] = (stack[-1], value)
                elif op == 0x85:  # TUPLE1
                    value = stack[-1] = (stack[-1],)
                elif op == 0x52:  # REDUCE
                    arguments = stack.pop()
                    call = stack[-1]
                    if type(call) is not Call or type(arguments) is not tuple:
                        raise Malformed("it calls something that is not a function")
                    value = stack[-1] = call.make(*arguments)
                elif op == 0x28:  # MARK
                    marks.append(stack)
                    self.stack = stack = []
                    continue
                elif op == 0x8C:  # SHORT_BINUNICODE
                    stop = at + 1 + content[at]
                    value = str(content[at + 1 : stop], "utf-8", "surrogatepass")
                    # Cut short: the file ends here, and so does reading it.
                    at = stop
                    stack.append(value)
                elif op == 0x62:  # BUILD
                    state = stack.pop()
                    value = stack[-1]
                    if empty.pop(id(value), None) is None or not fills[type(value)](value, state):
                        raise Malformed(f"it sets attributes of a `{type(value).__name__}`")
                    continue
                elif op == 0x89:  # NEWFALSE
                    stack.append(False)
                    continue
                elif op == 0x4D:  # BININT2
                    stack.append(content[at] | content[at + 1] << 8)
                    at += 2
                    continue
                elif op == 0x4A:  # BININT
                    stack.append(_I32(content, at)[0])
                    at += 4
                    continue
                elif op == 0x5D:  # EMPTY_LIST
                    value = []
                    stack.append(value)
                elif op == 0x74:  # TUPLE
                    value, stack = tuple(stack), marks.pop()
                    self.stack = stack
                    stack.append(value)
                elif op == 0x61:  # APPEND
                    value = stack.pop()
                    if type(stack[-1]) is not list:
                        raise Malformed("it appends to something that is not a list")
                    stack[-1].append(value)
                    continue
                elif op == 0x94:  # MEMOIZE
                    remember(stack[-1])
                    continue
                elif op == 0x2E:  # STOP
                    if empty:
                        raise Malformed(f"a `{type(next(iter(empty.values()))).__name__}` has no contents")
                    if marks or len(stack) != 1:
                        raise Malformed("it leaves values behind")
                    if at != len(content):
                        raise Malformed(f"{len(content) - at} bytes follow its end")
                    return stack[0]
                else:
                    self.at = at
                    handler = _HANDLERS.get(op)
                    if handler is None:
                        raise Malformed(f"opcode {op:#04x} at {at - 1} is none that such a file has")
                    handler(self)
                    at, stack = self.at, self.stack
                    continue
                if content[at] == 0x94:  # MEMOIZE
                    remember(value)
                    at += 1

    def _find(self, module: str, name: str) -> Any:
        if self.vocabulary.find is None:
            raise Refused(f"{module}.{name}")
        return self.vocabulary.find(module, name)

    def _text(self, start: int, stop: int) -> str:
        if stop > len(self.content):
            raise Malformed("it is cut short")
        return str(self.content[start:stop], "utf-8", "surrogatepass")

    def _take(self, count: int) -> bytes:
        start, self.at = self.at, self.at + count
        if self.at > len(self.content):
            raise Malformed("it is cut short")
        return self.content[start : self.at]

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _since_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.marks.pop()
        return items

    def _set_items(self, table: Any, items: list[Any]) -> None:
        if (type(table) is not dict and type(table) is not collections.OrderedDict) or len(items) % 2:
            raise Malformed("it sets keys of something that is not a table")
        keys, allowed = items[::2], self.vocabulary.keys
        for key in keys:
            if type(key) is not str:
                check_key(key, allowed)
                if self.empty and id(key) in self.empty:
                    raise Malformed("an object without contents is a key of a table")
                count_hash(key, self._hashes_in(table))
        table.update(zip(keys, items[1::2], strict=True))

    def _hashes_in(self, table: Any) -> dict[int, int]:
        return self.hashes.setdefault(id(table), (table, {}))[1]

    # What follows is in `_HANDLERS`.

    def stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if type(module) is not str or type(name) is not str:
            raise Malformed("it names something by a value that is not text")
        self._name(module, name)

    def named(self) -> None:
        self._name(self._line(), self._line())

    def _name(self, module: str, name: str) -> None:
        known = self.vocabulary.names.get((module, name))
        self.stack.append(self._find(module, name) if known is None else known)

    def protocol(self) -> None:
        if not 2 <= self._number("<B") <= 5:
            raise Malformed("it is of a protocol that no saver here writes")

    def frame(self) -> None:
        self._number("<Q")

    def binput(self) -> None:
        self._put(self._number("<B"))

    def long_binput(self) -> None:
        self._put(self._number("<I"))

    def _put(self, index: int) -> None:
        # The pickler counts up.
        if index > len(self.memo):
            raise Malformed("it numbers its values out of order")
        self.memo[index : index + 1] = [self.stack[-1]]

    def none(self) -> None:
        self.stack.append(None)

    def true(self) -> None:
        self.stack.append(True)

    def long(self) -> None:
        count = self._number("<B")
        if count > _INTEGER_BYTES:
            raise Malformed(f"it holds an integer of {count} bytes")
        self.stack.append(int.from_bytes(self._take(count), "little", signed=True))

    def real(self) -> None:
        self.stack.append(self._number(">d"))

    def text(self) -> None:
        self._long_text("<I")

    def text_8(self) -> None:
        self._long_text("<Q")

    def _long_text(self, form: str) -> None:
        length = self._number(form)
        self.stack.append(self._text(self.at, self.at + length))
        self.at += length

    def short_bytes(self) -> None:
        self.stack.append(self._take(self._number("<B")))

    def bytes_4(self) -> None:
        self.stack.append(self._take(self._number("<I")))

    def bytes_8(self) -> None:
        self.stack.append(self._take(self._number("<Q")))

    def triple(self) -> None:
        self.stack[-3:] = [(self.stack[-3], self.stack[-2], self.stack[-1])]

    def appends(self) -> None:
        items = self._since_mark()
        if type(self.stack[-1]) is not list:
            raise Malformed("it appends to something that is not a list")
        self.stack[-1].extend(items)

    def setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items(self.stack[-1], [key, value])

    def empty_set(self) -> None:
        self.stack.append(set())

    def additems(self) -> None:
        items = self._since_mark()
        if type(self.stack[-1]) is not set:
            raise Malformed("it adds to something that is not a set")
        self.stack[-1].update(hashable(items, self._hashes_in(self.stack[-1])))

    def frozen_set(self) -> None:
        items = self._since_mark()
        self.stack.append(frozenset(hashable(items)))

    def _line(self) -> str:
        stop = self.content.find(b"\n", self.at, self.at + 1000)
        if stop < 0:
            raise Malformed("it is cut short, or names something by too long a name")
        start, self.at = self.at, stop + 1
        return self._text(start, stop)

    def persistent(self) -> None:
        if self.vocabulary.persistent is None:
            raise Malformed("it refers to data outside of the file")
        self.stack[-1] = self.vocabulary.persistent(self.stack[-1])


_HANDLERS: dict[int, Callable[[_Loading], None]] = {
    0x80: _Loading.protocol,
    0x95: _Loading.frame,
    0x71: _Loading.binput,
    0x72: _Loading.long_binput,
    0x4E: _Loading.none,
    0x88: _Loading.true,
    0x8A: _Loading.long,
    0x47: _Loading.real,
    0x58: _Loading.text,
    0x8D: _Loading.text_8,
    0x43: _Loading.short_bytes,
    0x42: _Loading.bytes_4,
    0x8E: _Loading.bytes_8,
    0x87: _Loading.triple,
    0x65: _Loading.appends,
    0x73: _Loading.setitem,
    0x8F: _Loading.empty_set,
    0x90: _Loading.additems,
    0x91: _Loading.frozen_set,
    0x63: _Loading.named,
    0x93: _Loading.stack_global,
    0x51: _Loading.persistent,
}
