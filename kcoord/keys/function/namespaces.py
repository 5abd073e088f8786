"""The attributes of classes and modules that their authors defined, without those that Python adds, which differ by version."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import types
from collections.abc import Iterator
from typing import Any

from kcoord.keys.packages import Owner, owner_of

_OF_CLASSES = frozenset(
    (
        *("__dict__", "__weakref__", "__doc__", "__module__", "__qualname__"),
        *("__firstlineno__", "__static_attributes__"),
        "__slotnames__",  # since one was copied or pickled
        "__cache_signature__",  # what its values say, not what they do
        *("__annotations_cache__", "__annotate_func__", "__abstractmethods__", "_abc_impl", "__annotations__"),
        *("__dataclass_fields__", "__dataclass_params__", "__type_params__", "__protocol_attrs__"),
        *("__non_callable_proto_members__", "__callable_proto_members_only__", "__orig_bases__", "__parameters__"),
        *("__readonly_keys__", "__mutable_keys__", "__attrs_attrs__"),
    )
)
_OF_MODULES = frozenset(
    (
        *("__name__", "__doc__", "__package__", "__loader__", "__spec__", "__file__", "__cached__", "__path__"),
        *("__builtins__", "__annotations__", "__annotate__", "__conditional_annotations__", "__warningregistry__"),
    )
)
_CHOICES = ("init", "repr", "eq", "order", "unsafe_hash", "frozen")
"""A dataclass's options that all versions of Python have."""


def names_in_class(kind: type) -> list[str]:
    """The names that the author defined, sorted, without those in `declared_values` and the methods that Python derives."""
    is_enum = issubclass(kind, enum.Enum)
    makes = is_enum or "__dataclass_fields__" in vars(kind) or (issubclass(kind, tuple) and hasattr(kind, "_fields"))
    members = kind.__members__ if is_enum else {}  # type: ignore[attr-defined]
    return sorted(
        name
        for name, value in vars(kind).items()
        if name not in _OF_CLASSES and name not in members and not (makes and _is_made(name, value, is_enum))
    )


def names_in_module(module: types.ModuleType) -> list[str]:
    return sorted(vars(module).keys() - _OF_MODULES)


def declared_values(kind: type) -> Iterator[tuple[str, Any]]:
    """Values that a class declares beside its attributes: an enum's members, a dataclass's options and fields."""
    if issubclass(kind, enum.Enum):
        for name, member in kind.__members__.items():
            yield name, member._value_
    if "__dataclass_fields__" in vars(kind):
        parameters = kind.__dataclass_params__  # type: ignore[attr-defined]
        yield "dataclass", [getattr(parameters, name) for name in _CHOICES]
        for field in dataclasses.fields(kind):
            yield f"field {field.name}", [field.init, field.repr, field.compare, field.hash, field.kw_only]
            for part in ("default", "default_factory"):
                # by name: a class that came by value has its own copy of MISSING
                if type(getattr(field, part)).__name__ != "_MISSING_TYPE":
                    yield f"field {field.name} {part}", getattr(field, part)


def _is_made(name: str, value: Any, is_enum: bool) -> bool:
    """True if `value` was generated for an enum, a dataclass or a named tuple."""
    function = getattr(value, "__func__", value)
    if isinstance(function, types.FunctionType):
        inner = inspect.unwrap(function)
        made = inner.__code__.co_filename == "<string>" and name.startswith("__") and inner.__name__ == name
        return made or owner_of(inner) is Owner.PYTHON
    if is_enum:
        return (name.startswith("_") and name.endswith("_")) or isinstance(value, types.DynamicClassAttribute)
    return type(value).__name__ == "_tuplegetter"  # a named tuple's field; its module was renamed in 3.12
