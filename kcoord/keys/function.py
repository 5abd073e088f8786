"""A function by content: what it, its helpers, its closure and the values that they read say; never an `id`.

Followed, recursively: functions, also through ``module.helper`` and ``object.method``, in whatever file of the project they are;
partials; closures; methods of the class that they are called on; classes that are used; what decorators wrap. Installed
packages and Python's own modules end the walk: they count by name and version (`kcoord.keys.packages`).
"""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import resolve_name
from typing import Any

from kcoord.errors import KeyFactorError
from kcoord.keys.cache_key import encode
from kcoord.keys.globals import MISSING, Watch
from kcoord.keys.lookup import PLAIN, Lookup, Receiver, is_method, is_open, is_project, jit_function
from kcoord.keys.packages import Owner, identity_of, owner_of, portable_name
from kcoord.keys.reads import Read, reads_of
from kcoord.keys.signature import Arguments
from kcoord.keys.source import said_by

_MADE_BY_PYTHON = frozenset(
    (
        *(
            "__dict__",
            "__weakref__",
            "__doc__",
            "__module__",
            "__qualname__",
            "__firstlineno__",
            "__static_attributes__",
        ),
        *("__annotations_cache__", "__annotate_func__", "__abstractmethods__", "_abc_impl", "__annotations__"),
    )
)
_NO_CODE = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType)


@dataclass
class Content:
    """What a function says. Each mapping is a key factor; their names are the same in every process.

    `code` maps functions to their text, `globals` ``module.NAME`` to values, `closure` and `defaults` ``function.name`` to
    values; `variables` are the environment variables that are read by a constant name; `attributes` the paths that a method
    reads from its own object, `escapes` whether it also hands that object on; `jit_functions` Triton's functions among the code.
    `watch` knows whether any of it has changed.
    """

    function: str = ""
    code: dict[str, Any] = field(default_factory=dict)
    globals: dict[str, Any] = field(default_factory=dict)
    closure: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    variables: set[str] = field(default_factory=set)
    attributes: set[tuple[str, ...]] = field(default_factory=set)
    escapes: bool = False
    jit_functions: list[Any] = field(default_factory=list)
    watch: Watch = field(default_factory=Watch)

    def factors(self) -> dict[str, Any]:
        parts = {"code": self.code, "globals": self.globals, "closure": self.closure, "defaults": self.defaults}
        return {"function": self.function} | {name: part for name, part in parts.items() if part}


def content_of(
    function: Callable[..., Any],
    ignore: frozenset[str] = frozenset(),
    owner: type | None = None,
    skip: Callable[[str], bool] = lambda module: False,
) -> Content:
    """What `function` says. `owner` is the class that it is called on, if it is a method.

    `ignore` names globals and closure variables that do not change what it does (a logger, say); `skip` modules of which
    nothing counts. Raises `KeyFactorError` for a value that has no identity, with its name and a remedy.
    """
    walk = _Walk(Content(), ignore, skip)
    try:
        walk.content.function = walk.callable(function, Receiver(owner) if owner is not None else None)
    except RecursionError:
        raise KeyFactorError(f"{_name_of(function)} reads a value that contains itself: name it in ignore=…") from None
    return walk.content


