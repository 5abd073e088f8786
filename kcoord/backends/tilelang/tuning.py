"""TileLang's autotuner: the first rank that has measured decides for all; nobody waits for it.

Ranks that start together each measure, as without kcoord, kernels that they compile once. In the end they take the choice that
was offered first, and later jobs take it without measuring. The key holds the function by content, helpers and globals included,
which TileLang's own key leaves out; TileLang's own files are kept by this key, too.

Not shared: choices with a callback that supplies inputs or checks results, as TileLang does not keep them either.
"""

from __future__ import annotations

import functools
import inspect
import json
import time
from collections.abc import Mapping
from typing import Any

import msgpack

from kcoord.backends.fail_open import coordinator_in_use, fails_open, notices
from kcoord.errors import KeyFactorError
from kcoord.interruption import let_through
from kcoord.keys.arguments.signature import register_signature
from kcoord.keys.cache_key import CacheKey
from kcoord.keys.device import Scope, current_device
from kcoord.keys.environment import TOOLCHAIN_VARIABLES, Environment
from kcoord.keys.function.walk import content_of
from kcoord.keys.packages import identity_of

_FORMAT = 1
_PASS_CONFIGS = "__pass_configs__"  # TileLang's name for what it passes to the compile beside the arguments
_environment = Environment(TOOLCHAIN_VARIABLES)


class _Key(str):
    """The key that TileLang keeps the choice by, and ours, of which it is the digest."""

    key: CacheKey


def hook(tuner: Any) -> None:
    """Hook the class `tuner`, TileLang's ``AutoTuner``."""
    register_signature("tvm_ffi._dtype.dtype", str)  # the module's ``T.float32``
    native_key, native_load, native_run = tuner.generate_cache_key, tuner._load_result_from_disk, tuner.run

    @functools.wraps(native_key)
    def generate_cache_key(self: Any, *args: Any, **kwargs: Any) -> Any:
        key = native_key(self, *args, **kwargs)
        self._kcoord_key = found = None if key is None else _keyed(self, key)
        self._kcoord_result = _shared(self, found)
        return found or key

    @functools.wraps(native_load)
    def load_result(self: Any, *args: Any, **kwargs: Any) -> Any:
        """TileLang calls it under a lock of all tuners: it must not wait."""
        return vars(self).pop("_kcoord_result", None) or native_load(self, *args, **kwargs)

    @functools.wraps(native_run)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        result = native_run(self, *args, **kwargs)
        key = vars(self).pop("_kcoord_key", None)
        return result if key is None else _agreed(self, key, result, time.perf_counter() - begun)

    tuner.generate_cache_key, tuner._load_result_from_disk, tuner.run = generate_cache_key, load_result, run


@fails_open(lambda *arguments: None)
def _keyed(tuner: Any, native: str) -> _Key | None:
    """None if kcoord is off, or the function has no key: then the choice is kept by TileLang's."""
    if coordinator_in_use() is None:
        return None
    function = getattr(tuner.fn, "orig_func", tuner.fn)
    try:
        content = content_of(function).factors()
    except KeyFactorError as error:
        notices.tell(f"{function.__qualname__} is tuned by each rank for itself: {error}")
        return None
    key = CacheKey.of(
        "tilelang-autotune",
        function.__qualname__,
        format=_FORMAT,
        native=native,  # the arguments, the configurations, how they are compiled and measured
        function=content,
        env=_environment.read(),
        packages=[identity_of("tilelang")],
    )
    key = key.on(current_device(), Scope.MODEL)
    found = _Key(key.digest)
    found.key = key
    return found


@fails_open(lambda *arguments: None)
def _shared(tuner: Any, key: _Key | None) -> Any:
    """The result of the choice that was made before; None if there is none, or if TileLang is not to ask for one."""
    from tilelang.env import env

    asks = env.is_cache_enabled() and not env.is_autotune_cache_disabled()
    coordinator = coordinator_in_use()
    if key is None or not asks or key in tuner._memory_cache or coordinator is None:
        return None
    content = coordinator.choices.get(key.key)
    return None if content is None else _result(tuner, content)


@fails_open(lambda tuner, key, result, seconds: result)
def _agreed(tuner: Any, key: _Key, result: Any, seconds: float) -> Any:
    """The result of the choice that holds in the job: this rank's or an earlier one."""
    coordinator = coordinator_in_use()
    if coordinator is None or result.config is None:
        return result
    mine = _packed(result)
    decided = coordinator.choices.offer(key.key, mine, seconds, str(current_device()))
    if decided is None or _config(tuner, _unpacked(decided)) == result.config:
        return result
    return _result(tuner, decided) or result


def _packed(result: Any) -> bytes:
    document = {"format": _FORMAT, "config": _text(result.config), "latency": result.latency, "ref": result.ref_latency}
    return bytes(msgpack.packb(document))


def _unpacked(content: bytes) -> Mapping[str, Any]:
    """Empty if `content` is no choice. Other ranks' content is untrusted."""
    try:
        document = msgpack.unpackb(content)
    except (ValueError, msgpack.exceptions.UnpackException):
        return {}
    is_choice = isinstance(document, dict) and document.get("format") == _FORMAT
    figures = (document.get("latency"), document.get("ref")) if is_choice else ()
    return document if is_choice and all(each is None or type(each) is float for each in figures) else {}


def _config(tuner: Any, document: Mapping[str, Any]) -> Any:
    """The configuration of the tuner that the choice names; None if it has none of this name."""
    return next((dict(config) for config in tuner.configs if _text(config) == document.get("config")), None)


def _text(config: Any) -> str:
    return json.dumps(config, sort_keys=True, default=str)


def _result(tuner: Any, content: bytes) -> Any:
    """None if the choice is none of the tuner's, or its kernel does not compile here: then this rank measures."""
    from tilelang.autotuner.param import AutotuneResult

    document = _unpacked(content)
    config = _config(tuner, document)
    if config is None:
        return None
    compile, _ = tuner._ensure_jit_functions()
    arguments = {name: config[name] for name in inspect.signature(tuner.fn).parameters if name in config}
    try:
        kernel = compile(**arguments, **({_PASS_CONFIGS: configs} if (configs := config.get("pass_configs")) else {}))
    except Exception as error:  # noqa: BLE001 - a compiler may raise anything
        let_through(error)
        notices.tell(f"the shared choice {config} does not compile here: {error}; this rank tunes for itself")
        return None
    figures = {"latency": document["latency"], "config": config, "ref_latency": document["ref"]}
    kernel = kernel.update_tuner_result(**figures)
    return AutotuneResult(**figures, libcode=kernel.get_kernel_source(), func=kernel.prim_func, kernel=kernel)
