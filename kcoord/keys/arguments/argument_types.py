"""The plain argument types: how their values become tokens, and tokens canonical values.

A token begins with the `ArgumentType` that made it (``int`` and ``bytes`` are their own), so it can be read without the value,
and no two types share a token: ``1``, ``1.0`` and ``True`` are equal as keys of a dictionary, their tokens are not. A canonical
value is computed from the token alone; hence equal tokens have equal canonical values, by construction.
"""

from __future__ import annotations

import collections
import enum
import functools
import itertools
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Protocol

from kcoord.errors import KeyFactorError
from kcoord.keys.packages import HEAP_TYPE, portable_name

_DEEPEST, _MOST_VALUES = 32, 100_000

Token = Any
"""Hashable: None, a bool or a str as itself; anything else as a tuple that begins with its type. Valid in this process only."""


class NoIdentity(KeyFactorError):
    """A value has no identity. `where`, the path to it, is completed on the way up."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why, self.where = why, ""

    def inside(self, step: str) -> NoIdentity:
        """This error as seen from one level further out; `step` leads inwards: ``[3]`` or ``.name``."""
        self.where = step + self.where
        return self


class Describer(Protocol):
    """Describes inner values, for the type of the value around them."""

    functions: Callable[[Any], Any] | None
    """Returns the identity of a function, a class or a module; None: they have none."""

    def inner(self, value: Any, depth: int) -> Token:
        """The token of a value inside a value that lies at `depth`. Raises `NoIdentity`."""


class Described(Mapping[str, Any]):
    """A canonical value with a type: ``torch.Tensor`` and its dtype, shape and so on. `fields` become parts of a factor."""

    __module__ = "kcoord.keys.forms"  # part of the digests of keys: this class may move, they must not change

    def __init__(self, kind: str, fields: dict[str, Any]) -> None:
        self.kind, self.fields = kind, fields

    def __cache_signature__(self) -> Any:
        return (self.kind, self.fields)

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)

    def __repr__(self) -> str:
        return f"{self.kind}({', '.join(f'{n}={v!r}' for n, v in self.fields.items())})"

    __eq__, __hash__ = object.__eq__, object.__hash__  # a set may hold it


class ArgumentType:
    """Describes values of the class `kind`."""

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.name = f"{portable_name(str(kind.__module__))}.{kind.__qualname__}"

    def token(self, value: Any, describer: Describer, depth: int) -> Token:
        """A tuple that begins with this type and refers to nothing mutable. Raises `NoIdentity`."""
        raise NotImplementedError

    def canonical(self, token: Token, device_id: int) -> Any:
        """A value that `kcoord.keys.cache_key.encode` takes, made of `token` alone; `device_id` is the current device."""
        raise NotImplementedError

    def generalized(self, token: Token) -> Token:
        """`token` with the sizes of tensors as Triton specializes them."""
        return token


def value_of(token: Token, device_id: int) -> Any:
    """The canonical value that `token` stands for."""
    if type(token) is not tuple:
        return token
    head = token[0]
    return token[1] if head is int or head is bytes else head.canonical(token, device_id)


def generalized(token: Token) -> Token:
    """`token` with the sizes of tensors, however deep inside it, as Triton specializes them."""
    return token[0].generalized(token) if type(token) is tuple and isinstance(token[0], ArgumentType) else token


class Float(ArgumentType):
    """Zeros and NaNs by their text: 0.0 == -0.0, and no NaN equals any other."""

    def token(self, value: Any, describer: Describer, depth: int) -> Token:
        return (self, value if value and value == value else repr(value))

    def canonical(self, token: Token, device_id: int) -> Any:
        return float(token[1])


class Complex(ArgumentType):
    def token(self, value: Any, describer: Describer, depth: int) -> Token:
        return (self, describer.inner(value.real, depth), describer.inner(value.imag, depth))

    def canonical(self, token: Token, device_id: int) -> Any:
        return complex(value_of(token[1], device_id), value_of(token[2], device_id))


class Composite(ArgumentType):
    """A type whose tokens hold the tokens of inner values."""

    def generalized(self, token: Token) -> Token:
        return (self, *map(generalized, token[1:]))


def inner_tokens(values: Iterable[Any], describer: Describer, depth: int, step: Callable[[int], str]) -> list[Token]:
    """The tokens of `values`; ``step(n)`` is the path to the n-th one, for the error alone."""
    found: list[Token] = []
    try:
        for value in values:
            found.append(describer.inner(value, depth))
    except NoIdentity as error:
        raise error.inside(step(len(found))) from error.__cause__
    return found


class SequenceType(Composite):
    """A list or a tuple."""

    def token(self, value: Any, describer: Describer, depth: int) -> Token:
        return (self, *inner_tokens(value, describer, depth, "[{}]".format))

    def canonical(self, token: Token, device_id: int) -> Any:
        return self.kind(value_of(t, device_id) for t in token[1:])


def _order(value: Any) -> tuple[str, ...]:
    """An order of a set's members that does not depend on the process, so that functions in them are numbered alike."""
    code = getattr(value, "__code__", None) if type(value) is types.FunctionType else None
    plain = repr(value) if type(value) in (str, int, float, bytes, bool) else f"{code and code.co_firstlineno}"
    return type(value).__qualname__, getattr(type(value), "__module__", ""), getattr(code, "co_qualname", ""), plain


