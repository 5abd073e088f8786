"""The inputs of a Triton kernel that Triton's own key leaves open, as they are now, and kernels in memory that follow them.

Left open are: constants read through a module or an object (``hp.TILE``), globals that are no constexpr, helpers and values that
are exchanged in mid-process, variables of the environment that a kernel in memory was not compiled under, the content of
ptxas and its like, types of constants (``1`` and ``"1"``), and a kernel's name.

`kcoord.backends.triton.folding` puts them into the key. ``JITFunction.device_caches``, where a launch looks its kernel up, drops
kernels when an input of theirs, or the device's target, has changed: the launch compiles under a new key. That is a look-up in a
dictionary of some 0.5 µs; nothing else is added to a launch.
"""

from __future__ import annotations

import functools
import os
import time
import types
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from triton.runtime import jit
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from kcoord.backends.fail_open import fails_open, notices
from kcoord.backends.triton.additions import is_addition, is_triton
from kcoord.backends.triton.knobs import count_changes_of_knobs, hidden_knobs
from kcoord.backends.triton.own_key import libraries_moved
from kcoord.backends.triton.tools import TOOL_VARIABLES, tool_factors
from kcoord.backends.triton.variables import VARIABLES
from kcoord.errors import KeyFactorError, SettingsError
from kcoord.keys.cache_key import CacheKey
from kcoord.keys.environment import Environment, variables
from kcoord.keys.function.walk import Content, content_of
from kcoord.rank.connect import connect

JITCallable = getattr(jit, "JITCallable", JITFunction)  # from 3.5: functions of the host as well
CODE = (JITCallable, types.FunctionType, types.MethodType, functools.partial, type, types.ModuleType)
_LOOK_AT_TOOLS = 0.05  # seconds: a tool replaced on disk in mid-process is noticed by then
_ENVIRONMENT = Environment(VARIABLES)
_others: dict[int, tuple[Any, Inputs]] = {}
"""Inputs of constants that are no JITFunction, by id: few, and they live as long as the kernels."""
_watched_variables = VARIABLES.keys() | TOOL_VARIABLES


class _Process:
    """This process's surroundings, as a launch last looked at them.

    `changes` counts changes of the environment, the knobs and the tools, after which each kernel looks closely. A launch looks at
    the files of the tools again when `due` (monotonic seconds) is over.
    """

    changes = libraries = 0
    seen: tuple[Any, Any] = (), ()
    due = 0.0


_process = _Process()


class Inputs:
    """The open inputs of one kernel, or of a constant of one, as they were when this was made.

    `problem` is the reason why they cannot be told; then nobody shares the kernel.
    """

    def __init__(self, function: Any) -> None:
        self._seen = _process.changes
        self.problem = ""
        self.content, named = Content(), None
        try:
            self.content = kernel_content(function)
            named = _repr(function)
        except KeyFactorError as error:
            self.problem = str(error)
        self.functions = self.content.jit_functions
        _watched_variables.update(self.content.variables)
        self.surroundings = surroundings(self.content.variables)
        self._factors = self.content.factors() | {"repr": named}
        self.key = CacheKey.of("triton", "inputs", **self._factors, surroundings=self.surroundings.digest)
        self._unchanged = self.content.watch.unchanged()

    def __reduce__(self) -> tuple[Any, ...]:
        """None in a copy or a pickle of Triton's function, on which this hangs."""
        return type(None), ()

    def hold(self) -> bool:
        """True if they are unchanged. A launch passes here."""
        if (self._seen != _process.changes or time.monotonic() > _process.due) and not self._surroundings_hold():
            return False
        return self._unchanged()

    @fails_open(lambda self: False)
    def _surroundings_hold(self) -> bool:
        changes = _process.changes
        if surroundings(self.content.variables) != self.surroundings:
            return False
        self._seen = changes
        return True

    def details(self) -> dict[str, Any]:
        """The inputs by name, to explain why two keys differ."""
        return self._factors | self.surroundings.factors


class _Caches(defaultdict[Any, Any]):
    """A JITFunction's kernels per device, dropped when an input of theirs has changed."""

    __slots__ = ("_functions", "_inputs")

    def watch(self, function: Any) -> None:
        self._functions, self._inputs = [function], [inputs_of(function)]

    def passed(self, constant: Any) -> None:
        """`constant`, a function or an object, was passed to one of the kernels."""
        if not any(constant is known for known in self._functions):
            self._functions.append(constant)  # first: another thread may look closely meanwhile
            self._inputs = [*self._inputs, inputs_of(constant)]

    def __getitem__(self, device: Any) -> Any:
        for inputs in self._inputs:
            if not inputs.hold():
                self._look_closely()
                break
        found = _stored(self, device)
        active = _active_in(driver)
        if type(active) in _stock_drivers or not _moved(active, found):
            return found
        self.pop(device, None)  # another thread may have been faster
        return _stored(self, device)

    @fails_open(lambda self: dict.clear(self))  # kernels that cannot be watched are compiled anew
    def _look_closely(self) -> None:
        before, self._inputs = self._inputs, [inputs_of(function) for function in self._functions]
        if [_version(each) for each in before] != [_version(each) for each in self._inputs]:
            self.clear()

    def __copy__(self) -> Any:
        """Plain, as a pickle is: nobody watches a copy."""
        return defaultdict(self.default_factory, self)

    copy = __copy__

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (self.default_factory,), None, None, iter(self.items())


