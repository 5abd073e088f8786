"""Inductor's run-time tuning: the first rank that has measured decides for later jobs and for other nodes.

A kernel with several configurations is measured when it is launched for the first time. The choices of all kernels of one
generated module are one choice of ours: looked up at the first launch, offered once all of them are made, by a thread of its own.
So ranks that start together each measure, as without kcoord, and nobody waits. Torch keeps the choices in its own cache, too.

The first call of a compiled model runs under a dispatch mode of torch's that looks for faults of custom operators. Measuring
under it takes three times as long and shows nothing: it is lifted meanwhile.

Not shared: choices for kernels that the user wrote, which may wait for other ranks.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import msgpack

from kcoord.backends.fail_open import coordinator_in_use, fails_open
from kcoord.keys.cache_key import CacheKey
from kcoord.keys.device import Scope, current_device
from kcoord.rank.coordinator import Coordinator

_FORMAT = 1

Choice = Mapping[str, Any]
"""A configuration as data: ``kwargs`` (block sizes by name), ``num_warps``, ``num_stages``."""


class _Module:
    """A generated module, and the choices for its kernels: those that are made, by `_name`, and the names that are `wanted`."""

    def __init__(self, name: str, chosen: Mapping[str, Choice], wanted: Collection[str], compiler: str) -> None:
        self._name, self._wanted, self._compiler = name, frozenset(wanted), compiler
        self._lock = threading.Lock()  # protects the two below
        self._found: Mapping[str, Choice] | None = None
        self._chosen = dict(chosen)
        self._begun = time.perf_counter()

    def known(self, tuner: Any) -> Choice:
        """The choice that another process made for this kernel; empty if there is none."""
        with self._lock:
            if self._found is None:
                coordinator = coordinator_in_use()
                content = coordinator.choice(self._key()) if coordinator is not None else None
                self._found, self._begun = _read(content), time.perf_counter()
            return self._found.get(_name(tuner), {})

    def choose(self, tuner: Any, config: Any) -> None:
        """This rank has measured, and launches `config`."""
        with self._lock:
            self._chosen[_name(tuner)] = _described(config)
            if not self._chosen.keys() >= self._wanted:
                return
            chosen = dict(self._chosen)
        coordinator, seconds = coordinator_in_use(), time.perf_counter() - self._begun
        if coordinator is not None:
            content = msgpack.packb({"format": _FORMAT, "configs": chosen})
            arguments = (coordinator, self._key(), content, seconds, str(current_device()))
            threading.Thread(target=_offer, args=arguments, name="kcoord-choices", daemon=True).start()

    def _key(self) -> CacheKey:
        from torch._inductor.codecache import torch_key
        from torch.compiler import config

        key = CacheKey.of(
            "inductor-autotune",
            self._name[:13],
            format=_FORMAT,
            module=self._name,  # a hash of its source, which holds the kernels
            tag=config.cache_key_tag,
            torch=torch_key().hex(),
            compiler=self._compiler,
        )
        return key.on(current_device(), Scope.MODEL)


@fails_open(lambda *arguments: None)
def _offer(coordinator: Coordinator, key: CacheKey, content: bytes, seconds: float, device: str) -> None:
    coordinator.offer(key, content, seconds, device)


def _read(content: bytes | None) -> dict[str, Choice]:
    """Choices by kernel. Other ranks' content is untrusted."""
    try:
        document = msgpack.unpackb(content) if content is not None else None
    except (ValueError, msgpack.exceptions.UnpackException):
        return {}
    found = document.get("configs") if isinstance(document, dict) and document.get("format") == _FORMAT else None
    return {name: each for name, each in found.items() if isinstance(each, dict)} if isinstance(found, dict) else {}


def _described(config: Any) -> dict[str, Any]:
    return {"kwargs": dict(config.kwargs), "num_warps": config.num_warps, "num_stages": config.num_stages}


def _name(tuner: Any) -> str:
    return f"{tuner.fn.__name__}-{Path(tuner.filename).name}"


# The kernels of a module.

_modules: weakref.WeakKeyDictionary[Any, _Module] = weakref.WeakKeyDictionary()  # by kernel


def kernels_ready(native: Callable[..., None], compiles: Any, scope: dict[str, Any]) -> None:
    """As ``AsyncCompile.wait``, which a generated module ends with. `scope`: the module's variables, its kernels among them."""
    native(compiles, scope)
    _meet(scope)


@fails_open(lambda scope: None)
def _meet(scope: dict[str, Any]) -> None:
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    kernels = [each for each in scope.values() if isinstance(each, CachingAutotuner) and each.filename]
    kernels = [each for each in kernels if each.launchers and not _is_users(each)]
    wanted = [each for each in kernels if len(each.launchers) > 1 or _descends(each)]
    if wanted and scope.get("__file__"):
        chosen = {_name(each): _described(each.launchers[0].config) for each in kernels if each not in wanted}
        compiler = str(wanted[0].inductor_meta.get("backend_hash"))
        module = _Module(Path(scope["__file__"]).stem, chosen, {_name(each) for each in wanted}, compiler)
        _modules.update(dict.fromkeys(wanted, module))


