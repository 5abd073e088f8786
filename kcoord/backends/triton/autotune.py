"""Triton's autotuner: its choices are shared. The first rank that has tuned decides, and nobody waits.

A rank that finds no choice tunes, and offers its choice; the first offer wins, and all ranks launch it. So ranks may tune at
once, and still run the same configuration in the end. Tuning holds no lease: it launches kernels.

Ranks of a node that tune at once divide the measurements: each measures a configuration that no other has measured, and takes
the others' results. Their key is the same, so their GPUs are of one model, and no rank waits for another while it measures.

The hook is `Autotuner.check_disk_cache`, where Triton looks for a choice before it measures, once for each tuning key. Triton
always calls it (`cache_results` reads True), and it goes on to Triton's own cache if the user wants that. A launch whose choice
is known costs nothing more. A subclass with a `check_disk_cache` of its own is left alone.

A choice is checked before it is used: it must be one of the configurations that pruning left *here*, and compile and load *here*.
A rank on whose GPU it does not run tunes, and keeps what it finds.

Not guaranteed: that ranks agree without an agent, or nodes without a common store; each then keeps its own choice, as without
kcoord. So does a rank that was measuring when its first compile brought kcoord, by Triton's cache manager alone. Choices without
a key (`kcoord.backends.triton.choice`) are not shared.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from triton import knobs
from triton.compiler.errors import CompileTimeAssertionFailure
from triton.runtime.autotuner import Autotuner
from triton.runtime.driver import driver
from triton.runtime.errors import OutOfResources, PTXASError

from kcoord.backends.fail_open import coordinator_in_use, fails_open, notices
from kcoord.backends.reliances import Part
from kcoord.backends.triton import choice
from kcoord.backends.triton.measuring import Measuring
from kcoord.backends.triton.recipes import recipes_of
from kcoord.backends.triton.request import purpose
from kcoord.errors import KeyFactorError
from kcoord.keys.cache_key import CacheKey
from kcoord.keys.device import DeviceKey, GPUTarget, Scope, scope_factors
from kcoord.packs.recipe import TRIED, Recipe
from kcoord.rank.coordinator import Coordinator
from kcoord.ranks import ranks_of

TUNING = Part("triton", "triton", "tuning", {
    "runtime.autotuner:Autotuner.check_disk_cache": "self tuning_key configs bench_fn",
    "runtime.autotuner:Autotuner._bench": "self config=",
})  # fmt: skip


@dataclass
class _Tuning:
    """The choice that an autotuner has to make for one tuning key. `configs` are those that pruning left."""

    coordinator: Coordinator
    autotuner: Autotuner
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    key: CacheKey
    configs: Sequence[Any]
    digests: list[str]
    device: DeviceKey
    begun: float = field(default_factory=time.perf_counter)
    listed: bool = False
    """True if the compiles that measuring may begin are known, as recipes."""

    def __post_init__(self) -> None:
        digest = choice.measured_as(self.key, choice.named(self.autotuner, self.args) | self.kwargs)
        self.measuring = Measuring(self.coordinator.choices, digest, self.configs, self.runs)

    @fails_open(lambda self: None)
    def announce(self) -> None:
        """Let the node's pool compile at once all configurations, which this rank is about to compile one by one."""
        pool, function = self.coordinator.pool, self.autotuner.fn
        hooks = [*(config.pre_hook for config in self.configs), *getattr(function, "pre_run_hooks", ())]
        if any(hooks):  # the user's may wait for other ranks
            return
        if pool.takes_announcements or self.coordinator.settings.recorded_as is not None:
            recipes = recipes_of([functools.partial(self.launch, config) for config in self.configs])
            listed = _listed.setdefault(self.autotuner, {})
            for recipe in recipes:
                listed.setdefault(self.configs[recipe.order - TRIED], {})[recipe.digest] = recipe
            self.listed = True
            pool.announce(recipes)

    @fails_open(lambda self: None)
    def find(self) -> Any | None:
        """The configuration that the first rank chose; None if there is none, or it cannot be used here."""
        content = self.coordinator.choices.get(self.key)
        chosen = self._use(content, None) if content is not None else None
        if chosen is not None and content is not None:
            timings = choice.timings_in(content, len(self.configs))
            # as Triton's own cache on disk leaves them; Triton's listener must find something there
            self.autotuner.configs_timings = dict(zip(self.configs, timings, strict=True)) if timings else {}
        return chosen

    @fails_open(lambda self, chosen, timings: chosen)
    def settle(self, chosen: Any, timings: dict[Any, Any] | None) -> Any:
        """Offer `chosen`, this rank's choice; returns the configuration to launch: the first offer, if it runs here."""
        took = time.perf_counter() - self.begun
        if timings is not None and not choice.is_finite(timings.get(chosen)):
            return chosen  # none of them runs here, and the launch is to say so
        mine = choice.config_digest(chosen)
        if mine not in self.digests:
            return chosen
        measured = None if timings is None else [timings.get(config) for config in self.configs]
        content = choice.pack(mine, chosen, measured)
        decided = self.coordinator.choices.offer(self.key, content, took, str(self.device))
        winner = self._use(decided, self.measuring.own) if decided is not None and decided != content else None
        winner = chosen if winner is None else winner
        self._record(winner)
        return winner

    def _record(self, winner: Any) -> None:
        """The job will ask for this kernel again, and not for the others."""
        for recipe in _listed.get(self.autotuner, {}).get(winner, {}).values():
            self.coordinator.record(recipe.measured(0.0, time.monotonic_ns()))

    def bound_with(self, config: Any) -> dict[str, Any]:
        """The arguments of the launch by name, as Triton gives them to hooks."""
        return {**choice.named(self.autotuner, self.args), **self.kwargs, **config.all_kwargs()}

    def _use(self, content: bytes, timings: Mapping[Any, Any] | None) -> Any | None:
        """The configuration of `content` if it runs here, by its measurement, or else by its compile; None if not."""
        digest = choice.chosen_in(content)
        if digest not in self.digests:
            notices.tell(
                f"{self.key.name}: the shared choice is none of its configurations; this rank tunes for itself"
            )
            return None
        config = self.configs[self.digests.index(digest)]
        known = None if timings is None else timings.get(config)
        if not (self.runs(config) if known is None else choice.is_finite(known)):
            notices.tell(f"{self.key.name}: the shared choice does not run on this GPU; this rank tunes for itself")
            return None
        return config

    def runs(self, config: Any) -> bool:
        """True if `config` compiles for this very call, and loads. The launch needs the kernel anyway, and finds it in memory."""
        try:
            kernel = self.launch(config)
            if not hasattr(kernel, "_init_handles"):
                return True  # the user's hook has compiled it
            kernel._init_handles()
        except (OutOfResources, CompileTimeAssertionFailure, PTXASError):  # as Triton does when it measures
            return False
        return bool(kernel.metadata.num_warps * self.device.target.warp_size <= kernel.n_max_threads)

    def launch(self, config: Any) -> Any:
        """The kernel of `config` for this very call. Nothing is launched."""
        if config.pre_hook is not None:  # as before each launch: the compile may depend on its effect
            config.pre_hook(self.bound_with(config))
        return self.autotuner.fn.run(*self.args, **{**self.kwargs, **config.all_kwargs(), "warmup": True})


