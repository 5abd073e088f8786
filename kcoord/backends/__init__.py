"""Compilers: one folder and one `Backend` each. `docs/backends.md` shows how to add one.

The names below are public. No compiler is imported here.
"""

from kcoord.backends.backend import UNLOADED as UNLOADED
from kcoord.backends.backend import Backend as Backend
from kcoord.backends.backend import Bypassed as Bypassed
from kcoord.backends.compiler import Compiler as Compiler
from kcoord.backends.fail_open import fails_open as fails_open
from kcoord.keys.device import current_device as current_device
from kcoord.keys.tools.toolchain import Tool as Tool
from kcoord.keys.tools.toolchain import fingerprint as tool_fingerprint
from kcoord.keys.tools.tree import tree_fingerprint as tree_fingerprint
from kcoord.rank.coordinator import BUSY as BUSY
from kcoord.rank.coordinator import Compilation as Compilation
from kcoord.rank.coordinator import Request as Request

__all__ = [
    "BUSY", "UNLOADED", "Backend", "Bypassed", "Compilation", "Compiler", "Request", "Tool", "current_device", "fails_open",
    "tool_fingerprint", "tree_fingerprint",
]  # fmt: skip
