"""Triton's autotuner: its choices are shared. The first rank that has tuned decides, and nobody waits.

Every rank that has not found a choice tunes as ever, and offers what it chose; the first offer wins, and the winner's choice is
what each of them launches. So ranks may tune at once, and still run the same configuration in the end. Tuning holds no lease:
it launches kernels, perhaps in step with other ranks.

The hook is the autotuner's `cache`: a dictionary that looks further on a miss, and asks for the winner when a choice is put in. A
launch whose choice is known costs 0.05 µs more. ``kernel.cache = {}`` gives an autotuner back to Triton alone.

Not guaranteed: that ranks agree which cannot reach their agent, or nodes that have no store in common: each then keeps its own
choice, as without kcoord. Not shared at all: what `kcoord.backends.triton_choice_key` cannot give a key.
"""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import CodeType, FrameType
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget as TritonTarget
from triton.runtime.autotuner import Autotuner
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from kcoord.api import connect
from kcoord.backends import triton_choice
from kcoord.backends import triton_choice_key as choice_key
from kcoord.backends.base import fails_open, notices
from kcoord.coordinator import Coordinator
from kcoord.errors import KeyFactorError, SettingsError
from kcoord.keys.cache_key import CacheKey
from kcoord.keys.device import DeviceKey, GPUTarget, Scope, scope_factors
from kcoord.profiles.recipe import Recipe

_RECIPES = "triton_autotune"
_run_code: list[CodeType] = []
"""Of `Autotuner.run`, as Triton has it."""
_bench_code: list[CodeType] = []
"""Of the function inside it that measures, and puts the choice in."""


@dataclass
class _Tuning:
    """One tuning key of one autotuner, which has to be chosen for. `configs` are those that pruning left."""

    coordinator: Coordinator
    autotuner: Autotuner
    key: CacheKey
    configs: Sequence[Any]
    digests: list[str]
    call: dict[str, Any]
    device: DeviceKey
    model: str
    begun: float = field(default_factory=time.perf_counter)

    def find(self) -> Any | None:
        """The configuration that was chosen by whichever rank was first; None if there is none, or it cannot be used."""
        content = self.coordinator.choice(self.key)
        chosen = self._use(content) if content is not None else None
        if chosen is not None and content is not None:
            self._record(content, 0.0)
            timings = triton_choice.timings_in(content, len(self.configs))
            if timings is not None:  # as Triton's own cache on disk leaves them
                self.autotuner.configs_timings = dict(zip(self.configs, timings, strict=True))
        return chosen

    def settle(self, chosen: Any, timings: dict[Any, Any] | None) -> Any:
        """This rank has `chosen`; returns what holds, the winner's choice."""
        took = time.perf_counter() - self.begun
        if timings is not None and not choice_key.is_finite(timings.get(chosen)):
            return chosen  # none of them runs here, and the launch is to say so
        mine = choice_key.config_digest(chosen)
        if mine not in self.digests:
            return chosen
        measured = None if timings is None else [timings.get(config) for config in self.configs]
        content = triton_choice.pack(mine, chosen, measured)
        decided = self.coordinator.offer(self.key, content, took, str(self.device))
        winner = self._use(decided) if decided is not None else None
        self._record(content if winner is None or decided is None else decided, took)
        return chosen if winner is None else winner

    def _use(self, content: bytes) -> Any | None:
        digest = triton_choice.chosen_in(content)
        if digest in self.digests:
            return self.configs[self.digests.index(digest)]
        notices.tell(f"{self.key.name}: the shared choice is none of its configurations; this rank tunes for itself")
        return None

    def _record(self, content: bytes, seconds: float) -> None:
        """Keep the recipe of the choice, if the job has a profile and the kernel can be imported."""
        if self.coordinator.settings.profile is None:
            return
        function = _function_of(self.autotuner)
        module, qualname = function.__module__, function.__qualname__
        try:
            if module == "__main__" or _resolve(module, qualname) is not self.autotuner:
                return
            call = {
                "call": self.call, "configs": self.digests, "model": self.model,
                "digest": self.key.digest, "choice": content,
            }  # fmt: skip
            target = str(self.device.target)
            recipe = Recipe(_RECIPES, module, qualname, call, target, seconds, time.monotonic_ns())
        except (ValueError, ImportError):
            return  # what is too large, or leads nowhere, is not recorded
        self.coordinator.record(recipe)


