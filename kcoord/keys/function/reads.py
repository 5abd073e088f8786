"""The names that a code object reads from outside itself: ``hp.TILE`` is a root, ``hp``, and a path, ``("TILE",)``.

They are found in the bytecode, without source, and are equal under every version of Python: their order and number do not
count. Nested functions and comprehensions belong to the function around them. A local name that is only another name for such a
value (``e = os.environ``, ``import hp as h``) is followed.
"""

from __future__ import annotations

import dis
import functools
import os
import re
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field, replace


def _ops(*names: str) -> frozenset[int]:
    return frozenset(dis.opmap[n] for n in names if n in dis.opmap)  # no version of Python has all of them


_EXTENDED = dis.opmap["EXTENDED_ARG"]
_NOTHING = _ops("CACHE", "NOP", "PRECALL", "RESUME", "NOT_TAKEN")
_NULL, _COPY = dis.opmap["PUSH_NULL"], dis.opmap["COPY"]
_ATTRIBUTES = _ops("LOAD_ATTR", "LOAD_METHOD")
_METHODS = _ops("LOAD_METHOD")
_GLOBALS = _ops("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_CELLS = _ops("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")
_FASTS = frozenset(op for op, n in enumerate(dis.opname) if n.startswith("LOAD_FAST") and n.count("FAST") == 1)
_PAIRS = frozenset(op for op, n in enumerate(dis.opname) if n.count("LOAD_FAST") == 2)  # two variables in one go
_STORE_AND_LOAD = _ops("STORE_FAST_LOAD_FAST")
_STORES = _ops("STORE_FAST", "STORE_DEREF", "STORE_NAME", "STORE_FAST_LOAD_FAST", "STORE_FAST_STORE_FAST")
_STORE_NAME = dis.opmap["STORE_NAME"]
_CALL, _CALL_KW = dis.opmap["CALL"], dis.opmap.get("CALL_KW", -1)
_KW_NAMES = dis.opmap.get("KW_NAMES", -1)
_MOVES = _ops("SWAP", "POP_TOP")
_IMPORT_NAME, _IMPORT_FROM = dis.opmap["IMPORT_NAME"], dis.opmap["IMPORT_FROM"]
_CONST, _CONTAINS = dis.opmap["LOAD_CONST"], dis.opmap["CONTAINS_OP"]
_SUBSCRIPTS = _ops("BINARY_SUBSCR", "STORE_SUBSCR", "DELETE_SUBSCR", "COPY")
_BINARY_OP, _SUBSCRIPT = dis.opmap["BINARY_OP"], 26  # from 3.14 on `a[b]` is one of its kinds
_MATCH_MAPPING, _MATCH_KEYS = dis.opmap["MATCH_MAPPING"], dis.opmap["MATCH_KEYS"]
_REST_OF_MATCH = dis.opmap["DICT_UPDATE"]
_TESTS = frozenset(op for op, n in enumerate(dis.opname) if n.startswith("POP_JUMP")) | _ops("TO_BOOL")
_SMALL_INT = _ops("LOAD_SMALL_INT")
_SHIFTED = _ops("LOAD_GLOBAL")  # the low bit means: push a NULL, too
_ATTRIBUTE_SHIFT = 1 if sys.version_info >= (3, 12) else 0  # the low bit means: a method call
_ROUNDS = 4  # a name for a name for a name


@dataclass(frozen=True, order=True)
class Read:
    """`kind` is ``global``, ``closure``, ``import`` (an import statement) or ``imported`` (a name that one binds).

    `name` is the variable's or the imported module's (with leading dots if it is relative); `path` the attributes that
    follow. `key` is the string constant by which the result is looked up or that it is called with, as in ``os.environ["X"]``
    or ``getenv(key="X")``, or "". `is_tested`: only its truth matters. `is_bound`: the result is not used here, but bound to a
    local name, whose reads follow.
    """

    kind: str
    name: str
    path: tuple[str, ...] = ()
    key: str = ""
    is_bound: bool = False
    is_tested: bool = False
    line: int = field(default=0, compare=False)

    def __str__(self) -> str:
        return ".".join((self.name, *self.path))


@functools.lru_cache(maxsize=4096)
def reads_of(code: types.CodeType) -> tuple[Read, ...]:
    """All reads of `code`, sorted, each once.

    Not seen: a read by a computed name (``getattr(module, name)``), or through a local name that is bound in another way.
    """
    return tuple(sorted(set(_Scope(code, frozenset(code.co_freevars), {}).reads())))


def imports_of(code: types.CodeType) -> dict[str, tuple[Read, ...]]:
    """The names that import statements of `code` itself bind."""
    return _Scope(code, frozenset(), {}, list(_instructions(code))).imports()


@functools.lru_cache(maxsize=4096)
def names_of(code: types.CodeType) -> frozenset[str]:
    """The names that `code` may look up on any object: its attributes, and its texts, which it may pass to ``getattr``."""
    found = set(code.co_names) - stores_of(code)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= names_of(constant)
        elif isinstance(constant, str):
            found.update(part for part in constant.split(".") if part.isidentifier())
        elif isinstance(constant, tuple):
            found.update(part for part in constant if isinstance(part, str))
    return frozenset(found)


def stores_of(code: types.CodeType) -> frozenset[str]:
    """The names that the code of a module binds."""
    return frozenset(code.co_names[arg] for op, arg in instructions(code) if op == _STORE_NAME)


@functools.lru_cache(maxsize=4096)
def words_of(code: types.CodeType) -> frozenset[str]:
    """The words in the texts of `code`."""
    found: set[str] = set()
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= words_of(constant)
        elif isinstance(constant, str):
            found.update(re.findall(r"\w+", constant))
    return frozenset(found)


def without_functions(code: types.CodeType) -> types.CodeType:
    """The code that runs at an import, less the functions and classes that it defines, and less the names that it binds."""
    inner = (isinstance(each, types.CodeType) and not each.co_name.startswith("<") for each in code.co_consts)
    kept = tuple(None if skipped else each for skipped, each in zip(inner, code.co_consts, strict=True))
    return code.replace(co_consts=kept)


@dataclass
class _Scope:
    """One code object and the meaning of its names: `free` ones are closure variables of the outermost function, `bound` ones
    stand for one of several reads.
    """

    code: types.CodeType
    free: frozenset[str]
    bound: dict[str, tuple[Read, ...]]
    steps: list[tuple[int, int, int]] = field(default_factory=list)

    def reads(self) -> Iterator[Read]:
        self.steps = list(_instructions(self.code))
        imported = self.imports()
        outer = self.bound
        self.bound = {**outer, **imported}
        for _ in range(_ROUNDS):
            found = list(self._own_reads())
            names = {name: tuple(dict.fromkeys(reads)) for name, reads in _by_name(found).items()}
            bound = {**outer, **{name: (*imported.get(name, ()), *names.get(name, ())) for name in {*imported, *names}}}
            if bound == self.bound:
                break
            self.bound = bound
        yield from (read for _, read in found)
        for constant in self.code.co_consts:
            if isinstance(constant, types.CodeType):
                names_there = frozenset(constant.co_freevars)
                inner = {n: r for n, r in self.bound.items() if n in names_there}
                yield from _Scope(constant, self.free & names_there, inner).reads()

    def imports(self) -> dict[str, tuple[Read, ...]]:
        found: dict[str, tuple[Read, ...]] = {}
        for name, read in self._imports():
            found[name] = (*found.get(name, ()), read)
        return found

    def _own_reads(self) -> Iterator[tuple[str, Read]]:
        """(the local name that it is bound to or "", read) pairs."""
        for position, (op, arg, index) in enumerate(self.steps):
            if op == _IMPORT_NAME:
                yield "", Read("import", self._module(position), line=self._line(index))
            elif op in _PAIRS:
                first, second = _pair(self.code, arg)
                for root in self._fast(first):
                    yield "", root
                for root in self._fast(second):
                    yield from self._followed(root, position)
            else:
                for root in self._roots(op, arg):
                    yield from self._followed(root, position)

    def _followed(self, root: Read, begin: int) -> Iterator[tuple[str, Read]]:
        """A root with the attributes that are read of it, each time that it is bound or used."""
        position = begin + 1
        root = replace(root, key="", is_bound=False, line=self._line(self.steps[begin][2]))
        while True:
            if self._op(position) in _ATTRIBUTES:
                root = replace(root, path=(*root.path, self._attribute(position)))
                position += 1
            elif self._op(position) == _COPY and self._own_local(position + 1):
                yield self._own_local(position + 1), replace(root, is_bound=True)
                position += 2
            else:
                break
        if name := self._own_local(position):
            yield name, replace(root, is_bound=True)
            return
        is_tested = self._op(position) in _TESTS
        for key in self._keys(begin, position):
            yield "", replace(root, key=key, is_tested=is_tested)

    def _roots(self, op: int, arg: int) -> tuple[Read, ...]:
        code = self.code
        if op in _GLOBALS:
            name = code.co_names[arg >> 1 if op in _SHIFTED else arg]
            return self.bound.get(name) or (Read("global", name),)
        if op in _CELLS:
            name = _variable(code, arg)
            return (Read("closure", name),) if name in self.free else self.bound.get(name, ())
        if op in _FASTS:
            return self._fast(_variable(code, arg))
        return self._fast(_pair(code, arg)[1]) if op in _STORE_AND_LOAD else ()

    def _fast(self, name: str) -> tuple[Read, ...]:
        """None for a cell that an inner function needs: from 3.13 on it is loaded like a local variable, which is no read."""
        is_cell = name in self.code.co_cellvars or name in self.code.co_freevars
        return () if is_cell else self.bound.get(name, ())

    def _own_local(self, position: int) -> str:
        """The local variable of this code that a step binds, or ""."""
        if self._op(position) not in _STORES:
            return ""
        name = self._stored(position)
        return name if name in self.code.co_varnames or name in self.code.co_cellvars else ""

    def _imports(self) -> Iterator[tuple[str, Read]]:
        """The local names that import statements bind."""
        for position, (op, _, _) in enumerate(self.steps):
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
        op, arg, _ = self.steps[position - 2]
        level = arg if op in _SMALL_INT else self.code.co_consts[arg]
        return "." * int(level) + self.code.co_names[self.steps[position][1]]

    def _stored(self, position: int) -> str:
        op, arg, _ = self.steps[position]
        if dis.opname[op] == "STORE_NAME":
            return self.code.co_names[arg]
        return _pair(self.code, arg)[0] if dis.opname[op].count("FAST") == 2 else _variable(self.code, arg)

    def _op(self, position: int) -> int:
        return self.steps[position][0] if 0 <= position < len(self.steps) else -1

    def _attribute(self, position: int) -> str:
        op, arg, _ = self.steps[position]
        return self.code.co_names[arg >> _ATTRIBUTE_SHIFT if dis.opname[op] == "LOAD_ATTR" else arg]

    def _line(self, index: int) -> int:
        return next((line or 0 for start, end, line in self.code.co_lines() if start <= index < end), 0)

    def _keys(self, begin: int, end: int) -> list[str]:
        """The constants of ``root["X"]``, ``root("X")``, ``root(key="X")``, ``"X" in root`` and ``match root``; else [""]."""
        if self._op(end) == _CONTAINS:
            return [self._text(begin - 1)]
        if self._op(end) == _MATCH_MAPPING or self._op(end + 1) == _MATCH_MAPPING:
            return self._matched()
        end += self._op(end) == _NULL
        after = self.steps[end + 1][:2] if end + 1 < len(self.steps) else (-1, 0)
        if self._text(end) and (after[0] in _SUBSCRIPTS or after == (_BINARY_OP, _SUBSCRIPT)):
            return [self._text(end)]
        return [self._argument(end)]

    def _text(self, position: int) -> str:
        """The text of a constant that is loaded, or ""."""
        constant = self.code.co_consts[self.steps[position][1]] if self._op(position) == _CONST else None
        return os.fsdecode(constant) if isinstance(constant, (str, bytes)) else ""

    def _argument(self, begin: int) -> str:
        """The only or first argument of a call whose arguments begin here, or that of the name ``key`` or ``name``.

        Follows the height of the stack: each place holds the text of its constant, or "".
        """
        stack: list[str] = []
        names: tuple[str, ...] = ()
        for position in range(begin, len(self.steps)):
            op, arg, _ = self.steps[position]
            if op == _KW_NAMES:
                names = self.code.co_consts[arg]
            elif op == _CALL_KW and len(stack) == arg + 1:
                names, called = self.code.co_consts[self.steps[position - 1][1]], stack[:arg]
                return _chosen(called, names)
            elif op == _CALL and len(stack) == arg:
                return _chosen(stack, names)
            else:
                names = () if op == _CALL else names
                effect = -1 - arg if op == _CALL else dis.stack_effect(op, arg if op >= dis.HAVE_ARGUMENT else None)
                if len(stack) + effect < 0 or op in dis.hasjrel or op in dis.hasjabs:
                    break
                del stack[len(stack) + min(effect, 0) :]
                stack += [""] * max(effect, 0)
                if stack:
                    stack[-1] = self._text(position)
        return ""

    def _matched(self) -> list[str]:
        """The keys of all mapping patterns in this code; [""] if one of them takes the rest of the mapping, too."""
        found: list[str] = []
        for position, (op, _, _) in enumerate(self.steps):
            if op == _REST_OF_MATCH:
                return [""]
            if op == _MATCH_KEYS:
                before, arg, _ = self.steps[position - 1]
                found += self.code.co_consts[arg] if before == _CONST else [""]
        return found or [""]


def _by_name(reads: list[tuple[str, Read]]) -> dict[str, list[Read]]:
    found: dict[str, list[Read]] = {}
    for name, read in reads:
        if name:
            found.setdefault(name, []).append(replace(read, is_bound=False))
    return found


def _chosen(arguments: list[str], names: tuple[str, ...]) -> str:
    by_name = dict(zip(names, arguments[len(arguments) - len(names) :], strict=True))
    return by_name.get("key") or by_name.get("name") or (arguments[0] if len(arguments) > len(names) else "")


def _instructions(code: types.CodeType) -> Iterator[tuple[int, int, int]]:
    """(operation, argument, offset) triples, without no-ops and prefixes. `dis` does the same ten times slower."""
    raw, extended = code.co_code, 0
    for position in range(0, len(raw), 2):
        op, arg = raw[position], raw[position + 1] | extended
        extended = 0
        if op == _EXTENDED:
            extended = arg << 8
        elif op not in _NOTHING:
            yield op, arg, position


def instructions(code: types.CodeType) -> Iterator[tuple[int, int]]:
    return ((op, arg) for op, arg, _ in _instructions(code) if op != _NULL)


def global_name(code: types.CodeType, op: int, arg: int) -> str:
    """The global that an instruction loads, or ""."""
    return code.co_names[arg >> 1 if op in _SHIFTED else arg] if op in _GLOBALS else ""


def is_method_load(op: int, arg: int) -> bool:
    """True if an instruction loads an attribute to call it as a method."""
    return op in _METHODS or (op in _ATTRIBUTES and _ATTRIBUTE_SHIFT == 1 and bool(arg & 1))


def _variable(code: types.CodeType, arg: int) -> str:
    return code.co_varnames[arg] if arg < len(code.co_varnames) else _flat_names(code)[arg]


def _pair(code: types.CodeType, arg: int) -> tuple[str, str]:
    return _variable(code, arg >> 4), _variable(code, arg & 15)


@functools.lru_cache(maxsize=1024)
def _flat_names(code: types.CodeType) -> list[str]:
    cells = [n for n in code.co_cellvars if n not in code.co_varnames]  # an argument that is a cell has one number
    return [*code.co_varnames, *cells, *code.co_freevars]
