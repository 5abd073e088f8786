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
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kcoord.errors import KeyFactorError
from kcoord.keys.device import DeviceKey, Scope, scope_factors

_FORMAT = b"kcoord-key-1"
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
        named = [[f.name, f.digest] for f in self.factors]
        encoded = encode([self.backend, self.name, named])
        return hashlib.sha256(_FORMAT + encoded).hexdigest()

    def diff(self, other: CacheKey) -> list[FactorDiff]:
        """The factors, and the details, in which `other` differs, as (name, ours, theirs)."""
        found = []
        for part in ("backend", "name"):
            ours, theirs = getattr(self, part), getattr(other, part)
            if ours != theirs:
                found.append(FactorDiff(part, ours, theirs))
        found += _diff("", self.factors, other.factors)
        return found + _diff("", self.details, other.details)

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
        return cls(
            wire["backend"],
            wire["name"],
            factors,
            tuple(Factor.from_wire(f) for f in wire["details"]),
        )


def _diff(prefix: str, ours: tuple[Factor, ...], theirs: tuple[Factor, ...]) -> list[FactorDiff]:
    left, right = {f.name: f for f in ours}, {f.name: f for f in theirs}
    found = []
    for name in sorted(left.keys() | right.keys()):
        a, b = left.get(name), right.get(name)
        if a is not None and b is not None:
            if a.digest == b.digest:
                continue
            inner = _diff(f"{prefix}{name} ", a.parts, b.parts)
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
    try:
        digest = hashlib.sha256(encode(value)).hexdigest()
    except KeyFactorError as error:
        raise KeyFactorError(f"key factor {name!r}: {error}") from None
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
    try:
        text = str(value) if dataclasses.is_dataclass(value) else repr(value)
    except ValueError:
        text = f"a {type(value).__qualname__} of more digits than Python prints"
    if isinstance(value, str) and value.isprintable() and value.strip() == value and value:
        text = value
    return text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 1] + "…"


def encode(value: Any) -> bytes:
    """`value` as bytes that are equal exactly when value and type are. Raises `KeyFactorError`."""
    out = bytearray()
    _encode(value, out, 0)
    return bytes(out)


def _put(out: bytearray, tag: bytes, body: bytes) -> None:
    out += tag + struct.pack(">Q", len(body)) + body


def _encode(value: Any, out: bytearray, depth: int) -> None:
    if depth > _DEEPEST:
        raise KeyFactorError("it is nested too deeply, or refers to itself")
    kind = type(value)
    if value is None:
        _put(out, b"n", b"")
    elif kind is bool:
        _put(out, b"b", b"1" if value else b"0")
    elif kind is int:
        _put(out, b"i", b"%x" % value)  # decimal is refused beyond 4300 digits
    elif kind is float:
        _put(out, b"f", struct.pack(">d", value) if value == value else b"nan")
    elif kind is complex:
        _encode_many(b"c", (value.real, value.imag), out, depth)
    elif kind is str:
        _put(out, b"s", value.encode("utf-8", "surrogatepass"))
    elif kind is bytes:
        _put(out, b"y", value)
    elif kind in (list, tuple):
        _encode_many(b"l" if kind is list else b"t", value, out, depth)
    elif kind in (set, frozenset):
        _put_sorted(out, b"e", [_encoded(v, depth) for v in value])
    elif isinstance(value, enum.Enum):
        _encode_many(b"E", (_qualified(kind), *_member(value)), out, depth)
    elif callable(signature := getattr(value, "__cache_signature__", None)) and not isinstance(value, type):
        _encode_many(b"S", (_qualified(kind), signature()), out, depth)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = tuple((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
        _encode_many(b"D", (_qualified(kind), pairs), out, depth)
    elif isinstance(value, Mapping) and kind.__module__ in ("builtins", "collections", "types"):
        _put_sorted(out, b"m", [_encoded(k, depth) + _encoded(v, depth) for k, v in value.items()])
    elif isinstance(value, tuple) and hasattr(kind, "_fields"):
        _encode_many(b"N", (_qualified(kind), tuple(value)), out, depth)
    else:
        raise KeyFactorError(
            f"a value of type {_qualified(kind)} has no identity that is stable across processes: "
            "pass the plain values that matter, or give its class a __cache_signature__() that returns them"
        )


def _member(member: enum.Enum) -> tuple[Any, ...]:
    """The identity of an enum's member. A flag is its value: names of combinations depend on the version of Python, or lack."""
    if isinstance(member, enum.Flag):
        return (member.value,)
    return (member.name, member.value) if isinstance(member.value, (bool, int, float, str)) else (member.name,)


def _encoded(value: Any, depth: int) -> bytes:
    out = bytearray()
    _encode(value, out, depth + 1)
    return bytes(out)


def _encode_many(tag: bytes, values: Any, out: bytearray, depth: int) -> None:
    body = bytearray()
    for value in values:
        _encode(value, body, depth + 1)
    _put(out, tag, bytes(body))


def _put_sorted(out: bytearray, tag: bytes, encoded: list[bytes]) -> None:
    _put(out, tag, b"".join(sorted(encoded)))


def _qualified(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
