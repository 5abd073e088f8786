"""A function by content: what it, its helpers, its closure and the values that they read say; never an `id`.

Followed, recursively: functions, also through ``module.helper`` and ``object.method``, in whatever file of the project they are;
partials; closures; methods of the class that they are called on; classes that are used; what decorators wrap. Installed
packages and Python's own modules end the walk: they count by name and version (`kcoord.keys.packages`).
"""

from __future__ import annotations

import builtins
import functools
import os
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import resolve_name
from typing import Any

from kcoord.errors import KeyFactorError
from kcoord.interruption import let_through
from kcoord.keys import written
from kcoord.keys.agenda import Agenda, Visit, Where
from kcoord.keys.globals import MISSING
from kcoord.keys.lookup import (
    COMPUTED,
    REMEDY,
    Lookup,
    Receiver,
    call_of,
    has_slots,
    is_method,
    is_open,
    is_project,
    jit_function,
    own_attributes,
    registered_with,
    wrapped_by,
)
from kcoord.keys.packages import Owner, identity_of, module_of, owner_of, portable_name
from kcoord.keys.reads import Read, reads_of
from kcoord.keys.source import said_by
from kcoord.keys.values import NO_CODE, OR_IGNORE, Values, is_callable
from kcoord.keys.values import Content as Content


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
    walk = _Walk(Content(), ignore, skip, owner)
    receiver = Receiver(owner) if owner is not None else None
    return _walked(walk, lambda: walk.callable(function, receiver), function)


def content_of_value(value: Any, skip: Callable[[str], bool] = lambda module: False) -> Content:
    """What `value` says, as something that code holds: by value, with the functions in it and the code of its class.

    An object of the project that has no identity counts by its attributes. Raises `KeyFactorError` for those that have none.
    """
    walk = _Walk(Content(), frozenset(), skip, None)
    return _walked(walk, lambda: walk.whole(_label_of(type(value)), value), value)


def _walked(walk: _Walk, begin: Callable[[], str], thing: Any) -> Content:
    try:
        walk.content.function = begin()
        walk.agenda.run()
    except RecursionError:
        raise KeyFactorError(f"{_name_of(thing)} is wrapped too deeply: name what it reads in ignore=…") from None
    return walk.content