class SetType(ArgumentType):
    """A set, without order. Members with equal tokens are counted: two tensors of one shape are two."""

    def token(self, value: Any, describer: Describer, depth: int) -> Token:
        return self._of(inner_tokens(sorted(value, key=_order), describer, depth, lambda _: "{…}"))

    def canonical(self, token: Token, device_id: int) -> Any:
        return self.kind(value_of(t, device_id) for t, count in token[1] for _ in range(count))

    def generalized(self, token: Token) -> Token:
        return self._of(generalized(t) for t, count in token[1] for _ in range(count))

    def _of(self, tokens: Iterable[Token]) -> Token:
        return (self, frozenset(collections.Counter(tokens).items()))


class MappingType(Composite):
    """A mapping, in the order of its entries: another order gives another token with the same canonical value."""

    def token(self, value: Any, describer: Describer, depth: int) -> Token:
        entries = list(value.items())
        if type(value) is dict and describer.functions is not None and all(type(key) is str for key, _ in entries):
            entries.sort(key=lambda entry: entry[0])  # functions of one name are numbered as they are met

        def step(n: int) -> str:
            key = entries[n // 2][0]
            return f"[{key!r}]" if n % 2 and type(key) in (str, int) else "[…]" if n % 2 else ".keys()"

        return (self, *inner_tokens(itertools.chain.from_iterable(entries), describer, depth, step))

    def canonical(self, token: Token, device_id: int) -> Any:
        values = [value_of(t, device_id) for t in token[1:]]
        entries = dict(zip(values[::2], values[1::2], strict=True))
        return entries if self.kind is dict else Described(self.name, {"entries": entries})


class OrderedMapping(MappingType):
    """A mapping whose class keeps the order of its entries as a part of its value, or what makes missing ones."""

    def token(self, value: Any, describer: Describer, depth: int) -> Token:
        made_by = getattr(value, "default_factory", None)
        made = inner_tokens([made_by], describer, depth, lambda _: ".default_factory")
        return (*super().token(value, describer, depth), *made)

    def canonical(self, token: Token, device_id: int) -> Any:
        *entries, made_by = (value_of(t, device_id) for t in token[1:])
        return Described(self.name, {"entries": entries, "default_factory": made_by})


class Fields(Composite):
    """An object that counts by named values, and `with_class` by the code of its class.

    They are its attributes, or what ``read(value)`` returns, which is called for each token.
    """

    def __init__(
        self, kind: type, names: tuple[str, ...], with_class: bool = False, read: Callable[[Any], Any] | None = None
    ) -> None:
        super().__init__(kind)
        self._names, self._with_class = names, with_class
        self._read = read or (lambda value: [getattr(value, name) for name in names])

    def token(self, value: Any, describer: Describer, depth: int) -> Token:
        values = _answer(self._read, value)
        tokens = inner_tokens(values, describer, depth, lambda n: f".{self._names[n]}")
        return (self, *tokens, *_class_tokens(self, describer, depth))

    def canonical(self, token: Token, device_id: int) -> Any:
        values = [value_of(t, device_id) for t in token[1:]]
        return Described(self.name, dict(zip((*self._names, "class"), values, strict=False)))


def _class_tokens(argument_type: Any, describer: Describer, depth: int) -> list[Token]:
    """The token of an object's class, if its code counts; else none. Its methods and values belong to the object."""
    if not argument_type._with_class or describer.functions is None:
        return []
    return inner_tokens([_answer(describer.functions, argument_type.kind)], describer, depth, lambda _: "")


class _Inside(threading.local):
    """Ids of the objects that the current thread describes, and the number of values in the outermost one."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.count = 0


_inside = _Inside()


def count(depth: int) -> None:
    """Count a value at `depth` in the one that the current thread describes. Raises `NoIdentity` if these are too many."""
    _inside.count = _inside.count + 1 if depth > 0 else 0
    if depth >= _DEEPEST or _inside.count > _MOST_VALUES:
        what = "nested too deeply, or refers to itself" if depth >= _DEEPEST else f"of more than {_MOST_VALUES} values"
        raise NoIdentity(f"it is {what}: give its class a __cache_signature__(), or pass the plain values that matter")


class _Again(ArgumentType):
    """An object around this place; how many objects outwards."""

    def canonical(self, token: Token, device_id: int) -> Any:
        return Described("again", {"outwards": token[1]})


_AGAIN = _Again(object)


class State(Composite):
    """An object of the project: all its attributes, and the code of its class. Those that `cached_property` keeps are derived.

    Where it refers to itself, the number of objects between counts.
    """

    _with_class = True

    def token(self, value: Any, describer: Describer, depth: int) -> Token:
        if id(value) in _inside.ids:
            return (_AGAIN, len(_inside.ids) - _inside.ids.index(id(value)))
        _inside.ids.append(id(value))
        try:
            own = dict(sorted(self._attributes(value)))
            tokens = inner_tokens(own.values(), describer, depth, lambda n: f".{list(own)[n]}")
        finally:
            _inside.ids.pop()
        kind = _class_tokens(self, describer, depth) or [None]
        return (self, *kind, *itertools.chain.from_iterable(zip(own, tokens, strict=True)))

    def canonical(self, token: Token, device_id: int) -> Any:
        kind, *pairs = (value_of(t, device_id) for t in token[1:])
        return Described(self.name, dict(zip(pairs[::2], pairs[1::2], strict=True)) | ({"class": kind} if kind else {}))

    def _attributes(self, value: Any) -> Iterator[tuple[str, Any]]:
        for base in self.kind.__mro__:
            for name, member in vars(base).items():
                if isinstance(member, types.MemberDescriptorType):
                    with suppress(AttributeError):  # nothing in it yet
                        yield name, member.__get__(value)
        for name, each in own_attributes(value).items():
            if not isinstance(getattr(self.kind, name, None), functools.cached_property):
                yield name, each


def has_plain_state(kind: type) -> bool:
    """True if all that objects of a class hold are attributes: no base of it, but `object`, is written in C."""
    return all(map(_is_made_by_statement, kind.__mro__[:-1]))


def _is_made_by_statement(kind: type) -> bool:
    space, base = vars(kind), kind.__base__
    places = sum(isinstance(member, types.MemberDescriptorType) for member in space.values())
    places += ("__dict__" in space) + ("__weakref__" in space)
    return (
        bool(kind.__flags__ & HEAP_TYPE) and base is not None and kind.__basicsize__ - base.__basicsize__ <= 8 * places
    )


def own_attributes(value: Any) -> Mapping[str, Any]:
    """An object's ``__dict__``, even if its class overrides access to it."""
    try:
        found: Any = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, Mapping) else {}


