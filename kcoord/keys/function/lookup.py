"""Resolves a path such as ``config.layer.tile`` through modules, classes and objects, without running a program's code.

Each step is watched (`kcoord.keys.function.watch.Watch`), also the places where a name was *not* found, since it could appear
there.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import inspect
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kcoord.interruption import let_through
from kcoord.keys.function.unimported import Imported, Text, Unimported, stand_in
from kcoord.keys.function.watch import MISSING, Watch
from kcoord.keys.packages import Owner, identity_of, module_of, owner_of, portable_name

PLAIN = (type(None), bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)
_METHODS = (
    *(types.FunctionType, staticmethod, classmethod, property),
    *(functools.cached_property, functools.partialmethod, functools.singledispatchmethod),
)
_NAMESPACES = ("types.SimpleNamespace", "argparse.Namespace")
_SLOTS = (types.MemberDescriptorType, types.GetSetDescriptorType)
_NOTHING: Mapping[str, Any] = {}
_IMMUTABLE_TYPE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE: Python's own classes

COMPUTED: Any = object()
"""Stands for an attribute that an object's class computes: where its value comes from is unknown."""
REMEDY = (
    "its class computes attributes (__getattr__), so what it reads is not known: give the class a __cache_signature__() that "
    "returns the plain values that matter"
)


@dataclass(frozen=True)
class Receiver:
    """The object that a method is called on: its class, and the object itself if it is known already."""

    kind: type
    value: Any = None
    known: bool = False


@dataclass(frozen=True)
class Found:
    """The end of a path, named ``module.NAME``. `value` is `MISSING` if there is none, `COMPUTED` if code decides.

    `receiver` is set if `value` is a method; `installed` names the package, if code of an installed package ended the walk.
    """

    name: str
    value: Any
    receiver: Receiver | None = None
    installed: str = ""


class Lookup:
    """Walks paths and watches every step."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self._texts: list[Text] = []
        self._spaces: dict[type, Mapping[str, Any]] = {}
        self._unimported: dict[str, Any] = {}

    def resolve(self, name: str, value: Any, path: tuple[str, ...]) -> Found:
        """Follow `path` from `value`. It ends at plain data, at a function, and where another package's code begins."""
        for attribute in path:
            if isinstance(value, types.ModuleType):
                inner = self._of_module(value, attribute)
                name = f"{portable_name(value.__name__)}.{attribute}"
                installed = owner_of(value) is not Owner.PROJECT
                if installed and not isinstance(inner, (types.ModuleType, *PLAIN)) and inner is not MISSING:
                    return Found(name, inner, installed=identity_of(value.__name__))
            elif isinstance(value, enum.EnumMeta) and attribute in value.__members__:
                inner = value.__members__[attribute]
            elif isinstance(value, type) and is_project(value):
                inner, receiver = self.of_class(value, attribute)
                if is_method(inner):
                    return Found(f"{name}.{attribute}", inner, receiver)
            elif isinstance(value, types.FunctionType):
                inner = self.watch.item(vars(value), attribute)  # set by a decorator
                if inner is MISSING or (isinstance(inner, types.FunctionType) and not is_project(inner)):
                    return Found(name, value)
            elif isinstance(value, (*PLAIN, type)) or not is_open(value):
                return Found(name, value)
            else:
                inner = self.of_object(value, attribute)
                if is_method(inner):
                    return Found(f"{name}.{attribute}", inner, Receiver(type(value), value, True))
            if not isinstance(value, types.ModuleType):
                name = f"{name}.{attribute}"
            value = inner
        return Found(name, value)

    def module(self, name: str) -> Any:
        """The module of this name, a stand-in if it is one of the project that is not imported, or `MISSING`."""
        found = self.watch.item(sys.modules, name)
        if found is not None and found is not MISSING:
            return found
        if name not in self._unimported:
            made = stand_in(name) if owner_of(name) is Owner.PROJECT else None
            self._unimported[name] = MISSING if made is None else made
        return self._unimported[name]

    def passed_texts(self) -> list[Text]:
        """The files of modules that are not imported, and that paths led through since the last call."""
        passed, self._texts = self._texts, []
        return passed

    def imported(self, name: Imported) -> Any:
        """The value of a name that an import statement of an unimported module binds."""
        module = self.module(name.module)
        is_attribute = name.attribute and isinstance(module, types.ModuleType)
        return self._of_module(module, name.attribute) if is_attribute else module

    def _of_module(self, module: types.ModuleType, attribute: str) -> Any:
        if isinstance(module, Unimported):
            found = vars(module).get(attribute, MISSING)
            if not module.is_plain:
                self._texts.append(module.file if found is not MISSING else module.whole)
            if isinstance(found, Imported):
                return self.imported(found)
        else:
            found = self.watch.item(vars(module), attribute)
        if found is MISSING and "__path__" in vars(module) and owner_of(module) is Owner.PROJECT:
            found = self.module(f"{module.__name__}.{attribute}")
        if isinstance(module, Unimported):
            return found if found is not MISSING or module.is_plain else module.whole
        if found is MISSING and "__getattr__" in vars(module):  # it imports its names when they are used
            try:
                found = self.watch.attribute(module, attribute)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - a module may raise anything when it is imported
                let_through(error)
        return found

    def of_class(self, kind: type, attribute: str) -> tuple[Any, Receiver]:
        """An attribute of a class of the project, its own or its metaclass's, and the receiver if it is a method."""
        self.watch.lineage(kind)
        found, meta = self.static(kind, attribute), type(kind)
        if not is_project(meta):
            return found, Receiver(kind)
        above = self.static(meta, attribute)
        if isinstance(above, property) or (found is MISSING and above is not MISSING):
            return above, Receiver(meta, kind, True)
        return COMPUTED if found is MISSING and is_computed(meta, attribute) else found, Receiver(kind)

    def of_object(self, value: Any, attribute: str) -> Any:
        """An attribute of an object of the project, its own or its class's. No method is called."""
        self.watch.lineage(value)
        found = self.static(type(value), attribute)
        if any(isinstance(vars(base).get("__getattribute__"), types.FunctionType) for base in type(value).__mro__):
            return COMPUTED
        if isinstance(found, (property, functools.cached_property)):
            return found
        own = MISSING if _is_data_descriptor(found) else self.watch.item(own_attributes(value), attribute)
        if own is not MISSING:
            return own
        if found is not MISSING and not is_method(found) and hasattr(type(found), "__get__"):  # a slot
            with contextlib.suppress(AttributeError):  # nothing in it yet
                return self.watch.attribute(value, attribute)
            return MISSING
        if found is MISSING and is_computed(type(value), attribute):
            return COMPUTED
        return found

    def static(self, kind: type, attribute: str) -> Any:
        """The class attribute of this name, or `MISSING`; classes earlier in the MRO, which could hide it, are watched too."""
        for base in kind.__mro__:
            cannot_change = base.__flags__ & _IMMUTABLE_TYPE
            found = (
                vars(base).get(attribute, MISSING) if cannot_change else self.watch.item(self.space(base), attribute)
            )
            if found is not MISSING:
                return found
        return MISSING

    def super_attribute(self, function: types.FunctionType, kind: type, attribute: str) -> Any:
        """The result of ``super().attribute``: found behind the class that defines `function` in the MRO."""
        mro = kind.__mro__
        defines = next((i for i, c in enumerate(mro) if _defines(c, function)), len(mro) - 1)
        for base in mro[defines + 1 :]:
            found = self.watch.item(self.space(base), attribute)
            if found is not MISSING:
                return found
        return MISSING

    def space(self, kind: type) -> Mapping[str, Any]:
        """``vars(kind)``, always the same object for one class."""
        return self._spaces.setdefault(kind, vars(kind))


