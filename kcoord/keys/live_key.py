"""The live key of a call: the function's present content, its arguments, the environment, the tools and the device.

The first call reads everything (some milliseconds). A later one only checks for changes, by a generated function
(`kcoord.keys.function.watch.Watch`), and looks the rest up: microseconds, without a lock.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from kcoord.errors import GlobalsDrift, KeyFactorError
from kcoord.keys.arguments.signature import Arguments
from kcoord.keys.cache_key import CacheKey, Factor, differences, make_factor
from kcoord.keys.device import DeviceKey, GPUTarget, Scope, current_device
from kcoord.keys.environment import TOOLCHAIN_VARIABLES, Environment, variables
from kcoord.keys.function.files import Files, changed_files
from kcoord.keys.function.walk import PARTS, Content, content_of
from kcoord.keys.tools.toolchain import tools
from kcoord.keys.tools.tree import tree_factors

_MOST_KEYS = 4096  # cached per function: a job that makes more of them compiles all the time anyway
_MOST_STATES = 256  # a function that is called with a new lambda each time
_REMEDY = (
    "undo the change, compile in a new process, "
    'allow it with on_drift="rekey", or name it in ignore=… if it changes nothing'
)
_REMEDY_WITHIN = (
    "the function changes what it reads itself, or another thread does: pass that as an argument, "
    "or name it in ignore=… if it changes nothing of what is compiled (a cache, a counter)"
)


@dataclass(frozen=True)
class Declared:
    """The author's declarations: factors of a function's key beside its content and its arguments."""

    scope: Scope = Scope.DEVICE
    ignore: frozenset[str] = frozenset()
    variables: frozenset[str] = frozenset()
    tools: tuple[str, ...] = ()
    trees: tuple[str, ...] = ()
    dynamic: frozenset[str] = frozenset()
    files: tuple[str, ...] = ()
    ignore_files: tuple[str, ...] = ()
    load: Callable[..., Any] | None = None

    def content_of(self, function: Callable[..., Any], arguments: Collection[Any], device_id: int) -> Content:
        """The content of the function and of the code in its `arguments`."""
        files = Files(self.ignore_files)
        if self.files:
            files.add_named(self.files, str(Path(inspect.unwrap(function).__code__.co_filename).parent))
        known = frozenset(name for name, said in (("environment", self.variables), ("imports", self.files)) if said)
        return content_of(function, self.ignore, arguments=arguments, files=files, known=known, device_id=device_id)


@dataclass
class _State:
    """A snapshot of a function, and of code that is passed to it: immutable but for `keys`, which are made of it alone.

    `content` makes the keys. It is what was `found`, unless the compile has imported modules since.
    """

    content: Content
    found: Content
    passed: tuple[Any, ...]
    unchanged: Callable[[], bool]
    environment: Environment
    bind: Callable[..., tuple[Any, ...]]
    tools: tuple[str, ...]
    trees: tuple[str, ...]
    keys: dict[Any, CacheKey] = field(default_factory=dict)

    @cached_property
    def facts(self) -> dict[str, Factor]:
        """Everything that the function reads, by name."""
        parts = {name: getattr(self.found, name) for name in PARTS} | {"file": self.found.files.digests}
        made = (make_factor(f"{part} {name}", value) for part, each in parts.items() for name, value in each.items())
        return {factor.name: factor for factor in made}

    @cached_property
    def factors(self) -> tuple[Factor, ...]:
        """Those of all keys, which are made once."""
        return _factors(self.content)


class Call(NamedTuple):
    """One call's key, and its sources beside the arguments."""

    key: CacheKey
    device: DeviceKey
    state: _State
    surroundings: Any


