"""How values of plain types become tokens, and tokens canonical values.

A token's head is the `Form` that made it (``int`` and ``bytes`` are their own), so it can be read without the value, and no two
types share a token: ``1``, ``1.0`` and ``True`` are equal as keys of a dictionary, their tokens are not. A canonical value is
computed from the token alone; hence equal tokens have equal canonical values, by construction.
"""

from __future__ import annotations

import collections
import enum
import functools
import itertools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from kcoord.errors import KeyFactorError
from kcoord.keys.packages import portable_name

Token = Any
"""Hashable: None, a bool or a str as itself; anything else as a tuple with its head. Of use in this process only."""


class Unkeyed(KeyFactorError):
    """A value has no identity; `where` it lies is completed on the way up."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why, self.where = why, ""

    def inside(self, step: str) -> Unkeyed:
        """This error, as seen from one level further out; `step` leads inwards: ``[3]`` or ``.name``."""
        self.where = step + self.where
        return self


class Walk(Protocol):
    """What a form may ask while it describes a value."""

    functions: Callable[[Any], Any] | None
    """What identifies a function, a class or a module; None: nothing does."""

    def inner(self, value: Any, depth: int) -> Token:
        """The token of a value inside a value that lies at `depth`. Raises `Unkeyed`."""


class Described(Mapping[str, Any]):
    """A canonical value with a type: ``torch.Tensor`` and its dtype, shape and so on. `fields` become parts of a factor."""

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


class Form:
    """How values of the type `kind` are described."""

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.name = f"{portable_name(str(kind.__module__))}.{kind.__qualname__}"

    def token(self, value: Any, walk: Walk, depth: int) -> Token:
        """A tuple that begins with this form and refers to nothing that can change. Raises `Unkeyed`."""
        raise NotImplementedError

    def canonical(self, token: Token, device_id: int) -> Any:
        """What `kcoord.keys.cache_key.encode` takes, made of `token` alone; `device_id` is the current device."""
        raise NotImplementedError

    def generalized(self, token: Token) -> Token:
        """`token` with the sizes of tensors as Triton specializes them."""
        return token


def qualified(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def value_of(token: Token, device_id: int) -> Any:
    """The canonical value that `token` stands for."""
    if type(token) is not tuple:
        return token
    head = token[0]
    return token[1] if head is int or head is bytes else head.canonical(token, device_id)


def generalized(token: Token) -> Token:
    """`token` with the sizes of tensors, however deep inside it, as Triton specializes them."""
    return token[0].generalized(token) if type(token) is tuple and isinstance(token[0], Form) else token


class Float(Form):
    """Zeros and NaNs by their text: 0.0 == -0.0, and no NaN equals any other."""

    def token(self, value: Any, walk: Walk, depth: int) -> Token:
        return (self, value if value and value == value else repr(value))

    def canonical(self, token: Token, device_id: int) -> Any:
        return float(token[1])


class Complex(Form):
    def token(self, value: Any, walk: Walk, depth: int) -> Token:
        return (self, walk.inner(value.real, depth), walk.inner(value.imag, depth))

    def canonical(self, token: Token, device_id: int) -> Any:
        return complex(value_of(token[1], device_id), value_of(token[2], device_id))


class Composite(Form):
    """A form whose tokens are its head and the tokens of what is inside."""

    def generalized(self, token: Token) -> Token:
        return (self, *map(generalized, token[1:]))


def inner_tokens(values: Iterable[Any], walk: Walk, depth: int, step: Callable[[int], str]) -> list[Token]:
    """The tokens of `values`; ``step(n)`` says how one reaches the n-th, for the error alone."""
    found: list[Token] = []
    try:
        for value in values:
            found.append(walk.inner(value, depth))
    except Unkeyed as error:
        raise error.inside(step(len(found))) from error.__cause__
    return found


class Sequence(Composite):
    """A list or a tuple."""

    def token(self, value: Any, walk: Walk, depth: int) -> Token:
        return (self, *inner_tokens(value, walk, depth, "[{}]".format))

    def canonical(self, token: Token, device_id: int) -> Any:
        return self.kind(value_of(t, device_id) for t in token[1:])


class Members(Form):
    """A set, in no order. Its members may have one token in common: two tensors of one shape are two."""

    def token(self, value: Any, walk: Walk, depth: int) -> Token:
        return self._of(inner_tokens(value, walk, depth, lambda _: "{…}"))

    def canonical(self, token: Token, device_id: int) -> Any:
        return self.kind(value_of(t, device_id) for t, count in token[1] for _ in range(count))

    def generalized(self, token: Token) -> Token:
        return self._of(generalized(t) for t, count in token[1] for _ in range(count))

    def _of(self, tokens: Iterable[Token]) -> Token:
        return (self, frozenset(collections.Counter(tokens).items()))


class Table(Composite):
    """A mapping, in the order in which it lists its entries: another order is another token of the same canonical value."""

    def token(self, value: Any, walk: Walk, depth: int) -> Token:
        entries = list(value.items())

        def step(n: int) -> str:
            key = entries[n // 2][0]
            return f"[{key!r}]" if n % 2 and type(key) in (str, int) else "[…]" if n % 2 else ".keys()"

        return (self, *inner_tokens(itertools.chain.from_iterable(entries), walk, depth, step))

    def canonical(self, token: Token, device_id: int) -> Any:
        values = [value_of(t, device_id) for t in token[1:]]
        return dict(zip(values[::2], values[1::2], strict=True))


class Fields(Composite):
    """An object that is what its named attributes are: a dataclass, a named tuple. `with_class`: and what its class says."""

    def __init__(self, kind: type, names: tuple[str, ...], with_class: bool = False) -> None:
        super().__init__(kind)
        self._names, self._with_class = names, with_class

    def token(self, value: Any, walk: Walk, depth: int) -> Token:
        values = [getattr(value, name) for name in self._names]
        tokens = inner_tokens(values, walk, depth, lambda n: f".{self._names[n]}")
        return (self, *tokens, *_class_tokens(self, walk, depth))

    def canonical(self, token: Token, device_id: int) -> Any:
        values = [value_of(t, device_id) for t in token[1:]]
        return Described(self.name, dict(zip((*self._names, "class"), values, strict=False)))


def _class_tokens(form: Fields | Member, walk: Walk, depth: int) -> list[Token]:
    """One, if the class of an object is code that counts, else none: its methods and its values belong to the object."""
    if not form._with_class or walk.functions is None:
        return []
    return inner_tokens(_said(walk.functions, form.kind), walk, depth, lambda _: "")


class Said(Composite):
    """An object that is what `say` answers for it, asked at each call; `question` names the answer."""

    def __init__(self, kind: type, say: Callable[[Any], Any], question: str) -> None:
        super().__init__(kind)
        self._say, self._question = say, question

    def token(self, value: Any, walk: Walk, depth: int) -> Token:
        return (self, *inner_tokens(_said(self._say, value), walk, depth, lambda _: f".{self._question}"))

    def canonical(self, token: Token, device_id: int) -> Any:
        return Described(self.name, {self._question: value_of(token[1], device_id)})


def _said(say: Callable[[Any], Any], value: Any) -> list[Any]:
    """What code from outside answers. A `KeyFactorError` of its own is completed on the way up."""
    try:
        return [say(value)]
    except KeyFactorError as error:
        raise Unkeyed(str(error)) from error


class Code(Composite):
    """A function, a class or a module: what the caller's `functions` says. Python's own, and NumPy's types, by their names."""

    def token(self, value: Any, walk: Walk, depth: int) -> Token:
        if _is_known(value):
            return (self, None, value.__qualname__)
        if walk.functions is None:
            raise Unkeyed(f"a {self.kind.__name__} has no identity here: pass the plain values that matter")
        return (self, *inner_tokens(_said(walk.functions, value), walk, depth, lambda _: ""))

    def canonical(self, token: Token, device_id: int) -> Any:
        what = {"name": token[2]} if len(token) == 3 else {"content": value_of(token[1], device_id)}
        return Described(self.name, what)