def described(kind: type, describe: Callable[[Any], Any], name: str, with_class: bool = False) -> Fields:
    """The type of objects that count by ``describe(value)``; `name` names the result."""
    return Fields(kind, (name,), with_class, lambda value: [describe(value)])


def _answer(describe: Callable[[Any], Any], value: Any) -> Any:
    """The result of a program's code. A `KeyFactorError` that it raises is completed on the way up."""
    try:
        return describe(value)
    except KeyFactorError as error:
        raise NoIdentity(str(error)) from error


class Code(Composite):
    """A function, a class or a module, by the caller's `functions`; Python's own, and NumPy's types, by name."""

    def token(self, value: Any, describer: Describer, depth: int) -> Token:
        if _is_known(value):
            return (self, None, value.__qualname__)
        if describer.functions is None:
            raise NoIdentity(f"a {self.kind.__name__} has no identity here: pass the plain values that matter")
        return (self, *inner_tokens([_answer(describer.functions, value)], describer, depth, lambda _: ""))

    def canonical(self, token: Token, device_id: int) -> Any:
        identity = {"name": token[2]} if len(token) == 3 else {"content": value_of(token[1], device_id)}
        return Described(self.name, identity)


def _is_known(value: Any) -> bool:
    """True for a builtin or a NumPy type. Looked up: code that runs without a ``__name__`` claims to be of ``builtins``."""
    module = value.__module__ if isinstance(value, (type, types.BuiltinFunctionType)) else None
    return module in ("builtins", "numpy") and vars(sys.modules[module]).get(value.__qualname__) is value


class EnumMember(ArgumentType):
    """A member of an enum, by name; a flag by value, since combinations have no names of their own."""

    def __init__(self, kind: type[enum.Enum], with_class: bool = False) -> None:
        super().__init__(kind)
        self._enum, self._with_class = kind, with_class
        self._is_flag = issubclass(kind, enum.Flag)

    def token(self, value: Any, describer: Describer, depth: int) -> Token:
        which = value._value_ if self._is_flag else value._name_
        return (self, which, *_class_tokens(self, describer, depth))

    def canonical(self, token: Token, device_id: int) -> Any:
        member = self._enum(token[1]) if self._is_flag else self._enum[token[1]]
        found = {"member": member, "class": value_of(token[2], device_id)} if len(token) == 3 else None
        return Described(self.name, found) if found else member


_CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)
PLAIN: dict[type, ArgumentType] = {
    float: Float(float),
    complex: Complex(complex),
    list: SequenceType(list),
    tuple: SequenceType(tuple),
    set: SetType(set),
    frozenset: SetType(frozenset),
    dict: MappingType(dict),
    **{kind: Code(kind) for kind in (*_CODE, types.ModuleType)},
}
"""The types of plain values; None, bool, int, str and bytes need none."""
