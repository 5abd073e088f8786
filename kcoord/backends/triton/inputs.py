"""The inputs of a Triton kernel that Triton's own key leaves open, as they are now, and kernels in memory that follow them.

Left open are: constants read through a module or an object (``hp.TILE``), globals that are no constexpr, helpers and values that
are exchanged in mid-process, variables of the environment that a kernel in memory was not compiled under, the content of
ptxas and its like, types of constants (``1`` and ``"1"``), and a kernel's name.

`kcoord.backends.triton.folding` puts them into the key. ``JITFunction.device_caches``, where a launch looks its kernel up, drops
kernels when an input of theirs, or the device's target, has changed: the launch compiles under a new key. That makes a dictionary
look-up 0.4 to 0.7 µs longer; nothing else is added to a launch.
"""

from __future__ import annotations

import functools
import os
import time
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from triton.runtime import jit
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from kcoord.backends.fail_open import fails_open, notices
from kcoord.backends.triton.own_key import libraries_moved
from kcoord.backends.triton.tools import TOOL_VARIABLES, tool_factors
from kcoord.backends.triton.variables import VARIABLES
from kcoord.errors import KeyFactorError, SettingsError
from kcoord.keys.cache_key import CacheKey
from kcoord.keys.environment import Environment, variables
from kcoord.keys.function.walk import Content, content_of, content_of_value
from kcoord.rank.connect import connect

JITCallable = getattr(jit, "JITCallable", JITFunction)  # from 3.5: functions of the host as well
CODE = (JITCallable, types.FunctionType, types.MethodType, functools.partial, type, types.ModuleType)
_LOOK_AT_TOOLS = 0.05  # seconds: a tool replaced on disk in mid-process is noticed by then
_ENVIRONMENT = Environment(VARIABLES)
_changes = [0]
"""A count of this process's changes of its environment."""
_last: dict[str, Any] = {}
_others: dict[int, tuple[Any, Inputs]] = {}
"""Inputs of constants that are no JITFunction, by id: few, and they live as long as the kernels."""
_watched_variables = VARIABLES.keys() | TOOL_VARIABLES
_OFTEN = 16  # launches of a kernel, after which making a class for it pays
_due = [0.0]
"""When a launch looks at the tools' files again (monotonic seconds)."""


class Inputs:
    """The open inputs of one kernel, or of a constant of one, as they were when this was made.

    `problem` says why they cannot be told; then nobody shares.
    """

    def __init__(self, function: Any) -> None:
        self._seen = _changes[0]
        self.problem = ""
        self.content = Content()
        self.functions: list[Any] = []
        try:
            self.content = (content_of if isinstance(function, CODE) else content_of_value)(function, skip=is_triton)
            self.functions = self.content.jit_functions
            named = _repr(function)
        except KeyFactorError as error:
            self.problem, named = str(error), None
        _watched_variables.update(self.content.variables)
        self.surroundings = surroundings(self.content.variables)
        factors = self.content.factors() | {"repr": named, "surroundings": self.surroundings.digest}
        self.key = CacheKey.of("triton", "inputs", **factors)
        self._unchanged = self.content.watch.unchanged()

    def __reduce__(self) -> tuple[Any, ...]:
        """It hangs on Triton's functions, which others copy and pickle: they are to find nothing there."""
        return type(None), ()

    def hold(self) -> bool:
        """True if they are unchanged."""
        if self._seen != _changes[0] or time.monotonic() > _due[0]:
            changes = _changes[0]
            if surroundings(self.content.variables).digest != self.surroundings.digest:
                return False
            self._seen = changes
        return self._unchanged()

    def details(self) -> dict[str, Any]:
        """The inputs by name, to explain why two keys differ."""
        return self.content.factors() | self.surroundings.factors


class _Caches(defaultdict[Any, Any]):
    """A JITFunction's kernels per device, dropped when an input of theirs has changed.

    This class looks closely at each access. A kernel that is launched often gets a subclass, made for its very inputs, which
    knows the few values that matter; a change of the environment takes the object back to this one.
    """

    __slots__ = ("__weakref__", "_accesses", "_function", "_inputs", "_passed", "_quick")

    def watch(self, function: Any) -> None:
        self._function = function
        self._passed: list[Any] = []  # functions and objects that were passed as constants
        self._inputs: list[Inputs] = []
        self._quick: type[_Caches] | None = None
        self._hold()
        _all_caches[id(self)] = self

    def __getitem__(self, device: Any) -> Any:
        return self._closely(device)

    def _closely(self, device: Any) -> Any:
        self._look()
        try:
            return _look_up(self, device)
        except KeyError:
            return self.__missing__(device)

    @fails_open(lambda self: dict.clear(self))  # kernels that cannot be watched are compiled anew
    def _look(self) -> None:
        if hasattr(self, "_function"):
            before = [each.key.digest for each in self._inputs]
            self._hold()
            if before != [each.key.digest for each in self._inputs]:
                self.clear()

    def passed(self, function: Any) -> None:
        if not any(function is known for known in self._passed):
            self._passed.append(function)
            self._hold()

    def _hold(self) -> None:
        """Know the inputs as they are now."""
        changes = _changes[0]
        inputs = [inputs_of(function) for function in (self._function, *self._passed)]
        if len(inputs) != len(self._inputs) or any(a is not b for a, b in zip(inputs, self._inputs, strict=True)):
            self._inputs, self._quick, self._accesses = inputs, None, 0
        self._accesses += 1
        if self._quick is None and self._accesses > _OFTEN:
            self._quick = self._made_for(inputs)
        if self._quick is not None:
            self.__class__ = self._quick
            if changes != _changes[0]:
                self.__class__ = _Caches

    def _made_for(self, inputs: list[Inputs]) -> type[_Caches]:
        first, *others = inputs
        look_up = first.content.watch.compile(
            "self, device",
            "if {condition}: return look_up(self, device)",
            "return self._closely(device)",
            ("monotonic() < due[0]", *(f"hold{n}()" for n in range(len(others)))),
            look_up=_look_up,
            monotonic=time.monotonic,
            due=_due,
            **{f"hold{n}": each.hold for n, each in enumerate(others)},
        )
        return type(_Caches.__name__, (_Caches,), {"__slots__": (), "__getitem__": look_up})

    def __copy__(self) -> Any:
        """Plain, as a pickle is: nobody watches a copy."""
        return defaultdict(self.default_factory, self)

    copy = __copy__

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (self.default_factory,), None, None, iter(self.items())


