"""A message of the agent's socket as a frozen dataclass, whose annotations say how each field is read and checked.

A field that is None is not sent, and one that is absent has its default. Everything that parses raises `ProtocolError`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

from kcoord.errors import ProtocolError
from kcoord.keys.cache_key import CacheKey
from kcoord.protocol import fields

M = TypeVar("M", bound="Message")
Reader = Callable[[Mapping[str, Any], str], Any]
"""``read(message, name)``: the checked value of the field `name`. Raises `ProtocolError`."""


@dataclass(frozen=True)
class Message:
    """`op` names the type on the wire. Messages without fields are no dataclasses of their own, which take a while to import."""

    op: ClassVar[str]
    ops: ClassVar[dict[str, type[Any]]]

    def __init_subclass__(cls, op: str = "") -> None:
        if op:
            cls.op, cls.ops[op] = op, cls

    def to_wire(self, request: int) -> dict[str, Any]:
        """A frame's content, for the request with the id `request`."""
        values = {name: _plain(value) for name, value in vars(self).items() if value is not None}
        return {"op": self.op, "id": request, **values}

    @classmethod
    def from_wire(cls: type[M], message: Mapping[str, Any]) -> M:
        found = {}
        for name, (read, required) in _readers(cls).items():  # type: ignore[arg-type]
            if required or message.get(name) is not None:
                found[name] = read(message, name)
        return cls(**found)


def kind_of(base: type[M], message: Mapping[str, Any]) -> type[M]:
    """The type among the `ops` of `base` that a frame names."""
    op = fields.field(message, "op", str)
    kind: type[M] | None = base.ops.get(op)
    if kind is None:
        raise ProtocolError(f"there is no {base.__name__.lower()} {op[:80]!r}")
    return kind


@functools.cache
def _readers(kind: type[Message]) -> dict[str, tuple[Reader, bool]]:
    """Each field's reader, and True if the field is required."""
    hints = get_type_hints(kind, include_extras=True)
    return {
        field.name: (
            _reader(hints[field.name]),
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
        )
        for field in dataclasses.fields(kind)
    }


def _reader(hint: Any) -> Reader:
    """The reader that an `Annotated` hint brings; else one that checks the type."""
    if hasattr(hint, "__metadata__"):
        return hint.__metadata__[0]  # type: ignore[no-any-return]
    if isinstance(hint, UnionType):
        (hint,) = (kind for kind in get_args(hint) if kind is not NoneType)
    return functools.partial(fields.field, kind=get_origin(hint) or hint)


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return value.to_wire() if isinstance(value, CacheKey) else value
