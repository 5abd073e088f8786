"""The arguments of a call: a token for every call, and the canonical values that a key is made of, for each new token.

A token is cheap enough for a launch path; canonical values are made of it alone, once. So a caller may cache results by token
without expiry: a list or an object is read again at each call.

A type without a description raises `KeyFactorError`: there is no fallback to a name, an address or a ``repr``.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import methodcaller
from pathlib import PurePath
from typing import Any

from kcoord.errors import KeyFactorError
from kcoord.interruption import let_through
from kcoord.keys.arguments import argument_types, library_types
from kcoord.keys.arguments.argument_types import ArgumentType, NoIdentity, Token, generalized, value_of
from kcoord.keys.cache_key import qualified
from kcoord.keys.packages import Owner, owner_of

_MOST_TYPES = 4096  # a program that makes classes without end must not fill the memory

_NAMESPACES = ("types.SimpleNamespace", "argparse.Namespace")
_NATIVE: set[type] = {object, type(None), bool, int, str, bytes, *argument_types.PLAIN}
_by_type: dict[type, Callable[[Any], Any]] = {}
_by_name: dict[str, Callable[[Any], Any]] = {}
_types: dict[type, ArgumentType] = dict(argument_types.PLAIN)
"""Argument types by class. Replaced, never emptied: a thread in a lookup keeps the dictionary that it began with."""


def register_signature(kind: type | str, describe: Callable[[Any], Any]) -> None:
    """Let values of a type that is not yours be arguments: ``describe(value)`` returns the parts that count.

    `kind` is the class, or its qualified name (``"torch.fx.GraphModule"``; as it is imported, or where it is defined), which
    imports nothing. `describe` returns values that `kcoord.CacheKey.of` accepts, or values of types that are described in turn,
    and is called at each call. It serves subclasses too, unless they or a nearer base have a description of their own.
    Raises `KeyFactorError` for a type of Python's own, whose identity is its value.
    """
    global _types
    if not callable(describe):
        raise KeyFactorError(f"register_signature({kind!r}, …) needs a function that describes a value")
    if isinstance(kind, str) and not ("." in kind and all(part.isidentifier() for part in kind.split("."))):
        raise KeyFactorError(f"{kind!r} is no qualified name: write 'package.module.Class'")
    if any(kind in (native, qualified(native)) for native in _NATIVE):
        raise KeyFactorError(f"a value of type {kind} is its own description: register a class of your own")
    if isinstance(kind, str):
        _by_name[kind] = describe
    else:
        _by_type[kind] = describe
    _types = dict(argument_types.PLAIN)


class Arguments:
    """Describes the calls of one function. Thread-safe, and without a lock.

    `names` are its arguments, in the order of the values of each call. In arguments that `dynamic` names, each size and stride of
    a tensor counts as Triton specializes it: 1, a multiple of 16, or another. ``functions(f)`` returns the identity of a
    function, a class or a module that is an argument; without it they raise. Raises `KeyFactorError` if `dynamic`
    names no argument.
    """

    def __init__(
        self, names: Sequence[str], *, dynamic: Collection[str] = (), functions: Callable[[Any], Any] | None = None
    ) -> None:
        unknown = sorted(set(dynamic) - set(names))
        if unknown:
            raise KeyFactorError(f"dynamic={unknown[0]!r} is no argument: there are {', '.join(names)}")
        self.functions = functions
        self._names = tuple(names)
        self._dynamic = tuple(n for n, name in enumerate(names, 1) if name in dynamic)

    def token(self, values: Sequence[Any], device_id: int = 0) -> Token:
        """A hashable tuple; two of one `Arguments` are equal only if their canonical values are.

        `device_id` is the ordinal of the current device: a tensor on it is the same to every rank. The tuple refers to classes,
        and to no mutable value; it is valid in this process only. Not guaranteed: that tokens differ *only* if the
        canonical values do (a dict's order). Raises `KeyFactorError`, one line that names the value and the remedy.
        """
        found: list[Token] = [device_id]
        known = _types
        try:
            for value in values:
                kind = type(value)
                if kind is str or kind is bool or value is None:
                    found.append(value)
                elif kind is int or kind is bytes:
                    found.append((kind, value))
                else:
                    argument_type = known.get(kind) or _type_of(kind)
                    found.append(argument_type.token(value, self, 0))
        except Exception as error:  # also of the program: a proxy, a __cache_signature__
            let_through(error)
            if not isinstance(error, NoIdentity):
                name = self._names[len(found) - 1]
                raise KeyFactorError(f"arguments.{name}: {type(error).__name__} while it was read: {error}") from error
            where = f"arguments.{self._names[len(found) - 1]}{error.where}"
            raise KeyFactorError(f"{where}: {error.why}") from error.__cause__
        for n in self._dynamic:
            found[n] = generalized(found[n])
        return tuple(found)

    def canonical(self, token: Token) -> dict[str, Any]:
        """The key's factor `arguments`: name → a value that `kcoord.keys.cache_key.encode` takes."""
        device_id, *tokens = token
        return {name: value_of(t, device_id) for name, t in zip(self._names, tokens, strict=True)}

    def inner(self, value: Any, depth: int) -> Token:
        """The token of a value inside one at `depth`."""
        kind = type(value)
        if kind is str or kind is bool or value is None:
            return value
        if kind is int or kind is bytes:
            return (kind, value)
        argument_types.count(depth)
        argument_type = _types.get(kind) or _type_of(kind)
        return argument_type.token(value, self, depth + 1)


class HeldValues(Arguments):
    """Describes values that code holds, not its arguments: tensors and arrays in them count by content.

    ``functions(f)`` returns the identity of a function, a class or a module; ``is_code(value)`` is true for what else has one.
    """

    def __init__(self, functions: Callable[[Any], Any], is_code: Callable[[Any], bool], device_id: int = 0) -> None:
        super().__init__((), functions=functions)
        self._is_code, self._device_id = is_code, device_id

    def describe(self, value: Any, name: str) -> Any:
        """`value` as `kcoord.keys.cache_key.encode` takes it. Raises `KeyFactorError`, which states `name` and the remedy."""
        try:
            return value_of(self.inner(value, 0), self._device_id)
        except NoIdentity as error:
            raise KeyFactorError(f"{name}{error.where}: {error.why}") from error.__cause__

    def inner(self, value: Any, depth: int) -> Token:
        kind = type(value)
        argument_type = _types.get(kind) or (None if kind in _NATIVE else self._type_of(value))
        if isinstance(argument_type, library_types.Tensor):
            return library_types.content_type(argument_type).token(value, self, depth)
        if isinstance(argument_type, argument_types.Code):
            argument_types.count(depth)
            return argument_type.token(value, self, depth + 1)
        return super().inner(value, depth)

    def _type_of(self, value: Any) -> ArgumentType:
        return argument_types.Code(type(value)) if self._is_code(value) else _type_of(type(value))


def _type_of(kind: type) -> ArgumentType:
    global _types
    known = _types
    argument_type = _described(kind) or _structural(kind)
    if argument_type is None:
        raise NoIdentity(_refusal(kind))
    if len(known) >= _MOST_TYPES:
        known = _types = dict(argument_types.PLAIN)
    return known.setdefault(kind, argument_type)


def _described(kind: type) -> ArgumentType | None:
    """The type of a class that is described itself, or by its nearest described base; None: there is none."""
    for base in kind.__mro__:
        describe = _registered(base)
        if describe is not None:
            return argument_types.described(kind, describe, "signature")
        if base is enum.Enum:
            return argument_types.EnumMember(kind, _is_project(kind))
        if "__cache_signature__" in vars(base) and not issubclass(kind, enum.Enum):
            name = "__cache_signature__"
            return argument_types.described(kind, methodcaller(name), name, _is_project(kind))
        if qualified(base) in library_types.LIBRARY_TYPES:
            if (
                base is not kind
                and _is_project(kind)
                and base.__module__.partition(".")[0] not in ("torch", "numpy", "triton")
            ):
                return None  # it may hold more
            return library_types.LIBRARY_TYPES[qualified(base)](kind)
        if base is type:
            return argument_types.Code(kind)
    return None


def _registered(base: type) -> Callable[[Any], Any] | None:
    describe = _by_type.get(base) or _by_name.get(qualified(base))
    return describe or next((d for name, d in list(_by_name.items()) if _imported(name) is base), None)


def _imported(name: str) -> Any:
    """The object of this name, if its module was imported; not by the module's ``__getattr__``, which may import."""
    module, _, attribute = name.rpartition(".")
    return getattr(sys.modules.get(module), "__dict__", {}).get(attribute)


def _structural(kind: type) -> ArgumentType | None:
    """The type of an object of the project, a dataclass, one of Python's own mappings, or a named tuple."""
    if qualified(kind) in _NAMESPACES or (_is_project(kind) and argument_types.has_plain_state(kind)):
        return argument_types.State(kind)
    if dataclasses.is_dataclass(kind):
        return argument_types.Fields(kind, tuple(f.name for f in dataclasses.fields(kind)), _is_project(kind))
    if issubclass(kind, Mapping) and kind.__module__ in ("builtins", "collections", "types"):
        return argument_types.MappingType(kind)
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return argument_types.Fields(kind, kind._fields, _is_project(kind))
    return None


def _is_project(kind: type) -> bool:
    return owner_of(kind) is Owner.PROJECT


def _refusal(kind: type) -> str:
    if issubclass(kind, PurePath):
        return (
            "a path says nothing of its file: declare the files that are read with trees=[…] and name the path in ignore=[…]; "
            "as an argument pass the content (path.read_bytes())"
        )
    name = qualified(kind)
    return (
        f"a value of type {name} has no identity that is stable across processes: give its class a __cache_signature__() "
        f'that returns the plain values that matter; for a class that is not yours, kcoord.register_signature("{name}", function)'
    )