_stored = dict.__getitem__
_active_in = attrgetter("_active" if hasattr(driver, "_active") else "active")  # in 3.4 a proxy, until a driver is set
_stock_drivers: set[type] = {type(None)}
"""Drivers whose target for a device never changes: Triton's own. None: no driver is in use yet."""


@fails_open(lambda active, found: False)
def _moved(active: Any, found: Any) -> bool:
    """True if a driver that is not Triton's names another target than that of the kernels in `found`."""
    if type(active).__module__.startswith("triton."):
        _stock_drivers.add(type(active))
        return False
    return active.get_current_target() not in found


def _version(inputs: Inputs) -> tuple[str, int]:
    return inputs.key.digest, inputs.surroundings.libraries


def watch_kernels(function: Any, passed: Collection[Any]) -> None:
    """Drop the JITFunction's kernels from now on when an input of theirs has changed; `passed` are constants of one of them."""
    if type(function.device_caches) is defaultdict:
        caches = _Caches(function.device_caches.default_factory, function.device_caches)
        caches.watch(function)
        function.device_caches = caches
    if isinstance(function.device_caches, _Caches):
        for constant in passed:
            function.device_caches.passed(constant)


def inputs_of(function: Any) -> Inputs:
    """The live inputs of a JITFunction. Triton's memorized hashes of it and its helpers are dropped if they are outdated."""
    known: Inputs | None = vars(function).get("_kcoord_inputs") if isinstance(function, JITCallable) else None
    if not isinstance(function, JITCallable):
        kept = _others.get(id(function))
        known = kept[1] if kept is not None and kept[0] is function else None
    if known is not None and known.hold():
        return known
    inputs = Inputs(function)
    if known is None or known.key.digest != inputs.key.digest:
        for each in inputs.functions:
            if each.hash is not None:
                each.hash = None
                each.used_global_vals = {}  # up to 3.7 a caller would merge the old ones
    if isinstance(function, JITCallable):
        function._kcoord_inputs = inputs
    else:
        _others[id(function)] = function, inputs
    if inputs.problem:
        name = getattr(function, "__name__", f"a kernel with a constant of type {type(function).__qualname__}")
        notices.tell(f"{name} is compiled by each rank for itself: {inputs.problem}")
    return inputs


def kernel_content(thing: Any) -> Content:
    """The content of a kernel, of a function of the host or of a constant, less Triton's own. Raises `KeyFactorError`."""
    return content_of(thing, skip=is_triton, keep=is_addition)


def _repr(function: Any) -> Any:
    """The function that gives a kernel its name in the binary, if that is not the kernel's own name."""
    chosen = getattr(function, "_repr", None) if isinstance(function, JITCallable) else None
    return None if chosen is None else kernel_content(chosen).factors()


@dataclass(frozen=True)
class _Surroundings:
    """The environment, the knobs and the tools. `libraries` counts changes of libraries that launches link: it is in no key."""

    digest: str
    libraries: int
    factors: dict[str, Any] = field(compare=False)


def surroundings(read: Collection[str] = ()) -> _Surroundings:
    """As they are now, with the variables that host functions `read`. After a change here all kernels look closely."""
    local_dir = _local_dir()
    tools = tuple(tool_factors(local_dir).items()) if local_dir is not None else ()
    moved = local_dir is not None and libraries_moved(local_dir)
    _process.libraries += moved
    knobs = hidden_knobs()
    _process.changes += moved or (tools, knobs) != _process.seen
    _process.seen, _process.due = (tools, knobs), time.monotonic() + _LOOK_AT_TOOLS
    own = tuple((name, os.environ.get(name)) for name in sorted(read))
    digest, factors = _described(_ENVIRONMENT.token(), own, knobs, tools)
    return _Surroundings(digest, _process.libraries, factors)


@functools.lru_cache(maxsize=64)
def _described(
    environment: bytes,
    read: tuple[tuple[str, str | None], ...],
    knobs: tuple[tuple[str, Any], ...],
    tools: tuple[tuple[str, str], ...],
) -> tuple[str, dict[str, Any]]:
    env = variables(environment) | {name: value for name, value in read if value is not None}
    factors = {"env": env, "knobs": dict(knobs), "tools": dict(tools)}
    return CacheKey.of("triton", "surroundings", **factors).digest, factors


def _local_dir() -> Path | None:
    """None if the settings cannot be used."""
    try:
        return connect().settings.local_dir
    except SettingsError:
        return None


def count_changes() -> None:
    """Count changes of the environment and of the knobs. `os.environ` writes through two functions, whose wrappers count."""
    count_changes_of_knobs(_count)
    for name in ("putenv", "unsetenv"):
        original = getattr(os, name)
        if not hasattr(original, "__wrapped__"):
            setattr(os, name, _counting(original))


def _count() -> None:
    _process.changes += 1


def _counting(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def change(name: Any, *value: Any) -> None:
        original(name, *value)
        if os.fsdecode(name) in _watched_variables:
            _count()

    return change