def _is_users(tuner: Any) -> bool:
    return bool(getattr(tuner, "custom_kernel", False)) or getattr(tuner.heuristic_type, "name", "") == "USER_AUTOTUNE"


def _descends(tuner: Any) -> bool:
    return bool(tuner.inductor_meta.get("coordinate_descent_tuning"))


@fails_open(lambda tuner: {})
def _known(tuner: Any) -> Choice:
    module = _modules.get(tuner)
    return {} if module is None else module.known(tuner)


@fails_open(lambda tuner, config: None)
def _choose(tuner: Any, config: Any) -> None:
    module = _modules.get(tuner)
    if module is not None:
        module.choose(tuner, config)


def _no_dispatch_modes() -> contextlib.AbstractContextManager[object]:
    from torch.utils import _python_dispatch

    disable = getattr(_python_dispatch, "_disable_current_modes", contextlib.nullcontext)
    return disable()


# Among configurations that are compiled already.


def to_one_config(native: Callable[..., None], tuner: Any, *args: Any, **kwargs: Any) -> None:
    """As ``CachingAutotuner.autotune_to_one_config``, which launches the fastest of the measurements that it is given."""
    tuner.benchmark_all_configs = functools.partial(_measurements, tuner)
    try:
        native(tuner, *args, **kwargs)
    finally:
        vars(tuner).pop("benchmark_all_configs", None)  # another thread may have launched it, too


def _measurements(tuner: Any, *args: Any, **kwargs: Any) -> dict[Any, float]:
    """Milliseconds by launcher; a choice that is known is the only one."""
    choice = _known(tuner)
    if choice:
        chosen = next((each for each in tuner.launchers if _described(each.config) == choice), None)
        if chosen is None and _descends(tuner):
            chosen = tuner.launchers[0]  # `by_descent` goes on
        if chosen is not None:
            return {chosen: 0.0}
    with _no_dispatch_modes():
        timings: dict[Any, float] = type(tuner).benchmark_all_configs(tuner, *args, **kwargs)
    best = min(timings, key=lambda launcher: timings[launcher])
    if math.isfinite(timings[best]) and not _descends(tuner):
        _choose(tuner, best.config)
    return timings


# By coordinate descent, which compiles as it goes.


def by_descent(native: Callable[..., Any], tuner: Any, launcher: Any, *args: Any, **kwargs: Any) -> Any:
    """As ``CachingAutotuner._coordinate_descent_tuning``."""
    own = tuner.coordesc_tuner
    tuner.coordesc_tuner = _Descent(tuner, own)
    try:
        return native(tuner, launcher, *args, **kwargs)
    finally:
        tuner.coordesc_tuner = own


class _Descent:
    """The coordinate descent of one launch, in place of torch's."""

    def __init__(self, tuner: Any, native: Any) -> None:
        self._tuner, self._native = tuner, native

    def autotune(self, measure: Callable[[Any], float], baseline: Any, timing: float | None = None) -> Any:
        """The configuration to launch; torch compiles it if it must."""
        chosen = _config_of(_known(self._tuner), baseline)
        if chosen is not None:
            return chosen
        with _no_dispatch_modes():
            best = self._native.autotune(measure, baseline, timing)
        _choose(self._tuner, best)
        return best

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)


@fails_open(lambda choice, baseline: None)
def _config_of(choice: Choice, baseline: Any) -> Any | None:
    """`baseline` with the chosen numbers; None if `choice` is none of its kind."""
    mine, sizes = _described(baseline), choice.get("kwargs")
    if not isinstance(sizes, dict) or choice.keys() != mine.keys() or sizes.keys() != mine["kwargs"].keys():
        return None
    numbers = [(choice[name], mine[name]) for name in ("num_warps", "num_stages")]
    numbers += [(sizes[name], mine["kwargs"][name]) for name in sizes]
    if not all(theirs == own or (type(theirs) is type(own) is int and theirs > 0) for theirs, own in numbers):
        return None
    found = copy.deepcopy(baseline)
    found.kwargs.update(sizes)
    found.num_warps, found.num_stages = choice["num_warps"], choice["num_stages"]
    return found


# Torch's own cache of choices.


def in_our_cache(native: Callable[..., None], cache: Any, *args: Any, **kwargs: Any) -> None:
    """As the methods of ``AutotuneCache`` that set its file, which an entry names where its lead kept it.

    On another node this user may not be allowed to make that directory, or to read it, and torch would raise that to the job.
    """
    native(cache, *args, **kwargs)
    _bring_home(cache)


@fails_open(lambda cache: None)
def _bring_home(cache: Any) -> None:
    from torch._inductor.runtime.runtime_utils import cache_dir

    if cache.local_cache is None:
        return
    store, name = cache.local_cache
    if not Path(name).is_relative_to(cache_dir()):
        cache.local_cache = (store, str(Path(cache_dir(), *Path(name).parts[-2:])))