# The hook.


def hook() -> None:
    """Share the choices of every autotuner of this process, also of those that exist already. Idempotent."""
    stock = getattr(Autotuner, "check_disk_cache", None)
    if hasattr(stock, "__kcoord_stock__") or not TUNING.holds():
        return
    Autotuner.check_disk_cache = _sharing(stock)
    Autotuner.cache_results = property(_asks, _set_cache_results)
    Autotuner._bench = _measuring(Autotuner._bench)


def _asks(autotuner: Autotuner) -> bool:
    """The value of `cache_results`: True if Triton is to call `check_disk_cache` before `autotuner` measures."""
    # neither a subclass's own, nor a later replacement
    ours = hasattr(type(autotuner).check_disk_cache, "__kcoord_stock__")
    return _wants_disk_cache(autotuner) or (ours and not knobs.runtime.interpret)


def _set_cache_results(autotuner: Autotuner, value: bool) -> None:
    vars(autotuner)["cache_results"] = value  # where copies and pickles find it


def _wants_disk_cache(autotuner: Autotuner) -> bool:
    return bool(vars(autotuner).get("cache_results"))


@fails_open(lambda autotuner: True)
def _is_alone(autotuner: Autotuner) -> bool:
    """True if a rank may take a choice from Triton's cache on its own disk: no rank that measures waits for it."""
    if ranks_of().world == 1 or not choice.waits(autotuner):
        return True
    notices.tell(f"{autotuner.base_fn.__name__}: Triton's own cache of choices is off: ranks have to tune it in step")
    return False


