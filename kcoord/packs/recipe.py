"""Recipes: plain data from which a key is compiled again without the training script.

A recipe is msgpack, never pickle, and is checked where it is made and where it is read, so every `Recipe` can be delivered and
read back. Its replayer decides whether its function may be called.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgpack

from kcoord.artifacts.choices import LARGEST_CHOICE
from kcoord.files.reading import unpack
from kcoord.keys.cache_key import CacheKey

if TYPE_CHECKING:
    from kcoord.keys.device import GPUTarget

MOST_RECIPES = 100_000  # of a profile
MOST_AT_ONCE = 256  # recipes in one frame
LARGEST_RECIPE = 64 << 10  # bytes
TRIED = 1 << 62
"""The order of a compile that the job needed only to choose among several: from here on."""
_FORMAT = b"kcoord-profile-1\n"
_MOST_HELD = 192 << 20  # bytes of the calls of recipes that are read together; an agent records 64 MiB
_VALUE = 32  # bytes for which each value in a call counts, besides its own
_DEEPEST = 32
_LONGEST_NAME = 1000
_LIST, _TUPLE = 0, 1  # the first item of each packed array: msgpack has one array type for both
_SCALARS = frozenset({type(None), bool, float, str, bytes})
_BIG_INT = 1  # msgpack's own integers have 64 bits
_BACKEND = re.compile(r"[a-z0-9_]{1,64}")
_MODULE = re.compile(r"[\w-]+(\.[\w-]+)*")
_QUALNAME = re.compile(r"\w+(\.\w+)*")
_TARGET = re.compile(r"(\w+:[\w.:+-]+)?")


@dataclass(frozen=True)
class Recipe:
    """One call of a kernel or compile function, whose import path is `module` and `qualname`.

    `call` holds the arguments: None, bool, int, float, str, bytes, list, tuple and dict with str keys. Do not change it
    afterwards. `target` is such as ``cuda:90``, or empty. `seconds` is the recorded compile time; `order` grows in the order in
    which the process asked; `day` is that of the last use, counted from 1970, or 0 if nobody knows it. Raises ValueError for
    anything else, and for more than `LARGEST_RECIPE` bytes.
    """

    backend: str
    module: str
    qualname: str
    call: Any
    target: str
    seconds: float
    order: int
    day: int = 0

    def __post_init__(self) -> None:
        _check("backend", self.backend, _BACKEND)
        _check("module", self.module, _MODULE)
        _check("qualname", self.qualname, _QUALNAME)
        _check("target", self.target, _TARGET)
        _check_figures(self.seconds, self.order, self.day)
        if self.size > LARGEST_RECIPE:
            raise ValueError(f"the recipe of {self.qualname[:80]} has {self.size} bytes; it may have {LARGEST_RECIPE}")

    @classmethod
    def of(
        cls, backend: str, module: str, qualname: str, call: Any, target: GPUTarget | str | None, seconds: float,
        order: int | None = None,
    ) -> Recipe | None:  # fmt: skip
        """As the constructor, for today; None for a call that no recipe can hold. `order`: by default the process asks now."""
        order = time.monotonic_ns() if order is None else order
        try:
            return cls(backend, module, qualname, call, str(target or ""), seconds, order, today())
        except ValueError:
            return None

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of all fields but `seconds`, `order` and `day`."""
        names = [self.backend, self.module, self.qualname, self.target]
        return hashlib.sha256(_FORMAT + msgpack.packb([*names, _packed(self.call, in_order=True)])).hexdigest()

    @cached_property
    def size(self) -> int:
        """Bytes of the fields that may be long."""
        return len(self._call) + len(self.module.encode()) + len(self.qualname.encode()) + len(self.target.encode())

    @cached_property
    def _call(self) -> bytes:
        """`call` at the time when the recipe was made, packed."""
        return _packed(self.call, in_order=False)

    def to_wire(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"call": self._call}

    def measured(self, seconds: float, order: int, day: int | None = None) -> Recipe:
        """The same recipe with other figures, without a second check of `call`; by default of the same day. Raises ValueError if
        the figures are malformed.
        """
        day = self.day if day is None else day
        _check_figures(seconds, order, day)
        other = object.__new__(Recipe)
        other.__dict__.update(self.__dict__, seconds=seconds, order=order, day=day)
        return other

    @classmethod
    def from_wire(cls, data: Any, known: Known | None = None) -> Recipe:
        """Raises ValueError on anything that `to_wire` does not return, and for one that `known` has no room for."""
        if not isinstance(data, dict) or data.keys() != _FIELDS:
            raise ValueError("a recipe's fields are wrong")
        call = data["call"]
        if not isinstance(call, bytes) or len(call) > LARGEST_RECIPE:
            raise ValueError("a recipe's call must be a few bytes")
        if known is None:
            return cls._read(data, call, Known())
        texts = data["backend"], data["module"], data["qualname"], data["target"]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("a recipe's names must be str")
        found = known.recipes.get((texts, call))
        if found is not None:
            return found.measured(data["seconds"], data["order"], data["day"])
        recipe = cls._read(data, call, known)
        if len(known.recipes) < MOST_RECIPES:
            known.recipes[texts, call] = recipe
        return recipe

    @classmethod
    def _read(cls, data: dict[str, Any], call: bytes, known: Known) -> Recipe:
        plain = unpack(call, LARGEST_RECIPE, unicode_errors="surrogatepass")
        made = _unpacked(plain, _DEEPEST)
        known.room -= len(call) + _VALUE * _values(made)
        if known.room < 0:
            raise ValueError("the recipes of its profile hold more than a profile may")
        return cls(**{**data, "call": made})


