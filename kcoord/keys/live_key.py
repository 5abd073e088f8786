"""The live key of a call: the function's present content, its arguments, the environment, the tools and the device.

The first call reads everything (some milliseconds). A later one only checks for changes, by a generated function
(`kcoord.keys.function.watch.Watch`), and looks the rest up: microseconds, without a lock.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from kcoord.errors import GlobalsDrift, KeyFactorError
from kcoord.keys.arguments.signature import Arguments
from kcoord.keys.cache_key import CacheKey, Factor, make_factor
from kcoord.keys.device import DeviceKey, GPUTarget, Scope, current_device
from kcoord.keys.environment import TOOLCHAIN_VARIABLES, Environment, variables
from kcoord.keys.function.lookup import REMEDY, is_computed, is_open, is_slot, own_attributes
from kcoord.keys.function.unimported import changed_files
from kcoord.keys.function.values import PARTS
from kcoord.keys.function.walk import Content, content_of
from kcoord.keys.tools.toolchain import tools
from kcoord.keys.tools.tree import by_name, tree_fingerprint

_MOST_KEYS = 4096  # cached per function: a job that makes more of them compiles all the time anyway
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


@dataclass
class _State:
    """A snapshot of a function: immutable but for `keys`, which are made of it alone."""

    content: Content
    unchanged: Callable[[], bool]
    environment: Environment
    bind: Callable[..., tuple[Any, ...]]
    keys: dict[Any, CacheKey] = field(default_factory=dict)

    @cached_property
    def facts(self) -> dict[str, Factor]:
        """Everything that the function reads, by name."""
        found = ((f"{part} {name}", v) for part in PARTS for name, v in getattr(self.content, part).items())
        return {name: make_factor(name, value) for name, value in found}


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
        names = [p.name for p in self._parameters]
        self._is_method = _is_method(function, names)
        self._arguments = Arguments(names, dynamic=declared.dynamic, functions=_Functions(declared.ignore))
        self._states: dict[type | None, _State] = {}
        self._compiled: dict[str, Factor] = {}  # facts of the calls that this process has compiled or loaded

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: GPUTarget | None = None) -> Call:
        """The key of a call, on the current device, or for `target`, which needs no device.

        Raises `KeyFactorError` for what has no identity, and for a `target` that the function could not compile for;
        TypeError if the call does not fit.
        """
        owner = type(args[0]) if self._is_method and args else None
        state = self._states.get(owner)
        if state is None or not state.unchanged():
            state = self._find(owner)
        values = state.bind(*args, **kwargs)
        if owner is not None:
            values = (_receiver_read(values[0], state.content), *values[1:])
        device = current_device() if target is None else self._pretended(target)
        arguments = self._arguments.token(values, device.device_id)
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
        changes = []
        for name, factor in call.state.facts.items():
            before = self._compiled.get(name)
            if before is not None and "#" not in name and before.digest != factor.digest:
                changes.append(f"{name}: {before.text} → {factor.text}")
        if changes:
            raise GlobalsDrift(self._function.__qualname__, tuple(changes), _REMEDY)

    def check_still(self, call: Call) -> None:
        """Raises `GlobalsDrift` if something moved since `call` was made: its compile may have read either value."""
        if call.state.unchanged() and self._surroundings(call.state) == call.surroundings:
            return
        owner = next((o for o, s in self._states.items() if s is call.state), None)
        now = self._find(owner)
        changes = [f"{n}: {call.state.facts[n].text} → {f.text}" for n, f in now.facts.items()
                   if n in call.state.facts and call.state.facts[n].digest != f.digest]  # fmt: skip
        changes += [f"{file}, which was imported" for file in changed_files(call.state.content.files)]
        if changes or self._surroundings(now) != call.surroundings:
            changes = changes or ["the environment, a tool or a tree of files"]
            raise GlobalsDrift(self._function.__qualname__, tuple(changes), _REMEDY_WITHIN)

    def _find(self, owner: type | None) -> _State:
        content = content_of(self._function, self._declared.ignore, owner)
        variables = (TOOLCHAIN_VARIABLES.keys() | self._declared.variables | content.variables) - self._declared.ignore
        bind = _binder(self._function, self._parameters)
        state = _State(content, content.watch.unchanged(), Environment(variables), bind)
        self._states[owner] = state
        return state

    def _surroundings(self, state: _State) -> Any:
        """A token of the environment, tools and trees."""
        if not (self._declared.tools or self._declared.trees):
            return state.environment.token()
        directory = self._local_dir()
        found = tuple((label, tool.sha256) for label, tool in tools(self._declared.tools, directory).items())
        trees = tuple((tree, tree_fingerprint(tree, directory)) for tree in self._declared.trees)
        return state.environment.token(), found, trees

    def _make(self, state: _State, arguments: Any, surroundings: Any, device: DeviceKey) -> CacheKey:
        factors = state.content.factors() | {"arguments": self._arguments.canonical(arguments)}
        environment, found, trees = surroundings if isinstance(surroundings, tuple) else (surroundings, (), ())
        factors |= {"env": variables(environment)}
        factors |= {"tools": dict(found)} if found else {}
        factors |= {"trees": by_name(trees)} if trees else {}
        return CacheKey.of("python", self._function.__qualname__, **factors).on(device, self._declared.scope)


def _takes_target(function: Callable[..., Any]) -> bool:
    """True if kcoord passes the GPU to compile for, in a keyword parameter without a default."""
    parameter = inspect.signature(function).parameters.get("target")
    return (
        parameter is not None
        and parameter.kind is inspect.Parameter.KEYWORD_ONLY
        and parameter.default is inspect.Parameter.empty
    )


class _Functions:
    """Identifies a function that is an argument by the digest of its content, cached while that is unchanged."""

    def __init__(self, ignore: frozenset[str]) -> None:
        self._ignore = ignore
        self._known: dict[int, tuple[Any, Callable[[], bool], str]] = {}

    def __call__(self, function: Any) -> str:
        known = self._known.get(id(function))
        if known is not None and known[0] is function and known[1]():
            return known[2]
        content = content_of(function, self._ignore)
        digest = CacheKey.of("python", "argument", **content.factors()).digest
        if len(self._known) >= _MOST_KEYS:
            self._known = {}
        self._known[id(function)] = function, content.watch.unchanged(), digest
        return digest


def _is_method(function: Callable[..., Any], names: list[str]) -> bool:
    """True if `function` was defined in a class, and takes the object that it is called on."""
    parent = function.__qualname__.rpartition(".")[0]
    return bool(names) and bool(parent) and not parent.endswith("<locals>")


def _receiver_read(value: Any, content: Content) -> Any:
    """The parts of a method's receiver that count: the attributes that are read, or the object itself if it is described."""
    if content.escapes or not is_open(value):
        return value
    own = own_attributes(value)
    read = []
    for path in sorted(content.attributes):
        if path[0] in own or is_slot(type(value), path[0]):
            inner = value
            for attribute in path:
                if inner is not value and not is_open(inner):
                    break
                inner = getattr(inner, attribute, None)
            read.append((".".join(path), inner))
        elif is_computed(type(value), path[0]):
            raise KeyFactorError(f"arguments.self.{'.'.join(path)}: {REMEDY}")
    return read


