"""Where a path leads: ``config.layer.tile``, through modules, classes and objects, without running anybody's code.

Each step is watched (`kcoord.keys.function.watch.Watch`), also the places where a name was *not* found, since it could appear
there.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import inspect
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
"""What an attribute stands for that an object's class computes: only its code knows where it comes from."""
REMEDY = (
    "its class computes attributes (__getattr__), so what it reads is not known: give the class a __cache_signature__() that "
    "returns the plain values that matter"
)


@dataclass(frozen=True)
class Receiver:
    """The object that a method is called on: its class, and itself if it is known already."""

    kind: type
    value: Any = None
    known: bool = False


@dataclass(frozen=True)
class Found:
    """What a path leads to, and its identity as ``module.NAME``. `value` is `MISSING` if the path ends before, and
    `COMPUTED` if code decides.

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
        self._spaces: dict[type, Mapping[str, Any]] = {}

    def resolve(self, name: str, value: Any, path: tuple[str, ...]) -> Found:
        """Follow `path` from `value`. It ends at plain data, at a function, and where another package's code begins."""
        for attribute in path:
            if isinstance(value, types.ModuleType):
                inner = self._of_module(value, attribute)
                name = f"{portable_name(value.__name__)}.{attribute}"
                foreign = owner_of(value.__name__) is not Owner.PROJECT
                if foreign and not isinstance(inner, (types.ModuleType, *PLAIN)) and inner is not MISSING:
                    return Found(name, inner, installed=identity_of(value.__name__))
            elif isinstance(value, enum.EnumMeta) and attribute in value.__members__:
                inner = value.__members__[attribute]
            elif isinstance(value, type) and is_project(value):
                inner, receiver = self.of_class(value, attribute)
                if is_method(inner):
                    return Found(f"{name}.{attribute}", inner, receiver)
            elif isinstance(value, types.FunctionType):
                inner = self.watch.item(vars(value), attribute)  # what a decorator left there
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

    def _of_module(self, module: types.ModuleType, attribute: str) -> Any:
        found = self.watch.item(vars(module), attribute)
        if found is MISSING and "__getattr__" in vars(module):  # it imports its names when they are used
            with contextlib.suppress(AttributeError, ImportError):
                found = self.watch.attribute(module, attribute)
        return found

    def of_class(self, kind: type, attribute: str) -> tuple[Any, Receiver]:
        """An attribute of a class of the project: its own or its metaclass's; and what it is called on, if it is a method."""
        self.watch.lineage(kind)
        found, meta = self.static(kind, attribute), type(kind)
        if not is_project(meta):
            return found, Receiver(kind)
        above = self.static(meta, attribute)
        if isinstance(above, property) or (found is MISSING and above is not MISSING):
            return above, Receiver(meta, kind, True)
        return COMPUTED if found is MISSING and is_computed(meta, attribute) else found, Receiver(kind)

    def of_object(self, value: Any, attribute: str) -> Any:
        """An attribute of an object of the project: its own, or what its class has; a method is not called."""
        self.watch.lineage(value)
        found = self.static(type(value), attribute)
        if any(isinstance(vars(base).get("__getattribute__"), types.FunctionType) for base in type(value).__mro__):
            return COMPUTED
        if isinstance(found, (property, functools.cached_property)):
            return found
        own = MISSING if _has_the_say(found) else self.watch.item(own_attributes(value), attribute)
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
        """What a class has under `attribute`; the classes before that could hide it are watched as well."""
        for base in kind.__mro__:
            cannot_change = base.__flags__ & _IMMUTABLE_TYPE
            found = (
                vars(base).get(attribute, MISSING) if cannot_change else self.watch.item(self.space(base), attribute)
            )
            if found is not MISSING:
                return found
        return MISSING

    def after(self, function: types.FunctionType, kind: type, attribute: str) -> Any:
        """What ``super().attribute`` finds: behind the class that defines `function`."""
        mro = kind.__mro__
        defines = next((i for i, c in enumerate(mro) if _defines(c, function)), len(mro) - 1)
        for base in mro[defines + 1 :]:
            found = self.watch.item(self.space(base), attribute)
            if found is not MISSING:
                return found
        return MISSING

    def space(self, kind: type) -> Mapping[str, Any]:
        """``vars(kind)``, one object for one class."""
        return self._spaces.setdefault(kind, vars(kind))