class Known:
    """Recipes that are read together. One that comes again is not checked again, in a tenth of the time, and all have a bound:
    a packed list of one byte is 64 in memory, and a store's files may be anybody's. `room` is in bytes of calls.
    """

    def __init__(self, room: int = _MOST_HELD) -> None:
        self.recipes: dict[Any, Recipe] = {}
        self.room = room


def merge(recipes: Iterable[Recipe]) -> dict[str, Recipe]:
    """Recipes by digest, each once; see `add`."""
    found: dict[str, Recipe] = {}
    for recipe in recipes:
        add(found, recipe)
    return found


def add(found: dict[str, Recipe], recipe: Recipe) -> bool:
    """Merge `recipe` into `found`: the smallest order, the *longest* compile, the latest day, at most `MOST_RECIPES`.
    True if that changed it.

    A maximum does not depend on the order of merges, as a median would; and overestimating a compile costs a warm-up less than
    underestimating it.
    """
    known = found.get(recipe.digest)
    if known is None:
        if len(found) >= MOST_RECIPES:
            return False
        found[recipe.digest] = recipe
        return True
    figures = max(known.seconds, recipe.seconds), min(known.order, recipe.order), max(known.day, recipe.day)
    if figures == (known.seconds, known.order, known.day):
        return False
    found[recipe.digest] = known.measured(*figures)
    return True


_FIELDS = {field.name for field in fields(Recipe)}


def today() -> int:
    """The day, counted from 1970, by this host's clock."""
    return int(time.time() // 86400)


def _check_figures(seconds: object, order: object, day: object) -> None:
    if type(seconds) not in (int, float) or not 0 <= seconds < 1e9:  # type: ignore[operator]
        raise ValueError("a recipe's seconds must be a number of seconds")
    if type(order) is not int or not 0 <= order < 1 << 63:
        raise ValueError("a recipe's order must be a whole number")
    if type(day) is not int or not 0 <= day < 1 << 32:
        raise ValueError("a recipe's day must be a whole number")


def _check(name: str, value: object, pattern: re.Pattern[str]) -> None:
    if not isinstance(value, str):
        raise ValueError(f"a recipe's {name} must be str, not {type(value).__name__}")
    if len(value) > _LONGEST_NAME or not pattern.fullmatch(value):
        raise ValueError(f"a recipe's {name} cannot be {value[:80]!r}")


def _packed(call: Any, *, in_order: bool) -> bytes:
    """`in_order`: sort the keys of dicts, so that equal values give equal bytes."""
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


def _values(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        return 1 + sum(map(_values, value))
    return 1 + 2 * sum(map(_values, value.values())) if isinstance(value, dict) else 1


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
    raise ValueError("a recipe's call holds a value of another type")


# A choice is recorded with its key, which holds all that the choice depends on. A replay of it needs no compiler, and a kernel
# that has changed since asks for another key.

CHOICE = "choice"
"""The `backend` of such recipes."""
_NOT_IN_A_NAME = re.compile(r"\W+")


def choice_recipe(key: CacheKey, content: bytes, seconds: float) -> Recipe | None:
    """The recipe of the choice `content` for `key`; None if it is too large, or has no name."""
    call = {"key": [key.backend, key.name, [factor.to_wire() for factor in key.factors]], "content": content}
    return Recipe.of(CHOICE, key.backend, _NOT_IN_A_NAME.sub("_", key.name), call, None, seconds)


def choice_in(recipe: Recipe) -> tuple[CacheKey, bytes]:
    """The key, and the content. Raises ValueError unless `choice_recipe` could have returned `recipe`, which is untrusted."""
    try:
        (backend, name, factors), content = recipe.call["key"], recipe.call["content"]
        key = CacheKey.from_wire({"backend": backend, "name": name, "factors": factors, "details": []})
    except (KeyError, TypeError) as error:
        raise ValueError(f"{recipe.qualname} is no choice: {error}") from error
    if not isinstance(content, bytes) or len(content) > LARGEST_CHOICE:
        raise ValueError(f"{recipe.qualname} is no choice")
    return key, content
