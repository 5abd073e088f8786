"""Compilers: one folder and one `Backend` each. `docs/backends.md` shows how to add one.

The names below are public, and imported when they are first used: a process whose compilers are hooked may compile nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kcoord.backends.backend import UNLOADED as UNLOADED
    from kcoord.backends.backend import Backend as Backend
    from kcoord.backends.backend import Bypassed as Bypassed
    from kcoord.backends.compiler import Compiler as Compiler
    from kcoord.backends.fail_open import fails_open as fails_open
    from kcoord.keys.device import current_device as current_device
    from kcoord.keys.tools.toolchain import Tool as Tool
    from kcoord.keys.tools.toolchain import fingerprint as tool_fingerprint  # noqa: F401 - it is in _HOME
    from kcoord.keys.tools.tree import tree_fingerprint as tree_fingerprint
    from kcoord.rank.coordinator import BUSY as BUSY
    from kcoord.rank.coordinator import Compilation as Compilation
    from kcoord.rank.coordinator import Request as Request

_HOME = {
    "BUSY": "kcoord.rank.coordinator:BUSY",
    "UNLOADED": "kcoord.backends.backend:UNLOADED",
    "Backend": "kcoord.backends.backend:Backend",
    "Bypassed": "kcoord.backends.backend:Bypassed",
    "Compilation": "kcoord.rank.coordinator:Compilation",
    "Compiler": "kcoord.backends.compiler:Compiler",
    "Request": "kcoord.rank.coordinator:Request",
    "Tool": "kcoord.keys.tools.toolchain:Tool",
    "current_device": "kcoord.keys.device:current_device",
    "fails_open": "kcoord.backends.fail_open:fails_open",
    "tool_fingerprint": "kcoord.keys.tools.toolchain:fingerprint",
    "tree_fingerprint": "kcoord.keys.tools.tree:tree_fingerprint",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOME:
        raise AttributeError(f"module 'kcoord.backends' has no attribute {name!r}")
    module, _, attribute = _HOME[name].partition(":")
    found = globals()[name] = getattr(import_module(module), attribute)
    return found
