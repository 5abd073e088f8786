"""The content of a function: its code, its helpers, and the values that they read; never an `id`.

The walk follows functions, classes and modules of the project, from one to the next, by the names that their code reads. Of a
class, or of a module that is used as a value, it follows the members whose names occur in code that it has met. Installed
packages and Python's own modules end it: they count by name and version. A value without identity raises.
"""

from __future__ import annotations

import builtins
import enum
import functools
import importlib
import os
import re
import sys
import types
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.util import resolve_name
from typing import Any

from kcoord.errors import KeyFactorError
from kcoord.interruption import let_through
from kcoord.keys.arguments.argument_types import own_attributes
from kcoord.keys.arguments.signature import HeldValues
from kcoord.keys.cache_key import encode
from kcoord.keys.function.callables import HOLDERS, NO_CODE, is_code, is_method, jit_function, wrapped_by
from kcoord.keys.function.files import Files
from kcoord.keys.function.namespaces import declared_values, names_in_class, names_in_module
from kcoord.keys.function.reads import Read, imports_of, names_of, reads_of, without_functions, words_of
from kcoord.keys.function.source import bytecode, source_of
from kcoord.keys.function.watch import MISSING, Watch
from kcoord.keys.packages import Owner, identity_of, is_found, label_of, module_of, owner_of, portable_name

PARTS = ("code", "globals", "closure", "defaults", "annotations")  # of a content, which are factors
_OR_IGNORE = "or name it in ignore=… if it changes nothing"
_PLAIN = (type(None), bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)
_VARIABLE = re.compile(r"\$\{?(\w+)")  # in a text that `os.path.expandvars` reads
_NOT_READ = frozenset(("update", "__setitem__", "__delitem__"))
_READ_BY_NAME = frozenset(("get", "pop", "setdefault", "__getitem__", "__contains__"))
_IMPORTERS = (importlib.import_module, importlib.__import__, builtins.__import__)
_GETTERS = (os.getenv, os.getenvb, os.path.expandvars)
_TEXTS = frozenset(("globals", "eval", "exec", "get_type_hints"))
_EVALUATED = frozenset(("eval", "exec", "locals", "vars"))
_OF_WRAPPERS = frozenset((*functools.WRAPPER_ASSIGNMENTS, "__wrapped__"))
_READ_OF_FUNCTIONS = ("__doc__", "__name__")
"""Attributes of functions that few programs read."""


@dataclass
class Content:
    """The content of a function. Each of `PARTS` is a key factor; its names are the same in every process.

    `code` maps functions to their places in files or to their text, `globals` ``module.NAME`` to values, `closure`, `defaults`
    and `annotations` ``function.name`` to values. `variables` are variables of the environment that are read by a constant name;
    `files` those that count whole; `passed` the labels of code in the arguments; `nested` the declarations of compile functions
    among the code; `jit_functions` Triton's functions. `watch` detects changes of all of it.
    """

    function: str = ""
    code: dict[str, Any] = field(default_factory=dict)
    globals: dict[str, Any] = field(default_factory=dict)
    closure: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    annotations: dict[str, Any] = field(default_factory=dict)
    variables: set[str] = field(default_factory=set)
    files: Files = field(default_factory=Files)
    passed: list[str] = field(default_factory=list)
    nested: list[Any] = field(default_factory=list)
    jit_functions: list[Any] = field(default_factory=list)
    watch: Watch = field(default_factory=Watch)

    def factors(self) -> dict[str, Any]:
        found: dict[str, Any] = {"function": self.function}
        found |= {name: part for name in PARTS if (part := getattr(self, name))}
        found |= {"passed": self.passed} if self.passed else {}
        found |= {"files": self.files.factor()} if self.files.digests else {}
        found |= {"packages": self.files.packages} if self.files.packages else {}
        return found | ({"optimize": sys.flags.optimize} if sys.flags.optimize else {})  # -O drops assertions


