"""A kernel's open inputs (`kcoord.backends.triton.inputs`), folded into the hash of its source.

``ASTSource.hash`` gets them as a suffix: Triton and Inductor look for the kernel's files under this hash, and so agree.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from triton.compiler.compiler import ASTSource, IRSource
from triton.runtime.jit import JITFunction

from kcoord.backends.fail_open import fails_open
from kcoord.backends.triton import base32
from kcoord.backends.triton.inputs import (
    CODE,
    Inputs,
    count_changes,
    inputs_of,
    surroundings,
    watch_kernels,
)  # fmt: skip
from kcoord.keys.function.callables import wrapped_by
from kcoord.keys.packages import Owner, module_of, owner_of

_TEXTS: frozenset[type] = frozenset((int, bool, float, complex, str, bytes, type(None)))
"""Types of constants that their text identifies, so that nothing about them need be looked up."""
_stock_names: dict[str, str] = {}
"""Names of directories: by the name made of a source's folded hash, the name made of Triton's own."""


class Folded(NamedTuple):
    """A source's hash with its open inputs folded in, and these inputs as they were then: of the kernel, and of the functions
    and objects that are passed to it as constants.
    """

    hash: str
    inputs: tuple[Inputs, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        """It hangs on Triton's source, which others pickle: another process folds anew."""
        return type(None), ()


def _folded(stock: Callable[[Any], str]) -> Callable[[Any], str]:
    """`ASTSource.hash`, with the source's open inputs."""

    @functools.wraps(stock)
    def hash(self: Any) -> str:
        suffix, inputs = _suffix(self)
        found = stock(self)
        if not suffix:
            self._kcoord_folded = None
            return found
        folded = hashlib.sha256(f"{found}-{suffix}".encode()).hexdigest()
        self._kcoord_folded = Folded(folded, inputs)
        _stock_names[base32(folded)] = base32(found)
        return folded

    hash.__kcoord_stock__ = stock  # type: ignore[attr-defined]
    return hash


@fails_open(lambda source: ("", ()))
def _suffix(source: Any) -> tuple[str, tuple[Inputs, ...]]:
    function = getattr(source, "fn", None)
    if not isinstance(function, JITFunction):  # IR that was read from a file
        return surroundings().digest, ()
    passed = list(_with_content(source.constants.values()))
    inputs = tuple(map(inputs_of, (function, *passed)))
    watch_kernels(function, passed)
    types = sorted((str(path), _type(constant)) for path, constant in source.constants.items())
    told = source.name, [each.key.digest for each in inputs], types
    return hashlib.sha256(repr(told).encode()).hexdigest(), inputs


def _type(constant: Any) -> Any:
    """The constant's type, and a string's text. Triton's key joins the texts of constants: ``1`` and ``"1"`` are equal there, and
    so are "a-b", "c" and "a", "b-c".
    """
    if isinstance(constant, (tuple, list)):
        return tuple(map(_type, constant))
    if isinstance(constant, str):
        return type(constant).__qualname__, str(constant)
    return type(constant).__qualname__, type(getattr(constant, "value", None)).__qualname__


def stock_name(name: str) -> str:
    """The directory that Triton without kcoord dumps a source to, and looks for overrides in: people fill it by hand."""
    return _stock_names.get(name, name)


def true_text(text: str, source: Any) -> tuple[str, tuple[Inputs, ...]] | None:
    """The text of Triton's key with the inputs folded in, and the inputs; None if they cannot be had.

    It is `text` itself unless that was made before kcoord was imported, as the very first one is by ``TRITON_CACHE_MANAGER``.
    """
    if vars(source).get("_kcoord_folded") is None:
        source.hash()
    folded: Folded | None = vars(source).get("_kcoord_folded")
    if folded is None:
        return None  # its inputs could not be read
    if folded.hash in text:
        return text, folded.inputs
    stock = type(source).hash.__kcoord_stock__(source)
    return (text.replace(stock, folded.hash, 1), folded.inputs) if stock in text else None


def _with_content(constants: Iterable[Any]) -> Iterator[Any]:
    """The constants that their text does not identify: functions, classes and objects."""
    for constant in constants:
        if type(constant) in _TEXTS:
            continue
        if type(constant) in (tuple, list, set, frozenset):
            yield from _with_content(constant)
        elif type(constant).__name__ == "constexpr":
            yield from _with_content([constant.value])
        elif isinstance(constant, CODE) or wrapped_by(constant) is not None or not _is_its_text(type(constant)):
            yield constant


def _is_its_text(kind: type) -> bool:
    """True if the text of such a constant, which is in Triton's key, identifies it."""
    owner = owner_of(kind)
    return owner is Owner.PYTHON or (
        owner is Owner.INSTALLED and module_of(kind).partition(".")[0] in ("numpy", "torch", "triton")
    )


def hook() -> None:
    """Fold the open inputs into every source's hash from now on. Idempotent."""
    count_changes()
    for kind in (ASTSource, IRSource):
        if not hasattr(kind.hash, "__kcoord_stock__"):
            kind.hash = _folded(kind.hash)
