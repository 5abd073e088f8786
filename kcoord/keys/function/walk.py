"""The content of a function: its code, its helpers, its closure and the values that they read; never an `id`.

The walk follows, recursively: functions, also through ``module.helper`` and ``object.method``, in any file of the project;
partials; closures; methods of the class that they are called on; classes that are used; functions that decorators wrap.
Installed packages and Python's own modules end the walk: they count by name and version (`kcoord.keys.packages`).
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kcoord.errors import KeyFactorError
from kcoord.keys.function.bodies import Bodies, closure_of
from kcoord.keys.function.lookup import (
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
from kcoord.keys.function.namespaces import declared_values, names_in_class, names_in_module
from kcoord.keys.function.unimported import Text
from kcoord.keys.function.values import NO_CODE, Values
from kcoord.keys.function.values import Content as Content
from kcoord.keys.function.visits import Identity, Visit, VisitQueue
from kcoord.keys.packages import Owner, identity_of, label_of, module_of, owner_of, portable_name


def content_of(
    function: Callable[..., Any],
    ignore: frozenset[str] = frozenset(),
    owner: type | None = None,
    skip: Callable[[str], bool] = lambda module: False,
) -> Content:
    """The content of `function`. `owner` is the class that it is called on, if it is a method.

    `ignore` names globals and closure variables that do not count (a logger, say); `skip` selects installed modules that do not
    count.
    Raises `KeyFactorError` for a value that has no identity, with its name and a remedy.
    """
    walk = _Walk(Content(), ignore, skip, owner)
    receiver = Receiver(owner) if owner is not None else None
    return _walked(walk, lambda: walk.callable(function, receiver), function)


def content_of_value(value: Any, skip: Callable[[str], bool] = lambda module: False) -> Content:
    """The content of a value that code holds: the value, the functions in it and the code of its class.

    An object of the project that has no identity counts by its attributes. Raises `KeyFactorError` if one of these has none.
    """
    walk = _Walk(Content(), frozenset(), skip, None)
    return _walked(walk, lambda: walk.add_value(label_of(type(value)), value), value)


def _walked(walk: _Walk, begin: Callable[[], str], thing: Any) -> Content:
    try:
        walk.content.function = begin()
        walk.queue.run()
    except RecursionError:
        raise KeyFactorError(f"{_name_of(thing)} is wrapped too deeply: name what it reads in ignore=…") from None
    return walk.content


@dataclass
class _Walk:
    content: Content
    ignore: frozenset[str]
    skip: Callable[[str], bool]
    owner: type | None
    queue: VisitQueue = field(default_factory=VisitQueue)

    def __post_init__(self) -> None:
        self.lookup = Lookup(self.content.watch)
        self.values = Values(self.content, self.queue, self.callable)
        self.bodies = Bodies(
            self.content, self.queue, self.lookup, self.values, self.callable, self.ignore, self.skip, self.owner
        )

    def callable(self, value: Any, receiver: Receiver | None = None) -> str:
        """The label of a callable or a module, whose whole content is in `content` when the walk ends."""
        if isinstance(value, Text):
            return self._text(value)
        value = _undecorated(value)
        jit = jit_function(value)
        if jit is not None:
            if not any(jit is known for known in self.content.jit_functions):
                self.content.jit_functions.append(jit)
            inlined = () if not getattr(jit, "noinline", None) else ("noinline",)
            return self._function(jit.fn, None, ("triton", jit.src, *inlined))
        if isinstance(value, types.FunctionType):
            if not is_project(value):
                return self._installed(value)
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

    def _installed(self, function: types.FunctionType) -> str:
        """A function of an installed package counts by name, with the project's functions in its closure: it decorates them."""
        name = self._named(module_of(function), function.__qualname__)
        cells = (value for _, value in closure_of(function))
        held = [each for each in cells if isinstance(each, types.FunctionType) and is_project(each)]
        if not held:
            return name

        def visit(label: str) -> None:
            self.content.watch.function(function, code=False)
            self.content.code[label] = ["holds", [self.callable(each) for each in held]]

        return self._label((id(function), None, 0), function, name, visit, lenient=True)

    def _text(self, text: Text) -> str:
        """Code that is not imported, by its file, and by what it reads: leniently, for it may never run."""

        def visit(label: str) -> None:
            self.bodies.visit(text.function, label, None, ("file", text.digest))
            if file := text.function.__globals__["__file__"]:
                self.content.files[file] = text.digest
            for name in text.imported:
                self.bodies.add_imported(name)
            if text.whole is not None:
                self.callable(text.whole)

        return self._label((id(text), None, 0), text, label_of(text.function), visit, lenient=True)

    def _named(self, module: str, qualname: str) -> str:
        return f"{portable_name(module)}.{qualname} ({identity_of(module)})"

    def _partial(self, value: functools.partial[Any] | functools.partialmethod[Any], receiver: Receiver | None) -> str:
        def visit(label: str) -> None:
            for part, arguments in (("arguments", value.args), ("keywords", value.keywords)):
                self.values.add("defaults", f"{label} {part}", arguments)
            self.content.code[label] = "partial"

        owner = receiver.kind if receiver is not None else None
        return self._label((id(value), owner, 0), value, f"partial({self.callable(value.func, receiver)})", visit)

    def _class(self, kind: type) -> str:
        """A class that is used counts by all attributes that its author defined; a value without identity by its type."""
        if not is_project(kind):
            return self._named(module_of(kind), kind.__qualname__)

        def visit(label: str) -> None:
            self._namespace(label, self.lookup.space(kind), names_in_class(kind), Receiver(kind))
            for name, fact in declared_values(kind):
                self.values.add("globals", f"{label}.{name}", fact)
            self.content.watch.lineage(kind)
            made_by = [type(kind)] if is_project(type(kind)) else []
            self.content.code[label] = ["class", [self.callable(c) for c in (*kind.__bases__, *made_by)]]

        return self._label((id(kind), None, 0), kind, label_of(kind), visit, lenient=True)

    def _module(self, module: types.ModuleType) -> str:
        """A project's module that is used as a value counts as a class does; other modules by name and version."""
        name = portable_name(module.__name__)
        if owner_of(module) is not Owner.PROJECT:
            return f"{name} ({identity_of(module.__name__)}) {getattr(module, '__version__', '')}"

        def visit(label: str) -> None:
            self._namespace(label, vars(module), names_in_module(module), None)
            self.content.code[label] = "module"

        return self._label((id(module), None, 0), module, f"module {name}", visit, lenient=True)

    def add_value(self, name: str, value: Any, outer: frozenset[int] = frozenset()) -> str:
        """Add all that can be read of `value` under `name`, which is returned; `outer` are the ids of the objects around it."""
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
                self.add_value(f"{name}.{attribute}", self.content.watch.item(own, attribute), outer | {id(value)})
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
        """An object that is called counts by the function that it wraps, and its ``__call__`` with what that reads of the object.

        Its whole class counts too if it is a decorator, or if an installed class's ``__call__`` may call any of its methods.
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

        label = self._label((id(value), None, 0), value, f"{label_of(kind)} called", visit, lenient=is_whole)
        if wrapped is not None:
            self._add_wrapped(label, wrapped, receiver)
        return label

    def _function(
        self, function: types.FunctionType, receiver: Receiver | None, text: tuple[str, ...] | None = None
    ) -> str:
        owner = receiver.kind if receiver is not None else None
        where = (id(function), owner, id(receiver.value) if receiver is not None and receiver.known else 0)
        name = label_of(function)
        if owner is not None and label_of(owner) != name.rpartition(".")[0]:
            name += f" of {label_of(owner)}"
        wrapped = function.__dict__.get("__wrapped__")
        is_wrapper = isinstance(wrapped, types.FunctionType)

        def visit(label: str) -> None:
            self.bodies.visit(function, label, receiver, text)

        label = self._label(where, function, name, visit, lenient=is_wrapper)
        if is_wrapper:
            self._add_wrapped(label, wrapped, receiver)
        if (registry := registered_with(function)) is not None:
            self._add_choices(label, registry, receiver)
        return label

    def _add_choices(self, label: str, registry: Mapping[type, Any], receiver: Receiver | None) -> None:
        def visit(name: str) -> None:
            self.content.watch.content(registry, lambda: tuple(registry.items()))
            for kind, function in registry.items():
                self.content.globals[f"{name} {label_of(kind)}"] = self.callable(function, receiver)

        self.queue.add(f"{label} for", visit)

    def _add_wrapped(self, label: str, wrapped: Any, receiver: Receiver | None) -> None:
        """A wrapped function is visited strictly, though its wrapper is not."""

        def visit(name: str) -> None:
            self.content.globals[name] = self.callable(wrapped, receiver)

        self.queue.add(f"{label} wraps", visit)

    def _label(self, where: Identity, thing: Any, name: str, visit: Visit, lenient: bool = False) -> str:
        label = self.queue.label(where, thing, name)
        if not self.queue.is_over:
            self.content.code.setdefault(label, "")
            self.queue.add(label, visit, lenient)
        return label


def _undecorated(function: Any) -> Any:
    """`function` without kcoord's own decorators, which do not change what it compiles."""
    while isinstance(function, types.FunctionType):
        module, inner = function.__globals__.get("__name__"), function.__dict__.get("__wrapped__")
        if inner is None or not isinstance(module, str) or not module.startswith("kcoord."):
            break
        function = inner
    return function


def _name_of(value: Any) -> str:
    name = value.__qualname__ if isinstance(value, types.FunctionType) else ""
    return f"{module_of(type(value))}.{type(value).__qualname__} {name}".rstrip()