def content_of(
    thing: Any,
    ignore: frozenset[str] = frozenset(),
    skip: Callable[[str], bool] = lambda module: False,
    *,
    keep: Callable[[types.ModuleType, str, Any], bool] = lambda module, attribute, value: False,
    arguments: Iterable[Any] = (),
    files: Files | None = None,
    known: frozenset[str] = frozenset(),
    device_id: int = 0,
) -> Content:
    """The content of a function, or of another value that code holds, with the functions in it and the code of its class.

    `arguments` are functions, classes and modules that are passed to it. With `files` a function's whole file counts, else its
    text. `ignore` names globals and closure variables that do not count (a logger, say); `skip` selects installed modules that do
    not count, and `keep` attributes of these that do. `known`: the author has declared the ``environment`` or the ``imports``: a
    use that is not understood is no error. `device_id` is the ordinal of the current device: every rank has its own.

    Raises `KeyFactorError` for a value that has no identity, with its name and a remedy.
    """
    content = Content() if files is None else Content(files=files)
    return _Walk(content, ignore, skip, keep, files is not None, known, device_id).run(thing, arguments)


@dataclass
class _Walk:
    content: Content
    ignore: frozenset[str]
    skip: Callable[[str], bool]
    keep: Callable[[types.ModuleType, str, Any], bool]
    has_whole_files: bool
    known: frozenset[str]
    device_id: int
    _queue: deque[Callable[[], Any]] = field(default_factory=deque)
    _labels: dict[tuple[Any, ...], str] = field(default_factory=dict)
    _numbers: Counter[str] = field(default_factory=Counter)
    _alive: list[Any] = field(default_factory=list)  # keeps the objects that `_labels` names by id
    _names: set[str] = field(default_factory=set)
    _prefixes: set[str] = field(default_factory=set)
    _members: defaultdict[str, list[Callable[[], Any]]] = field(default_factory=lambda: defaultdict(list))
    _spaces: dict[type, Mapping[str, Any]] = field(default_factory=dict)
    _is_over: bool = False
    _evaluates: bool = False  # the function that is visited: a text may name its local variables
    _takes_all: bool = False  # members, also those whose names were not met: a value's reader is not known

    def __post_init__(self) -> None:
        self._values = HeldValues(self.label, is_code, self.device_id)

    def run(self, thing: Any, arguments: Iterable[Any]) -> Content:
        name = label_of(type(thing))
        self._takes_all = not is_code(thing) or isinstance(thing, type)
        try:
            is_followed = is_code(thing) or isinstance(thing, types.ModuleType)
            self.content.function = self.label(thing) if is_followed else self._add("globals", name, thing)
            self.content.passed = [self.label(each) for each in arguments]
            while self._queue:  # so a chain of calls may be longer than Python's stack
                self._queue.popleft()()
                self._unimported()
        except RecursionError:
            raise KeyFactorError(f"{name} is wrapped too deeply: name what it reads in ignore=…") from None
        except KeyFactorError:
            raise
        except Exception as error:  # of an object of the program: a proxy, a class whose attributes raise
            let_through(error)
            raise KeyFactorError(f"{name}: {type(error).__name__} while it was read: {error}; {_OR_IGNORE}") from error
        self._is_over = True
        self._members.clear()  # the watch keeps this walk
        return self.content

    # Labels.

    def label(self, thing: Any) -> str:
        """The label of code: a function, a class, a module. All of it is in `content` when the walk ends."""
        thing = self._undecorated(thing)
        if (jit := jit_function(thing)) is not None:
            if not any(jit is known for known in self.content.jit_functions):
                self.content.jit_functions.append(jit)
            inlined = () if not getattr(jit, "noinline", None) else ("noinline",)
            return self._function(jit.fn, ("triton", jit.src, *inlined))
        if isinstance(thing, types.FunctionType):
            return self._function(thing) if owner_of(thing) is Owner.PROJECT else self._installed(thing)
        if isinstance(thing, (type, types.ModuleType)):
            return self._class(thing) if isinstance(thing, type) else self._module(thing)
        if isinstance(thing, types.MethodType):
            if owner_of(thing.__func__) is not Owner.PROJECT and owner_of(type(thing.__self__)) is not Owner.PROJECT:
                return self._loosely(thing, thing.__func__, {"self": thing.__self__})
            return self._holding(thing, thing.__func__, {"self": thing.__self__})
        if isinstance(thing, (functools.partial, functools.partialmethod)):
            held = {"arguments": thing.args, "keywords": thing.keywords}
            return self._holding(thing, thing.func, held | ({"attributes": own} if (own := vars(thing)) else {}))
        if names := next((each for kind, each in HOLDERS.items() if isinstance(thing, kind)), ()):
            each = ((name, getattr(thing, name)) for name in names)
            functions = ", ".join(f"{name}={self.label(function)}" for name, function in each if function is not None)
            return f"{type(thing).__name__}({functions})"
        if isinstance(thing, NO_CODE):
            return self._built_in(thing)
        if (wrapped := wrapped_by(thing)) is not None:
            own = {name: each for name, each in own_attributes(thing).items() if name not in _OF_WRAPPERS}
            return self._loosely(thing, wrapped, own)
        raise KeyFactorError(
            f"a {type(thing).__qualname__} is no Python function, and has no identity: wrap it in one of yours"
        )

    def _built_in(self, thing: Any) -> str:
        """A function that is written in C: by name, with the object that it is a method of; a project's by its file."""
        module, owner = module_of(thing), getattr(thing, "__self__", None)
        is_ours = isinstance(owner, types.ModuleType) and owner_of(module) is Owner.PROJECT
        if is_ours and not (sys.modules.get(module) is owner and self.content.files.add_module(module)):
            raise KeyFactorError(
                f"{module}, whose {thing.__qualname__} it calls, is not imported by that name: import it"
            )
        name = _named(module, thing.__qualname__)
        if isinstance(owner, (type, types.ModuleType, type(None))):
            return name
        return self._holding(thing, None, {"self": owner}, name)

    def _numbered(self, where: tuple[Any, ...], thing: Any, name: str) -> tuple[str, bool]:
        """A label, and whether it is new. Things of one name are numbered in the order in which they are met.

        After the walk no new number is given: a watch that describes a value again must not change the labels.
        """
        if where in self._labels or self._is_over:
            return self._labels.get(where, f"{name} (new)"), False
        self._numbers[name] += 1
        self._labels[where] = name if self._numbers[name] == 1 else f"{name}#{self._numbers[name]}"
        self._alive.append(thing)
        return self._labels[where], True

    def _once(self, thing: Any, name: str, visit: Callable[[str], Any]) -> str:
        """The label of `thing`, which is visited if it is new."""
        label, is_new = self._numbered((id(thing),), thing, name)
        if is_new:
            self._queue.append(lambda: visit(label))
        return label

    def _home(self, namespace: Mapping[str, Any]) -> str:
        """The name of a module by its namespace: there may be several of one name."""
        name = namespace.get("__name__")
        return self._numbered(
            (id(namespace), "home"), namespace, portable_name(name) if isinstance(name, str) else "<none>"
        )[0]

    def _undecorated(self, function: Any) -> Any:
        """`function` without kcoord's own decorators, which do not change what it compiles; their declarations are kept."""
        while isinstance(function, types.FunctionType):
            module, inner = function.__globals__.get("__name__"), function.__dict__.get("__wrapped__")
            if inner is None or not isinstance(module, str) or not module.startswith("kcoord."):
                break
            if (declared := function.__dict__.get("declared")) is not None:
                self._declare(declared, f"{self._home(inner.__globals__)}.{inner.__qualname__}")
            function = inner
        return function

    def _declare(self, declared: Any, name: str) -> None:
        """The declarations of a compile function among the code: they are this one's, too."""
        if not any(declared is known for known in self.content.nested):
            self.content.nested.append(declared)
            self.known |= {"environment"} if declared.variables else set()
            self.known |= {"imports"} if declared.files else set()
            if declared.load is not None:
                self._queue.append(functools.partial(self._add, "globals", f"{name} load", declared.load))

    # Code.

    def _function(self, function: types.FunctionType, text: tuple[Any, ...] = ()) -> str:
        name = f"{self._home(function.__globals__)}.{function.__qualname__}"
        return self._once(function, name, lambda label: self._visit(function, label, text))

    def _visit(self, function: types.FunctionType, label: str, text: tuple[Any, ...]) -> None:
        code = function.__code__
        self.content.watch.function(function, code=not text)
        self.content.code[label] = self._described(function, text)
        self._parts(function, label)
        cells = dict(closure_of(function))
        self._evaluates = not _EVALUATED.isdisjoint(code.co_names)
        for read in reads_of(code):
            if read.name not in self.ignore and str(read) not in self.ignore:
                self._read(read, function, label, cells)
        if "__class__" in cells:  # for ``super()``; not every version of Python reads it in the code
            self._add("closure", f"{label}.__class__", cells["__class__"])
        if not _TEXTS.isdisjoint(code.co_names):  # globals of the function whose names occur in its texts
            for name in sorted(words_of(code) & function.__globals__.keys() - self.ignore):
                self._read(Read("global", name), function, label, cells)
        self._meet(names_of(code))

    def _meet(self, names: frozenset[str]) -> None:
        for name in sorted(names - self._names):
            self._names.add(name)
            self._queue.extend(self._members.pop(name, ()))
            if name.endswith("_") and not name.startswith("__"):
                self._prefixes.add(name)
                for each in sorted(member for member in self._members if member.startswith(name)):
                    self._queue.extend(self._members.pop(each))

    def _described(self, function: types.FunctionType, text: tuple[Any, ...]) -> Any:
        if not self.has_whole_files:
            return text or source_of(function.__code__)
        place = self.content.files.place_of(function)
        return (*bytecode(function.__code__), *text) if place is None else place | ({"text": text} if text else {})

    def _parts(self, function: types.FunctionType, label: str) -> None:
        """The defaults, the annotations, and the attributes that were put on a function."""
        code, values = function.__code__, function.__defaults__ or ()
        names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
        for name, value in (*zip(names, values, strict=True), *(function.__kwdefaults__ or {}).items()):
            if name not in self.ignore:
                self._add("defaults", f"{label}.{name}", value)
        if function.__kwdefaults__:
            self._watch(function.__kwdefaults__, label)
        for name, value in _annotations_of(function).items():
            self._annotation(f"{label}.{name}", name, value)
        own = function.__dict__
        if (registry := _registry_of(function)) is not None:
            own = {"registry": registry}
        if own:
            self.content.watch.content(types.MappingProxyType(own), lambda: len(own))
        for name in sorted(own):
            if name not in self.ignore:
                self._add("globals", f"{label}.{name}", self.content.watch.item(own, name))
        for name in _READ_OF_FUNCTIONS:
            self._when_met(name, functools.partial(self._attribute, function, label, name))

    def _attribute(self, function: types.FunctionType, label: str, name: str) -> None:
        self.content.globals[f"{label}.{name}"] = self.content.watch.attribute(function, name)

    def _annotation(self, label: str, name: str, value: Any) -> None:
        """Compilers written for Python read them. Types count by name, values by content, others by the text of the code."""
        if name in self.ignore or isinstance(value, types.GenericAlias):
            return
        if isinstance(value, type):
            self.content.annotations[label] = ("type", label_of(value))
        elif not is_code(value):
            try:
                self.content.annotations[label] = self._values.describe(value, name)
            except KeyFactorError:
                return

    def _installed(self, function: types.FunctionType) -> str:
        """A function of an installed package counts by name; one that a decorator of a package made, with what it holds."""
        name = _named(module_of(function), function.__qualname__)
        cells = dict(closure_of(function))
        return name if not cells or is_found(function) else self._loosely(function, None, cells, name)

    def _loosely(self, thing: Any, function: Any, held: Mapping[str, Any], name: str = "") -> str:
        """Code of an installed package, with the values that it holds: those without identity by their classes' names."""
        where = ("loosely", id(function), *map(id, held.values()))
        name = f"{type(thing).__name__}({name or self.label(function)})"
        label, is_new = self._numbered(where, (thing, held), name)
        if is_new:
            self.content.code[label] = label_of(type(thing))
            for each, value in held.items():
                try:
                    self._add("defaults", f"{label} {each}", value)
                except KeyFactorError:
                    self.content.defaults[f"{label} {each}"] = self._loose(value)
        return label

    def _loose(self, value: Any) -> Any:
        """The class of a value without identity, and those of its attributes that have one."""
        found: dict[str, Any] = {"class": label_of(type(value))}
        is_pythons = owner_of(type(value)) is Owner.PYTHON  # a cache of a decorator's, say
        for name, each in sorted(own_attributes(value).items()) if not is_pythons else ():
            try:
                found[name] = self._values.describe(each, name)
            except KeyFactorError:
                found[name] = label_of(type(each))
        return found

    def _holding(self, thing: Any, function: Any, held: Mapping[str, Any], name: str = "") -> str:
        """A function with values that it is called with: a partial, a bound method."""
        if _reads_environment(function):
            name = f"a partial of os.{function.__name__}"
            read = Read("global", name, key=str(next((each for each in held["arguments"]), "")))
            self._environment("", read, self._home({"__name__": function.__module__}))
        where = (name, id(function), *map(id, held.values()))  # a bound method is made anew at each lookup
        name = f"{type(thing).__name__}({name or self.label(function)})"
        label, is_new = self._numbered(where, (thing, held), name)
        if is_new:
            self.content.code[label] = type(thing).__name__
            for name, value in held.items():
                self._add("defaults", f"{label} {name}", value)
        return label

    def _class(self, kind: type) -> str:
        if owner_of(kind) is not Owner.PROJECT:
            return _named(module_of(kind), kind.__qualname__)
        return self._once(kind, label_of(kind), lambda label: self._visit_class(kind, label))

    def _visit_class(self, kind: type, label: str) -> None:
        self.content.watch.attribute(kind, "__mro__")
        if self.has_whole_files and is_found(kind):
            self.content.files.add_module(kind.__module__)
        takes_all = self._takes_all or any(map(_calls_back, kind.__mro__))
        self._namespace(label, self._space(kind), names_in_class(kind), takes_all)
        for name, value in declared_values(kind):
            self._add("globals", f"{label}.{name}", value)
        made_by = [type(kind)] if owner_of(type(kind)) is Owner.PROJECT else []
        self.content.code[label] = ["class", [self.label(each) for each in (*kind.__bases__, *made_by)]]

    def _module(self, module: types.ModuleType) -> str:
        """A project's module that is used as a value counts as a class does; other modules by name and version."""
        name = module.__name__
        if owner_of(module) is not Owner.PROJECT:
            return f"{portable_name(name)} ({identity_of(name)}) {getattr(module, '__version__', '')}"
        return self._once(module, f"module {self._home(vars(module))}", lambda label: self._visit_module(module, label))

    def _visit_module(self, module: types.ModuleType, label: str) -> None:
        if self.has_whole_files and sys.modules.get(module.__name__) is module:
            self.content.files.add_module(module.__name__)
        self.content.code[label] = "module"
        self._namespace(label, vars(module), names_in_module(module), self._takes_all)

    def _namespace(self, label: str, space: Mapping[str, Any], names: list[str], takes_all: bool) -> None:
        """The members of a class or a module whose names occur in code, and those that Python calls itself; or all."""
        proxy = types.MappingProxyType(space) if isinstance(space, dict) else space
        self.content.watch.content(proxy, lambda: b"%d" % len(space))  # a name that is added
        for name in names:
            if name in self.ignore:
                continue
            visit = functools.partial(self._member, label, space, name)
            if takes_all or (name.startswith("__") and name.endswith("__")):
                self._queue.append(visit)
            else:
                self._when_met(name, visit)

    def _when_met(self, name: str, visit: Callable[[], Any]) -> None:
        """Visit what has a `name` once that, or a prefix of it (``getattr(self, "visit_" + kind)``), occurs in code."""
        if name in self._names or name.startswith(tuple(self._prefixes)):
            self._queue.append(visit)
        else:
            self._members[name].append(visit)

    def _member(self, label: str, space: Mapping[str, Any], name: str) -> None:
        value = self.content.watch.item(space, name)
        if name == "__new__" and isinstance(value, staticmethod):
            value = value.__func__  # Python makes it one, if a class statement defines it
        if isinstance(value, types.ModuleType):
            self.content.globals[f"{label}.{name}"] = ("module", self._home(vars(value)))
        elif value is not MISSING and not isinstance(value, types.MemberDescriptorType):
            self._add("globals", f"{label}.{name}", value)

    # Values.

    def _add(self, part: str, name: str, value: Any) -> str:
        """Add the description of `value` under `name`, which is returned, and watch it. Functions in it are watched apart."""
        described = "missing"
        if _is_environment(value):
            if "environment" not in self.known:
                raise KeyFactorError(
                    f"{part} {name} is the environment: declare the variables that count with environ=[…]"
                )
            return name
        if value is not MISSING:
            described = self._described_value(value, f"{part} {name}")
            self._watch(value, name)
        getattr(self.content, part)[name] = described
        return name

    def _watch(self, value: Any, name: str) -> None:
        if not is_code(value):
            self.content.watch.content(value, lambda: encode(self._described_value(value, name)))

    def _described_value(self, value: Any, name: str) -> Any:
        """`value` in terms that `encode` takes, functions in it by label."""
        try:
            if not isinstance(value, _PLAIN) and is_code(value):
                return ("function", self.label(value))
            if isinstance(value, types.ModuleType):
                return ("module", self.label(value))
            described = self._values.describe(value, name)
            encode(described)
        except KeyFactorError as error:
            raise KeyFactorError(f"{error}; {_OR_IGNORE}") from None
        return described

    # Code that is not imported.

    def _unimported(self) -> None:
        """Files that are not imported yet count by their text, and by what that reads of modules that are: at the import, and in
        functions whose names were met.
        """
        while self.content.files.fresh:
            source, package, may_read = self.content.files.fresh.pop()
            if not may_read:  # but it may use objects that are there
                self._meet(source.attributes.union(*(names for _, names in source.imports)))
                continue
            codes = source.codes
            bound = imports_of(codes[0]) if codes else {}
            for module in (each for each, names in source.imports if "*" in names):
                self._star(module, package)
            for code in map(without_functions, codes):
                visit = functools.partial(self._visit_text, code, bound, package)
                if code.co_name == "<module>":
                    self._queue.append(visit)
                else:
                    self._when_met(code.co_name, visit)

    def _star(self, name: str, package: str) -> None:
        """``import *`` in a file that is not imported: any name of the module may be used."""
        with suppress(ImportError, ValueError):
            module = self.content.watch.item(sys.modules, resolve_name(name, package or None))
            if isinstance(module, types.ModuleType) and owner_of(module) is Owner.PROJECT:
                self.label(module)

    def _visit_text(self, code: types.CodeType, bound: Mapping[str, tuple[Read, ...]], package: str) -> None:
        for read in reads_of(code):
            if read.name in self.ignore or str(read) in self.ignore:
                continue
            imported = bound.get(read.name, ()) if read.kind == "global" else (read,) if read.kind == "imported" else ()
            for each in imported:
                path = each.path if each is read else (*each.path, *read.path)
                self._imported(replace(read, kind="imported", name=each.name, path=path), package, code.co_filename)
        self._meet(names_of(code))

    # Reads.

    def _read(self, read: Read, function: types.FunctionType, label: str, cells: dict[str, Any]) -> None:
        package = str(function.__globals__.get("__package__") or "")
        if read.kind == "closure":
            if read.name in cells and read.name != "__class__":
                self._follow("closure", f"{label}.{read.name}", cells[read.name], read, package, label)
        elif read.kind == "global":
            namespace = function.__globals__
            if self._passes_over(namespace.get(read.name), read.path):
                return
            value = self.content.watch.item(namespace, read.name)
            if read.name == "__name__" and isinstance(value, str):
                value = portable_name(value)
            if value is MISSING:
                value = self._builtin(namespace, read.name)
                if not _is_in(value, _IMPORTERS) and not _is_put_there(value):
                    return  # Python's own; or a name that is not there, and would raise
            self._follow("globals", f"{self._home(namespace)}.{read.name}", value, read, package, label)
        else:
            self._imported(read, package, label)

    def _builtin(self, namespace: Mapping[str, Any], name: str) -> Any:
        found = namespace.get("__builtins__", {})
        space = vars(found) if isinstance(found, types.ModuleType) else found
        if name in space and space is vars(builtins):
            self.content.watch.attribute(builtins, name)
        return space.get(name, MISSING)

    def _imported(self, read: Read, package: str, label: str) -> None:
        """A module that code imports when it runs. None is imported for the key: it may be of a branch never taken."""
        try:
            name = resolve_name(read.name, package or None)
        except (ImportError, ValueError):
            return  # the function may have another way
        if self.skip(name) and owner_of(name) is not Owner.PROJECT:
            return
        if owner_of(name) is not Owner.PROJECT and name not in ("os", "os.path", "posixpath", "importlib"):
            self.content.globals[".".join((name, *read.path))] = identity_of(name)
            return
        if owner_of(name) is Owner.PROJECT:
            for inner in (name, *(f"{name}.{attribute}" for attribute in read.path[:1])):
                self.content.files.add_module(inner)
        module = self.content.watch.item(sys.modules, name)
        if read.kind == "import" or module is MISSING or module is None:
            self.content.globals[name] = ("module", portable_name(name))
        else:
            self._follow("globals", name, module, read, package, label)

    def _follow(self, part: str, name: str, value: Any, read: Read, package: str, label: str) -> None:
        """Follow the path of `read` from `value` through modules and classes, to a value that counts whole."""
        for number, attribute in enumerate(read.path):
            inner = MISSING
            if isinstance(value, types.ModuleType):
                if self._passes_over(value, read.path[number:]):
                    return
                is_ours = owner_of(value) is Owner.PROJECT
                if is_ours:
                    kind = [] if type(value) is types.ModuleType else [self.label(type(value))]
                    getattr(self.content, part)[name] = ("module", self._home(vars(value)), *kind)
                inner, part = self._of_module(value, attribute), "globals"
                inner = tuple(inner) if inner is sys.version_info else inner
                if inner is MISSING and is_ours and self.content.files.add_module(f"{value.__name__}.{attribute}"):
                    return  # it is not imported yet: its file counts
                name = f"{self._home(vars(value))}.{attribute}"
                is_kept = is_ours or (self._skips(value) and self.keep(value, attribute, inner))
                if not is_kept and not _counts_by_itself(inner):
                    self.content.globals[name] = identity_of(value.__name__)
                    return
            elif isinstance(value, enum.EnumMeta) and attribute in value.__members__:
                getattr(self.content, part)[name] = ("class", self.label(value))
                inner, name = value.__members__[attribute], f"{name}.{attribute}"
            elif isinstance(value, type) and owner_of(value) is Owner.PROJECT:
                inner = self._of_class(value, attribute)
                if inner is not MISSING:
                    getattr(self.content, part)[name] = ("class", self._class(value))
                    name, part = f"{self._class(value)}.{attribute}", "globals"
            elif _is_environment(value):
                inner = getattr(value, attribute, MISSING)
            if inner is MISSING and not isinstance(value, types.ModuleType):
                break  # the value counts whole
            value = inner
            if name in self.ignore or ".".join((read.name, *read.path[: number + 1])) in self.ignore:
                return
        if name not in self.ignore and not self._skips(value):
            self._end(part, name, value, read, package, label)

    def _end(self, part: str, name: str, value: Any, read: Read, package: str, label: str) -> None:
        if _reads_environment(value):
            method = "" if _is_in(value, _GETTERS) else getattr(value, "__name__", "")
            self._environment(method, read, label)
        elif _is_in(value, _IMPORTERS):
            self._import_call(read, package, label)
        elif not (read.is_bound and isinstance(value, (type, types.ModuleType, types.FunctionType))):
            self._add(part, name, value)  # also where it is bound: a text may be evaluated that reads the local name

    def _environment(self, method: str, read: Read, label: str) -> None:
        if read.key:
            self.content.variables.update(_VARIABLE.findall(read.key) or [read.key])
        is_understood = bool(read.key) and (not method or method in _READ_BY_NAME)
        is_unused = (read.is_bound and not self._evaluates) or read.is_tested or method in _NOT_READ
        if not (is_understood or is_unused or "environment" in self.known):
            raise KeyFactorError(
                f"line {read.line} of {label} reads the environment in a way that names no variable ({read}): declare the "
                f"variables with environ=[…], or name {str(read)!r} in ignore=… if it changes nothing"
            )

    def _import_call(self, read: Read, package: str, label: str) -> None:
        if read.is_bound or (not read.key and "imports" in self.known):
            return
        name = resolve_name(read.key, package) if package and read.key else read.key.lstrip(".")
        if not read.key or not (self.content.files.add_module(name) or owner_of(name) is not Owner.PROJECT):
            raise KeyFactorError(
                f"line {read.line} of {label} imports a module whose name is not understood ({read}): name the modules or files "
                f"that it may be in files=[…], or {str(read)!r} in ignore=… if it changes nothing"
            )
        module = self.content.watch.item(sys.modules, name)
        if isinstance(module, types.ModuleType):
            self.content.globals[name] = ("module", self.label(module))

    def _of_module(self, module: types.ModuleType, attribute: str) -> Any:
        space = vars(module)
        found = self.content.watch.item(space, attribute)
        if found is MISSING and "__path__" in space and owner_of(module) is Owner.PROJECT:
            found = self.content.watch.item(sys.modules, f"{module.__name__}.{attribute}")
        if found is MISSING and "__getattr__" in space:  # it imports its names when they are used
            try:
                found = self.content.watch.attribute(module, attribute)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - a module may raise anything when it is imported
                let_through(error)
        return found

    def _of_class(self, kind: type, attribute: str) -> Any:
        """A plain value that is an attribute of a class; `MISSING` if the whole class has to count: code decides."""
        self.content.watch.attribute(kind, "__mro__")
        if type(kind) is not type and owner_of(type(kind)) is Owner.PROJECT:
            return MISSING
        for base in kind.__mro__:
            found = self.content.watch.item(self._space(base), attribute) if base is not object else MISSING
            if found is not MISSING:
                return MISSING if is_method(found) or hasattr(type(found), "__get__") else found
        return MISSING

    def _space(self, kind: type) -> Mapping[str, Any]:
        """``vars(kind)``, always the same object for one class."""
        return self._spaces.setdefault(kind, vars(kind))

    def _passes_over(self, value: Any, path: tuple[str, ...]) -> bool:
        """True if a read ends in code that does not count. It is not watched: a kernel reads dozens of such names."""
        if not self._skips(value):
            return False
        for attribute in path:
            inner = vars(value).get(attribute, MISSING)
            if inner is not MISSING and self.keep(value, attribute, inner):
                return False
            if not isinstance(inner, types.ModuleType) or not self._skips(inner):
                return True
            value = inner
        return True

    def _skips(self, module: Any) -> bool:
        is_module = isinstance(module, types.ModuleType)
        return is_module and self.skip(module.__name__) and owner_of(module) is not Owner.PROJECT


