"""Triton's adapter: a cache manager that claims before it compiles, and publishes a kernel's files as one artifact.

Triton resolves ``TRITON_CACHE_MANAGER`` to `TritonCacheManager` and calls ``get_group``, then ``put`` for every stage, then
``put_group``; afterwards it reads the files back through the dictionary that it passed, which is why ``put_group`` edits
it. A kernel's artifact lies at ``$TRITON_CACHE_DIR/<key>/``, the layout that Triton and Inductor read themselves.

Triton never tells a cache manager that a compile *failed*: `kcoord.backends.abandoned` finds out.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import sys
import sysconfig
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import triton
from triton.runtime.cache import FileCacheManager

from kcoord.artifacts.local import Artifact
from kcoord.artifacts.manifest import HOME_PLACEHOLDER
from kcoord.backends import abandoned
from kcoord.backends.base import fails_open, notices
from kcoord.backends.triton import (
    inputs as triton_inputs,
)
from kcoord.backends.triton import (
    launchers as triton_launchers,
)
from kcoord.backends.triton import (
    own_key as triton_key,
)
from kcoord.backends.triton import (
    recipes as triton_recipes,
)
from kcoord.backends.triton.inputs import Inputs
from kcoord.errors import SettingsError
from kcoord.files.faults import (
    store_error,
)
from kcoord.interruption import let_through
from kcoord.keys.cache_key import CacheKey
from kcoord.keys.device import GPUTarget
from kcoord.rank.connect import connect
from kcoord.rank.coordinator import (
    Busy,
    Compilation,
    Coordinator,
    Request,
)
from kcoord.telemetry.counters import Counters

OLDEST = (3, 4)
_GROUP = "__grp__"


try:
    from triton import knobs
except ImportError:  # before 3.4, which `supported` leaves alone
    knobs = None

_MODULE = "triton-module"
_module_counters = Counters()
"""Triton's own C modules are no kernels of the job: a summary that counted them would contradict Triton's listener."""


def _forget_after_fork() -> None:
    global _module_counters
    _module_counters = Counters()


os.register_at_fork(after_in_child=_forget_after_fork)


class TritonCacheManager(FileCacheManager):  # type: ignore[misc]
    """One kernel's (or one file's) access to the cache, as Triton makes it for every compile."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        self._compilation: Compilation | None = None
        self._publishes = True
        self._inputs: list[Inputs] = []
        self._options: Any = None
        self._options_hash = ""
        self._compile_locals: Mapping[str, Any] | None = None
        self._coordinator = None if override or dump else _coordinator()
        if self._coordinator is None:
            name = triton_inputs.stock_name(key) if override or dump else key
            super().__init__(name, override=override, dump=dump)
            return
        # not the stock constructor: it makes an empty directory at the final name
        self._look_at(key)

    @fails_open(lambda self, filename: FileCacheManager.get_group(self, filename))
    def get_group(self, filename: str) -> dict[str, str] | None:
        """All of the kernel's files, or None: then the caller compiles, as the leader or because it must."""
        if self._coordinator is None:
            return cast("dict[str, str] | None", FileCacheManager.get_group(self, filename))
        frame = sys._getframe(2)  # Triton's compile: 0 is this function, 1 its guard
        compile_locals = frame.f_locals
        shared = self._has_all_inputs(compile_locals)
        home = Path(self.cache_dir)
        name = filename.removesuffix(".json")
        key = CacheKey.of("triton", name, triton_key=self.key)
        if not shared or not _may_be_shared(compile_locals):
            usable = shared and not knobs.compilation.always_compile
            artifact = self._coordinator.find(key, home, _target(compile_locals)) if usable else None
            if artifact is not None:
                return _group_of(artifact)
            self._compilation, self._publishes = self._coordinator.private(key, home), False
            abandoned.register(self._compilation, frame)
            return None
        replaying = triton_recipes.replaying
        asked = Request(
            key,
            home,
            _target_text(compile_locals),
            target=_target(compile_locals),
            explain=lambda: _details(compile_locals),
            meanwhile=lambda: triton_launchers.begin(compile_locals.get("src"), compile_locals.get("target")),
            loads=not replaying.active,
        )
        found = self._coordinator.request(asked) if replaying.waits else self._coordinator.attempt(asked)
        if isinstance(found, Busy):
            raise triton_recipes.Settled("busy")
        self._compile_locals = compile_locals if self._coordinator.settings.profile else None
        if isinstance(found, Artifact):
            self._record(found.manifest.compile_seconds)
            if replaying.active:
                raise triton_recipes.Settled("loaded")  # it will be read when it is used
            return _group_of(found)
        self._compilation = found
        abandoned.register(found, frame)
        return None

    def _has_all_inputs(self, compile_locals: Mapping[str, Any]) -> bool:
        """Whether all that this compile depends on is in `key`, which is made right if it was made before kcoord was there."""
        source, text = compile_locals.get("src"), compile_locals.get("key")
        if not isinstance(text, str):
            return False
        text = triton_inputs.true_text(text, source)
        inputs = triton_inputs.inputs_of_source(source)
        if text is None or any(each.problem for each in inputs):
            return False
        self._inputs, self._options = inputs, compile_locals.get("options")
        self._options_hash = self._options.hash() if self._options is not None else ""
        key = triton_inputs.base32(hashlib.sha256(text.encode()).hexdigest())
        if key != self.key:
            self._look_at(key)
        return True

    def _libraries_moved(self) -> bool:
        return self._options is not None and self._options.hash() != self._options_hash

    def _look_at(self, key: str) -> None:
        self.key = key
        self.cache_dir = os.path.join(knobs.cache.dir, key)  # noqa: PTH118 - a str, as the base class has it
        self.lock_path = os.path.join(self.cache_dir, "lock")  # noqa: PTH118

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        """Write one file; a file that is an artifact by itself is published at once."""
        compilation = self._compilation
        if compilation is None or self._coordinator is None:
            return str(FileCacheManager.put(self, data, filename, binary))
        content = data if isinstance(data, bytes) else str(data).encode()
        path = compilation.staging / filename
        try:
            path.write_bytes(content)
        except OSError as error:
            let_through(error)
            self._publishes = False
            notices.tell(f"{store_error(error, path.parent)}; the kernel stays with this process")
            path = self._coordinator.private_directory() / filename
            path.write_bytes(content)
            if compilation.key.backend == _MODULE:
                self._compilation = None
                compilation.keep()
                abandoned.unregister(compilation)
            return str(path)
        if compilation.key.backend == _MODULE:
            published = str(self._publish_module(compilation, filename))
            if triton_launchers.ahead.active:
                raise triton_launchers.Done  # it will be loaded when it is used
            return published
        return str(path)

    @fails_open(lambda self, filename, group: None)
    def put_group(self, filename: str, group: dict[str, str]) -> Any:
        """Publish the kernel. On return `group` names the published files: all ours, or all of the winner's."""
        compilation, self._compilation = self._compilation, None
        if compilation is None:
            return FileCacheManager.put_group(self, filename, group)
        try:
            moved_meanwhile = not all(each.hold() for each in self._inputs) or self._libraries_moved()
            if moved_meanwhile or not self._publishes or not all((compilation.staging / n).is_file() for n in group):
                compilation.keep()  # the whole group or nothing
                return None
            placeholder = HOME_PLACEHOLDER.decode()
            text = json.dumps({"child_paths": {n: f"{placeholder}/{n}" for n in sorted(group)}})
            (compilation.staging / f"{_GROUP}{filename}").write_text(text)
            self._record(time.perf_counter() - compilation.started)  # before it is published, which delivers it
            artifact = compilation.publish()
            published = _group_of(artifact)
            if filename in published:
                group.clear()
                group.update(published)
        finally:
            if not compilation.ended:
                compilation.keep()
            abandoned.unregister(compilation)
        return None

    @fails_open(lambda self, seconds: None)
    def _record(self, seconds: float) -> None:
        """Keep the recipe of what was compiled or loaded, if the job has a profile."""
        found = self._compile_locals
        if found is None or self._coordinator is None:
            return
        recipe = triton_recipes.recipe_of(found["src"], found["target"], found["options"], seconds, time.monotonic_ns())
        if recipe is not None:
            self._coordinator.record(recipe)

    @fails_open(lambda self, filename: FileCacheManager.get_file(self, filename))
    def get_file(self, filename: str) -> str | None:
        """One file's path. A module that Triton builds with the C compiler is claimed like a kernel."""
        if self._compilation is not None:
            staged = self._compilation.staging / filename
            return str(staged) if staged.exists() else None
        here = FileCacheManager.get_file(self, filename)
        if here is not None or self._coordinator is None or not _is_module(filename):
            return None if here is None else str(here)
        key = _module_key(self.key, filename)
        home = Path(knobs.cache.dir) / triton_inputs.base32(key.digest)
        ahead = triton_launchers.ahead.active
        asked = Request(key, home, counters=_module_counters, loads=not ahead)
        found = self._coordinator.attempt(asked) if ahead else self._coordinator.request(asked)
        if ahead and not isinstance(found, Compilation):
            raise triton_launchers.Done
        if isinstance(found, Artifact):
            return str(found.path / filename)
        assert isinstance(found, Compilation)
        self._compilation = found
        abandoned.register(found, sys._getframe(2))
        return None

    @fails_open(lambda self, compilation, filename: str(compilation.staging / filename))
    def _publish_module(self, compilation: Compilation, filename: str) -> str:
        self._compilation = None
        try:
            return str(compilation.publish().path / filename)
        finally:
            if not compilation.ended:
                compilation.keep()
            abandoned.unregister(compilation)


