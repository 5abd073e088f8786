"""Where a path leads: ``config.layer.tile``, through modules, classes and objects, without running anybody's code.

Each step is watched (`kcoord.keys.globals.Watch`), also the places where a name was *not* found, since it could appear there.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kcoord.keys.globals import MISSING, Watch
from kcoord.keys.packages import Owner, identity_of, owner_of, portable_name

PLAIN = (type(None), bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)
_METHODS = (types.FunctionType, staticmethod, classmethod, property, functools.cached_property, functools.partialmethod)
_NAMESPACES = ("types.SimpleNamespace", "argparse.Namespace")


@dataclass(frozen=True)
class Receiver:
    """The object that a method is called on: its class, and itself if it is known already."""

    kind: type
    value: Any = None
    known: bool = False


@dataclass(frozen=True)
class Found:
    """What a path leads to, and its identity as ``module.NAME``. `value` is `MISSING` if the path ends before.

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
                inner = self.static(value, attribute)
                if is_method(inner):
                    return Found(f"{name}.{attribute}", inner, Receiver(value))
            elif isinstance(value, (*PLAIN, types.FunctionType, type)) or not is_open(value):
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
        if found is MISSING and hasattr(module, "__getattr__"):  # it imports its names when they are used
            found = self.watch.attribute(module, attribute)
        return found

    def of_object(self, value: Any, attribute: str) -> Any:
        """An attribute of an object of the project: its own, or what its class has; a method is not called."""
        found = self.static(type(value), attribute)
        if isinstance(found, (property, functools.cached_property)):
            return found
        if hasattr(value, "__dict__"):
            own = self.watch.item(vars(value), attribute)
            if own is not MISSING:
                return own
        if found is not MISSING and not is_method(found) and hasattr(type(found), "__get__"):  # a slot
            return self.watch.attribute(value, attribute)
        return found

    def static(self, kind: type, attribute: str) -> Any:
        """What a class has under `attribute`; the classes before that could hide it are watched as well."""
        for base in kind.__mro__:
            found = self.watch.item(self.space(base), attribute)
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


def is_project(thing: Any) -> bool:
    """Whether a class or function belongs to the project, and counts by content."""
    return owner_of(thing.__module__ or "builtins") is Owner.PROJECT


def is_open(value: Any) -> bool:
    """Whether single attributes of an object can be read: its class is the project's, and says nothing itself."""
    kind = type(value)
    if f"{kind.__module__}.{kind.__qualname__}" in _NAMESPACES:
        return True
    return is_project(kind) and not hasattr(kind, "__cache_signature__")


def is_slot(kind: type, attribute: str) -> bool:
    return any(isinstance(vars(base).get(attribute), types.MemberDescriptorType) for base in kind.__mro__)


def is_method(value: Any) -> bool:
    """Whether looking `value` up on an object runs code, which is then what counts."""
    return isinstance(value, _METHODS) or hasattr(value, "__wrapped__") or jit_function(value) is not None


def jit_function(value: Any) -> Any:
    """Triton's object (with `fn`, the Python function, and `src`, its text) that `value` is, or wraps; None for others."""
    while type(value).__module__.partition(".")[0] == "triton" and hasattr(value, "fn"):
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