class _Choices(dict[Any, Any]):
    """An autotuner's configurations by tuning key, as Triton has them; one that is missing is looked up first."""

    __slots__ = ("_tunings",)

    def __init__(self, known: dict[Any, Any]) -> None:
        super().__init__(known)
        self._tunings: dict[Any, _Tuning] = {}

    def __contains__(self, key: object) -> bool:
        return dict.__contains__(self, key) or self._look_further(key, sys._getframe(1))

    def __setitem__(self, key: Any, config: Any) -> None:
        frame = sys._getframe(1)
        tuning = self._tunings.pop(key, None)
        if tuning is None and frame.f_code in _bench_code:  # it was being measured when kcoord came
            tuning = _tuning_of(frame.f_locals["self"], key, frame.f_locals["kwargs"])
        if tuning is not None:
            config = _settled(tuning, config, frame)
        dict.__setitem__(self, key, config)

    def _look_further(self, key: Any, frame: FrameType) -> bool:
        if frame.f_code not in _run_code:
            return False  # somebody looks, and nobody launches
        found = frame.f_locals
        autotuner, kwargs = found["self"], found["kwargs"]
        if autotuner.cache is not self:
            return False
        tuning = _tuning_of(autotuner, key, kwargs)
        if tuning is None:
            return False
        config = _found(tuning)
        if config is None:
            self._tunings[key] = tuning
            return False
        dict.__setitem__(self, key, config)
        _tell_listener(autotuner, key, config)
        return True

    def __deepcopy__(self, memo: dict[int, Any]) -> _Choices:
        return _Choices(copy.deepcopy(dict(self), memo))

    def copy(self) -> _Choices:
        return _Choices(self)

    __copy__ = copy

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickle is plain: whoever reads it may have no kcoord."""
        return dict, (), None, None, iter(self.items())


@fails_open(lambda *arguments: None)
def _tuning_of(autotuner: Autotuner, key: tuple[Any, ...], kwargs: dict[str, Any]) -> _Tuning | None:
    """None if the choice is not to be shared: there is none to make, or it has no key."""
    coordinator = _coordinator()
    if coordinator is None or knobs.runtime.interpret:
        return None
    configs = autotuner.prune_configs(kwargs)
    if len(configs) < 2:
        return None
    name = _function_of(autotuner).__name__
    try:
        pairs = [(choice_key.config_digest(config), config) for config in configs]
        pairs.sort(key=lambda pair: pair[0])  # by its configurations, in whatever order pruning leaves them
        digests, configs = [digest for digest, _ in pairs], [config for _, config in pairs]
        target = driver.active.get_current_target()
        call = choice_key.call_factors(autotuner, key, kwargs, configs)
        found = choice_key.choice_key(choice_key.kernel_factors(autotuner, target), call, digests, name)
    except KeyFactorError as error:
        notices.tell(f"{name} is tuned by each rank for itself: {error}")
        return None
    device = DeviceKey(GPUTarget(target.backend, target.arch, target.warp_size), driver.active.get_current_device())
    scope = scope_factors(Scope.MODEL, device)
    found = found.with_factors(**scope).with_details(
        {"configs": [str(config)[: triton_choice.LONGEST_TEXT] for config in configs]}
    )
    return _Tuning(coordinator, autotuner, found, configs, digests, call, device, scope["device_model"])


@fails_open(lambda tuning: None)
def _found(tuning: _Tuning) -> Any | None:
    return tuning.find()


@fails_open(lambda tuning, config, frame: config)
def _settled(tuning: _Tuning, config: Any, frame: FrameType) -> Any:
    """`frame` is Triton's, which has just measured, or read its own cache."""
    timings = frame.f_locals.get("timings")
    return tuning.settle(config, timings if isinstance(timings, dict) else None)


def _tell_listener(autotuner: Autotuner, key: Any, config: Any) -> None:
    """As after a hit in Triton's own cache on disk. What a listener raises is the user's to see."""
    listener = getattr(knobs.autotuning, "listener", None)  # since 3.7
    timings = getattr(autotuner, "configs_timings", None)
    if listener is not None and timings is not None:
        listener(
            fn=_jit_function(autotuner), key=key, best_config=config, configs_timings=timings, duration=None, cache_hit=True
        )  # fmt: skip