def _is_data_descriptor(found: Any) -> bool:
    """True for a descriptor of the program that also sets: it precedes an object's own attributes."""
    kind = type(found)
    return isinstance(getattr(kind, "__get__", None), types.FunctionType) and hasattr(kind, "__set__")


def is_project(thing: Any) -> bool:
    """True if a class or function belongs to the project, and so counts by content."""
    return owner_of(thing) is Owner.PROJECT


def is_open(value: Any) -> bool:
    """True if an object counts by single attributes: its class is the project's, and has no ``__cache_signature__``."""
    kind = type(value)
    if f"{module_of(kind)}.{kind.__qualname__}" in _NAMESPACES:
        return True
    return is_project(kind) and not hasattr(kind, "__cache_signature__")


def is_slot(kind: type, attribute: str) -> bool:
    return any(isinstance(vars(base).get(attribute), types.MemberDescriptorType) for base in kind.__mro__)


def has_slots(kind: type) -> bool:
    return any(isinstance(value, types.MemberDescriptorType) for base in kind.__mro__ for value in vars(base).values())


def is_computed(kind: type, attribute: str) -> bool:
    """True if ``__getattr__`` of the class `kind` answers for an attribute that an object lacks."""
    if any(attribute in vars(base) for base in kind.__mro__):
        return False
    return any("__getattr__" in vars(base) for base in kind.__mro__)


def own_attributes(value: Any) -> Mapping[str, Any]:
    """An object's ``__dict__``, even if its class overrides access to it."""
    try:
        found: Mapping[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return _NOTHING
    return found if isinstance(found, Mapping) else _NOTHING


def is_method(value: Any) -> bool:
    """True if a lookup of `value` on an object runs or binds code, which counts in its place."""
    return isinstance(value, _METHODS) or wrapped_by(value) is not None or jit_function(value) is not None


def wrapped_by(value: Any) -> Any:
    """The function that the decorator object `value` wraps, or None. ``__getattr__`` is not asked: it may answer anything."""
    found = inspect.getattr_static(value, "__wrapped__", None)
    return getattr(value, "__wrapped__", None) if isinstance(found, _SLOTS) else found


def registered_with(function: types.FunctionType) -> Mapping[type, Any] | None:
    """The functions that `functools.singledispatch` chooses from, by the first argument's type; None for other functions."""
    registry, dispatch = (function.__dict__.get(name) for name in ("registry", "dispatch"))
    is_one = isinstance(registry, types.MappingProxyType) and getattr(dispatch, "__module__", "") == "functools"
    return registry if is_one else None


def call_of(value: Any) -> Any:
    """The ``__call__`` of the class of `value`, or None."""
    return next((vars(c)["__call__"] for c in type(value).__mro__ if "__call__" in vars(c)), None)


def jit_function(value: Any) -> Any:
    """The Triton function (with `fn`, the Python function, and `src`, its text) that `value` is or wraps, or None."""
    while module_of(type(value)).partition(".")[0] == "triton" and hasattr(value, "fn"):
        if isinstance(value.fn, types.FunctionType) and hasattr(value, "src"):
            return value
        value = value.fn  # an autotuner, or heuristics
    return None


def _defines(kind: type, function: types.FunctionType) -> bool:
    """True if `kind` defines `function`, also below decorators."""
    found = vars(kind).get(function.__name__)
    while found is not None and found is not function:
        found = getattr(found, "__func__", None) or getattr(found, "__wrapped__", None)
    return found is function