def _sharing(stock: Any) -> Any:
    @functools.wraps(stock)
    def check_disk_cache(
        self: Autotuner, tuning_key: Any, configs: Sequence[Any], bench_fn: Any, *args: Any, **kwargs: Any
    ) -> bool:
        tuning = _tuning(self, tuning_key, configs, bench_fn)
        chosen = None if tuning is None else tuning.find()
        if chosen is not None:
            self.cache[tuning_key] = chosen
            return True
        if tuning is not None:
            tuning.announce()
        before = vars(self).get("configs_timings")
        found = False
        with _under(tuning):
            if _wants_disk_cache(self) and (tuning is not None or _is_alone(self)):
                found = bool(stock(self, tuning_key, configs, bench_fn, *args, **kwargs))
            else:
                bench_fn()
        if tuning is not None:
            timings = vars(self).get("configs_timings")
            _settle(tuning, tuning_key, timings if timings is not before else None)
        return found

    check_disk_cache.__kcoord_stock__ = stock  # type: ignore[attr-defined]
    return check_disk_cache


_listed: weakref.WeakKeyDictionary[Autotuner, dict[Any, dict[str, Recipe]]] = weakref.WeakKeyDictionary()
"""Recipes by configuration, of all calls that an autotuner was tuned for. A kernel in memory has no recipe listed again."""


class _Current(threading.local):
    tuning: _Tuning | None = None


_current = _Current()


@contextlib.contextmanager
def _under(tuning: _Tuning | None) -> Iterator[None]:
    """This thread measures for `tuning`: it tries the kernels that it compiles, and `_Tuning.settle` records the used one."""
    before, _current.tuning = _current.tuning, tuning
    try:
        with purpose.being(tries=tuning is not None and tuning.listed):
            yield
    finally:
        _current.tuning = before


def _measuring(stock: Any) -> Any:
    @functools.wraps(stock)
    def _bench(self: Autotuner, *args: Any, config: Any, **meta: Any) -> Any:
        tuning = _current.tuning
        if tuning is None or tuning.autotuner is not self or type(self)._bench is not _bench:
            return stock(self, *args, config=config, **meta)  # a subclass's `_bench` decides about one configuration
        return tuning.measuring.timing(config, lambda each: stock(self, *args, config=each, **meta))

    return _bench


@fails_open(lambda *arguments: None)
def _tuning(autotuner: Autotuner, key: Any, configs: Sequence[Any], bench_fn: Any) -> _Tuning | None:
    """None if the choice is not to be shared: there is none to make, nothing is launched, or it has no key.

    `bench_fn` is Triton's, made for the launch: it holds the launch's arguments, which no other thread's launch replaces.
    """
    code, cells = getattr(bench_fn, "__code__", None), getattr(bench_fn, "__closure__", None)
    if code is None or cells is None or not {"args", "kwargs"} <= set(code.co_freevars):
        return None
    bound = dict(zip(code.co_freevars, cells, strict=True))
    args, kwargs = bound["args"].cell_contents, bound["kwargs"].cell_contents
    coordinator = coordinator_in_use()
    if coordinator is None or knobs.runtime.interpret or kwargs.get("warmup") or len(configs) < 2:
        return None
    name = autotuner.base_fn.__name__
    try:
        pairs = [(choice.config_digest(config), config) for config in configs]
        pairs.sort(key=lambda pair: pair[0])  # by its configurations, in whatever order pruning leaves them
        digests, configs = [digest for digest, _ in pairs], [config for _, config in pairs]
        found = choice.choice_key(autotuner, key, args, kwargs, dict(zip(digests, configs, strict=True)))
    except KeyFactorError as error:
        notices.tell(f"{name} is tuned by each rank for itself: {error}")
        return None
    target = driver.active.get_current_target()
    device = DeviceKey(GPUTarget(target.backend, target.arch, target.warp_size), driver.active.get_current_device())
    scope = scope_factors(Scope.MODEL, device)
    found = found.with_factors(**scope).with_details(
        {"configs": [str(config)[: choice.LONGEST_TEXT] for config in configs]}
    )
    return _Tuning(coordinator, autotuner, args, kwargs, found, configs, digests, device)


def _settle(tuning: _Tuning, tuning_key: Any, timings: dict[Any, Any] | None) -> None:
    """Replace this rank's choice, which Triton has just stored, by the one that holds."""
    autotuner = tuning.autotuner
    if tuning_key not in autotuner.cache:
        return  # a subclass keeps it elsewhere
    mine = autotuner.cache[tuning_key]
    winner = tuning.settle(mine, timings if isinstance(timings, dict) else None)
    if winner is not mine:
        autotuner.cache[tuning_key] = winner
        if autotuner.user_defined_pre_hook:  # Triton has called it with this rank's own choice
            autotuner.pre_hook(tuning.bound_with(winner), reset_only=True)
