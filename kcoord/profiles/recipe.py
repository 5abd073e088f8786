"""A recipe: what is needed to compile a key again without the training script.

It is plain data (msgpack, never pickle), checked where it is made and where it is read: whoever holds a `Recipe` can deliver it
and read it back. Whether its function may be called is for whoever replays it to decide.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import msgpack

MOST_RECIPES = 100_000  # of a profile
MOST_AT_ONCE = 256  # recipes in one frame
LARGEST_RECIPE = 64 << 10  # bytes
_FORMAT = b"kcoord-profile-1\n"
_DEEPEST = 32
_LONGEST_NAME = 1000
_LIST, _TUPLE = 0, 1  # the first item of each packed array: msgpack has one kind for both
_SCALARS = frozenset({type(None), bool, float, str, bytes})
_BIG_INT = 1  # msgpack's own integers have 64 bits
_BACKEND = re.compile(r"[a-z0-9_]{1,64}")
_MODULE = re.compile(r"[\w-]+(\.[\w-]+)*")
_QUALNAME = re.compile(r"\w+(\.\w+)*")
_TARGET = re.compile(r"(\w+:[\w.:+-]+)?")


@dataclass(frozen=True)
class Recipe:
    """What is needed to compile a key again without the training script.

    `module` and `qualname` are the import path of the kernel or compile function; `call` is what it is compiled for, of None,
    bool, int, float, str, bytes, list, tuple and dict with str keys; `target` is ``cuda:90``, say, or empty. `seconds` is what
    the compile took, `order` a number that grows in the order in which its process asked. Do not change `call` afterwards.

    Raises ValueError if there is anything else in it, or more than `LARGEST_RECIPE`: a recipe that exists can be delivered and
    read back.
    """

    backend: str
    module: str
    qualname: str
    call: Any
    target: str
    seconds: float
    order: int

    def __post_init__(self) -> None:
        _check("backend", self.backend, _BACKEND)
        _check("module", self.module, _MODULE)
        _check("qualname", self.qualname, _QUALNAME)
        _check("target", self.target, _TARGET)
        _check_figures(self.seconds, self.order)
        if self.size > LARGEST_RECIPE:
            raise ValueError(f"the recipe of {self.qualname[:80]} has {self.size} bytes; it may have {LARGEST_RECIPE}")

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of what is compiled: of all but `seconds` and `order`."""
        names = [self.backend, self.module, self.qualname, self.target]
        return hashlib.sha256(_FORMAT + msgpack.packb([*names, _packed(self.call, in_order=True)])).hexdigest()

    @cached_property
    def size(self) -> int:
        """Bytes, of what may be long."""
        return len(self._call) + len(self.module.encode()) + len(self.qualname.encode()) + len(self.target.encode())

    @cached_property
    def _call(self) -> bytes:
        """`call` as it was when the recipe was made."""
        return _packed(self.call, in_order=False)

    def to_wire(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"call": self._call}

    def measured(self, seconds: float, order: int) -> Recipe:
        """The same with other figures; nothing of `call` is looked at again. Raises ValueError if they are none."""
        _check_figures(seconds, order)
        other = object.__new__(Recipe)
        other.__dict__.update(self.__dict__, seconds=seconds, order=order)
        return other

    @classmethod
    def from_wire(cls, data: Any, known: dict[Any, Recipe] | None = None) -> Recipe:
        """Raises ValueError on anything that `to_wire` does not return.

        `known` remembers what was read with it, so that what comes again is not checked again: it takes a tenth of the time.
        """
        if not isinstance(data, dict) or data.keys() != _FIELDS:
            raise ValueError("a recipe has other fields")
        call = data["call"]
        if not isinstance(call, bytes) or len(call) > LARGEST_RECIPE:
            raise ValueError("a recipe's call must be a few bytes")
        if known is None:
            return cls._read(data, call)
        texts = data["backend"], data["module"], data["qualname"], data["target"]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("a recipe's names must be str")
        found = known.get((texts, call))
        if found is not None:
            return found.measured(data["seconds"], data["order"])
        recipe = cls._read(data, call)
        if len(known) < MOST_RECIPES:
            known[texts, call] = recipe
        return recipe

    @classmethod
    def _read(cls, data: dict[str, Any], call: bytes) -> Recipe:
        try:
            plain = msgpack.unpackb(call, unicode_errors="surrogatepass")
        except (ValueError, msgpack.exceptions.UnpackException) as error:
            raise ValueError(f"a recipe's call is not msgpack: {error}") from error
        return cls(**{**data, "call": _unpacked(plain, _DEEPEST)})


