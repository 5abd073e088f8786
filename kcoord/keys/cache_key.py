"""A key: everything an artifact's bytes depend on, as named factors and their SHA-256 digest.

A factor's value is encoded by value *and* type (``1``, ``1.0``, ``True`` and ``"1"`` differ) into bytes that
do not depend on the process, the hash seed or the host. A value without such an encoding raises
`KeyFactorError`: never a silent collision, never a key that differs between ranks.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kcoord.errors import KeyFactorError
from kcoord.interruption import let_through
from kcoord.keys.device import DeviceKey, Scope, scope_factors

_FORMAT = b"kcoord-key-1"
_LENGTH = struct.Struct(">Q").pack
_LONGEST_TEXT = 200
_DEEPEST = 32


@dataclass(frozen=True)
class Factor:
    """One named dependency of an artifact's bytes. `text` is for people; only `digest` identifies."""

    name: str
    digest: str
    text: str
    parts: tuple[Factor, ...] = ()

    def to_wire(self) -> list[Any]:
        return [self.name, self.digest, self.text, [p.to_wire() for p in self.parts]]

    @classmethod
    def from_wire(cls, wire: Any, depth: int = 0) -> Factor:
        """Raises ValueError or TypeError unless `to_wire` could have returned `wire`."""
        name, digest, text, parts = wire
        if not (isinstance(name, str) and isinstance(digest, str) and isinstance(text, str)):
            raise TypeError("a factor is three strings and a list")
        if depth > _DEEPEST:
            raise ValueError("a factor is nested too deeply")
        return cls(name, digest, text, tuple(cls.from_wire(p, depth + 1) for p in parts))


@dataclass(frozen=True)
class FactorDiff:
    """A factor that differs between two keys; None where one key does not have it."""

    name: str
    ours: str | None
    theirs: str | None

    def __str__(self) -> str:
        ours = "unset" if self.ours is None else self.ours
        theirs = "unset" if self.theirs is None else self.theirs
        return f"{self.name}: {ours} → {theirs}"