def _group_of(artifact: Artifact) -> dict[str, str]:
    root = str(artifact.path)
    return {f.name: f"{root}/{f.name}" for f in artifact.manifest.files if not f.name.startswith(_GROUP)}


def _may_be_shared(compile_locals: Mapping[str, Any]) -> bool:
    """False if what this compile makes is not what its key says, or must not come from the cache."""
    options = compile_locals.get("options")
    overridden = knobs.compilation.override or getattr(options, "ir_override", None)
    return not overridden and not knobs.compilation.always_compile


def _target(compile_locals: Mapping[str, Any]) -> GPUTarget | None:
    target = compile_locals.get("target")
    return GPUTarget(target.backend, target.arch, target.warp_size) if target is not None else None


def _target_text(compile_locals: Mapping[str, Any]) -> str:
    target = _target(compile_locals)
    return str(target) if target is not None else ""


def _details(compile_locals: Mapping[str, Any]) -> dict[str, Any]:
    """What Triton's own key is made of, for people who ask why two of them differ."""
    source: Any = compile_locals.get("src")
    options = compile_locals.get("options")
    function = getattr(source, "fn", None)
    found: dict[str, Any] = {"triton": triton.__version__, "target": _target_text(compile_locals)}
    if function is not None:
        found["source"] = function.cache_key
        found["signature"] = {str(k): str(v) for k, v in source.signature.items()}
        found["constants"] = {_name(function, k): str(v) for k, v in source.constants.items()}
        found["attributes"] = {str(k): str(v) for k, v in source.attrs.items()}
    if options is not None:
        found["options"] = {k: str(v) for k, v in vars(options).items() if k != "extern_libs"}
    for inputs in triton_inputs.inputs_of_source(source)[:1]:
        found |= inputs.details()
    return found