class LiveKey:
    """The keys of one function's calls. Thread-safe: a state is replaced as a whole, and two threads may find the same one."""

    def __init__(self, function: Callable[..., Any], declared: Declared, local_dir: Callable[[], Path]) -> None:
        self._function, self._declared, self._local_dir = function, declared, local_dir
        self.takes_target, self.scope = _takes_target(function), declared.scope
        given = ("staging", "target") if self.takes_target else ("staging",)
        self._parameters = [p for n, p in inspect.signature(function).parameters.items() if n not in given]
        self._passed = _Passed()
        names = [p.name for p in self._parameters]
        self._arguments = Arguments(names, dynamic=declared.dynamic, functions=self._passed.number)
        self._states: dict[tuple[int, ...], _State] = {}
        self._as_before: dict[str, Content] = {}  # before a compile's imports, by the digest of that after them
        self._compiled: dict[str, Factor] = {}  # facts of the calls that this process has compiled or loaded

    def __getstate__(self) -> dict[str, Any]:
        """A decorated function may be sent to a worker by value: what was found here says nothing of the code there."""
        return vars(self) | {"_states": {}, "_as_before": {}, "_compiled": {}}

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: GPUTarget | None = None) -> Call:
        """The key of a call, on the current device, or for `target`, which needs no device.

        Raises `KeyFactorError` for what has no identity, and for a `target` that the function could not compile for;
        TypeError if the call does not fit.
        """
        device = current_device() if target is None else self._pretended(target)
        state = self._state((), device.device_id)
        values = state.bind(*args, **kwargs)
        passed: list[Any] = []
        self._passed.things = passed
        arguments = self._arguments.token(values, device.device_id)
        if passed:
            state = self._state(tuple(passed), device.device_id)
        surroundings = self._surroundings(state)
        token = (arguments, surroundings, device)
        key = state.keys.get(token)
        if key is None:
            key = self._make(state, arguments, surroundings, device)
            if len(state.keys) >= _MOST_KEYS:
                state.keys.clear()
            state.keys[token] = key
        return Call(key, device, state, surroundings)

    def _pretended(self, target: GPUTarget) -> DeviceKey:
        if self.takes_target and self._declared.scope is Scope.TARGET:
            return DeviceKey(target, 0)
        raise KeyFactorError(
            f"{self._function.__qualname__} compiles for the current device only: give it scope=Scope.TARGET and a keyword "
            "parameter 'target', the GPU to compile for"
        )

    def served(self, call: Call) -> None:
        """Record that `call` was compiled or loaded: from now on `check` compares later calls with it."""
        for name, factor in call.state.facts.items():
            self._compiled.setdefault(name, factor)

    def check(self, call: Call) -> None:
        """Raises `GlobalsDrift` if what `call` reads has changed since an earlier call was served, in a subclass too."""
        changes: list[str] = []
        for name, factor in call.state.facts.items():
            before = self._compiled.get(name)
            if before is not None and "#" not in name:
                changes += map(str, differences("", (before,), (factor,)))
        if changes:
            raise GlobalsDrift(self._function.__qualname__, tuple(changes), _REMEDY)

    def check_still(self, call: Call) -> None:
        """Raises `GlobalsDrift` if a value moved since `call` was made: its compile may have read either one.

        Modules that the compile imported go on to count by their files: other ranks, which load the artifact, do not import them.
        """
        before = call.state
        has_moved = before.environment.token() != _environment(call.surroundings)
        if before.unchanged() and not has_moved:
            return
        now = self._find(before.passed, call.device.device_id)
        changes = [str(d) for n, f in now.facts.items() for d in differences("", (before.facts.get(n, f),), (f,))]
        unimported = before.content.files.unimported
        changes += [f"{file}, which was imported" for file in changed_files(unimported)]
        if changes or has_moved:
            changes = changes or ["the environment"]
            raise GlobalsDrift(self._function.__qualname__, tuple(changes), _REMEDY_WITHIN)
        still = unimported.keys() & now.content.files.unimported.keys()
        if still != unimported.keys():
            files = replace(before.content.files, unimported={path: unimported[path] for path in still})
            self._as_before[_digest(now.found)] = replace(before.content, files=files)
            self._compiled = now.facts | self._compiled
            self._find(before.passed, call.device.device_id)

    def is_shared(self, call: Call) -> bool:
        """False if a file's text is not what runs, or if a tool or a tree changed since: the compile may have read either."""
        return not call.state.content.files.edited and self._surroundings(call.state) == call.surroundings

    def _state(self, passed: tuple[Any, ...], device_id: int) -> _State:
        state = self._states.get((device_id, *map(id, passed)))  # a state keeps them alive
        return self._find(passed, device_id) if state is None or not state.unchanged() else state

    def _find(self, passed: tuple[Any, ...], device_id: int) -> _State:
        own, found = self._declared, self._declared.content_of(self._function, passed, device_id)
        content = self._as_before.get(_digest(found), found) if self._as_before else found
        declared = [own, *content.nested]
        variables = TOOLCHAIN_VARIABLES.keys() | content.variables | {n for each in declared for n in each.variables}
        state = _State(
            content,
            found,
            passed,
            found.watch.unchanged(),
            Environment(variables - own.ignore),
            _binder(self._function, self._parameters),
            tuple(tool for each in declared for tool in each.tools),
            tuple(tree for each in declared for tree in each.trees),
        )
        if len(self._states) >= _MOST_STATES:
            self._states = {}
        self._states[device_id, *map(id, passed)] = state
        return state

    def _surroundings(self, state: _State) -> Any:
        """A token of the environment, tools and trees."""
        if not (state.tools or state.trees):
            return state.environment.token()
        directory = self._local_dir()
        found = tuple(
            (label, tool.sha256) for label, tool in tools(state.tools, directory, self._declared.ignore).items()
        )
        return state.environment.token(), found, tuple(tree_factors(state.trees, directory).items())

    def _make(self, state: _State, arguments: Any, surroundings: Any, device: DeviceKey) -> CacheKey:
        _, found, trees = surroundings if isinstance(surroundings, tuple) else ((), (), ())
        factors = {"arguments": self._arguments.canonical(arguments), "env": variables(_environment(surroundings))}
        factors |= {"tools": dict(found)} if found else {}
        factors |= {"trees": dict(trees)} if trees else {}
        key = CacheKey("python", self._function.__qualname__, state.factors).with_factors(**factors)
        return key.on(device, self._declared.scope)


