"""Inductor's run-time tuning: the first rank that has measured decides for later jobs and for other nodes.

A kernel with several configurations is measured when it is launched for the first time. The choices of all kernels of one
generated module are one choice of ours, also for the module as it is moved to other GPUs of the model: looked up at the first
launch, offered once all of them are made, by a thread of its own. So ranks that start together each measure, as without kcoord,
and nobody waits. Torch keeps the choices in its own cache, too.

The first call of a compiled model runs under a dispatch mode of torch's that looks for faults of custom operators. Measuring
under it takes three times as long and shows nothing: it is lifted meanwhile.

Not shared: choices for kernels that the user wrote. Measuring them may run collectives.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgpack

from kcoord.backends.fail_open import coordinator_in_use, fails_open
from kcoord.backends.inductor import moving
from kcoord.interruption import let_through
from kcoord.keys.cache_key import CacheKey
from kcoord.keys.device import Scope, current_device
from kcoord.rank.coordinator import Coordinator

_FORMAT = 2

Choice = Mapping[str, Any]
"""A configuration as data: ``kwargs`` (block sizes by name), ``num_warps``, ``num_stages``."""


class _Module:
    """A generated module, and the choices for its kernels, by the name that each has in it: those made, and those `wanted`.

    `content`: a hash of its source, which holds the kernels, without the index of the GPU.
    """

    def __init__(self, content: str, chosen: Mapping[str, Choice], wanted: frozenset[str], compiler: str) -> None:
        self._content, self._wanted, self._compiler = content, wanted, compiler
        self._lock = threading.RLock()  # protects the two below; a signal's handler may launch a kernel meanwhile
        self._found: Mapping[str, Choice] | None = None
        self._chosen = dict(chosen)
        self._begun = time.perf_counter()

    def known(self, name: str) -> Choice:
        """The choice that another process made for this kernel; empty if there is none."""
        with self._lock:
            if self._found is None:
                coordinator = coordinator_in_use()
                content = coordinator.choices.get(self._key()) if coordinator is not None else None
                self._found, self._begun = _read(content), time.perf_counter()
            return self._found.get(name, {})

    def choose(self, name: str, config: Any) -> None:
        """This rank has measured, and launches `config`."""
        with self._lock:
            self._chosen[name] = _described(config)
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
            self._content[:13],
            format=_FORMAT,
            module=self._content,
            tag=config.cache_key_tag,
            torch=torch_key().hex(),
            compiler=self._compiler,
        )
        return key.on(current_device(), Scope.MODEL)


@fails_open(lambda *arguments: None)
def _offer(coordinator: Coordinator, key: CacheKey, content: bytes, seconds: float, device: str) -> None:
    coordinator.choices.offer(key, content, seconds, device)


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


# The kernels of a module.

_modules: weakref.WeakKeyDictionary[Any, list[tuple[_Module, str]]] = weakref.WeakKeyDictionary()
"""By kernel: the modules that have it, mostly one, and its name there."""


def kernels_ready(native: Any, compiles: Any, scope: dict[str, Any], *args: Any, **kwargs: Any) -> None:
    """As ``AsyncCompile.wait``, which a generated module ends with. `scope`: the module's variables, its kernels among them."""
    native(compiles, scope, *args, **kwargs)
    _register(scope)


@fails_open(lambda scope: None)
def _register(scope: dict[str, Any]) -> None:
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    kernels = {name: each for name, each in scope.items() if isinstance(each, CachingAutotuner) and each.launchers}
    kernels = {name: each for name, each in kernels.items() if not _is_users(each)}
    wanted = {name: each for name, each in kernels.items() if len(each.launchers) > 1 or _will_descend(each)}
    if wanted and scope.get("__file__"):
        chosen = {name: _described(each.launchers[0].config) for name, each in kernels.items() if name not in wanted}
        compiler = str(next(iter(wanted.values())).inductor_meta.get("backend_hash"))
        module = _Module(_content(Path(scope["__file__"])), chosen, frozenset(wanted), compiler)
        for name, each in wanted.items():
            _modules.setdefault(each, []).append((module, name))


def _content(file: Path) -> str:
    """A hash of the module's source. Torch names its file by one in which the index of the GPU counts."""
    try:
        return hashlib.sha256(moving.without_index(file.read_text("utf-8")).encode()).hexdigest()
    except (OSError, ValueError) as error:  # it was removed
        let_through(error)
        return file.stem


def _is_users(tuner: Any) -> bool:
    return bool(getattr(tuner, "custom_kernel", False)) or _heuristic(tuner) == "USER_AUTOTUNE"


def _heuristic(tuner: Any) -> str:
    return getattr(tuner.heuristic_type, "name", "")


