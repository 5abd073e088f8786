"""Hooks Triton once it is imported."""

from __future__ import annotations

import sys

from kcoord.backends import abandoned_frames
from kcoord.backends.fail_open import coordinator_in_use
from kcoord.backends.reliances import Part, release_of, stand_aside
from kcoord.backends.triton import OLDEST
from kcoord.backends.wrapping import is_wrapped
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
    version = tuple(int("".join(filter(str.isdigit, part)) or 0) for part in found.split(".")[:2])
    if version < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        stand_aside("triton", f"Triton {found}", "kernels", f"it is older than {oldest}: upgrade Triton to use kcoord")
        return False
    return KERNELS.holds()