def _is_known(value: Any) -> bool:
    """Looked up, not believed: code that was executed without a ``__name__`` claims to be of ``builtins``."""
    module = value.__module__ if isinstance(value, (type, types.BuiltinFunctionType)) else None
    return module in ("builtins", "numpy") and vars(sys.modules[module]).get(value.__qualname__) is value


class Member(Form):
    """A member of an enum: itself. A flag by its value: combinations have no names of their own."""

    def __init__(self, kind: type[enum.Enum], with_class: bool = False) -> None:
        super().__init__(kind)
        self._enum, self._with_class = kind, with_class
        self._is_flag = issubclass(kind, enum.Flag)

    def token(self, value: Any, walk: Walk, depth: int) -> Token:
        which = value._value_ if self._is_flag else value._name_
        return (self, which, *_class_tokens(self, walk, depth))

    def canonical(self, token: Token, device_id: int) -> Any:
        member = self._enum(token[1]) if self._is_flag else self._enum[token[1]]
        return Described(self.name, {"member": member, "class": token[2]}) if len(token) == 3 else member


class Text(Form):
    """An object that is what its text says: a dtype, a layout."""

    def token(self, value: Any, walk: Walk, depth: int) -> Token:
        return (self, str(value))

    def canonical(self, token: Token, device_id: int) -> Any:
        return Described(self.name, {"name": token[1]})


_CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)
PLAIN: dict[type, Form] = {
    float: Float(float),
    complex: Complex(complex),
    list: Sequence(list),
    tuple: Sequence(tuple),
    set: Members(set),
    frozenset: Members(frozenset),
    dict: Table(dict),
    **{kind: Code(kind) for kind in (*_CODE, types.ModuleType)},
}
"""Of the types whose values occur as they are; None, bool, int, str and bytes need no form."""