def _descends(tuner: Any) -> bool:
    """True if torch then calls `descended`, which descends from the fastest configuration, or leaves it."""
    return bool(tuner.inductor_meta.get("coordinate_descent_tuning"))


def _will_descend(tuner: Any) -> bool:
    return _descends(tuner) and not getattr(tuner.launchers[0].config, "found_by_coordesc", False)


@fails_open(lambda tuner: {})
def _known(tuner: Any) -> Choice:
    return next(filter(None, (module.known(name) for module, name in _modules.get(tuner, ()))), {})


@fails_open(lambda tuner, config: None)
def _choose(tuner: Any, config: Any) -> None:
    for module, name in _modules.get(tuner, ()):
        module.choose(name, config)


# The launch that measures.


class _Under(threading.local):
    tuner: Any = None


_under = _Under()


@contextlib.contextmanager
def _tuning(tuner: Any) -> Iterator[None]:
    before, _under.tuner = _under.tuner, tuner
    try:
        yield
    finally:
        _under.tuner = before


def fastest(native: Callable[..., Any], tuner: Any, *args: Any, **kwargs: Any) -> Any:
    """As ``CachingAutotuner.autotune_to_one_config``, which calls `measurements`."""
    with _tuning(tuner):
        return native(tuner, *args, **kwargs)


def descended(native: Callable[..., Any], tuner: Any, *args: Any, **kwargs: Any) -> Any:
    """As ``CachingAutotuner.coordinate_descent_tuning``, which calls `descent` for most kinds of kernels."""
    if tuner not in _modules:  # torch asks again at each launch of some kernels
        return native(tuner, *args, **kwargs)
    with _tuning(tuner):
        launcher = native(tuner, *args, **kwargs)
    if not _known(tuner):
        _choose(tuner, launcher.config)
    _modules.pop(tuner, None)
    return launcher


def measurements(native: Callable[..., dict[Any, float]], tuner: Any, *args: Any, **kwargs: Any) -> dict[Any, float]:
    """As ``CachingAutotuner.benchmark_all_configs``: milliseconds by launcher. A choice that is known is the only one."""
    if _under.tuner is not tuner:
        return native(tuner, *args, **kwargs)
    chosen = _launcher(tuner)
    if chosen is not None:
        return {chosen: 0.0}
    with _no_dispatch_modes():
        timings = native(tuner, *args, **kwargs)
    _measured(tuner, timings)
    return timings


@fails_open(lambda tuner: None)
def _launcher(tuner: Any) -> Any | None:
    """The launcher that another process chose; None if there is none."""
    choice = _known(tuner)
    chosen = next((each for each in tuner.launchers if choice == _described(each.config)), None)
    return tuner.launchers[0] if chosen is None and choice and _descends(tuner) else chosen  # `descent` goes on


@fails_open(lambda tuner, timings: None)
def _measured(tuner: Any, timings: Mapping[Any, float]) -> None:
    best = min(timings, key=lambda launcher: timings[launcher])
    if math.isfinite(timings[best]) and not _descends(tuner):
        _choose(tuner, best.config)


def descent(native: Callable[..., Any], torchs: Any, func: Any, baseline_config: Any, *args: Any, **kwargs: Any) -> Any:
    """As ``CoordescTuner.autotune``: the configuration to launch. A known one is tried, by `func`, before it is used."""
    tuner = _under.tuner
    chosen = None if tuner is None else _config_of(_known(tuner), baseline_config)
    with _no_dispatch_modes():
        if chosen is not None and _runs(func, chosen):
            return chosen
        return native(torchs, func, baseline_config, *args, **kwargs)


def _runs(measure: Callable[[Any], float], config: Any) -> bool:
    try:
        return math.isfinite(measure(config))
    except Exception as error:  # noqa: BLE001 - too large for this GPU, or no configuration at all: torch, too, catches all
        let_through(error)
        return False


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
    blocks = [size for name, size in sizes.items() if name.endswith("BLOCK") and size != mine["kwargs"][name]]
    if any(number & (number - 1) for number in (*blocks, choice["num_warps"])):
        return None  # Triton's sizes are powers of two
    from torch._inductor.runtime.triton_heuristics import check_max_block

    try:
        check_max_block(sizes)
    except AssertionError:
        return None  # masks may have been left out for what torch never chooses
    found = copy.deepcopy(baseline)
    found.kwargs.update(sizes)
    found.num_warps, found.num_stages = choice["num_warps"], choice["num_stages"]
    return found


def _no_dispatch_modes() -> contextlib.AbstractContextManager[object]:
    from torch.utils._python_dispatch import _disable_current_modes

    disabled: contextlib.AbstractContextManager[object] = _disable_current_modes()
    return disabled


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
