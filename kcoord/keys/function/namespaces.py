"""What of a class's or a module's namespace its author wrote: Python adds the rest, and adds another one in each version."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import types
from collections.abc import Iterator
from typing import Any

from kcoord.keys.packages import Owner, module_of, owner_of

_OF_CLASSES = frozenset(
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
        *("__dataclass_fields__", "__dataclass_params__", "__type_params__", "__protocol_attrs__"),
        "__non_callable_proto_members__",
    )
)
_OF_MODULES = frozenset(
    (
        *("__name__", "__doc__", "__package__", "__loader__", "__spec__", "__file__", "__cached__", "__path__"),
        *("__builtins__", "__annotations__", "__annotate__", "__conditional_annotations__", "__warningregistry__"),
    )
)
_CHOICES = ("init", "repr", "eq", "order", "unsafe_hash", "frozen")
"""Of a dataclass; those that all versions of Python have."""


def names_in_class(kind: type) -> list[str]:
    """Sorted. Not those whose values `facts_of` says, nor methods that Python makes: they say nothing that those do not."""
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


def facts_of(kind: type) -> Iterator[tuple[str, Any]]:
    """What a class says beside its attributes: the values of an enum's members, the fields of a dataclass."""
    if issubclass(kind, enum.Enum):
        for name, member in kind.__members__.items():
            yield name, member._value_
    if "__dataclass_fields__" in vars(kind):
        parameters = kind.__dataclass_params__  # type: ignore[attr-defined]
        yield "dataclass", [getattr(parameters, name) for name in _CHOICES]
        for field in dataclasses.fields(kind):
            yield f"field {field.name}", [field.init, field.repr, field.compare, field.hash, field.kw_only]
            for part in ("default", "default_factory"):
                if getattr(field, part) is not dataclasses.MISSING:
                    yield f"field {field.name} {part}", getattr(field, part)


def _is_made(name: str, value: Any, is_enum: bool) -> bool:
    """Whether an enum's, a dataclass's or a named tuple's machinery put `value` there."""
    function = getattr(value, "__func__", value)
    if isinstance(function, types.FunctionType):
        inner = inspect.unwrap(function)
        made = inner.__code__.co_filename == "<string>" and name.startswith("__") and inner.__name__ == name
        return made or owner_of(module_of(inner)) is Owner.PYTHON
    if is_enum:
        return (name.startswith("_") and name.endswith("_")) or isinstance(value, types.DynamicClassAttribute)
    return (
        type(value).__name__ == "_tuplegetter"
    )  # what a named tuple reads a field with; its module is renamed in 3.12