def function_factors(function: Callable[..., Any], ignore: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The key factors of `function` as it is now."""
    return content_of(function, ignore).factors()


@dataclass
class _Walk:
    content: Content
    ignore: frozenset[str]
    skip: Callable[[str], bool]
    owner: type | None
    agenda: Agenda = field(default_factory=Agenda)

    def __post_init__(self) -> None:
        self.lookup = Lookup(self.content.watch)
        self.values = Values(self.content, self.agenda, self.callable)

    def callable(self, value: Any, receiver: Receiver | None = None) -> str:
        """The label of what is called, or of a module. Everything that it says is in `content` at the end."""
        value = _undecorated(value)
        jit = jit_function(value)
        if jit is not None:
            if not any(jit is known for known in self.content.jit_functions):
                self.content.jit_functions.append(jit)
            inlined = () if not getattr(jit, "noinline", None) else ("noinline",)
            return self._function(jit.fn, None, ("triton", jit.src, *inlined))
        if isinstance(value, types.FunctionType):
            if not is_project(value) or self.skip(module_of(value)):
                return self._named(module_of(value), value.__qualname__)
            return self._function(value, receiver)
        if isinstance(value, (functools.partial, functools.partialmethod)):
            return self._partial(value, receiver)
        if isinstance(value, types.MethodType):
            owner = value.__self__
            receiver = Receiver(owner) if isinstance(owner, type) else Receiver(type(owner), owner, True)
            return self.callable(value.__func__, receiver)
        if isinstance(value, (staticmethod, classmethod)):
            return self.callable(value.__func__, receiver if isinstance(value, classmethod) else None)
        if isinstance(value, property):
            return " ".join(self.callable(f, receiver) for f in (value.fget, value.fset, value.fdel) if f is not None)
        if isinstance(value, functools.cached_property):
            return self.callable(value.func, receiver)
        if isinstance(value, functools.singledispatchmethod):
            return self.callable(value.dispatcher, receiver)
        if isinstance(value, (type, types.ModuleType)):
            return self._class(value) if isinstance(value, type) else self._module(value)
        call, wrapped = call_of(value), wrapped_by(value)
        if isinstance(call, types.FunctionType) and is_open(value):
            return self._object(value, call, wrapped, receiver)
        if wrapped is not None:
            return self.callable(wrapped, receiver)  # functools.lru_cache and its like
        if isinstance(value, NO_CODE):
            return self._named(module_of(value), value.__qualname__)
        if isinstance(call, types.FunctionType):
            return self.callable(call, Receiver(type(value), value, True))
        raise KeyFactorError(
            f"{_name_of(value)} is no Python function, and has no identity: wrap it in a function of yours"
        )

    def _named(self, module: str, qualname: str) -> str:
        return f"{portable_name(module)}.{qualname} ({identity_of(module)})"

    def _partial(self, value: functools.partial[Any] | functools.partialmethod[Any], receiver: Receiver | None) -> str:
        def visit(label: str) -> None:
            for part, arguments in (("arguments", value.args), ("keywords", value.keywords)):
                self.values.add("defaults", f"{label} {part}", arguments)
            self.content.code[label] = "partial"

        owner = receiver.kind if receiver is not None else None
        return self._meet((id(value), owner, 0), value, f"partial({self.callable(value.func, receiver)})", visit)

    def _class(self, kind: type) -> str:
        """A class that is used: all that its author wrote there; a value without identity counts by its type."""
        if not is_project(kind) or self.skip(module_of(kind)):
            return self._named(module_of(kind), kind.__qualname__)

        def visit(label: str) -> None:
            self._namespace(label, self.lookup.space(kind), written.names_in_class(kind), Receiver(kind))
            for name, fact in written.facts_of(kind):
                self.values.add("globals", f"{label}.{name}", fact)
            self.content.watch.lineage(kind)
            made_by = [type(kind)] if is_project(type(kind)) else []
            self.content.code[label] = ["class", [self.callable(c) for c in (*kind.__bases__, *made_by)]]

        return self._meet((id(kind), None, 0), kind, _label_of(kind), visit, lenient=True)

    def _module(self, module: types.ModuleType) -> str:
        """A module that is used as a value: all that its author wrote there, as with a class; other modules by name."""
        name = portable_name(module.__name__)
        if owner_of(module.__name__) is not Owner.PROJECT or self.skip(module.__name__):
            return f"{name} ({identity_of(module.__name__)}) {getattr(module, '__version__', '')}"

        def visit(label: str) -> None:
            self._namespace(label, vars(module), written.names_in_module(module), None)
            self.content.code[label] = "module"

        return self._meet((id(module), None, 0), module, f"module {name}", visit, lenient=True)

    def whole(self, name: str, value: Any, outer: frozenset[int] = frozenset()) -> str:
        """All that can be read of `value`, under `name`, which is returned; `outer` are the objects that it lies in."""
        try:
            self.values.add("globals", name, value, whole=is_open(value))
        except KeyFactorError:
            if not is_open(value) or has_slots(type(value)) or id(value) in outer:
                raise
            self.values.keep("globals", name, ("object", self.callable(type(value))))
            own = own_attributes(value)
            self.content.watch.lineage(value)
            self.content.watch.content(types.MappingProxyType(own), lambda: len(own))  # an attribute that is added
            for attribute in sorted(own):
                self.whole(f"{name}.{attribute}", self.content.watch.item(own, attribute), outer | {id(value)})
        return name

    def _namespace(self, label: str, space: Mapping[str, Any], names: list[str], receiver: Receiver | None) -> None:
        proxy = types.MappingProxyType(space) if isinstance(space, dict) else space
        self.content.watch.content(proxy, lambda: b"%d" % len(space))  # a name that is added
        for name in names:
            value = self.content.watch.item(space, name)
            if isinstance(value, types.ModuleType):
                self.values.keep("globals", f"{label}.{name}", ("module", portable_name(value.__name__)))
            elif receiver is not None and is_method(value):
                self.values.keep("globals", f"{label}.{name}", self.callable(value, receiver))
            else:
                self.values.add("globals", f"{label}.{name}", value)

    def _object(self, value: Any, call: types.FunctionType, wrapped: Any, receiver: Receiver | None) -> str:
        """An object that is called: what it wraps, and its ``__call__`` with what that reads of it.

        A decorator, or one that an installed class's ``__call__`` leads to its own methods, nobody knows to which: by all that
        its class says, and what those methods read of it.
        """
        kind, itself = type(value), Receiver(type(value), value, True)
        is_whole = wrapped is not None or not is_project(call)

        def visit(label: str) -> None:
            self.content.watch.lineage(value)
            parts = [self.callable(call, itself)]
            if is_whole:
                parts.append(self._class(kind))
            if not is_project(call):
                methods = [f for base in kind.__mro__ if is_project(base) for f in vars(base).values()]
                parts += [self.callable(f, itself) for f in methods if isinstance(f, types.FunctionType)]
            self.content.code[label] = ["object", parts]

        label = self._meet((id(value), None, 0), value, f"{_label_of(kind)} called", visit, lenient=is_whole)
        if wrapped is not None:
            self._wraps(label, wrapped, receiver)
        return label

    def _function(
        self, function: types.FunctionType, receiver: Receiver | None, says: tuple[str, ...] | None = None
    ) -> str:
        owner = receiver.kind if receiver is not None else None
        where = (id(function), owner, id(receiver.value) if receiver is not None and receiver.known else 0)
        name = _label_of(function)
        if owner is not None and _label_of(owner) != name.rpartition(".")[0]:
            name += f" of {_label_of(owner)}"
        wrapped = function.__dict__.get("__wrapped__")
        is_wrapper = isinstance(wrapped, types.FunctionType)

        def visit(label: str) -> None:
            self._visit(function, label, receiver, says)

        label = self._meet(where, function, name, visit, lenient=is_wrapper)
        if is_wrapper:
            self._wraps(label, wrapped, receiver)
        if (registry := registered_with(function)) is not None:
            self._chooses(label, registry, receiver)
        return label

    def _chooses(self, label: str, registry: Mapping[type, Any], receiver: Receiver | None) -> None:
        def visit(name: str) -> None:
            self.content.watch.content(registry, lambda: tuple(registry.items()))
            for kind, function in registry.items():
                self.content.globals[f"{name} {_label_of(kind)}"] = self.callable(function, receiver)

        self.agenda.add(f"{label} for", visit)

    def _wraps(self, label: str, wrapped: Any, receiver: Receiver | None) -> None:
        """What a decorator wraps is judged as strictly as ever."""

        def visit(name: str) -> None:
            self.content.globals[name] = self.callable(wrapped, receiver)

        self.agenda.add(f"{label} wraps", visit)

    def _meet(self, where: Where, thing: Any, name: str, visit: Visit, lenient: bool = False) -> str:
        label = self.agenda.label(where, thing, name)
        if not self.agenda.is_over:
            self.content.code.setdefault(label, "")
            self.agenda.add(label, visit, lenient)
        return label

    def _visit(
        self, function: types.FunctionType, label: str, receiver: Receiver | None, says: tuple[str, ...] | None
    ) -> None:
        code = function.__code__
        self.content.watch.function(function, code=says is None)
        name = f"{portable_name(module_of(function))}.{function.__qualname__}"
        self.content.code[label] = says or said_by(code, name)
        self._defaults(function, label)
        first = code.co_varnames[0] if receiver is not None and code.co_argcount else None
        cells = dict(_closure(function))
        for read in reads_of(code, first):
            if read.name not in self.ignore and str(read) not in self.ignore:
                self._read(read, function, label, receiver, cells)

    def _defaults(self, function: types.FunctionType, label: str) -> None:
        code = function.__code__
        values = function.__defaults__ or ()
        names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
        for name, value in (*zip(names, values, strict=True), *(function.__kwdefaults__ or {}).items()):
            if name not in self.ignore:
                self.values.add("defaults", f"{label}.{name}", value)
        if function.__kwdefaults__:
            self.values.watch(function.__kwdefaults__, label)

    def _read(
        self, read: Read, function: types.FunctionType, label: str, receiver: Receiver | None, cells: dict[str, Any]
    ) -> None:
        if read.kind == "global":
            namespace = function.__globals__
            if isinstance(module := namespace.get(read.name), types.ModuleType) and self.skip(module.__name__):
                return
            value = self.content.watch.item(namespace, read.name)
            if value is MISSING:
                found = _builtins_of(namespace)
                value = found.get(read.name, MISSING)
                if value is not MISSING and found is vars(builtins):
                    self.content.watch.builtin(read.name)
                if value is MISSING or not is_callable(value) or not is_project(value):
                    return  # Python's own; or a name that is not there, and would raise
            home = portable_name(str(namespace.get("__name__", module_of(function))))
            self._follow("globals", f"{home}.{read.name}", value, read)
        elif read.kind == "closure":
            if read.name in cells:
                self._follow("closure", f"{label}.{read.name}", cells[read.name], read)
        elif read.kind in ("import", "imported"):
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
        if found.value is COMPUTED:
            if not self.agenda.lenient:
                raise KeyFactorError(f"{part} {found.name}: {REMEDY}; {OR_IGNORE}")
            self.values.keep(part, found.name, "computed")
        elif found.installed:
            self.values.keep("globals", found.name, found.installed)
        elif found.receiver is not None:
            self.values.keep("globals", found.name, self.callable(found.value, found.receiver))
        elif not (isinstance(found.value, types.ModuleType) and self.skip(found.value.__name__)):
            self.values.add(part, found.name, found.value)

    def _imported(self, read: Read, function: types.FunctionType) -> None:
        """A module that the function imports when it runs. Only a project's own is imported for the key."""
        package = str(function.__globals__.get("__package__") or "")
        try:
            name = resolve_name(read.name, package or None)
        except (ImportError, ValueError):
            return  # the function may have another way
        if self.skip(name):
            return
        if owner_of(name) is not Owner.PROJECT and name != "os":
            self.content.globals[".".join((name, *read.path))] = identity_of(name)
            return
        try:
            module = import_module(name)
            if read.kind == "imported" and read.path and not hasattr(module, read.path[0]):
                import_module(f"{name}.{read.path[0]}")  # from . import part
        except Exception as error:  # noqa: BLE001 - a module may raise anything when it is imported: OSError for a library
            let_through(error)
            return  # the function may have another way, or never come here
        if read.kind == "import":
            self.content.globals[name] = ("module", portable_name(name))
        else:
            self._follow("globals", name, module, read)

    def _of_receiver(self, read: Read, function: types.FunctionType, label: str, receiver: Receiver) -> None:
        kind, name = receiver.kind, _label_of(receiver.kind)
        if read.kind == "super":
            found = self.lookup.after(function, kind, read.path[0]) if read.path else MISSING
            if is_method(found):
                self.content.globals[f"{label} super {read.path[0]}"] = self.callable(found, receiver)
        elif receiver.known:
            name = self.agenda.label((id(receiver.value), kind, -1), receiver.value, f"{name} object")
            if read.path:
                self._follow("globals", name, receiver.value, read)
            else:
                self.values.add("globals", name, receiver.value, whole=True)
        elif not read.path:
            self.content.escapes = self.content.escapes or kind is self.owner
        else:
            if kind is self.owner:
                self.content.attributes.add(read.path)  # the object has it, or hides what its class has
            found = self.lookup.static(kind, read.path[0])
            if is_method(found):
                self.values.keep("globals", f"{name}.{read.path[0]}", self.callable(found, receiver))
            elif found is not MISSING and not hasattr(type(found), "__get__"):
                self._follow("globals", f"{name}.{read.path[0]}", found, Read("", "", read.path[1:]))


def _undecorated(function: Any) -> Any:
    """Without `compile_once`, which changes nothing of what its function compiles."""
    while isinstance(function, types.FunctionType):
        module, inner = function.__globals__.get("__name__"), function.__dict__.get("__wrapped__")
        if inner is None or not isinstance(module, str) or not module.startswith("kcoord."):
            break
        function = inner
    return function


def _label_of(thing: Any) -> str:
    return f"{portable_name(module_of(thing))}.{thing.__qualname__}"


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
    name = value.__qualname__ if isinstance(value, types.FunctionType) else ""
    return f"{module_of(type(value))}.{type(value).__qualname__} {name}".rstrip()
