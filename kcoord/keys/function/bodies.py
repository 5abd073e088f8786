"""A function's own content: its code, its defaults, and its reads, each followed to a value or a callable."""

from __future__ import annotations

import builtins
import os
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import resolve_name
from typing import Any

from kcoord.errors import KeyFactorError
from kcoord.interruption import let_through
from kcoord.keys.function.lookup import COMPUTED, REMEDY, Lookup, Receiver, is_method, is_project
from kcoord.keys.function.reads import Read, reads_of
from kcoord.keys.function.source import source_of
from kcoord.keys.function.unimported import Imported, Text, Unimported, stand_in_of
from kcoord.keys.function.values import OR_IGNORE, Content, Values, is_callable
from kcoord.keys.function.visits import VisitQueue
from kcoord.keys.function.watch import MISSING
from kcoord.keys.packages import Owner, identity_of, label_of, module_of, owner_of, portable_name


@dataclass
class Bodies:
    """Adds functions to `content`. ``callable(thing, receiver)`` adds a callable and returns its label.

    `ignore` names variables that do not count, `skip` selects installed modules that do not count; `owner` is the class that the
    outermost function is called on, if it is a method.
    """

    content: Content
    queue: VisitQueue
    lookup: Lookup
    values: Values
    callable: Callable[..., str]
    ignore: frozenset[str]
    skip: Callable[[str], bool]
    owner: type | None

    def visit(
        self, function: types.FunctionType, label: str, receiver: Receiver | None, text: tuple[str, ...] | None
    ) -> None:
        code = function.__code__
        self.content.watch.function(function, code=text is None)
        self.content.code[label] = text or source_of(code, function.__qualname__)
        self._defaults(function, label)
        self._annotations(function, label)
        first = code.co_varnames[0] if receiver is not None and code.co_argcount else None
        cells = dict(closure_of(function))
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

    def _annotations(self, function: types.FunctionType, label: str) -> None:
        """Compilers written for Python read them. Types count by name, values by content, others by their text in `code`."""
        for name, value in _annotations_of(function).items():
            if name in self.ignore or isinstance(value, types.GenericAlias):
                continue
            if isinstance(value, type):
                self.values.keep("annotations", f"{label}.{name}", ("type", label_of(value)))
            elif not is_callable(value):
                with suppress(KeyFactorError):
                    described = self.values.describe(value, name, lenient=False)
                    self.values.keep("annotations", f"{label}.{name}", described)

    def _read(
        self, read: Read, function: types.FunctionType, label: str, receiver: Receiver | None, cells: dict[str, Any]
    ) -> None:
        if read.kind == "global":
            namespace = function.__globals__
            if isinstance(namespace.get(read.name), types.ModuleType) and self._skips(namespace[read.name]):
                return
            module = stand_in_of(namespace)
            value = (
                self.content.watch.item(namespace, read.name) if module is None else namespace.get(read.name, MISSING)
            )
            if value is MISSING:
                found = _builtins_of(namespace)
                value = found.get(read.name, MISSING)
                if value is not MISSING and found is vars(builtins):
                    self.content.watch.builtin(read.name)
                if value is MISSING and module is not None:
                    self.callable(module.whole)
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
            self._receiver_read(read, function, label, receiver)

    def _follow(self, part: str, name: str, value: Any, read: Read) -> None:
        if isinstance(value, Imported):
            home, value = value.module, self.lookup.imported(value)
            if value is MISSING and owner_of(home) is not Owner.PROJECT:
                self.content.globals[".".join((home, *read.path))] = identity_of(home)
            if value is MISSING:
                return  # it is not found: its name counts, in the text of the code that imports it
        if isinstance(value, types.ModuleType) and self._skips(value):
            return
        if isinstance(value, types.ModuleType) and read.path and owner_of(value) is Owner.PROJECT:
            self.content.globals[name] = ("module", portable_name(value.__name__))
        found = self.lookup.resolve(name, value, read.path)
        text = found.value.whole if isinstance(found.value, Unimported) else found.value
        for each in (*self.lookup.passed_texts(), *([text] if isinstance(text, Text) else [])):
            self.callable(each)
        if isinstance(text, Text):
            return
        if read.key and _is_environment(found.value):
            self.content.variables.add(read.key)
            return
        if found.name in self.ignore:
            return
        part = part if found.name.startswith(name) else "globals"
        if found.value is COMPUTED:
            if not self.queue.lenient:
                raise KeyFactorError(f"{part} {found.name}: {REMEDY}; {OR_IGNORE}")
            self.values.keep(part, found.name, "computed")
        elif found.installed:
            self.values.keep("globals", found.name, found.installed)
        elif found.receiver is not None:
            self.values.keep("globals", found.name, self.callable(found.value, found.receiver))
        elif not (isinstance(found.value, types.ModuleType) and self._skips(found.value)):
            self.values.add(part, found.name, found.value)

    def _imported(self, read: Read, function: types.FunctionType) -> None:
        """A module that the function imports when it runs. None is imported for the key: it may be of a branch never taken."""
        package = str(function.__globals__.get("__package__") or "")
        try:
            name = resolve_name(read.name, package or None)
        except (ImportError, ValueError):
            return  # the function may have another way
        if self._skips(name):
            return
        if owner_of(name) is not Owner.PROJECT and name != "os":
            self.content.globals[".".join((name, *read.path))] = identity_of(name)
            return
        if read.kind == "import":
            self.content.globals[name] = ("module", portable_name(name))
        else:
            self._follow("globals", name, Imported(name), read)

    def add_imported(self, what: Imported) -> None:
        """Add a module as a value, or an attribute of one."""
        name = f"{what.module}.{what.attribute}" if what.attribute else what.module
        self._follow("globals", name, what, Read("imported", what.module))

    def _skips(self, module: types.ModuleType | str) -> bool:
        return (
            self.skip(module if isinstance(module, str) else module.__name__) and owner_of(module) is not Owner.PROJECT
        )

    def _receiver_read(self, read: Read, function: types.FunctionType, label: str, receiver: Receiver) -> None:
        kind, name = receiver.kind, label_of(receiver.kind)
        if read.kind == "super":
            found = self.lookup.super_attribute(function, kind, read.path[0]) if read.path else MISSING
            if is_method(found):
                self.content.globals[f"{label} super {read.path[0]}"] = self.callable(found, receiver)
        elif receiver.known:
            name = self.queue.label((id(receiver.value), kind, -1), receiver.value, f"{name} object")
            if read.path:
                self._follow("globals", name, receiver.value, read)
            else:
                self.values.add("globals", name, receiver.value, whole=True)
        elif not read.path:
            self.content.escapes = self.content.escapes or kind is self.owner
        else:
            if kind is self.owner:
                self.content.attributes.add(read.path)  # the object has it, or hides the class attribute
            found = self.lookup.static(kind, read.path[0])
            if is_method(found):
                self.values.keep("globals", f"{name}.{read.path[0]}", self.callable(found, receiver))
            elif found is not MISSING and not hasattr(type(found), "__get__"):
                self._follow("globals", f"{name}.{read.path[0]}", found, Read("", "", read.path[1:]))


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


def _builtins_of(namespace: Mapping[str, Any]) -> Mapping[str, Any]:
    found = namespace.get("__builtins__", {})
    return vars(found) if isinstance(found, types.ModuleType) else found


def _is_environment(value: Any) -> bool:
    """``os.environ``, its methods and ``os.getenv``: looked up by a constant, they read one variable."""
    return value is os.environ or value is os.getenv or getattr(value, "__self__", None) is os.environ
