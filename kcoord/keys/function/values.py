"""The content of a function, and how the values in it are described."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kcoord.errors import KeyFactorError
from kcoord.keys.arguments.signature import HeldValues
from kcoord.keys.cache_key import encode
from kcoord.keys.function.lookup import PLAIN, call_of, is_method, is_open
from kcoord.keys.function.visits import VisitQueue
from kcoord.keys.function.watch import MISSING, Watch
from kcoord.keys.packages import module_of

NO_CODE = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType)
PARTS = ("code", "globals", "closure", "defaults", "annotations")  # of a content, which are factors
OR_IGNORE = "or name it in ignore=… if it changes nothing"


@dataclass
class Content:
    """The content of a function. Each mapping is a key factor; its names are the same in every process.

    `code` maps functions to their text, `globals` ``module.NAME`` to values, `closure`, `defaults` and `annotations`
    ``function.name`` to values. `variables` are the environment variables that are read by a constant name; `files` those of
    modules that are not imported, with their digests. `attributes` are the paths that a method reads from its own object;
    `escapes` is true if it also hands that object on. `jit_functions` are Triton's functions among the code. `watch` detects
    changes of all of it.
    """

    function: str = ""
    code: dict[str, Any] = field(default_factory=dict)
    globals: dict[str, Any] = field(default_factory=dict)
    closure: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    annotations: dict[str, Any] = field(default_factory=dict)
    variables: set[str] = field(default_factory=set)
    files: dict[str, str] = field(default_factory=dict)
    attributes: set[tuple[str, ...]] = field(default_factory=set)
    escapes: bool = False
    jit_functions: list[Any] = field(default_factory=list)
    watch: Watch = field(default_factory=Watch)

    def factors(self) -> dict[str, Any]:
        return {"function": self.function} | {name: part for name in PARTS if (part := getattr(self, name))}


class Values:
    """Adds values to a content and to its watch. ``functions(f)`` returns the label of a function, a class or a module."""

    def __init__(self, content: Content, queue: VisitQueue, functions: Callable[[Any], str]) -> None:
        self._content, self._queue, self._functions = content, queue, functions
        self._held_values = HeldValues(functions)

    def add(self, part: str, name: str, value: Any, whole: bool = False) -> None:
        """Add the description of `value` under `name`, and watch it. Functions in a value are watched separately, by label."""
        described = "missing"
        if value is not MISSING:
            described = self.describe(value, f"{part} {name}", self._queue.lenient, whole)
            self.watch(value, name, whole)
        self.keep(part, name, described)

    def watch(self, value: Any, name: str, whole: bool = False) -> None:
        """Watch a value that may change in place. It is described again for each comparison, as leniently as now."""
        lenient = self._queue.lenient
        if whole or not is_callable(value):
            self._content.watch.content(value, lambda: encode(self.describe(value, name, lenient, whole)))

    def keep(self, part: str, name: str, described: Any) -> None:
        """Add a description. Different values of one name (in modules made by exec, say) are numbered."""
        mapping: dict[str, Any] = getattr(self._content, part)
        number, unique = 1, name
        while unique in mapping and encode(mapping[unique]) != encode(described):
            number += 1
            unique = f"{name}#{number}"
        mapping[unique] = described

    def describe(self, value: Any, name: str, lenient: bool, whole: bool = False) -> Any:
        """`value` in terms that `encode` takes, functions in it by label. `whole`: a callable object counts as a value."""
        try:
            if is_callable(value) and not whole:
                return ("function", self._functions(value))
            if isinstance(value, types.ModuleType):
                return ("module", self._functions(value))
            described = self._held_values.describe(value, name)
            encode(described)
        except KeyFactorError as error:
            if not lenient:
                raise KeyFactorError(f"{error}; {OR_IGNORE}") from None
            return ("type", f"{module_of(type(value))}.{type(value).__qualname__}")
        return described


def is_callable(value: Any) -> bool:
    """True if the walk follows `value` as code. An object with a ``__cache_signature__`` is a value."""
    if isinstance(value, PLAIN):
        return False
    if isinstance(value, (types.FunctionType, types.MethodType, functools.partial, type, *NO_CODE)) or is_method(value):
        return True
    return isinstance(call_of(value), types.FunctionType) and is_open(value)