@dataclass(frozen=True)
class CacheKey:
    """The identity of an artifact. Equal digests mean interchangeable artifacts.

    `details` explain a factor that is an opaque hash (a compiler's own cache key, say): `diff` shows
    them, the digest does not include them.
    """

    backend: str
    name: str
    factors: tuple[Factor, ...]
    details: tuple[Factor, ...] = ()

    @classmethod
    def of(cls, backend: str, name: str, /, **factors: Any) -> CacheKey:
        """The key of `name` as compiled by `backend` under `factors`.

        A factor is None, a bool, int, float, complex, str or bytes; a tuple, list, set or mapping of factors;
        an enum member; a dataclass instance; or any object whose ``__cache_signature__()`` returns one of
        these. Everything else raises `KeyFactorError`, which names the factor and the remedy.
        """
        for part, text in (("backend", backend), ("name", name)):
            if not isinstance(text, str) or not text:
                raise KeyFactorError(f"the {part} of a key must be a string that is not empty, not {text!r}")
        return cls(backend, name, tuple(make_factor(n, v) for n, v in sorted(factors.items())))

    def with_factors(self, **factors: Any) -> CacheKey:
        """This key with more factors; a factor of the same name is replaced."""
        others = [f for f in self.factors if f.name not in factors]
        added = [make_factor(n, v) for n, v in factors.items()]
        return dataclasses.replace(self, factors=tuple(sorted(others + added, key=lambda f: f.name)))

    def with_details(self, details: Mapping[str, Any]) -> CacheKey:
        """This key with `details`. One that cannot be encoded is left out: it identifies nothing."""
        added = []
        for name, value in sorted(details.items()):
            try:
                added.append(make_factor(name, value))
            except KeyFactorError:
                continue
        return dataclasses.replace(self, details=tuple(added))

    def on(self, device: DeviceKey, scope: Scope) -> CacheKey:
        """This key with the part of `device` that `scope` selects."""
        return self.with_factors(**scope_factors(scope, device))

    @cached_property
    def digest(self) -> str:
        """64 hex digits; equal across processes, hash seeds, Python versions and hosts."""
        return _digest(self.backend, self.name, [[f.name, f.digest] for f in self.factors])

    def diff(self, other: CacheKey) -> list[FactorDiff]:
        """The factors, and the details, in which `other` differs, as (name, ours, theirs)."""
        found = []
        for part in ("backend", "name"):
            ours, theirs = getattr(self, part), getattr(other, part)
            if ours != theirs:
                found.append(FactorDiff(part, ours, theirs))
        found += differences("", self.factors, other.factors)
        return found + differences("", self.details, other.details)

    def to_wire(self) -> dict[str, Any]:
        return {
            "backend": self.backend,
            "name": self.name,
            "factors": [f.to_wire() for f in self.factors],
            "details": [f.to_wire() for f in self.details],
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> CacheKey:
        """Raises ValueError, TypeError or KeyError unless `to_wire` could have returned `wire`."""
        if not (isinstance(wire["backend"], str) and isinstance(wire["name"], str)):
            raise TypeError("a key's backend and name are strings")
        factors = tuple(Factor.from_wire(f) for f in wire["factors"])
        return cls(wire["backend"], wire["name"], factors, tuple(Factor.from_wire(f) for f in wire["details"]))


def _digest(backend: str, name: str, factors: list[list[str]]) -> str:
    """Of ``encode([backend, name, factors])``, written out: each request makes one."""
    pairs = [_put(b"l", _put_text(factor) + _put_text(digest)) for factor, digest in factors]
    encoded = _put(b"l", _put_text(backend) + _put_text(name) + _put(b"l", b"".join(pairs)))
    return hashlib.sha256(_FORMAT + encoded).hexdigest()


def _factor_digest(name: str, value: Any) -> str:
    try:
        return hashlib.sha256(encode(value)).hexdigest()
    except KeyFactorError as error:
        raise KeyFactorError(f"key factor {name!r}: {error}") from None


def differences(prefix: str, ours: tuple[Factor, ...], theirs: tuple[Factor, ...]) -> list[FactorDiff]:
    """The innermost factors that differ, each with `prefix` and the names of those around it before its own."""
    left, right = {f.name: f for f in ours}, {f.name: f for f in theirs}
    found = []
    for name in sorted(left.keys() | right.keys()):
        a, b = left.get(name), right.get(name)
        if a is not None and b is not None:
            if a.digest == b.digest:
                continue
            inner = differences(f"{prefix}{name} ", a.parts, b.parts)
            if inner:
                found += inner
                continue
        found.append(FactorDiff(prefix + name, _shown(a, b), _shown(b, a)))
    return found


def _shown(factor: Factor | None, other: Factor | None) -> str | None:
    """The text of `factor`, with its digest if `other` has the same shortened text."""
    if factor is None:
        return None
    if other is not None and other.text == factor.text:
        return f"{factor.text} (sha256 {factor.digest[:12]})"
    return factor.text


def make_factor(name: str, value: Any) -> Factor:
    """`value` as a factor; a mapping's entries and a dataclass's fields become its parts."""
    digest = _factor_digest(name, value)
    if type(value) is str:
        return Factor(name, digest, _text_of_str(value))
    parts: tuple[Factor, ...] = ()
    if isinstance(value, Mapping):
        if all(isinstance(k, str) for k in value):
            parts = tuple(make_factor(k, v) for k, v in sorted(value.items()))
    elif dataclasses.is_dataclass(value) and not hasattr(value, "__cache_signature__"):
        parts = tuple(make_factor(f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
    return Factor(name, digest, _text(value), parts)


def _text(value: Any) -> str:
    if signature := getattr(value, "__cache_signature__", None):
        return f"{type(value).__qualname__}{_text(signature())}"
    if isinstance(value, str):
        return _text_of_str(value)
    try:
        text = str(value) if dataclasses.is_dataclass(value) else repr(value)
    except Exception as error:  # noqa: BLE001 - of the program; or it has more digits than Python prints
        let_through(error)
        text = f"a {type(value).__qualname__} that has no text"
    return _shortened(text)


def _text_of_str(value: str) -> str:
    return _shortened(value if value.isprintable() and value.strip() == value and value else repr(value))


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 1] + "…"


def encode(value: Any) -> bytes:
    """`value` as bytes that are equal exactly when value and type are. Raises `KeyFactorError`."""
    return _encoded(value, 0)


def _encoded(value: Any, depth: int) -> bytes:
    if depth > _DEEPEST:
        raise KeyFactorError("it is nested too deeply, or refers to itself")
    kind = type(value)
    if kind is str:
        return _put_text(value)
    if kind in (list, tuple):
        return _put_many(b"l" if kind is list else b"t", value, depth)
    if value is None:
        return _put(b"n", b"")
    if kind is bool:
        return _put(b"b", b"1" if value else b"0")
    if kind is int:
        return _put(b"i", b"%x" % value)  # decimal is refused beyond 4300 digits
    if kind is float:
        return _put(b"f", struct.pack(">d", value) if value == value else b"nan")
    if kind is complex:
        return _put_many(b"c", (value.real, value.imag), depth)
    if kind is bytes:
        return _put(b"y", value)
    if kind in (set, frozenset):
        return _put_sorted(b"e" if kind is set else b"z", [_encoded(v, depth + 1) for v in value])
    if isinstance(value, enum.Enum):
        return _put_many(b"E", (qualified(kind), *_member(value)), depth)
    if callable(signature := getattr(value, "__cache_signature__", None)) and not isinstance(value, type):
        return _put_many(b"S", (qualified(kind), signature()), depth)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = tuple((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
        return _put_many(b"D", (qualified(kind), pairs), depth)
    if isinstance(value, Mapping) and kind.__module__ in ("builtins", "collections", "types"):
        return _put_sorted(b"m", [_encoded(k, depth + 1) + _encoded(v, depth + 1) for k, v in value.items()])
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return _put_many(b"N", (qualified(kind), tuple(value)), depth)
    raise KeyFactorError(
        f"a value of type {qualified(kind)} has no identity that is stable across processes: "
        "pass the plain values that matter, or give its class a __cache_signature__() that returns them"
    )


def _member(member: enum.Enum) -> tuple[Any, ...]:
    """The identity of an enum's member. A flag is its value: names of combinations depend on the version of Python, or lack."""
    if isinstance(member, enum.Flag):
        return (member.value,)
    return (member.name, member.value) if isinstance(member.value, (bool, int, float, str)) else (member.name,)


def _put(tag: bytes, body: bytes) -> bytes:
    return tag + _LENGTH(len(body)) + body


def _put_text(text: str) -> bytes:
    return _put(b"s", text.encode("utf-8", "surrogatepass"))


def _put_many(tag: bytes, values: Iterable[Any], depth: int) -> bytes:
    return _put(tag, b"".join([_encoded(value, depth + 1) for value in values]))


def _put_sorted(tag: bytes, encoded: list[bytes]) -> bytes:
    return _put(tag, b"".join(sorted(encoded)))


def qualified(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
