"""The names that a code object reads from outside itself: ``hp.TILE`` is a root, ``hp``, and a path, ``("TILE",)``.

They are found in the bytecode, without source, and are equal under every version of Python: their order and number do not
count. Nested functions and comprehensions belong to the function around them.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace


def _ops(*names: str) -> frozenset[int]:
    return frozenset(dis.opmap[n] for n in names if n in dis.opmap)  # no version of Python has all of them


_EXTENDED = dis.opmap["EXTENDED_ARG"]
_NOTHING = _ops("CACHE", "PUSH_NULL", "NOP", "PRECALL", "RESUME", "NOT_TAKEN")
_ATTRIBUTES = _ops("LOAD_ATTR", "LOAD_METHOD")
_METHODS = _ops("LOAD_METHOD")
_GLOBALS = _ops("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_CELLS = _ops("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")
_FASTS = frozenset(op for op, n in enumerate(dis.opname) if n.startswith("LOAD_FAST") and n.count("FAST") == 1)
_PAIRS = frozenset(op for op, n in enumerate(dis.opname) if n.count("LOAD_FAST") == 2)  # two variables in one go
_STORE_AND_LOAD = _ops("STORE_FAST_LOAD_FAST")
_STORES = _ops("STORE_FAST", "STORE_DEREF", "STORE_NAME", "STORE_FAST_LOAD_FAST", "STORE_FAST_STORE_FAST")
_CALLS = _ops("CALL", "CALL_FUNCTION", "CALL_METHOD")
_SUPER_ATTRIBUTE = _ops("LOAD_SUPER_ATTR")
_STORE_NAME = dis.opmap["STORE_NAME"]
_WRITES = _ops("STORE_ATTR", "DELETE_ATTR")
_MOVES = _ops("SWAP", "ROT_TWO", "POP_TOP")
_IMPORT_NAME, _IMPORT_FROM = dis.opmap["IMPORT_NAME"], dis.opmap["IMPORT_FROM"]
_CONST, _CONTAINS = dis.opmap["LOAD_CONST"], dis.opmap["CONTAINS_OP"]
_SMALL_INT = _ops("LOAD_SMALL_INT")
_GLOBAL_SHIFT = 1 if sys.version_info >= (3, 11) else 0  # the low bit means: push a NULL first
_ATTRIBUTE_SHIFT = 1 if sys.version_info >= (3, 12) else 0  # the low bit means: a method call
_FLAT_CELLS = sys.version_info >= (3, 11)  # cells are numbered after the local variables


@dataclass(frozen=True, order=True)
class Read:
    """`kind` is ``global``, ``closure``, ``receiver`` (the method's own object), ``super``, ``import`` (an import statement)
    or ``imported`` (a name that one binds).

    `name` is the variable's or the imported module's (with leading dots if it is relative); `path` the attributes that
    follow; `key` the string constant by which the result is looked up, as in ``os.environ["X"]``, or "".
    """

    kind: str
    name: str
    path: tuple[str, ...] = ()
    key: str = ""

    def __str__(self) -> str:
        return ".".join((self.name, *self.path))


@functools.lru_cache(maxsize=4096)
def reads_of(code: types.CodeType, receiver: str | None = None) -> tuple[Read, ...]:
    """All reads of `code`, sorted, each once. `receiver` is the name of its first parameter if it is a method.

    Not seen: a read by a computed name (``getattr(module, name)``), or through an attribute of a local variable.
    """
    return tuple(sorted(set(_Scope(code, receiver, frozenset(code.co_freevars), {}).reads())))


def imports_of(code: types.CodeType) -> list[tuple[str, Read]]:
    """The names that import statements of `code` itself bind, in their order."""
    return list(_Scope(code, None, frozenset(), {}, list(instructions(code))).imports())


def stores_of(code: types.CodeType) -> Counter[str]:
    """The number of times that the code of a module binds each name."""
    return Counter(code.co_names[arg] for op, arg in instructions(code) if op == _STORE_NAME)


@dataclass
class _Scope:
    """One code object and the meaning of its names. `free` names are closure variables of the outermost function."""

    code: types.CodeType
    receiver: str | None
    free: frozenset[str]
    imported: dict[str, Read]
    steps: list[tuple[int, int]] = field(default_factory=list)

    def reads(self) -> Iterator[Read]:
        self.steps = list(instructions(self.code))
        bound = list(self.imports())
        self.imported = {**self.imported, **dict(bound)}
        ways = [(self.imported[name], read) for name, read in bound if read != self.imported[name]]
        for read in self._reads():
            yield read
            for last, other in ways:  # of a name that several import statements bind: try: … except ImportError: …
                if read.kind == "imported" and read.name == last.name and read.path[: len(last.path)] == last.path:
                    yield replace(read, name=other.name, path=other.path + read.path[len(last.path) :])

    def _reads(self) -> Iterator[Read]:
        position = 0
        while position < len(self.steps):
            op, arg = self.steps[position]
            if op in _PAIRS and (first := self._fast(_pair(self.code, arg)[0])) is not None:
                yield first
            root = self._root(op, arg)
            begin, position = position, position + 1
            if op == _IMPORT_NAME:
                yield Read("import", self._module(begin))
            if root is None:
                continue
            if root == _SUPER:
                root, position = self._after_super(position)
            while position < len(self.steps) and self.steps[position][0] in _ATTRIBUTES:
                root = replace(root, path=(*root.path, self._attribute(position)))
                position += 1
            if root.path or root.kind != "receiver" or self._op(position) not in _WRITES:
                yield replace(root, key=self._key(begin, position))
        yield from self._nested()

    def _nested(self) -> Iterator[Read]:
        for constant in self.code.co_consts:
            if isinstance(constant, types.CodeType):
                names = frozenset(constant.co_freevars)
                receiver = self.receiver if self.receiver in names else None
                imported = {n: r for n, r in self.imported.items() if n in names}
                yield from _Scope(constant, receiver, self.free & names, imported).reads()

    def _root(self, op: int, arg: int) -> Read | None:
        code = self.code
        if op in _GLOBALS:
            name = global_name(code, op, arg)
            return self._local(name) or Read("global", name)
        if op in _CELLS:
            name = _cell(code, arg)
            return Read("closure", name) if name in self.free else self._local(name)
        if op in _FASTS:
            return self._fast(_variable(code, arg))
        if op in _PAIRS or op in _STORE_AND_LOAD:
            return self._fast(_pair(code, arg)[1])
        return None

    def _fast(self, name: str) -> Read | None:
        """None for a cell that an inner function needs: from 3.13 on it is loaded like a local variable, which is no read."""
        is_cell = name in self.code.co_cellvars or name in self.code.co_freevars
        return None if is_cell else self._local(name)

    def _local(self, name: str) -> Read | None:
        return Read("receiver", name) if name == self.receiver else self.imported.get(name)

    def _after_super(self, position: int) -> tuple[Read, int]:
        """``super()`` in any of its compiled forms; another use of that name reads a global."""
        if self._op(position) in _CALLS and self.steps[position][1] == 0:
            return Read("super", "super"), position + 1
        if self._op(position + 2) in _SUPER_ATTRIBUTE:
            name = self.code.co_names[self.steps[position + 2][1] >> 2]
            return Read("super", "super", (name,)), position + 3
        return _SUPER, position

    def imports(self) -> Iterator[tuple[str, Read]]:
        """The local names that import statements bind."""
        for position, (op, _) in enumerate(self.steps):
            if op != _IMPORT_NAME:
                continue
            module, after = self._module(position), position + 1
            if self._op(after) in _STORES:  # import a.b: binds a
                yield self._stored(after), Read("imported", module.partition(".")[0] if module[0] != "." else module)
            chosen = Read("imported", module)
            explicit = self.code.co_consts[self.steps[position - 1][1]] is not None  # from … import
            while self._op(after) == _IMPORT_FROM or self._op(after) in _MOVES or self._op(after) in _STORES:
                if self._op(after) == _IMPORT_FROM and explicit:
                    chosen = Read("imported", module, (self.code.co_names[self.steps[after][1]],))
                elif self._op(after) in _STORES and after > position + 1:
                    yield self._stored(after), chosen
                    if not explicit:
                        break
                elif self._op(after) not in _MOVES and self._op(after) != _IMPORT_FROM:
                    break
                after += 1

    def _module(self, position: int) -> str:
        op, arg = self.steps[position - 2]
        level = arg if op in _SMALL_INT else self.code.co_consts[arg]
        return "." * int(level) + self.code.co_names[self.steps[position][1]]

    def _stored(self, position: int) -> str:
        op, arg = self.steps[position]
        if dis.opname[op] == "STORE_NAME":
            return self.code.co_names[arg]
        if dis.opname[op] == "STORE_DEREF":
            return _cell(self.code, arg)
        return _pair(self.code, arg)[0] if dis.opname[op].count("FAST") == 2 else _variable(self.code, arg)

    def _op(self, position: int) -> int:
        return self.steps[position][0] if position < len(self.steps) else -1

    def _attribute(self, position: int) -> str:
        op, arg = self.steps[position]
        return self.code.co_names[arg >> _ATTRIBUTE_SHIFT if dis.opname[op] == "LOAD_ATTR" else arg]

    def _key(self, begin: int, end: int) -> str:
        """The constant of ``root["X"]``, ``root.get("X")`` and ``"X" in root``."""
        where = begin - 1 if self._op(end) == _CONTAINS else end
        if not 0 <= where < len(self.steps) or self.steps[where][0] != _CONST:
            return ""
        constant = self.code.co_consts[self.steps[where][1]]
        return constant if isinstance(constant, str) else ""


_SUPER = Read("global", "super")
_SHIFTED = _ops("LOAD_GLOBAL")


def instructions(code: types.CodeType) -> Iterator[tuple[int, int]]:
    """(operation, argument) pairs, without no-ops and prefixes. `dis` does the same ten times slower."""
    raw, extended = code.co_code, 0
    for position in range(0, len(raw), 2):
        op, arg = raw[position], raw[position + 1] | extended
        extended = 0
        if op == _EXTENDED:
            extended = arg << 8
        elif op not in _NOTHING:
            yield op, arg


def global_name(code: types.CodeType, op: int, arg: int) -> str:
    """The global that an instruction loads, or ""."""
    return code.co_names[arg >> _GLOBAL_SHIFT if op in _SHIFTED else arg] if op in _GLOBALS else ""


def is_method_load(op: int, arg: int) -> bool:
    """True if an instruction loads an attribute to call it as a method."""
    return op in _METHODS or (op in _ATTRIBUTES and _ATTRIBUTE_SHIFT == 1 and bool(arg & 1))


def _variable(code: types.CodeType, arg: int) -> str:
    if arg < len(code.co_varnames):
        return code.co_varnames[arg]
    return _cell(code, arg)


def _pair(code: types.CodeType, arg: int) -> tuple[str, str]:
    return _variable(code, arg >> 4), _variable(code, arg & 15)


def _cell(code: types.CodeType, arg: int) -> str:
    if _FLAT_CELLS:
        return _flat_names(code)[arg]
    return (code.co_cellvars + code.co_freevars)[arg]


@functools.lru_cache(maxsize=1024)
def _flat_names(code: types.CodeType) -> tuple[str, ...]:
    cells = tuple(n for n in code.co_cellvars if n not in code.co_varnames)
    return code.co_varnames + cells + code.co_freevars