def merge(recipes: Iterable[Recipe]) -> dict[str, Recipe]:
    """By digest; see `add`."""
    found: dict[str, Recipe] = {}
    for recipe in recipes:
        add(found, recipe)
    return found


def add(found: dict[str, Recipe], recipe: Recipe) -> bool:
    """Merge `recipe` into `found`: the smallest order, the *longest* compile, at most `MOST_RECIPES`. True if that changed it.

    A maximum comes out the same however parts were merged before, which a median would not; and a compile that is expected to
    be long and is not costs a warm-up less than the other way round.
    """
    known = found.get(recipe.digest)
    if known is None:
        if len(found) >= MOST_RECIPES:
            return False
        found[recipe.digest] = recipe
        return True
    both = _both(known, recipe)
    found[recipe.digest] = both
    return both is not known


def _both(known: Recipe, other: Recipe) -> Recipe:
    seconds, order = max(known.seconds, other.seconds), min(known.order, other.order)
    if (seconds, order) == (known.seconds, known.order):
        return known
    return known.measured(seconds, order)


_FIELDS = {field.name for field in fields(Recipe)}


# A recipe's parts.


def _check_figures(seconds: object, order: object) -> None:
    if type(seconds) not in (int, float) or not 0 <= seconds < 1e9:  # type: ignore[operator]
        raise ValueError("a recipe's seconds must be a number of seconds")
    if type(order) is not int or not 0 <= order < 1 << 63:
        raise ValueError("a recipe's order must be a whole number")


def _check(name: str, value: object, form: re.Pattern[str]) -> None:
    if not isinstance(value, str):
        raise ValueError(f"a recipe's {name} must be str, not {type(value).__name__}")
    if len(value) > _LONGEST_NAME or not form.fullmatch(value):
        raise ValueError(f"a recipe's {name} cannot be {value[:80]!r}")


def _packed(call: Any, *, in_order: bool) -> bytes:
    """`in_order`: with sorted keys, so that equal values give equal bytes."""
    return bytes(msgpack.packb(_plain(call, in_order, _DEEPEST), unicode_errors="surrogatepass"))


def _plain(value: Any, in_order: bool, depth: int) -> Any:
    kind = type(value)  # a subclass (an enum, a numpy scalar) would come back as another type
    if kind in _SCALARS:
        return value
    if kind is int:
        if -(1 << 63) <= value < 1 << 64:
            return value
        return msgpack.ExtType(_BIG_INT, value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))
    if not depth:
        raise ValueError(f"a recipe's call is nested deeper than {_DEEPEST}")
    if kind in (list, tuple):
        return [_TUPLE if kind is tuple else _LIST, *(_plain(v, in_order, depth - 1) for v in value)]
    if kind is dict and all(type(k) is str for k in value):
        keys = sorted(value) if in_order else value
        return {k: _plain(value[k], in_order, depth - 1) for k in keys}
    raise ValueError(f"a recipe's call cannot hold a {kind.__module__}.{kind.__qualname__}")


def _unpacked(value: Any, depth: int) -> Any:
    if type(value) in _SCALARS or type(value) is int:
        return value
    if type(value) is msgpack.ExtType and value.code == _BIG_INT:
        return int.from_bytes(value.data, "big", signed=True)
    if not depth:
        raise ValueError(f"a recipe's call is nested deeper than {_DEEPEST}")
    if isinstance(value, list) and value[:1] and type(value[0]) is int and value[0] in (_LIST, _TUPLE):
        items = [_unpacked(v, depth - 1) for v in value[1:]]
        return tuple(items) if value[0] == _TUPLE else items
    if isinstance(value, Mapping) and all(type(k) is str for k in value):
        return {k: _unpacked(v, depth - 1) for k, v in value.items()}
    raise ValueError("a recipe's call holds what no recipe holds")