def _binder(function: Callable[..., Any], parameters: list[inspect.Parameter]) -> Callable[..., tuple[Any, ...]]:
    """``bind(*args, **kwargs)``: the arguments' values in the order of the parameters, defaults filled in."""
    names: dict[str, Any] = {}
    signature, star = [], False
    for p in parameters:
        text = p.name
        if p.kind is p.VAR_POSITIONAL:
            text, star = f"*{text}", True
        elif p.kind is p.VAR_KEYWORD:
            text = f"**{text}"
        elif p.kind is p.KEYWORD_ONLY and not star:
            signature.append("*")
            star = True
        if p.default is not p.empty:
            names[f"_default_{p.name}"] = _default_of(function, p)
            text += f"=_default_{p.name}"
        signature.append(text)
    positional_only = [n for n, p in enumerate(parameters) if p.kind is p.POSITIONAL_ONLY]
    if positional_only:
        signature.insert(positional_only[-1] + 1, "/")
    values = "".join(f"{p.name}, " for p in parameters)
    exec(f"def {function.__name__}({', '.join(signature)}): return ({values})", names)
    found: Callable[..., tuple[Any, ...]] = names[function.__name__]
    return found


def _default_of(function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """The present default: a function's defaults can be replaced."""
    return inspect.signature(function).parameters[parameter.name].default
