"""Reliances of hooks on a compiler. If one does not hold, kcoord leaves that part to each rank, and tells.

A `Part` names functions, and looks at their signatures as it is hooked. A `Tripwire` tells, in each process, of compiles that the
hook has not seen. A trial (`kcoord.backends.trials`) compiles a constant, which takes seconds: no rank runs it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from kcoord.backends.fail_open import coordinator_in_use, fails_open, notices
from kcoord.backends.wrapping import is_wrapped
from kcoord.interruption import let_through
from kcoord.units import first_few

_MOST_NAMED = 3

asides: dict[tuple[str, str], tuple[str, str]] = {}
"""Parts that this process has not hooked: the compiler's release and the reason, by `Compiler.name` and part."""


@dataclass(frozen=True)
class Part:
    """One mechanism of a compiler's hooks: it is hooked whole, or not at all. `package` is the compiler's import name.

    `calls` are names ``module:attribute.attribute``, modules below `package`, each with the parameters of the call that the hooks
    make, or that their wrapper takes: ``name`` at its position, ``_`` of any name, ``name=`` anywhere; ``...`` for others, which
    the wrapper hands on. A further optional parameter is no difference. With an empty call the name is enough. No attribute is
    evaluated: it may be read live.
    """

    compiler: str
    package: str
    name: str
    calls: Mapping[str, str]

    def holds(self) -> bool:
        """True if this release has all that the part relies on. If not, kcoord stands aside from it."""
        missing = [name.partition(":")[2] for name, call in self.calls.items() if not self._has(name, call)]
        if missing:
            why = f"{first_few(missing, _MOST_NAMED)} {'differs' if len(missing) == 1 else 'differ'}"
            stand_aside(self.compiler, release_of(self.package), self.name, why)
        return not missing

    def place(self, name: str) -> tuple[Any, str]:
        """The object that has the attribute of `name`, and the attribute's own name."""
        module, _, path = name.partition(":")
        *owners, attribute = path.split(".")
        found: Any = import_module(f"{self.package}.{module}" if module else self.package)
        for owner in owners:
            found = inspect.getattr_static(found, owner)
        return found, attribute

    def wrap(self, name: str, wrapped: Callable[[Any], Any]) -> None:
        """Put ``wrapped(native)`` in place of the function or method `name`. Idempotent."""
        owner, attribute = self.place(name)
        native = getattr(owner, attribute)
        if not is_wrapped(native):
            of_class = isinstance(inspect.getattr_static(owner, attribute), (classmethod, staticmethod))
            setattr(owner, attribute, staticmethod(wrapped(native)) if of_class else wrapped(native))

    def parameters(self, name: str) -> set[str]:
        """The parameters that the call of `name` names."""
        return set(self.calls[name].replace("=", "").split())

    def _has(self, name: str, call: str) -> bool:
        try:
            owner, attribute = self.place(name)
            if isinstance(owner, type):  # `object` has methods of all kinds, and a metaclass has `__call__`
                found = next(vars(each)[attribute] for each in owner.__mro__[:-1] if attribute in vars(each))
            else:
                found = inspect.getattr_static(owner, attribute)
        except (ImportError, AttributeError, StopIteration) as error:
            let_through(error)
            return False
        found = getattr(found, "__func__", found)
        return not call or is_wrapped(found) or _takes(found, call.split())


@dataclass(frozen=True)
class Tripwire:
    """Tells once in a process that compiles pass by the hook of `part`, and counts it as standing aside from the part.

    A hook trips it where the compiler stores a kernel that it compiled, and did not ask for where the hook is. A kernel that it
    asked for trips nothing, nor does one whose compile began before the hook was there, nor one that a cache holds. A compiler in
    which that cannot be told has no tripwire.
    """

    part: Part
    why: str

    @fails_open(lambda tripwire: None)
    def trip(self) -> None:
        stand_aside(self.part.compiler, release_of(self.part.package), self.part.name, self.why)


def _takes(function: Any, call: list[str]) -> bool:
    positional = [word for word in call if word.isidentifier()]
    named = {word[:-1]: word for word in call if word.endswith("=")}
    try:
        signature = inspect.signature(function)
        bound = (signature.bind_partial if "..." in call else signature.bind)(*range(len(positional)), **named)
    except (TypeError, ValueError) as error:  # not callable, without a signature, or other parameters
        let_through(error)
        return False
    asked = named | {name: at for at, name in enumerate(positional) if name != "_"}
    return asked.items() <= bound.arguments.items()


def unknown_argument(bound: inspect.BoundArguments, known: Collection[str]) -> str:
    """The first parameter outside `known` that this call gives another value than its default; empty if there is none.

    A key that is made of the known ones does not hold it. Call it before `apply_defaults`.
    """
    parameters = bound.signature.parameters
    others = (name for name in bound.arguments if name not in known)
    return next((name for name in others if bound.arguments[name] is not parameters[name].default), "")


def release_of(package: str) -> str:
    """``torch 2.16.0``."""
    return f"{package} {getattr(sys.modules.get(package), '__version__', '')}".rstrip()


def stand_aside(compiler: str, release: str, part: str, why: str) -> None:
    """Leave `part` of a compiler to each rank: told once in this process, and counted in the figures of its job."""
    mine = release, why
    if asides.setdefault((compiler, part), mine) is not mine:
        return
    notices.tell(f"{release}: {why}: kcoord stands aside from {part}, which each rank does for itself")
    coordinator = coordinator_in_use()
    if coordinator is not None:
        coordinator.stands_aside(compiler, part, f"{release}: {why}")