def _has_the_say(found: Any) -> bool:
    """Whether what a class has is asked before an object's own attributes: it sets them, too."""
    kind = type(found)
    return isinstance(getattr(kind, "__get__", None), types.FunctionType) and hasattr(kind, "__set__")


def is_project(thing: Any) -> bool:
    """Whether a class or function belongs to the project, and counts by content."""
    return owner_of(module_of(thing)) is Owner.PROJECT


def is_open(value: Any) -> bool:
    """Whether single attributes of an object can be read: its class is the project's, and says nothing itself."""
    kind = type(value)
    if f"{module_of(kind)}.{kind.__qualname__}" in _NAMESPACES:
        return True
    return is_project(kind) and not hasattr(kind, "__cache_signature__")


def is_slot(kind: type, attribute: str) -> bool:
    return any(isinstance(vars(base).get(attribute), types.MemberDescriptorType) for base in kind.__mro__)


def has_slots(kind: type) -> bool:
    return any(isinstance(value, types.MemberDescriptorType) for base in kind.__mro__ for value in vars(base).values())


def is_computed(kind: type, attribute: str) -> bool:
    """Whether code of the class `kind` answers for an attribute that its object itself has not."""
    if any(attribute in vars(base) for base in kind.__mro__):
        return False
    return any("__getattr__" in vars(base) for base in kind.__mro__)


def own_attributes(value: Any) -> Mapping[str, Any]:
    """An object's ``__dict__``, whatever its class answers when it is asked for one."""
    try:
        found: Mapping[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return _NOTHING
    return found if isinstance(found, Mapping) else _NOTHING


def is_method(value: Any) -> bool:
    """Whether looking `value` up on an object runs code, which is then what counts."""
    return isinstance(value, _METHODS) or wrapped_by(value) is not None or jit_function(value) is not None


def wrapped_by(value: Any) -> Any:
    """What the decorator object `value` wraps, or None. An object that answers everything wraps nothing."""
    found = inspect.getattr_static(value, "__wrapped__", None)
    return getattr(value, "__wrapped__", None) if isinstance(found, _SLOTS) else found


def registered_with(function: types.FunctionType) -> Mapping[type, Any] | None:
    """The functions among which `functools.singledispatch` chooses, by the type of the first argument; None for others."""
    registry, dispatch = (function.__dict__.get(name) for name in ("registry", "dispatch"))
    is_one = isinstance(registry, types.MappingProxyType) and getattr(dispatch, "__module__", "") == "functools"
    return registry if is_one else None


def call_of(value: Any) -> Any:
    """What the class of `value` has as ``__call__``, or None."""
    return next((vars(c)["__call__"] for c in type(value).__mro__ if "__call__" in vars(c)), None)


def jit_function(value: Any) -> Any:
    """Triton's object (with `fn`, the Python function, and `src`, its text) that `value` is, or wraps; None for others."""
    while module_of(type(value)).partition(".")[0] == "triton" and hasattr(value, "fn"):
        if isinstance(value.fn, types.FunctionType) and hasattr(value, "src"):
            return value
        value = value.fn  # an autotuner, or heuristics
    return None


def _defines(kind: type, function: types.FunctionType) -> bool:
    """Decorated methods too: what the class holds may wrap `function`."""
    found = vars(kind).get(function.__name__)
    while found is not None and found is not function:
        found = getattr(found, "__func__", None) or getattr(found, "__wrapped__", None)
    return found is function