# Autotuners, and where they are.


def _function_of(autotuner: Autotuner) -> Any:
    return autotuner.base_fn


def _jit_function(autotuner: Autotuner) -> Any:
    function = autotuner.fn
    while not isinstance(function, JITFunction):
        function = function.fn
    return function


def _resolve(module: str, qualname: str) -> Autotuner | None:
    """Raises ImportError, and what importing raises."""
    found: Any = import_module(module)
    for name in qualname.split("."):
        found = getattr(found, name, None)
    while found is not None and not isinstance(found, Autotuner):
        found = getattr(found, "fn", None)  # heuristics around it
    return found


def _coordinator() -> Coordinator | None:
    """None if kcoord is off, or its settings cannot be used, which the first compile has told."""
    try:
        coordinator = connect()
    except SettingsError:
        return None
    return None if coordinator.settings.disable else coordinator


def replay(recipe: Recipe, target: GPUTarget | None, waits: bool) -> str:
    """Offer a recorded choice, unless there is one. Always ``loaded``: nothing is compiled, and there is nothing to wait for.

    A choice of another GPU than `target`, or of a kernel, a compiler or configurations that have changed since, is a choice of
    something else, and is left alone. Raises what importing raises, and KeyError or TypeError for what is no recipe.
    """
    coordinator, call = _coordinator(), recipe.call
    if coordinator is None or target is None or str(target) != recipe.target:
        return "loaded"
    autotuner = _resolve(recipe.module, recipe.qualname)
    if autotuner is None:
        return "loaded"
    try:
        key = _key_of(autotuner, call, target)
    except KeyFactorError:
        return "loaded"
    content = call["choice"]
    is_of_now = key is not None and key.digest == call["digest"] and triton_choice.chosen_in(content) in call["configs"]
    if key is not None and is_of_now and coordinator.choice(key) is None:
        coordinator.offer(key, content, recipe.seconds, recipe.target)
    return "loaded"


def _key_of(autotuner: Autotuner, call: Any, target: GPUTarget) -> CacheKey | None:
    """The key that a recorded call has now, on the device model that it was recorded on, which need not be here."""
    if not {choice_key.config_digest(config) for config in autotuner.configs} >= set(call["configs"]):
        return None  # or pruning made them up, and only a call can tell
    kernel = choice_key.kernel_factors(autotuner, TritonTarget(target.backend, target.arch, target.warp_size))
    key = choice_key.choice_key(kernel, call["call"], call["configs"], _function_of(autotuner).__name__)
    return key.with_factors(target=target, device_model=call["model"])


# The hook.


def hook() -> None:
    """Share the choices of every autotuner of this process, also of those that exist already. Idempotent."""
    run = inspect.unwrap(Autotuner.run)
    if hasattr(Autotuner.__init__, "__kcoord_stock__") or not {"self", "kwargs", "key"} <= set(_names(run.__code__)):
        return
    _run_code.append(run.__code__)
    inner = [code for code in run.__code__.co_consts if isinstance(code, CodeType)]
    _bench_code.extend(code for code in inner if {"self", "kwargs", "timings"} <= set(_names(code)))
    Autotuner.__init__ = _watching(Autotuner.__init__)
    for autotuner in _existing(Autotuner):
        _watch(autotuner)


def _names(code: CodeType) -> Iterator[str]:
    """The variables of a function, those too that it shares with one around it or inside it."""
    yield from code.co_varnames
    yield from code.co_cellvars
    yield from code.co_freevars


def _watching(stock: Any) -> Any:
    @functools.wraps(stock)
    def __init__(self: Autotuner, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        _watch(self)

    __init__.__kcoord_stock__ = stock  # type: ignore[attr-defined]
    return __init__


@fails_open(lambda autotuner: None)
def _watch(autotuner: Autotuner) -> None:
    """Not one whose class keeps its choices in something else."""
    if type(vars(autotuner).get("cache")) is dict:
        autotuner.cache = _Choices(autotuner.cache)


def _existing(kind: type) -> Iterator[Any]:
    """The objects of `kind` and of its subclasses: each refers to its class. 10 ms in a process with torch."""
    for found in gc.get_referrers(kind):
        if type(found) is kind:
            yield found
        elif isinstance(found, type) and issubclass(found, kind) and found is not kind:
            yield from _existing(found)