def watch_kernels(function: Any, passed: Collection[Any]) -> None:
    """Drop the JITFunction's kernels from now on when an input of theirs has changed; `passed` are constants of one of them."""
    if type(function.device_caches) is defaultdict:
        caches = _Caches(function.device_caches.default_factory, function.device_caches)
        caches.watch(function)
        function.device_caches = caches
    if isinstance(function.device_caches, _Caches):
        for constant in passed:
            function.device_caches.passed(constant)


_stored = dict.__getitem__
_HAS_ACTIVE = hasattr(driver, "_active")  # 3.4 has a proxy, until a driver is set
_constant: list[Any] = [None]
"""``get_current_target`` of a driver of Triton's own, whose answer for a device never changes."""


def _look_up(caches: _Caches, device: Any) -> Any:
    """A device's kernels, without those of a target that the driver no longer says the device has. Raises KeyError."""
    found = _stored(caches, device)
    active = driver._active if _HAS_ACTIVE else getattr(driver.active, "_obj", driver.active)
    if active is None:  # nothing was launched yet
        return found
    ask = active.get_current_target
    if ask == _constant[0] or not _moved(ask, found):
        return found
    caches.pop(device, None)  # another thread may have been faster
    return _stored(caches, device)


@fails_open(lambda ask, found: False)
def _moved(ask: Callable[[], Any], found: tuple[Any, ...]) -> bool:
    """True if the kernels in `found` are not of the target that ``ask()`` names."""
    if (ask.__module__ or "").startswith("triton.backends."):
        _constant[0] = ask
        return False
    return ask() not in found


_all_caches: weakref.WeakValueDictionary[int, _Caches] = weakref.WeakValueDictionary()


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


def is_triton(module: str) -> bool:
    """Triton's own code is in its key."""
    return module.partition(".")[0] in ("triton", "builtins", "math")


def _repr(function: Any) -> Any:
    """The function that gives a kernel its name in the binary, if that is not the kernel's own name."""
    chosen = getattr(function, "_repr", None) if isinstance(function, JITCallable) else None
    return None if chosen is None else content_of(chosen, skip=is_triton).factors()


@dataclass(frozen=True)
class _Surroundings:
    """The environment and the tools."""

    digest: str
    factors: dict[str, Any]


def surroundings(read: Collection[str] = ()) -> _Surroundings:
    """As they are now, with the variables that host functions `read`. After a change of the tools all kernels look closely."""
    tools, known, moved = _tools(), _last.get("tools"), _libraries_moved()
    _due[0] = time.monotonic() + _LOOK_AT_TOOLS
    token = _ENVIRONMENT.token(), tuple((n, os.environ.get(n)) for n in sorted(read)), tuple(tools.items())
    _last["tools"] = token[2]
    if moved:
        for caches in _known_caches():
            caches.clear()  # a launch is known by the paths of its libraries
    if known is not None and known != token[2]:
        _look_closely()
    return _described(token)


@functools.lru_cache(maxsize=64)
def _described(token: tuple[bytes, tuple[tuple[str, str | None], ...], tuple[tuple[str, str], ...]]) -> _Surroundings:
    environment, read, tools = token
    env = variables(environment) | {name: value for name, value in read if value is not None}
    factors = {"env": env, "tools": dict(tools)}
    return _Surroundings(CacheKey.of("triton", "surroundings", **factors).digest, factors)


def _tools() -> dict[str, Any]:
    try:
        return tool_factors(connect().settings.local_dir)
    except SettingsError:
        return {}


def _libraries_moved() -> bool:
    try:
        return libraries_moved(connect().settings.local_dir)
    except SettingsError:
        return False


def count_changes_of_the_environment() -> None:
    """`os.environ` writes through these two; the wrappers call them, and count."""
    for name in ("putenv", "unsetenv"):
        original = getattr(os, name)
        if not hasattr(original, "__wrapped__"):
            setattr(os, name, _counting(original))


def _counting(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def change(name: Any, *value: Any) -> None:
        original(name, *value)
        if os.fsdecode(name) in _watched_variables:
            _look_closely()

    return change


@fails_open(lambda: None)
def _look_closely() -> None:
    """All kernels are to look closely, once."""
    _changes[0] += 1
    for caches in _known_caches():
        caches.__class__ = _Caches


def _known_caches() -> list[_Caches]:
    """Other threads go on compiling: the list is of one moment."""
    return [caches for reference in _all_caches.valuerefs() if (caches := reference()) is not None]