def _name(function: Any, path: Any) -> str:
    """Constants are keyed by a path into the arguments, which starts with an argument's position."""
    try:
        return ".".join([function.arg_names[path[0]], *map(str, path[1:])])
    except (TypeError, IndexError):
        return str(path)


def _is_module(filename: str) -> bool:
    return filename.endswith(".so")


@functools.lru_cache(maxsize=1)
def _host_abi() -> dict[str, str]:
    return {
        "machine": platform.machine(),
        "libc": "-".join(platform.libc_ver()),
        "python": str(sysconfig.get_config_var("EXT_SUFFIX")),
    }


def _module_key(key: str, filename: str) -> CacheKey:
    compilers = {name: os.environ.get(name) for name in ("CC", "CXX")}
    return CacheKey.of(_MODULE, filename, triton_key=key, compilers=compilers, **_host_abi())


@fails_open(lambda: None)
def _coordinator() -> Coordinator | None:
    """None if kcoord is off, or its settings cannot be used: then Triton works as it does without kcoord."""
    try:
        coordinator = connect()
    except SettingsError as error:
        notices.tell(f"{error}; kcoord stands aside")
        return None
    return None if coordinator.settings.disable else coordinator


def hook() -> None:
    """Wrap `compile` wherever Triton keeps it, complete its keys, keep its hash of itself, and share autotuners' choices.

    Idempotent; does nothing on a version that is not supported, or if kcoord is off.
    """
    coordinator = _coordinator() if supported() else None
    if coordinator is None:
        return
    import triton.compiler
    import triton.compiler.compiler

    for namespace in (triton.compiler.compiler, triton.compiler, triton):
        if not abandoned.is_wrapped(namespace.compile):
            namespace.compile = abandoned.wrap(namespace.compile)
    triton_inputs.hook()
    triton_key.hook(coordinator.settings.local_dir)
    triton_key.hook_libraries(coordinator.settings.local_dir)
    from kcoord.backends.triton import autotune as triton_autotune  # not before `supported`

    triton_autotune.hook()


def supported() -> bool:
    """Whether this Triton has the interface that this adapter was written for. Says so once if not."""
    version = tuple(int("".join(filter(str.isdigit, p)) or 0) for p in triton.__version__.split(".")[:2])
    if version < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        notices.tell(
            f"Triton {triton.__version__} is older than {oldest}: kcoord leaves it alone; upgrade Triton to use it"
        )
        return False
    return True


if not supported():
    TritonCacheManager = FileCacheManager  # type: ignore[misc]
hook()