class _Passed(threading.local):
    """Functions, classes and modules in the arguments of the current thread's call: they are part of the function's content."""

    def __init__(self) -> None:
        self.things: list[Any] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return _Passed, ()  # a decorated function may be sent to a worker by value

    def number(self, thing: Any) -> int:
        known = next((n for n, each in enumerate(self.things) if each is thing), None)
        if known is None:
            self.things.append(thing)
        return len(self.things) - 1 if known is None else known


def _environment(surroundings: Any) -> bytes:
    found: bytes = surroundings[0] if isinstance(surroundings, tuple) else surroundings
    return found


def _factors(content: Content) -> tuple[Factor, ...]:
    return tuple(make_factor(name, value) for name, value in content.factors().items())


def _digest(content: Content) -> str:
    return CacheKey("python", "content", _factors(content)).digest


def _takes_target(function: Callable[..., Any]) -> bool:
    """True if kcoord passes the GPU to compile for, in a keyword parameter without a default."""
    p = inspect.signature(function).parameters.get("target")
    return p is not None and p.kind is p.KEYWORD_ONLY and p.default is p.empty


def _binder(function: Callable[..., Any], parameters: list[inspect.Parameter]) -> Callable[..., tuple[Any, ...]]:
    """``bind(*args, **kwargs)``: the arguments' values in the order of the parameters, defaults filled in."""
    now = inspect.signature(function).parameters  # a function's defaults can be replaced
    defaults = {p.name: now[p.name].default for p in parameters if p.default is not p.empty}
    plain = [
        each.replace(annotation=each.empty, default=None if each.name in defaults else each.empty)
        for each in parameters
    ]
    values = "".join(f"{p.name}, " for p in parameters)
    names: dict[str, Any] = {}
    exec(f"def {function.__name__}{inspect.Signature(plain)}: return ({values})", names)
    found: Any = names[function.__name__]
    named = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name in defaults]
    found.__kwdefaults__ = {name: defaults.pop(name) for name in named}
    found.__defaults__ = tuple(defaults.values())
    return found  # type: ignore[no-any-return]
