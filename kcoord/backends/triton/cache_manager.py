"""Triton's hook: a cache manager that claims before Triton compiles, and publishes a kernel's files as one artifact.

Triton resolves ``TRITON_CACHE_MANAGER`` to `TritonCacheManager` and calls ``get_group``, then ``put`` for every stage, then
``put_group``; afterwards it reads the files back through the dictionary that it passed, which is why ``put_group`` edits
it. A kernel's artifact lies at ``$TRITON_CACHE_DIR/<key>/``, the layout that Triton and Inductor read themselves.

Triton never tells a cache manager that a compile *failed*: `kcoord.backends.abandoned_frames` finds out.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from triton.runtime.cache import FileCacheManager

from kcoord.artifacts.local import Artifact
from kcoord.artifacts.manifest import HOME_PLACEHOLDER
from kcoord.backends import abandoned_frames
from kcoord.backends.backend import Bypassed
from kcoord.backends.fail_open import coordinator_in_use, fails_open, notices
from kcoord.backends.reliances import release_of, stand_aside
from kcoord.backends.triton import GROUP, base32, hooks
from kcoord.backends.triton.request import PARTS, Kernel, Module, Settled, purpose
from kcoord.errors import StoreError
from kcoord.files.faults import store_error
from kcoord.interruption import let_through
from kcoord.rank.coordinator import Busy, Compilation, Coordinator

_usable = hooks.supported()
try:
    from triton import knobs

    from kcoord.backends.triton import adapter, folding
except ImportError as error:  # Triton would raise it to the script
    let_through(error)
    if _usable:
        stand_aside("triton", release_of("triton"), "kernels", str(error))
    _usable = False


class TritonCacheManager(FileCacheManager):  # type: ignore[misc]
    """One kernel's (or one file's) access to the cache, as Triton makes it for every compile."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        self.was_asked = False  # by `get_group`
        self._compilation: Compilation | None = None
        self._kernel: Kernel | None = None
        self._module: Module | None = None
        self._stored: dict[str, bytes] = {}  # of the compile under way: a cleaner may remove its staged files
        self._cache = knobs.cache.dir
        self._coordinator = None if override or dump else _coordinator_of(self._cache)
        if self._coordinator is None:
            name = folding.stock_name(key) if override or dump else key
            super().__init__(name, override=override, dump=dump)
            return
        # not the stock constructor: it makes an empty directory at the final name
        self._look_at(key)

    @fails_open(lambda self, filename: None)
    def get_group(self, filename: str) -> dict[str, str] | None:
        """All of the kernel's files, or None: then the caller compiles, as the leader or because it must."""
        self.was_asked = True
        frame = sys._getframe(2)  # Triton's compile: 0 is this function, 1 its guard
        if purpose.lists:
            raise Settled("listed", frame.f_locals)
        if self._coordinator is None:
            return cast("dict[str, str] | None", FileCacheManager.get_group(self, filename))
        kernel = self._kernel = self._asked_for(filename, frame.f_locals)
        found = adapter.backend.begin(kernel, waits=purpose.waits, loads=not purpose.replays)
        if isinstance(found, Bypassed):
            key = adapter.backend.key(kernel)
            usable = not kernel.problem and not knobs.compilation.always_compile
            artifact = self._coordinator.find(key, kernel.home, adapter.backend.target(kernel)) if usable else None
            found = artifact or self._coordinator.private(key, kernel.home)
        elif purpose.replays and not isinstance(found, Compilation):
            raise Settled("busy" if isinstance(found, Busy) else "loaded")  # it is loaded when it is used
        if isinstance(found, Artifact):
            return adapter.backend.load(kernel, found)
        assert isinstance(found, Compilation)
        self._compilation = found
        abandoned_frames.register(found, frame)
        return None

    def _asked_for(self, filename: str, compile_locals: Mapping[str, Any]) -> Kernel:
        """The kernel that Triton compiles. The key is completed here if Triton made it before kcoord was imported."""
        source, made_of = compile_locals.get("src"), compile_locals.get("key")
        target, options = compile_locals.get("target"), compile_locals.get("options")
        name = filename.removesuffix(".json")
        found = folding.true_text(made_of, source) if isinstance(made_of, str) else None
        if found is None:
            problem = "its key cannot be completed"
            return Kernel(name, self.key, Path(self.cache_dir), source, target, options, problem)
        text, inputs = found
        problem = next((each.problem for each in inputs if each.problem), "")
        if text is not made_of and not problem:
            self._look_at(base32(hashlib.sha256(text.encode()).hexdigest()))
        return Kernel(name, self.key, Path(self.cache_dir), source, target, options, problem, inputs, text)

    def _look_at(self, key: str) -> None:
        self.key = key
        self.cache_dir = os.path.join(self._cache, key)  # noqa: PTH118 - a str, as the base class has it
        self.lock_path = os.path.join(self.cache_dir, "lock")  # noqa: PTH118

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        """Write one file; a C module is published at once."""
        compilation = self._compilation
        if compilation is None or self._coordinator is None:
            return self._put_natively(data, filename, binary)
        content = self._stored[filename] = data if isinstance(data, bytes) else str(data).encode()
        path = str(compilation.staging / filename)
        try:
            Path(path).write_bytes(content)
        except OSError as error:
            let_through(error)
            compilation.shared = False
            notices.tell(f"{store_error(error, compilation.staging)}; the kernel stays with this process")
            try:
                path = self._put_privately(self._coordinator, filename)
            except (OSError, StoreError) as refused:
                let_through(refused)
                return self._put_natively(data, filename, binary)
        if self._module is None:
            return path
        self._compilation = None
        artifact = adapter.modules.finish(self._module, compilation)
        if purpose.prepares and compilation.shared:
            raise Settled("compiled")  # it is loaded when it is used
        return path if artifact is None else adapter.modules.load(self._module, artifact)

    def _put_privately(self, coordinator: Coordinator, filename: str) -> str:
        path = coordinator.private_directory() / filename
        path.write_bytes(self._stored[filename])
        return str(path)

    def _put_natively(self, data: Any, filename: str, binary: bool) -> str:
        """As Triton does. If the directory that kcoord gave Triton takes no file: where it would without kcoord."""
        try:
            return str(FileCacheManager.put(self, data, filename, binary))
        except OSError as error:
            let_through(error)
            coordinator = self._coordinator
            if coordinator is None or not Path(self._cache).is_relative_to(coordinator.settings.local_dir):
                raise
            self._cache = knobs.cache.get_triton_dir("cache")
            notices.tell(f"{store_error(error, coordinator.settings.local_dir)}; Triton keeps kernels in {self._cache}")
        self._look_at(self.key)
        os.makedirs(self.cache_dir, exist_ok=True)  # noqa: PTH103
        return str(FileCacheManager.put(self, data, filename, binary))

    @fails_open(lambda self, filename, group: None)
    def put_group(self, filename: str, group: dict[str, str]) -> Any:
        """Publish the kernel. On return `group` names the published files: all ours, or all of the winner's."""
        compilation, self._compilation = self._compilation, None
        if compilation is None or self._kernel is None:
            return FileCacheManager.put_group(self, filename, group)
        listing = compilation.staging / f"{GROUP}{filename}"
        try:
            children = {name: f"{HOME_PLACEHOLDER.decode()}/{name}" for name in sorted(group)}
            listing.write_text(json.dumps({"child_paths": children}))
        except OSError as error:
            let_through(error)
            compilation.shared = False
        artifact = adapter.backend.finish(self._kernel._replace(files=(*group, listing.name)), compilation)
        published = {} if artifact is None else adapter.backend.load(self._kernel, artifact)
        if filename in published:
            group.clear()
            group.update(published)
        else:
            group.update({name: self._kept(path) for name, path in group.items()})
        return None

    def _kept(self, path: str) -> str:
        """The path of a staged file that is not published. It is written again if it has vanished."""
        place, name = os.path.split(path)
        if self._coordinator is None or name not in self._stored or os.path.exists(path):  # noqa: PTH110 - a str
            return path
        notices.tell(f"{place} has vanished in mid-compile: does something clean it?", about="vanished kernels")
        return self._put_privately(self._coordinator, name)

    @fails_open(lambda self, filename: None)
    def get_file(self, filename: str) -> str | None:
        """One file's path. A module that Triton builds with the C compiler is claimed like a kernel.

        A module that Triton stored without kcoord is ignored: it has no manifest.
        """
        if self._compilation is not None:
            staged = self._compilation.staging / filename
            return str(staged) if staged.exists() else None
        if self._coordinator is None or not filename.endswith(".so"):
            if self._coordinator is not None and not self._coordinator.trusts(self.cache_dir):
                return None  # kcoord chose the directory, and others may write to it: Triton would load what lies there
            return cast("str | None", FileCacheManager.get_file(self, filename))
        frame = sys._getframe(2)
        builds = frame.f_globals.get("__name__") == "triton.runtime.build"
        build = {name: value for name, value in frame.f_locals.items() if builds and name in PARTS}
        module = Module(filename, self.key, Path(knobs.cache.dir), build)
        found = adapter.modules.begin(module, waits=purpose.waits or not purpose.prepares, loads=not purpose.prepares)
        if purpose.prepares and not isinstance(found, Compilation):
            raise Settled("busy" if isinstance(found, Busy) else "loaded")
        if isinstance(found, Artifact):
            return adapter.modules.load(module, found)
        if isinstance(found, Compilation):
            self._module, self._compilation = module, found
            abandoned_frames.register(found, frame)
        return None


@fails_open(lambda cache: None)
def _coordinator_of(cache: str) -> Coordinator | None:
    """None if Triton keeps its cache to itself: others may write there, and the user chose the directory."""
    coordinator = coordinator_in_use()
    if coordinator is None or coordinator.trusts(f"{cache}/any"):
        return coordinator
    return coordinator if Path(cache).is_relative_to(coordinator.settings.local_dir) else None


if _usable:
    hooks.hook()
else:
    TritonCacheManager = FileCacheManager  # type: ignore[misc]
