"""The arguments of a call: a token for every call, and the canonical values that a key is made of, for a token that is new.

The token is what a launch path can afford; the canonical values are made of it alone, once. So a caller keeps what it found for
a token and never asks again, and what it keeps cannot go stale: a list or an object is read at each call.

A type that nobody described raises `KeyFactorError`: there is no fallback to a name, an address or a ``repr``.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from kcoord.errors import KeyFactorError
from kcoord.keys.arguments import argument_types as forms
from kcoord.keys.arguments import library_types as foreign
from kcoord.keys.arguments.argument_types import (
    Form,
    Token,
    Unkeyed,
    generalized,
    qualified,
    value_of,
)
from kcoord.keys.packages import Owner, module_of, owner_of

_DEEPEST = 32
_MOST_FORMS = 4096  # a program that makes classes without end must not fill the memory

_NATIVE: set[type] = {object, type(None), bool, int, str, bytes, *forms.PLAIN}
_by_type: dict[type, Callable[[Any], Any]] = {}
_by_name: dict[str, Callable[[Any], Any]] = {}
_forms: dict[type, Form] = dict(forms.PLAIN)
"""What was found for a type. Replaced, never emptied: a thread that is looking one up keeps the dictionary it began with."""


def register_signature(kind: type | str, describe: Callable[[Any], Any]) -> None:
    """Let values of a type that is not yours be arguments: ``describe(value)`` returns what matters of one.

    `kind` is the class, or its qualified name (``"torch.fx.GraphModule"``; as it is imported, or where it is defined), which
    imports nothing. `describe` returns what `kcoord.CacheKey.of` accepts, or values of types that are described in turn, and
    is asked at each call. It serves subclasses too, unless they or a base nearer to them have a description of their own.
    Raises `KeyFactorError` for a type of Python's own, whose identity is its value.
    """
    global _forms
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
    _forms = dict(forms.PLAIN)


class Arguments:
    """Describes the calls of one function. Thread-safe, and without a lock.

    `names` are its arguments, in the order of the values of each call. Of a tensor in one that `dynamic` names, each size and
    stride counts as Triton specializes it: 1, a multiple of 16, or another. ``functions(f)`` returns what identifies a
    function, a class or a module that is an argument; without it they raise. Raises `KeyFactorError` if `dynamic`
    names no argument.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        dynamic: Collection[str] = (),
        functions: Callable[[Any], Any] | None = None,
    ) -> None:
        unknown = sorted(set(dynamic) - set(names))
        if unknown:
            raise KeyFactorError(f"dynamic={unknown[0]!r} is no argument: there are {', '.join(names)}")
        self.functions = functions
        self._names = tuple(names)
        self._dynamic = tuple(n for n, name in enumerate(names, 1) if name in dynamic)

    def token(self, values: Sequence[Any], device_id: int = 0) -> Token:
        """A hashable tuple; two of one `Arguments` are equal only if what `canonical` makes of them is.

        `device_id` is the ordinal of the current device: a tensor on it is the same to every rank. The tuple refers to classes,
        and to no value that can change; it is of use in this process only. Not guaranteed: that tokens differ *only* if the
        canonical values do (a dict's order). Raises `KeyFactorError`, one line that names the value and the remedy.
        """
        found: list[Token] = [device_id]
        known = _forms
        try:
            for value in values:
                kind = type(value)
                if kind is str or kind is bool or value is None:
                    found.append(value)
                elif kind is int or kind is bytes:
                    found.append((kind, value))
                else:
                    form = known.get(kind) or _form_of(kind)
                    found.append(form.token(value, self, 0))
        except Unkeyed as error:
            where = f"arguments.{self._names[len(found) - 1]}{error.where}"
            raise KeyFactorError(f"{where}: {error.why}") from error.__cause__
        for n in self._dynamic:
            found[n] = generalized(found[n])
        return tuple(found)

    def canonical(self, token: Token) -> dict[str, Any]:
        """What the key's factor `arguments` is made of: name → a value that `kcoord.keys.cache_key.encode` takes."""
        device_id, *tokens = token
        return {name: value_of(t, device_id) for name, t in zip(self._names, tokens, strict=True)}

    def inner(self, value: Any, depth: int) -> Token:
        """The token of a value inside one at `depth`."""
        kind = type(value)
        if kind is str or kind is bool or value is None:
            return value
        if kind is int or kind is bytes:
            return (kind, value)
        if depth >= _DEEPEST:
            raise Unkeyed("it is nested too deeply, or refers to itself")
        form = _forms.get(kind) or _form_of(kind)
        return form.token(value, self, depth + 1)


