"""The names that a code object reads from outside itself: ``hp.TILE`` is a root, ``hp``, and a path, ``("TILE",)``.

They are found in the bytecode, without source, and are equal under every version of Python: their order and number do not
count. Nested functions and comprehensions belong to the function around them. A local name that is only another name for such a
value (``e = os.environ``, ``import hp as h``) is followed.
"""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import os
import re
import types
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

_NOTHING = ("EXTENDED_ARG", "NOP", "PRECALL", "RESUME", "NOT_TAKEN")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_CELLS = ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")
_FASTS = frozenset(
    name for name in dis.opname if name.startswith("LOAD_FAST") and "CLEAR" not in name and name.count("FAST") == 1
)
_PAIRS = frozenset(name for name in dis.opname if name.count("LOAD_FAST") == 2)  # two variables in one go
_STORES = ("STORE_FAST", "STORE_DEREF", "STORE_NAME", "STORE_FAST_LOAD_FAST", "STORE_FAST_STORE_FAST")
_MOVES = ("SWAP", "POP_TOP")
_SUBSCRIPTS = ("BINARY_SUBSCR", "STORE_SUBSCR", "DELETE_SUBSCR")
_MOST_ROUNDS, _MOST_MEANINGS, _LONGEST_PATH = 64, 32, 3
"""Bounds of what a local name may stand for, as in ``while n: n = n.next``. Beyond them a read counts as a use of the value."""
_SUBSCRIPTED = (("BINARY_OP", 26), ("COPY", 2))  # from 3.14 on `a[b]` is a BINARY_OP; of `a[b] += c` both are copied


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
    """The names that the code of a module or a class binds."""
    if code.co_flags & inspect.CO_OPTIMIZED:
        return frozenset()  # of a function
    return frozenset(step.argval for step in _instructions(code) if step.opname == "STORE_NAME")


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
    steps: list[dis.Instruction] = field(default_factory=list)

    def reads(self) -> Iterator[Read]:
        self.steps = list(_instructions(self.code))
        imported = self.imports()
        outer = self.bound
        self.bound = {**outer, **imported}
        for _ in range(_MOST_ROUNDS):  # a name for a name for a name
            found = list(self._own_reads())
            names = {name: tuple(sorted(set(reads)))[:_MOST_MEANINGS] for name, reads in _by_name(found).items()}
            bound = {**outer, **{name: (*imported.get(name, ()), *names.get(name, ())) for name in {*imported, *names}}}
            if bound == self.bound:
                break
            self.bound = bound
        for name, read in found:
            is_followed = not name or replace(read, is_bound=False) in self.bound.get(name, ())
            yield read if is_followed else replace(read, is_bound=False)
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
        for position, step in enumerate(self.steps):
            if step.opname == "IMPORT_NAME":
                yield "", Read("import", self._module(position), line=_line(step))
            elif step.opname in _PAIRS:
                first, second = step.argval
                for root in self._fast(first):
                    yield "", root
                for root in self._fast(second):
                    yield from self._followed(root, position)
            else:
                for root in self._roots(step):
                    yield from self._followed(root, position)

    def _followed(self, root: Read, begin: int) -> Iterator[tuple[str, Read]]:
        """A root with the attributes that are read of it, each time that it is bound or used."""
        position = begin + 1
        root = replace(root, key="", is_bound=False, line=_line(self.steps[begin]))
        while True:
            if self._op(position) in _ATTRIBUTES:
                root = replace(root, path=(*root.path, self.steps[position].argval))
                position += 1
            elif self._op(position) == "COPY" and self._own_local(position + 1):
                yield self._own_local(position + 1), replace(root, is_bound=True)
                position += 2
            else:
                break
        if (name := self._own_local(position)) and len(root.path) <= _LONGEST_PATH:
            yield name, replace(root, is_bound=True)
            return
        is_tested = self._op(position).startswith(("POP_JUMP", "TO_BOOL"))
        for key in self._keys(begin, position):
            yield "", replace(root, key=key, is_tested=is_tested)

    def _roots(self, step: dis.Instruction) -> tuple[Read, ...]:
        op, name = step.opname, step.argval
        if op in _GLOBALS:
            return self.bound.get(name) or (Read("global", name),)
        if op in _CELLS:
            return (Read("closure", name),) if name in self.free else self.bound.get(name, ())
        if op in _FASTS:
            return self._fast(name)
        return self._fast(name[1]) if op == "STORE_FAST_LOAD_FAST" else ()

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
        for position, step in enumerate(self.steps):
            if step.opname != "IMPORT_NAME":
                continue
            module, after = self._module(position), position + 1
            if self._op(after) in _STORES:  # import a.b: binds a
                yield self._stored(after), Read("imported", module.partition(".")[0] if module[0] != "." else module)
            chosen = Read("imported", module)
            explicit = self.steps[position - 1].argval is not None  # from … import
            while self._op(after) == "IMPORT_FROM" or self._op(after) in _MOVES or self._op(after) in _STORES:
                if self._op(after) == "IMPORT_FROM" and explicit:
                    chosen = Read("imported", module, (self.steps[after].argval,))
                elif self._op(after) in _STORES and after > position + 1:
                    yield self._stored(after), chosen
                    if not explicit:
                        break
                elif self._op(after) not in _MOVES and self._op(after) != "IMPORT_FROM":
                    break
                after += 1

    def _module(self, position: int) -> str:
        return "." * int(self.steps[position - 2].argval) + str(self.steps[position].argval)

    def _stored(self, position: int) -> str:
        name = self.steps[position].argval
        return str(name[0] if isinstance(name, tuple) else name)

    def _op(self, position: int) -> str:
        return self.steps[position].opname if 0 <= position < len(self.steps) else ""

    def _keys(self, begin: int, end: int) -> list[str]:
        """The constants of ``root["X"]``, ``root("X")``, ``root(key="X")``, ``"X" in root`` and ``match root``; else [""]."""
        if self._op(end) == "CONTAINS_OP":
            is_whole = begin < 2 or not self._op(begin - 2).startswith(
                ("POP_", "JUMP")
            )  # and no branch of an expression
            return [self._text(begin - 1) if is_whole else ""]
        if self._op(end) == "MATCH_MAPPING" or self._op(end + 1) == "MATCH_MAPPING":
            return self._matched()
        end += self._op(end) == "PUSH_NULL"
        is_subscript = (self._op(end + 1), self.steps[end + 1].arg if self._op(end + 1) else 0) in _SUBSCRIPTED
        if self._text(end) and (is_subscript or self._op(end + 1) in _SUBSCRIPTS):
            return [self._text(end)]
        return [self._argument(end)]

    def _text(self, position: int) -> str:
        """The text of a constant that is loaded, or ""."""
        constant = self.steps[position].argval if self._op(position) == "LOAD_CONST" else None
        return os.fsdecode(constant) if isinstance(constant, (str, bytes)) else ""

    def _argument(self, begin: int) -> str:
        """The only or first argument of a call whose arguments begin here, or that of the name ``key`` or ``name``.

        Follows the height of the stack: each place holds the text of its constant, or "".
        """
        stack: list[str] = []
        names: tuple[str, ...] = ()
        for position in range(begin, len(self.steps)):
            step = self.steps[position]
            op, arg = step.opname, step.arg or 0
            if op == "KW_NAMES":
                names = self.code.co_consts[arg]  # not decoded by every version
            elif op == "CALL_KW" and len(stack) == arg + 1:
                return _chosen(stack[:arg], self.steps[position - 1].argval)
            elif op == "CALL" and len(stack) == arg:
                return _chosen(stack, names)
            else:
                names = () if op == "CALL" else names
                effect = -1 - arg if op == "CALL" else dis.stack_effect(step.opcode, step.arg)
                if len(stack) + effect < 0 or step.opcode in dis.hasjrel or step.opcode in dis.hasjabs:
                    break
                del stack[len(stack) + min(effect, 0) :]
                stack += [""] * max(effect, 0)
                if stack:
                    stack[-1] = self._text(position)
        return ""

    def _matched(self) -> list[str]:
        """The keys of all mapping patterns in this code; [""] if one of them takes the rest of the mapping, too."""
        found: list[str] = []
        for before, step in itertools.pairwise(self.steps):
            if step.opname == "DICT_UPDATE":  # the rest of the mapping
                return [""]
            if step.opname == "MATCH_KEYS":
                found += before.argval if before.opname == "LOAD_CONST" else [""]
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


def _instructions(code: types.CodeType) -> Iterator[dis.Instruction]:
    """Without no-ops and prefixes."""
    return (step for step in dis.get_instructions(code) if step.opname not in _NOTHING)


def _line(step: dis.Instruction) -> int:
    return (step.positions and step.positions.lineno) or 0
