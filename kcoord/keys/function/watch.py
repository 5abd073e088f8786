"""Detects changes of the outside values that code reads, since a key was made of them.

A key holds a snapshot of these values. Before the key is used again, a `Watch` compares each with the snapshot, in tens of
nanoseconds per value, by a function that is generated for the values that were read. Immutable values are compared by identity,
values that can change in place by content. A doubt counts as a change: then the slow path reads everything again and decides.
"""

from __future__ import annotations

import dataclasses
import enum
import marshal
import types
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from kcoord.interruption import let_through
from kcoord.keys.cache_key import qualified

MISSING: Any = object()
"""Stands for the value of a name that does not exist."""

_IMMUTABLE = (
    *(type(None), bool, int, float, complex, str, bytes, type(...), types.ModuleType, type),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, enum.Enum, property, types.CodeType),
)
"""Compared by identity. Functions and classes can change inside: their parts are watched one by one."""
_FROZEN = frozenset(
    (
        *("torch.dtype", "torch.device", "torch.Size", "torch.layout", "triton.language.core.dtype"),
        *("triton.runtime.jit.JITFunction", "triton.runtime.jit.ConstexprFunction"),  # as a function is
        "triton.experimental.gluon._runtime.GluonJITFunction",
    )
)
_HOLDERS = {"triton.language.core.constexpr": "value"}
"""Frozen types, and types that hold one value, by name: nothing is imported here."""


class Watch:
    """Collects reads, then generates the function that compares them."""

    def __init__(self) -> None:
        self._terms: list[str] = []
        self._names: dict[str, Any] = {"dumps": marshal.dumps}
        self._seen: set[tuple[int, str]] = set()

    def item(self, mapping: Mapping[str, Any], name: str) -> Any:
        """``mapping.get(name)``, watched by identity; `MISSING` if it is not there."""
        value = mapping.get(name, MISSING)
        if (id(mapping), name) not in self._seen:
            self._seen.add((id(mapping), name))
            held = self._bind(mapping)
            missing = value is MISSING
            self._terms.append(f"{name!r} not in {held}" if missing else f"{held}[{name!r}] is {self._bind(value)}")
        return value

    def attribute(self, owner: Any, name: str) -> Any:
        """``getattr(owner, name)``, watched by identity, or by content if each read computes it. Raises AttributeError."""
        value = getattr(owner, name)
        if (id(owner), f".{name}") not in self._seen:
            self._seen.add((id(owner), f".{name}"))
            held = self._bind(owner)
            if getattr(owner, name) is value or not self._equal(f"{held}.{name}", value):
                self._terms.append(f"{held}.{name} is {self._bind(value)}")
        return value

    def content(self, value: Any, describe: Callable[[], Any]) -> None:
        """Watch a value that may change in place. For types that marshal does not know ``describe()`` is compared."""
        if is_immutable(value) or (id(value), "") in self._seen:
            return
        self._seen.add((id(value), ""))
        bound = self._bind(value)
        inside = _HOLDERS.get(qualified(type(value)))
        if inside is not None and is_immutable(getattr(value, inside)):
            self._terms.append(f"{bound}.{inside} is {self._bind(getattr(value, inside))}")
            return
        if not self._equal(bound, value):
            self._terms.append(f"{self._bind(describe)}() == {self._bind(describe())}")

    def _equal(self, expression: str, value: Any) -> bool:
        """Watch that `expression` stays equal to `value`; False if marshal does not know its type."""
        try:
            content = marshal.dumps(value, 2)  # without references, whose number depends on the process
        except ValueError:
            return False
        self._terms.append(f"dumps({expression}, 2) == {self._bind(content)}")
        return True

    def function(self, function: types.FunctionType, code: bool = True) -> None:
        """Watch the parts of a function that can be replaced; only its closure if `code` is false.

        The caller watches the values in them.
        """
        for part in ("__code__", "__defaults__", "__kwdefaults__") if code else ():
            self.attribute(function, part)
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # not bound yet: it cannot have been read
                self.attribute(cell, "cell_contents")

    def unchanged(self) -> Callable[[], bool]:
        """A function that returns true while nothing has changed. It takes no lock; any thread may call it.

        A comparison that raises counts as a change: a value was emptied or deleted meanwhile, or code of the project (a
        descriptor, a ``__cache_signature__``) raised. Generated as one function: a loop over the values takes several times as
        long, at each launch.
        """
        names = {**self._names, "let_through": let_through}
        source = (
            "def made():\n"
            f"    try:\n        return {' and '.join(self._terms) or 'True'}\n"
            "    except Exception as error:\n        let_through(error)\n"
            "    return False\n"
        )
        exec(compile(source, "<kcoord watch>", "exec"), names)
        found: Callable[[], bool] = names["made"]
        return found

    def _bind(self, value: Any) -> str:
        name = f"v{len(self._names)}"
        self._names[name] = value
        return name


def is_immutable(value: Any) -> bool:
    """True if equal identity means equal content."""
    if isinstance(value, (tuple, frozenset)) and not hasattr(value, "__dict__"):
        return all(map(is_immutable, value))
    parameters = getattr(type(value), "__dataclass_params__", None)
    if parameters is not None and parameters.frozen:
        return all(is_immutable(getattr(value, field.name)) for field in dataclasses.fields(value))
    if isinstance(value, _IMMUTABLE):
        return not (isinstance(value, (int, str, float)) and hasattr(value, "__dict__"))
    return qualified(type(value)) in _FROZEN