def _named(module: str, qualname: str) -> str:
    return f"{portable_name(module)}.{qualname} ({identity_of(module)})"


def _calls_back(kind: type) -> bool:
    """True if a class calls methods of its subclasses by names that no code of the project need mention."""
    return owner_of(kind) is not Owner.PROJECT and module_of(kind) not in ("builtins", "abc", "typing")


def _counts_by_itself(value: Any) -> bool:
    """True for an attribute of an installed module whose value counts, not its package: plain, or put there by the project."""
    if isinstance(value, (types.FunctionType, type)) and owner_of(value) is Owner.PROJECT:
        return True
    is_plain = isinstance(value, types.ModuleType) or type(value) in _PLAIN or value is MISSING
    return is_plain or _reads_environment(value) or _is_in(value, _IMPORTERS)


def _is_put_there(value: Any) -> bool:
    """True if the program has put a builtin there. Python's own are code, and a few constants."""
    if is_code(value):
        return owner_of(value) is Owner.PROJECT
    return type(value) in _PLAIN and value is not None and type(value) is not bool


def _is_in(value: Any, several: tuple[Any, ...]) -> bool:
    return any(value is each for each in several)  # an array compares itself with anything


def _is_environment(value: Any) -> bool:
    return value is os.environ or value is os.environb


def _reads_environment(value: Any) -> bool:
    """``os.environ``, its methods and ``os.getenv``: looked up by a constant, they read one variable."""
    if isinstance(value, types.FunctionType):
        return _is_in(value, _GETTERS)
    return _is_environment(value) or (isinstance(value, types.MethodType) and _is_environment(value.__self__))


def _registry_of(function: types.FunctionType) -> Mapping[type, Any] | None:
    """The functions that `functools.singledispatch` chooses from, by the first argument's type; None for other functions."""
    registry, dispatch = (function.__dict__.get(name) for name in ("registry", "dispatch"))
    is_one = isinstance(registry, types.MappingProxyType) and getattr(dispatch, "__module__", "") == "functools"
    return registry if is_one else None


def _annotations_of(function: types.FunctionType) -> Mapping[str, Any]:
    try:
        return function.__annotations__
    except Exception as error:  # noqa: BLE001 - from Python 3.14 on they are evaluated when they are asked for
        let_through(error)
        return {}


def closure_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue  # not bound yet: it cannot have been read
