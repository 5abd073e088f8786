"""Profiles: what jobs compiled, as recipes, in a directory of parts.

A profile is ``<store>/v1/profiles/<name>/``; what did not get there (no store, no agent, a disk that refused) is this node's
alone, in ``<local_dir>/profiles/<name>/``. Each writer adds a *part*, one file that is renamed into place and named after the set
of its recipes, so that equal nodes write one file. Reading merges all parts: nothing is locked, and nobody waits.

Not trusted: a part may be torn, another version's or another user's. It is checked as a frame from a stranger is. Whether a
recipe's function may be called is for whoever replays it to decide.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import msgpack

from kcoord.artifacts.local import make_private
from kcoord.artifacts.publish import staging_name, store_error, sync_directory, write_files
from kcoord.errors import KcoordError, StoreError
from kcoord.settings import Settings, profile_name
from kcoord.telemetry.events import Notices

MOST_RECIPES = 100_000  # of a profile
MOST_AT_ONCE = 256  # recipes in one frame
LARGEST_RECIPE = 64 << 10  # bytes
LARGEST_PART = 256 << 20  # bytes
_FORMAT = b"kcoord-profile-1\n"
_DIGEST = hashlib.sha256().digest_size
_SUFFIX = ".recipes"
_DEEPEST = 32
_LONGEST_NAME = 1000
_LIST, _TUPLE = 0, 1  # the first item of each packed array: msgpack has one kind for both
_SCALARS = frozenset({type(None), bool, float, str, bytes})
_BIG_INT = 1  # msgpack's own integers have 64 bits
_ATTEMPTS = 5
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
        if type(self.seconds) not in (int, float) or not 0 <= self.seconds < 1e9:
            raise ValueError("a recipe's seconds must be a number of seconds")
        if type(self.order) is not int or not 0 <= self.order < 1 << 63:
            raise ValueError("a recipe's order must be a whole number")
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

    @classmethod
    def from_wire(cls, data: Any) -> Recipe:
        """Raises ValueError on anything that `to_wire` does not return."""
        if not isinstance(data, dict) or data.keys() != {f.name for f in fields(cls)}:
            raise ValueError("a recipe has other fields")
        call = data["call"]
        if not isinstance(call, bytes) or len(call) > LARGEST_RECIPE:
            raise ValueError("a recipe's call must be a few bytes")
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
    return Recipe(known.backend, known.module, known.qualname, known.call, known.target, seconds, order)


# Where profiles are.


def roots(store: Path | None, local_dir: Path) -> list[Path]:
    """The directories of profiles; the first is where new parts go, if it can be written."""
    return [*([store / "v1" / "profiles"] if store else []), local_dir / "profiles"]


def profile_names(settings: Settings) -> list[str]:
    """The profiles there are. Raises `StoreError`. Blocks for as long as the file system does."""
    found = set()
    for root in _readable(settings):
        try:
            found |= {p.name for p in root.iterdir() if p.is_dir() and _is_name(p.name)}
        except FileNotFoundError:
            continue
        except OSError as error:
            raise store_error(error, root) from error
    return sorted(found)


def load_profile(settings: Settings, name: str, notices: Notices | None = None) -> list[Recipe]:
    """The recipes of all parts, each once, longest first; ties by order, then digest: the same for all who read the same parts.

    Parts that cannot be read are skipped with a notice. Raises `KcoordError` if there is no such profile, naming those there are.
    Blocks for as long as the file system does.
    """
    notices = Notices() if notices is None else notices
    there = profile_names(settings)  # lists the directory above, which refreshes the names that NFS remembers
    if name not in there:
        raise KcoordError(f"there is no profile {name!r}: there {_listed(there)}")
    found = merge(r for root in _readable(settings) for r in parts(root / name, notices))
    if not found:
        raise KcoordError(f"the profile {name!r} has no part that can be read: record it again")
    return sorted(found.values(), key=lambda r: (-r.seconds, r.order, r.digest))


def parts(directory: Path, notices: Notices) -> Iterator[Recipe]:
    """The recipes of every part in `directory`, in the order of their names; what cannot be read is told, and skipped."""
    for recipes in _read_all(directory, notices):
        yield from recipes


def save_part(directory: Path, recipes: Iterable[Recipe], earlier: Path | None = None) -> Path:
    """Write `recipes` as one part, atomically and durably; returns its path. Raises `StoreError`.

    `earlier` is what the same writer's last call returned, and all in it must be in `recipes`: it is removed.
    """
    by_digest = merge(recipes)
    name = hashlib.sha256("".join(sorted(by_digest)).encode()).hexdigest() + _SUFFIX
    body = msgpack.packb([by_digest[d].to_wire() for d in sorted(by_digest)], unicode_errors="surrogatepass")
    if len(body) > LARGEST_PART:
        raise StoreError(f"{directory}: a part of {len(body)} bytes is too large: record less under one name")
    part = directory / name
    fresh = directory / f".{staging_name()}"
    try:
        write_files(directory, {fresh.name: _FORMAT + hashlib.sha256(body).digest() + body}, durable=True)
        fresh.replace(part)
        sync_directory(directory)
        if earlier is not None and earlier.parent == directory and earlier != part:
            earlier.unlink(missing_ok=True)
    except OSError as error:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise store_error(error, directory) from error
    return part


def _readable(settings: Settings) -> list[Path]:
    make_private(settings.local_dir)  # what another user put into a directory of a known name is not ours to run
    return roots(settings.store, settings.local_dir)


def _is_name(text: str) -> bool:
    try:
        return bool(profile_name(text))
    except ValueError:
        return False


def _listed(names: list[str]) -> str:
    return f"are {', '.join(names)}" if names else "are none yet (KCOORD_PROFILE records one)"


def _read_all(directory: Path, notices: Notices) -> list[list[Recipe]]:
    """Looks again if a part vanishes between listing and reading: its writer has just put a larger one in its place."""
    for _ in range(_ATTEMPTS):
        try:
            paths = sorted(p for p in directory.iterdir() if p.suffix == _SUFFIX and not p.name.startswith("."))
        except FileNotFoundError:
            return []
        except OSError as error:
            notices.tell(f"a profile is skipped: {store_error(error, directory)}")
            return []
        found = [_read_part(path, notices) for path in paths]
        if None not in found:
            break
    return [recipes for recipes in found if recipes is not None]


def _read_part(path: Path, notices: Notices) -> list[Recipe] | None:
    """None: it is gone. Empty: it cannot be read."""
    try:
        if path.stat().st_size > LARGEST_PART:
            raise ValueError(f"it is larger than {LARGEST_PART} bytes")
        content = path.read_bytes()
        start = len(_FORMAT) + _DIGEST
        body = content[start:]
        if content[:start] != _FORMAT + hashlib.sha256(body).digest():
            raise ValueError("it is torn, or another version's")
        plain = msgpack.unpackb(body, unicode_errors="surrogatepass")
        if not isinstance(plain, list) or len(plain) > MOST_RECIPES:
            raise ValueError("it is no list of recipes")
        return [Recipe.from_wire(data) for data in plain]
    except FileNotFoundError:
        return None
    except OSError as error:
        notices.tell(f"a part of a profile is skipped: {store_error(error, path)}")
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        notices.tell(f"{path}: a part of a profile is skipped: {error}")
    return []


# A recipe's parts.


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