def function_factors(function: Callable[..., Any], ignore: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The key factors of `function` as it is now."""
    return content_of(function, ignore).factors()


@dataclass
class _Walk:
    content: Content
    ignore: frozenset[str]
    skip: Callable[[str], bool]
    labels: dict[tuple[int, type | None, int], str] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)  # what `labels` names by id lives as long as the walk
    lenient: bool = False  # a decorator's wrapper may hold what has no identity: it counts by its type

    def __post_init__(self) -> None:
        self.lookup = Lookup(self.content.watch)

    def describe(self, value: Any, name: str, whole: bool = False) -> Any:
        """`value` in terms that can be encoded; functions in it by content. `whole`: not as something that is called."""
        if self._is_callable(value) and not whole:
            return ("function", self.callable(value))
        if isinstance(value, types.ModuleType):
            project = owner_of(value.__name__) is Owner.PROJECT
            version = str(getattr(value, "__version__", ""))
            return ("module", portable_name(value.__name__) if project else identity_of(value.__name__), version)
        arguments = Arguments((name,), functions=self.callable)
        try:
            described = arguments.canonical(arguments.token((value,)))[name]
            encode(described)
        except KeyFactorError as error:
            if not self.lenient:
                text = str(error).removeprefix("arguments.")
                raise KeyFactorError(f"{text}; or name it in ignore=… if it changes nothing") from None
            return ("type", f"{type(value).__module__}.{type(value).__qualname__}")
        return described

    @staticmethod
    def _is_callable(value: Any) -> bool:
        """What is followed as code. An object with a signature of its own says itself what it is."""
        if isinstance(value, PLAIN):
            return False
        if isinstance(value, (types.FunctionType, types.MethodType, functools.partial, type, *_NO_CODE)) or is_method(
            value
        ):
            return True
        return isinstance(_call_of(value), types.FunctionType) and is_open(value)

    def callable(self, value: Any, receiver: Receiver | None = None) -> str:
        """The label of what is called. Everything that it says is in `content` then."""
        value = _undecorated(value)
        jit = jit_function(value)
        if jit is not None:
            if not any(jit is known for known in self.content.jit_functions):
                self.content.jit_functions.append(jit)
            return self._function(jit.fn, None, jit.src)
        if isinstance(value, types.FunctionType):
            if not is_project(value) or self.skip(value.__module__):
                return self._named(value.__module__, value.__qualname__)
            return self._function(value, receiver)
        if isinstance(value, functools.partial):
            return self._partial(value)
        if isinstance(value, types.MethodType):
            owner = value.__self__
            receiver = Receiver(owner) if isinstance(owner, type) else Receiver(type(owner), owner, True)
            return self.callable(value.__func__, receiver)
        if isinstance(value, (staticmethod, classmethod)):
            return self.callable(value.__func__, receiver if isinstance(value, classmethod) else None)
        if isinstance(value, property):
            return " ".join(self.callable(f, receiver) for f in (value.fget, value.fset) if f is not None)
        if isinstance(value, (functools.cached_property, functools.partialmethod)):
            return self.callable(value.func, receiver)
        if isinstance(value, type):
            return self._class(value)
        if hasattr(value, "__wrapped__"):
            return self.callable(value.__wrapped__, receiver)  # functools.lru_cache and its like
        if isinstance(value, _NO_CODE):
            module = getattr(value, "__module__", None) or "builtins"
            return self._named(module, value.__qualname__)
        call = _call_of(value)
        if isinstance(call, types.FunctionType):
            return self.callable(call, Receiver(type(value), value, True))
        raise KeyFactorError(
            f"{_name_of(value)} is no Python function, and has no identity: wrap it in a function of yours"
        )

    def _named(self, module: str, qualname: str) -> str:
        return f"{portable_name(module)}.{qualname} ({identity_of(module)})"

    def _partial(self, value: functools.partial[Any]) -> str:
        where = (id(value), None, 0)
        if where in self.labels:
            return self.labels[where]
        name = f"partial({self.callable(value.func)})"
        label = self._new_label(where, value, name)
        for part, arguments in (("arguments", value.args), ("keywords", value.keywords)):
            self._value("defaults", f"{label} {part}", arguments)
        self.content.code[label] = "partial"
        return label

    def _class(self, kind: type) -> str:
        """A class that is used: all of its functions and values; a value without identity counts by its type."""
        if not is_project(kind) or self.skip(kind.__module__):
            return self._named(kind.__module__, kind.__qualname__)
        where = (id(kind), None, 0)
        if where in self.labels:
            return self.labels[where]
        label = self._new_label(where, kind, f"{portable_name(kind.__module__)}.{kind.__qualname__}")
        strict, self.lenient = self.lenient, True
        for name in sorted(vars(kind).keys() - _MADE_BY_PYTHON):
            value = self.content.watch.item(self.lookup.space(kind), name)
            if is_method(value):
                self.content.globals[f"{label}.{name}"] = self.callable(value, Receiver(kind))
            else:
                self._value("globals", f"{label}.{name}", value)
        self.lenient = strict
        self.content.code[label] = ["class", [self.callable(b) for b in kind.__bases__]]
        return label

    def _function(self, function: types.FunctionType, receiver: Receiver | None, text: str | None = None) -> str:
        owner = receiver.kind if receiver is not None else None
        where = (id(function), owner, id(receiver.value) if receiver is not None and receiver.known else 0)
        if where in self.labels:
            return self.labels[where]  # a recursive function meets itself
        name = f"{portable_name(function.__module__)}.{function.__qualname__}"
        if owner is not None and f"{owner.__module__}.{owner.__qualname__}" != name.rpartition(".")[0]:
            name += f" of {portable_name(owner.__module__)}.{owner.__qualname__}"
        label = self._new_label(where, function, name)
        self.content.watch.function(function, code=text is None)
        wrapped, strict = getattr(function, "__wrapped__", None), self.lenient
        if isinstance(wrapped, types.FunctionType):
            self.content.globals[f"{label} wraps"] = self.callable(wrapped, receiver)  # first, and as strictly as ever
            self.lenient = True
        self.content.code[label] = ("triton", text) if text is not None else said_by(function.__code__, name)
        self._defaults(function, label)
        code = function.__code__
        first = code.co_varnames[0] if receiver is not None and code.co_argcount else None
        cells = dict(_closure(function))
        for read in reads_of(code, first):
            if read.name not in self.ignore and str(read) not in self.ignore:
                self._read(read, function, label, receiver, cells)
        self.lenient = strict
        return label

    def _new_label(self, where: tuple[int, type | None, int], thing: Any, name: str) -> str:
        """Things of one name (closures of one factory) are numbered in the order in which they are met."""
        number = 1 + sum(n.partition("#")[0] == name for n in self.content.code)
        label = name if number == 1 else f"{name}#{number}"
        self.labels[where], self.content.code[label] = label, ""
        self.kept.append(thing)
        return label

    def _defaults(self, function: types.FunctionType, label: str) -> None:
        code = function.__code__
        values = function.__defaults__ or ()
        names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
        for name, value in (*zip(names, values, strict=True), *(function.__kwdefaults__ or {}).items()):
            if name not in self.ignore:
                self._value("defaults", f"{label}.{name}", value)
        if function.__kwdefaults__:
            self._watch_content(function.__kwdefaults__, label)

    def _read(
        self, read: Read, function: types.FunctionType, label: str, receiver: Receiver | None, cells: dict[str, Any]
    ) -> None:
        if read.kind == "global":
            namespace = function.__globals__
            if isinstance(module := namespace.get(read.name), types.ModuleType) and self.skip(module.__name__):
                return
            value = self.content.watch.item(namespace, read.name)
            if value is MISSING:
                value = _builtins_of(namespace).get(read.name, MISSING)
                if value is MISSING or not self._is_callable(value) or not is_project(value):
                    return  # Python's own; or a name that is not there, and would raise
            home = portable_name(str(namespace.get("__name__", function.__module__)))
            self._follow("globals", f"{home}.{read.name}", value, read)
        elif read.kind == "closure":
            if read.name in cells:
                self._follow("closure", f"{label}.{read.name}", cells[read.name], read)
        elif read.kind == "import":
            self._imported(read, function)
        elif receiver is not None:
            self._of_receiver(read, function, label, receiver)

    def _follow(self, part: str, name: str, value: Any, read: Read) -> None:
        if isinstance(value, types.ModuleType) and self.skip(value.__name__):
            return
        if isinstance(value, types.ModuleType) and read.path and owner_of(value.__name__) is Owner.PROJECT:
            self.content.globals[name] = ("module", portable_name(value.__name__))
        found = self.lookup.resolve(name, value, read.path)
        if read.key and _is_environment(found.value):
            self.content.variables.add(read.key)
            return
        if found.name in self.ignore:
            return
        part = part if found.name.startswith(name) else "globals"
        if found.installed:
            self.content.globals[found.name] = found.installed
        elif found.receiver is not None:
            self.content.globals[found.name] = self.callable(found.value, found.receiver)
        elif not (isinstance(found.value, types.ModuleType) and self.skip(found.value.__name__)):
            self._value(part, found.name, found.value)

    def _imported(self, read: Read, function: types.FunctionType) -> None:
        """A module that the function imports when it runs. Only a project's own is imported for the key."""
        package = str(function.__globals__.get("__package__") or "")
        try:
            name = resolve_name(read.name, package or None)
            if self.skip(name):
                return
            if owner_of(name) is not Owner.PROJECT:
                self.content.globals[".".join((name, *read.path))] = identity_of(name)
                return
            module = import_module(name)
            if read.path and not hasattr(module, read.path[0]):
                import_module(f"{name}.{read.path[0]}")  # from . import part
        except (ImportError, ValueError):
            return  # the function may have another way
        self._follow("globals", name, module, read)

    def _of_receiver(self, read: Read, function: types.FunctionType, label: str, receiver: Receiver) -> None:
        name = f"{portable_name(receiver.kind.__module__)}.{receiver.kind.__qualname__}"
        if read.kind == "super":
            found = self.lookup.after(function, receiver.kind, read.path[0]) if read.path else MISSING
            if is_method(found):
                self.content.globals[f"{label} super {read.path[0]}"] = self.callable(found, receiver)
        elif not read.path:
            self.content.escapes = True
            if receiver.known:
                self._value("globals", f"{name} object", receiver.value, whole=True)
        elif receiver.known:
            self._follow("globals", f"{name} object", receiver.value, read)
        else:
            self.content.attributes.add(read.path)  # the object has it, or hides what its class has
            found = self.lookup.static(receiver.kind, read.path[0])
            if is_method(found):
                self.content.globals[f"{name}.{read.path[0]}"] = self.callable(found, receiver)
            elif found is not MISSING and not hasattr(type(found), "__get__"):
                self._follow("globals", f"{name}.{read.path[0]}", found, Read("", "", read.path[1:]))

    def _value(self, part: str, name: str, value: Any, whole: bool = False) -> None:
        """Keep what `name` is; two values of one name (modules made by exec, say) are numbered."""
        described = "missing" if value is MISSING else self.describe(value, f"{part} {name}", whole)
        mapping: dict[str, Any] = getattr(self.content, part)
        number, unique = 1, name
        while unique in mapping and encode(mapping[unique]) != encode(described):
            number += 1
            unique = f"{name}#{number}"
        mapping[unique] = described
        self._watch_content(value, name)

    def _watch_content(self, value: Any, name: str) -> None:
        """The functions in a value are watched by themselves, and keep the labels that they have."""
        if value is not MISSING and not self._is_callable(value):
            self.content.watch.content(value, lambda: encode(self.describe(value, name)))


def _undecorated(function: Any) -> Any:
    """Without `compile_once`, which changes nothing of what its function compiles."""
    while getattr(function, "__globals__", {}).get("__name__", "").startswith("kcoord."):
        inner = getattr(function, "__wrapped__", None)
        if inner is None:
            break
        function = inner
    return function


def _call_of(value: Any) -> Any:
    return next((vars(c)["__call__"] for c in type(value).__mro__ if "__call__" in vars(c)), None)


def _closure(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue  # not bound yet: it cannot have been read


def _builtins_of(namespace: Mapping[str, Any]) -> Mapping[str, Any]:
    found = namespace.get("__builtins__", {})
    return vars(found) if isinstance(found, types.ModuleType) else found


def _is_environment(value: Any) -> bool:
    """``os.environ``, its methods and ``os.getenv``: looked up by a constant, they read one variable."""
    return value is os.environ or value is os.getenv or getattr(value, "__self__", None) is os.environ


def _name_of(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__} {getattr(value, '__name__', '')}".rstrip()
