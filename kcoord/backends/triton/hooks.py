"""Hooks Triton once it is imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from kcoord.backends import abandoned_frames
from kcoord.backends.fail_open import coordinator_in_use, fails_open
from kcoord.backends.reliances import Part, Tripwire, release_of, stand_aside
from kcoord.backends.triton import MANAGER, OLDEST, version_of
from kcoord.backends.wrapping import is_wrapped, wraps
from kcoord.interruption import let_through
from kcoord.rank.directories import watch_temporary_directories

KERNELS = Part("triton", "triton", "kernels", {
    ":compile": "", "compiler:compile": "", "compiler.compiler:compile": "",
    "compiler.compiler:ASTSource.hash": "self", "compiler.compiler:IRSource.hash": "self",
    "runtime.cache:FileCacheManager.get_file": "self filename",
    "runtime.cache:FileCacheManager.get_group": "self filename",
    "runtime.cache:FileCacheManager.put": "self data filename binary",
    "runtime.cache:FileCacheManager.put_group": "self filename group",
    "runtime.jit:JITFunction": "",
})  # fmt: skip
UNSEEN = Tripwire(KERNELS, "it stores kernels that it has not asked kcoord's cache manager for")


def hook() -> None:
    """Wrap `compile` wherever Triton keeps it, complete its keys, keep its hash of itself, and share autotuners' choices.

    Idempotent. Nothing happens to another package of this name, nor to a version that is not supported, nor if kcoord is off.
    """
    coordinator = coordinator_in_use() if "triton.runtime.jit" in sys.modules and supported() else None
    if coordinator is None:
        return
    import triton.compiler
    import triton.compiler.compiler

    from kcoord.backends.triton import folding, own_key  # not before: they import parts that another version lacks

    for namespace in (triton.compiler.compiler, triton.compiler, triton):
        if not is_wrapped(namespace.compile):
            namespace.compile = abandoned_frames.wrap(namespace.compile)
    KERNELS.wrap("runtime.cache:FileCacheManager.__init__", _made)
    KERNELS.wrap("runtime.cache:FileCacheManager.put_group", _stored)
    folding.hook()
    watch_temporary_directories()
    own_key.hook(coordinator.settings.local_dir)
    own_key.hook_libraries(coordinator.settings.local_dir)
    try:
        from kcoord.backends.triton import autotune  # as above
    except ImportError as error:
        let_through(error)
        stand_aside("triton", release_of("triton"), "tuning", str(error))
    else:
        autotune.hook()


def supported() -> bool:
    """True if this Triton has the interface that this adapter was written for. If not, kcoord stands aside."""
    found = sys.modules["triton"].__version__
    if version_of(found) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        stand_aside("triton", f"Triton {found}", "kernels", f"it is older than {oldest}: upgrade Triton to use kcoord")
        return False
    return KERNELS.holds()


def _made(native: Callable[..., None]) -> Callable[..., None]:
    @wraps(native)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        self.was_asked = type(self) is not sys.modules["triton.runtime.cache"].FileCacheManager  # in place of kcoord's
        native(self, *args, **kwargs)

    return __init__


def _stored(native: Callable[..., Any]) -> Callable[..., Any]:
    """As ``put_group``, which ends a compile."""

    @wraps(native)
    def put_group(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not getattr(self, "was_asked", True) and _is_chosen():
            UNSEEN.trip()
        return native(self, *args, **kwargs)

    return put_group


@fails_open(lambda: False)
def _is_chosen() -> bool:
    """False if the script has chosen another cache manager than kcoord's."""
    chosen, module = getattr(sys.modules["triton.knobs"].cache, "manager_class", None), MANAGER.partition(":")[0]
    return os.environ.get("TRITON_CACHE_MANAGER") == MANAGER and getattr(chosen, "__module__", module) == module