class Held(Arguments):
    """Describes values that code holds, not its arguments: tensors and arrays in them count by content.

    ``functions(f)`` returns what identifies a function, a class or a module.
    """

    def __init__(self, functions: Callable[[Any], Any]) -> None:
        super().__init__((), functions=functions)

    def describe(self, value: Any, name: str) -> Any:
        """What `kcoord.keys.cache_key.encode` takes. Raises `KeyFactorError`, which says what `name` is, and the remedy."""
        try:
            return value_of(self.inner(value, 0), 0)
        except Unkeyed as error:
            raise KeyFactorError(f"{name}{error.where}: {error.why}") from error.__cause__

    def inner(self, value: Any, depth: int) -> Token:
        kind = type(value)
        form = _forms.get(kind) or (None if kind in _NATIVE else _form_of(kind))
        return form.content(value) if isinstance(form, foreign.Tensor) else super().inner(value, depth)


def _form_of(kind: type) -> Form:
    global _forms
    known = _forms
    form = _described(kind) or _structural(kind)
    if form is None:
        raise Unkeyed(_refusal(kind))
    if len(known) >= _MOST_FORMS:
        known = _forms = dict(forms.PLAIN)
    return known.setdefault(kind, form)


def _described(kind: type) -> Form | None:
    """By the class, or the nearest base, of which somebody said what identifies it."""
    for base in kind.__mro__:
        describe = _registered(base)
        if describe is not None:
            return forms.Said(kind, describe, "signature")
        if base is enum.Enum:
            return forms.Member(kind, _is_project(kind))
        if "__cache_signature__" in vars(base) and not issubclass(kind, enum.Enum):
            return forms.Said(kind, lambda value: value.__cache_signature__(), "__cache_signature__")
        if qualified(base) in foreign.FORMS:
            return foreign.FORMS[qualified(base)](kind)
        if base is type:
            return forms.Code(kind)
    return None


def _registered(base: type) -> Callable[[Any], Any] | None:
    describe = _by_type.get(base) or _by_name.get(qualified(base))
    return describe or next((d for name, d in list(_by_name.items()) if _imported(name) is base), None)


def _imported(name: str) -> Any:
    """What `name` is, if its module was imported; not by the module's ``__getattr__``, which may import."""
    module, _, attribute = name.rpartition(".")
    return getattr(sys.modules.get(module), "__dict__", {}).get(attribute)


def _structural(kind: type) -> Form | None:
    """As `kcoord.keys.cache_key.encode` has it: dataclasses, Python's own mappings, named tuples."""
    if dataclasses.is_dataclass(kind):
        return forms.Fields(kind, tuple(f.name for f in dataclasses.fields(kind)), _is_project(kind))
    if issubclass(kind, Mapping) and kind.__module__ in ("builtins", "collections", "types"):
        return forms.Table(kind)
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return forms.Fields(kind, kind._fields, _is_project(kind))
    return None


def _is_project(kind: type) -> bool:
    return owner_of(module_of(kind)) is Owner.PROJECT


def _refusal(kind: type) -> str:
    if issubclass(kind, PurePath):
        return "a path says nothing of its file: pass the file's content (path.read_bytes()), or its text (str(path))"
    name = qualified(kind)
    return (
        f"a value of type {name} has no identity that is stable across processes: give its class a __cache_signature__() "
        f'that returns the plain values that matter; for a class that is not yours, kcoord.register_signature("{name}", function)'
    )
